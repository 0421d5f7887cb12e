"""The exceptions that msgspec raises for malformed input, and one for all of them.

Three of them are not msgspec's own: for text that is not UTF-8, for nesting that is too
deep, and, up to msgspec 0.19, for a map with an unhashable key.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Return the message in ``data``, of the decoder's type.

    :raises msgspec.DecodeError: the input is malformed in any way; this one error
        stands for all that msgspec may raise (:data:`MALFORMED`).
    """
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise msgspec.DecodeError(str(error)) from error
