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


class Place(msgspec.Struct, frozen=True):
    """``nbytes`` bytes of a version, at ``offset`` of the slot ``key``."""

    key: int
    offset: int
    nbytes: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve a version. ``filled``: so many bytes are here, from its start."""

    transfer: int
    secret: bytes
    place: Place
    filled: int


class Filled(msgspec.Struct, frozen=True, tag=True):
    """So many bytes of a version that is served are here now, from its start."""

    transfer: int
    nbytes: int


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull a version, and serve what is here meanwhile.

    Again, with the same place: go on, with these holders. ``source``: address to
    connect from; empty: any.
    """

    id: int
    transfer: int
    secret: bytes
    place: Place
    holders: tuple[HolderAddress, ...]
    timeout_s: float
    source: str = ""


class Expect(msgspec.Struct, frozen=True, tag=True):
    """The publisher's digests of the blocks of a version that is pulled."""

    transfer: int
    digests: tuple[bytes, ...]


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """End the transfer; answered when nobody reads or writes its slot any more."""

    id: int
    transfer: int
    why: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    id: int


Request = MapSlot | ForgetSlot | Serve | Filled | StartPull | Expect | Withdraw | Ping


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The first message: pullers connect to this port."""

    id: int
    port: int


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """``received``: bytes by holder. ``again``: blocks that were asked for again.

    ``why``: reasons, by name, why holders were given up on the way. ``cut``: those of
    them to whom nothing, or little, gets through, as it seems.
    """

    id: int
    digest: str
    seconds: float
    received: dict[str, int]
    again: int
    why: dict[str, str]
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


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request could not be done at all: the memory cannot be mapped, say."""

    id: int
    text: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """``received``: bytes so far of each version that is being pulled, by transfer."""

    id: int
    received: dict[int, int]


Reply = Listening | Pulled | PullFailed | Withdrawn | Refused | Pong

decode_request: Callable[[bytes], Request] = frames.decoder(Request)
decode_reply: Callable[[bytes], Reply] = frames.decoder(Reply)
