"""Limits of message contents, and texts made to fit into messages.

Limits are checked in the call (:mod:`replicas.messages.arguments`), so the coordinator
gets no values beyond them from this library. From other programs it refuses them as it
decodes a message: the fields have the types below. A text's length is in characters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec

from replicas.common.foreign import lines, one_line

VERSION_MAX = 2**53
"""The largest number that a publisher may choose.

Metrics are floats, which are exact up to it, and the library's numbers that follow stay
far below :data:`INTEGER_MAX`.
"""
INTEGER_MAX = 2**62
RANKS_MAX = 1_000_000
REPLICAS_MAX = 100_000
"""Maximum number of replicas of one group."""
SECONDS_MAX = 1e9
LEASE_MIN_S = 2.0
"""Shortest lease of a member, which sends a heartbeat each second."""
NAME_LENGTH = 128
INFO_ENTRIES = 512
INFO_LENGTH = 4096
INFO_NBYTES = 8 * 2**10
"""Encoded size of a member's ``info``: the status page shows that of every member."""
ENV_NBYTES = 64 * 2**10
"""Encoded size of a process's NCCL variables."""
TEXT_LENGTH = 16 * 2**10
"""Characters of an error's text; longer texts are cut."""
REASON_LENGTH = 500
"""Characters of the text for one member or replica among many."""
REASONS_MAX = 64
"""Such texts in one message, such as a receipt, which every rank of a source gets."""
ERROR_LENGTH = 4 * TEXT_LENGTH + 256
"""Characters of an error's text that was sanitised, with the note about the cut."""
CONTROL_PORT = 9477
"""The control port of a run whose config names none, if it is free."""
CARRY_PORTS = 64
"""A carrier tries its configured port, then this many ports after it."""
FRAME_NBYTES = 8 * 2**20
"""Hard limit of the WebSocket. Messages have smaller limits, with an error each."""
MANIFEST_NBYTES = 64 * 2**20
"""Size of an encoded manifest of one rank, and of all ranks of a source together.

It is sent in pieces, which are far smaller.
"""
MANIFEST_TENSORS = 500_000
"""Tensors of one manifest, aliases included."""
OPERATION_NBYTES = 4 * 2**20
HELLO_NBYTES = 256 * 2**10
OTHER_NBYTES = 2**20
META_NBYTES = OTHER_NBYTES - 2**12
"""Encoded size of a publisher's ``meta``; the rest of its message is small."""
MANY = 4096
"""Texts of one kind in a message."""

Number = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Signed = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=SECONDS_MAX)]
"""A time, finite: no NaN is in a range."""
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Remaining = Annotated[float, msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX)]
"""The time until a deadline, negative if it has passed."""
Digest = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH)]
"""Also a hash, a nonce or the address of a door."""
Text = Annotated[str, msgspec.Meta(max_length=INFO_LENGTH)]
ErrorText = Annotated[str, msgspec.Meta(max_length=ERROR_LENGTH)]


def most_nbytes(kind: str) -> int:
    """Return the limit in bytes of an encoded message.

    :param kind: name of the message's class, such as ``Packed``.
    """
    return OPERATION_NBYTES if kind == "OperationPost" else OTHER_NBYTES


def is_name(text: str) -> bool:
    """Return True if ``text`` can name a channel, a group or an incarnation.

    That is 1 to 128 printable characters without a slash.
    """
    return 0 < len(text) <= NAME_LENGTH and text.isprintable() and "/" not in text


def encodable(text: str) -> bool:
    """Return True if ``text`` can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(text: str) -> str:
    """Return ``text`` as a plain str, also if it is a subclass such as numpy's."""
    return str.__str__(text)


def clean(text: str) -> str:
    """Return ``text`` with each lone surrogate, which UTF-8 cannot encode, escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_of(value: object, most: int = TEXT_LENGTH) -> str:
    """Return ``str(value)`` of any value, such as a foreign exception, safe to show.

    It is cut to about ``most`` characters, and has only printable ones and line breaks.
    It never raises.
    """
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  # a foreign __str__
        text = f"(no text: its __str__ raises {type(error).__name__})"
    if len(text) > most:
        text = f"{text[:most]} ... and {len(text) - most:,} characters more"
    return lines(text)


def texts_of(found: Mapping[str, str]) -> dict[str, str]:
    """Return a copy in which each text after the first 64, in the order of ``found``,
    is replaced by "see the status and the log of the coordinator", so that a message
    with many stays small.

    :param found: texts by name; all names stay.
    """
    return {
        name: text if index < REASONS_MAX else "see the status and the log of the coordinator"
        for index, (name, text) in enumerate(found.items())
    }


def _is_tensor(value: object, depth: int = 3) -> bool:
    """Return True for a torch tensor, or for a container of one; do not import torch.

    :param depth: how many levels of containers are looked into.
    """
    torch = sys.modules.get("torch")
    if torch is None or not depth:
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_is_tensor(one, depth - 1) for one in value)
    if isinstance(value, dict):
        return any(_is_tensor(one, depth - 1) for one in value.values())
    return isinstance(value, torch.Tensor)


def shown(value: object, most: int = 80) -> str:
    """Return ``repr(value)`` in one line, cut to about ``most`` characters, for an
    error.

    Tensors are shown by their type only: printing one whose memory was freed would end
    the process. It never raises.
    """
    try:
        text = f"<{type(value).__name__}>" if _is_tensor(value) else repr(value)
    except Exception:  # noqa: BLE001  # a foreign __repr__
        text = f"<{type(value).__name__}>"
    return one_line(text_of(text, most))
