"""Messages between a rank and its carrier: frames over a Unix socket.

Requests with an ``id`` are answered by exactly one reply with it, in any order: pulls
run side by side. A slot's memory is sent once (:class:`MapSlot`, with its descriptor)
and named by a key from then on. A *transfer* is one version that this carrier serves,
pulls, or both; its number and secret come from the coordinator. What a message says of
a transfer that has ended is ignored: it may have crossed the end. The end of the
socket, or of the rank's process, ends the carrier.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replicas.linux import frames
from replicas.messages import HolderAddress


class MapSlot(msgspec.Struct, frozen=True, tag=True):
    """Descriptor: the slot's memory. ``key``: its number from now on."""

    key: int


class ForgetSlot(msgspec.Struct, frozen=True, tag=True):
    """The slot's memory goes; no transfer uses it."""

    key: int


class Certify(msgspec.Struct, frozen=True, tag=True):
    """Speak TLS with this key and certificate, in PEM, which are kept nowhere else."""

    pem: bytes


class Place(msgspec.Struct, frozen=True):
    """``nbytes`` bytes of a version, at ``offset`` of the slot ``key``."""

    key: int
    offset: int
    nbytes: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve a version. ``filled``: so many bytes are here, from its start.

    ``base``: a version that pullers may have, to make deltas of. ``regions``: first
    byte, the one behind the last, and bytes of an element. ``encrypt``: in TLS alone; a
    :class:`Certify` came before.
    """

    transfer: int
    secret: bytes
    place: Place
    filled: int
    base: Place | None = None
    regions: tuple[tuple[int, int, int], ...] = ()
    encrypt: bool = False


class Filled(msgspec.Struct, frozen=True, tag=True):
    """So many bytes of a version that is served are here now, from its start."""

    transfer: int
    nbytes: int


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull a version, and serve what is here meanwhile.

    Again, with the same place: go on, with these holders. ``source``: address to
    connect from; empty: any. ``digest``: of the version; empty: not known yet.
    ``base``: a version that holders may have, to take deltas to. ``encrypt``: pull and
    serve in TLS alone. ``numbers``: of the transfer at each holder; none: as here.
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
    """Make no more deltas; answered when nobody reads the base's slot any more."""

    id: int
    transfer: int


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """End the transfer; answered when nobody reads or writes its slot any more."""

    id: int
    transfer: int
    why: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    id: int


Request = MapSlot | ForgetSlot | Certify | Serve | Filled | StartPull | DropBase | Withdraw | Ping


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The first message: pullers connect to this port.

    ``text``: what to warn of; with ``port`` 0: why it does not listen.
    """

    id: int
    port: int
    text: str = ""


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """``received``: bytes by holder. ``again``: blocks that were asked for again.

    ``why``: reasons, by name, why holders were given up on the way; ``wrong``: those
    that have served wrong bytes; ``cut``: those to whom nothing, or little, gets
    through, as it seems.
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
    """``why``: for each holder, by its name; ``cut``: as in :class:`Pulled`.

    What has landed stays, to go on from.
    """

    id: int
    why: dict[str, str]
    received: dict[str, int]
    cut: tuple[str, ...] = ()


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """``sent_nbytes``: to all pullers together."""

    id: int
    sent_nbytes: int


class Dropped(msgspec.Struct, frozen=True, tag=True):
    id: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request could not be done at all: the memory cannot be mapped, say."""

    id: int
    text: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """``received``: bytes so far of each version that is being pulled, by transfer."""

    id: int
    received: dict[int, int]


Reply = Listening | Pulled | PullFailed | Withdrawn | Dropped | Refused | Pong

decode_request: Callable[[bytes], Request] = frames.decoder(Request)
decode_reply: Callable[[bytes], Reply] = frames.decoder(Reply)
