"""Messages between a rank and its carrier: frames over a Unix socket.

Each request with an ``id`` gets exactly one reply with that id, in any order, as pulls
run in parallel. The rank sends a slot's memory once (:class:`MapSlot`, with a
descriptor) and names it by a key afterwards. A *transfer* is one version that the
carrier serves, pulls, or both; its number and secret come from the coordinator. The
carrier ignores messages about transfers that have ended, as these may cross the end. It
exits when the socket or the rank's process ends.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replicas.linux import frames
from replicas.messages import HolderAddress


class MapSlot(msgspec.Struct, frozen=True, tag=True):
    """A slot's memory, as the frame's descriptor; ``key`` names it from now on."""

    key: int


class ForgetSlot(msgspec.Struct, frozen=True, tag=True):
    """Unmap and close the slot's memory; no transfer uses it."""

    key: int


class Certify(msgspec.Struct, frozen=True, tag=True):
    """Use this private key and certificate (PEM) for TLS; no file ever holds them."""

    pem: bytes


class Place(msgspec.Struct, frozen=True):
    """``nbytes`` bytes of a version, at ``offset`` of the slot ``key``."""

    key: int
    offset: int
    nbytes: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve a version whose first ``filled`` bytes are in the slot.

    :ivar base: an older version that pullers may have, for deltas.
    :ivar regions: (first byte, end, bytes of an element) of its parts.
    :ivar encrypt: over TLS only, after a :class:`Certify`.
    """

    transfer: int
    secret: bytes
    place: Place
    filled: int
    base: Place | None = None
    regions: tuple[tuple[int, int, int], ...] = ()
    encrypt: bool = False


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The first ``nbytes`` bytes of a served version are in the slot now."""

    transfer: int
    nbytes: int


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull a version, and serve the bytes that have arrived meanwhile.

    Sent again with the same place, it resumes the pull with these holders. ``source``:
    address to connect from; empty means any. ``digest``: of the version; empty if not
    known yet. ``base``: an older version that holders may have, for deltas.
    ``encrypt``: pull and serve over TLS only. ``numbers``: the transfer's number at
    each holder; empty if all use ``transfer``.
    """

    id: int
    transfer: int
    secret: bytes
    place: Place
    holders: tuple[HolderAddress, ...]
    timeout_s: float
    source: str = ""
    digest: str = ""
    base: Place | None = None
    encrypt: bool = False
    numbers: tuple[int, ...] = ()


class DropBase(msgspec.Struct, frozen=True, tag=True):
    """Stop making deltas. The reply means that no reader uses the base's slot."""

    id: int
    transfer: int


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """End the transfer. The reply means that no thread reads or writes its slot."""

    id: int
    transfer: int
    why: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Ask for a :class:`Pong` with this id."""

    id: int


Request = MapSlot | ForgetSlot | Certify | Serve | Filled | StartPull | DropBase | Withdraw | Ping


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The carrier's first message: the port to which pullers connect.

    ``text``: a warning or, with ``port`` 0, why the carrier cannot listen.
    """

    id: int
    port: int
    text: str = ""


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """A pull is complete. ``received``: bytes by holder. ``again``: blocks requested
    again.

    By holder's name: ``why`` it was given up; ``wrong``: the wrong bytes that it
    served; ``cut``: holders whose network path seems broken or slow.
    """

    id: int
    digest: str
    seconds: float
    received: dict[str, int]
    again: int
    why: dict[str, str]
    wrong: dict[str, str]
    cut: tuple[str, ...] = ()


class PullFailed(msgspec.Struct, frozen=True, tag=True):
    """No holder is left. ``why`` and ``cut``: as in :class:`Pulled`.

    The bytes received so far stay in the slot, so that the pull can resume.
    """

    id: int
    why: dict[str, str]
    received: dict[str, int]
    cut: tuple[str, ...] = ()


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """The transfer has ended. ``sent_nbytes``: to all pullers together."""

    id: int
    sent_nbytes: int


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Answer to :class:`DropBase`: no thread reads the base's slot."""

    id: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The carrier cannot carry out the request, for example cannot map the memory."""

    id: int
    text: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The carrier is alive. ``received``: bytes so far, by transfer being pulled."""

    id: int
    received: dict[int, int]


Reply = Listening | Pulled | PullFailed | Withdrawn | Dropped | Refused | Pong

decode_request: Callable[[bytes], Request] = frames.decoder(Request)
decode_reply: Callable[[bytes], Reply] = frames.decoder(Reply)
