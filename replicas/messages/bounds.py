"""What a message may carry, defined once: for the call that makes it, the session that
sends it and the side that checks it.

Numbers, times and names are refused in the call (:mod:`replicas.messages.arguments`),
so that the coordinator (:mod:`replicas.coordinator.limits`) never gets them from a
library that is in order.
"""

from __future__ import annotations

from replicas.common.foreign import lines, one_line

__all__ = [
    "FRAME_NBYTES",
    "HELLO_NBYTES",
    "INFO_ENTRIES",
    "INFO_LENGTH",
    "INTEGER_MAX",
    "MANIFEST_NBYTES",
    "MANIFEST_TENSORS",
    "META_NBYTES",
    "NAME_LENGTH",
    "OPERATION_NBYTES",
    "OTHER_NBYTES",
    "RANKS_MAX",
    "REPLICAS_MAX",
    "SECONDS_MAX",
    "TEXT_LENGTH",
    "VERSION_MAX",
    "clean",
    "encodable",
    "is_name",
    "most_nbytes",
    "plain",
    "shown",
    "text_of",
]

VERSION_MAX = 2**53
"""The largest number that a publisher may choose: metrics, which are floats, tell it
from the next one, and what the library counts on from there stays far below
:data:`INTEGER_MAX`."""
INTEGER_MAX = 2**62
RANKS_MAX = 1_000_000
REPLICAS_MAX = 100_000
"""Of one group."""
SECONDS_MAX = 1e9
NAME_LENGTH = 128
INFO_ENTRIES = 512
INFO_LENGTH = 4096
TEXT_LENGTH = 16 * 2**10
"""Characters of a text of an error; what is longer is cut."""

FRAME_NBYTES = 8 * 2**20
"""Hard limit of the WebSocket; a message between this and its own limit gets a proper
error."""
MANIFEST_NBYTES = 64 * 2**20
"""A manifest as it is encoded: of one rank, and of all ranks of a source together. It
comes in pieces, each far smaller."""
MANIFEST_TENSORS = 500_000
"""Tensors of one manifest, aliases included."""
OPERATION_NBYTES = 4 * 2**20
HELLO_NBYTES = 256 * 2**10
OTHER_NBYTES = 2**20
META_NBYTES = OTHER_NBYTES - 2**12
"""What a publisher says of its weights, as it is encoded, in a message that says little
else."""

_MOST_NBYTES = {"OperationPost": OPERATION_NBYTES}


def most_nbytes(kind: str) -> int:
    """How large a message of a member may be, by the name of its class."""
    return _MOST_NBYTES.get(kind, OTHER_NBYTES)


def is_name(text: str) -> bool:
    """Whether it can be the name of a channel, a group or an incarnation."""
    return 0 < len(text) <= NAME_LENGTH and text.isprintable() and "/" not in text


def encodable(text: str) -> bool:
    """Whether UTF-8 can say it: no lone surrogate is in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(text: str) -> str:
    """The characters of a text alone, which may be of a subclass, such as numpy's."""
    return str.__str__(text)


def clean(text: str) -> str:
    """``text`` as UTF-8 can say it: what it cannot (a lone surrogate) is written as an
    escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_of(value: object, most: int = TEXT_LENGTH) -> str:
    """``str(value)`` of whatever value, such as somebody else's exception: cut to about
    ``most`` characters, and of printable characters and line breaks alone."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  # somebody else's __str__
        text = f"(its text cannot be had: __str__ raises {type(error).__name__})"
    if len(text) > most:
        text = f"{text[:most]} ... and {len(text) - most:,} characters more"
    return lines(text)


def shown(value: object, most: int = 80) -> str:
    """``repr(value)``, in short, for a message that refuses it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # somebody else's __repr__
        text = f"<{type(value).__name__}>"
    return one_line(text_of(text, most))
