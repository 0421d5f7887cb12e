"""Messages between a rank, its forkserver and its sidecars, over local Unix sockets.

Theory of operation
===================

Packets and frames are those of :mod:`replicas.linux.frames`.

* Rank and forkserver: SOCK_SEQPACKET, one message per packet. The rank first sends
  :class:`Attach`, answered by :class:`Attached` once torch is loaded, or by
  :class:`OtherRelease`. Each :class:`Fork` is answered by :class:`Forked`, or by
  :class:`ForkFailed`. The answers come in the order of the requests. An agent and a
  template (:mod:`replicas.supervisor.shim.template`) do the same with
  :class:`ForkShim`, and :class:`Ended` tells the shim's end.
* Rank and sidecar: SOCK_STREAM, frames. Requests carry an ``id`` and are handled one
  after another; each is answered by exactly one reply with the same ``id``. Buffers are
  sent once (:class:`MapBuffer`) and named by a key from then on. A sidecar whose group
  has failed sends :class:`Failed` with ``over`` and exits; its peers usually notice its
  closed connections. :class:`Ping` is handled immediately, during any request.

The end of either socket, or of the rank's process, ends the sidecar.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replicas import __version__
from replicas.linux import frames
from replicas.messages import GroupSpec, OperationKind, ReduceOp, Segment


class CollectiveSpec(msgspec.Struct, frozen=True):
    """One operation to run within the group.

    :param segments: the posted segments of each participant.
    :param me: index of this participant.
    :param root: index of the root, or -1.
    :param places: index of each participant among those of the first attempt; empty if
        they are the same.
    """

    operation: int
    kind: OperationKind
    reduce_op: ReduceOp
    lane_ranks: tuple[int, ...]
    segments: tuple[tuple[Segment, ...], ...]
    me: int
    root: int
    timeout_s: float
    places: tuple[int, ...] = ()


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First packet, answered by :class:`Attached`. The sidecars of a rank die with it.

    Descriptors: those of :func:`replicas.linux.rank_environment.describe_own_place`.

    :param secret: of the forkserver's :class:`replicas.linux.sockets.SocketAddress`.
    :param release: of the rank's library.
    """

    secret: str = ""
    release: str = __version__


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The forkserver is ready to fork."""


class OtherRelease(msgspec.Struct, frozen=True, tag=True):
    """The forkserver refuses the rank: their releases have different messages."""

    release: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Descriptor: the sidecar's end of its channel."""


class ForkShim(msgspec.Struct, frozen=True, tag=True):
    """To a template, for a shim with the output and environment of the Attach.

    Descriptors: the shim's end of its control socket, and those that ``others`` names.
    """

    others: tuple[str, ...] = ()


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Descriptor: a pidfd of the sidecar or shim."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The forked shim has ended.

    :param code: its exit code, or minus the signal that killed it.
    """

    code: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    error: str


ForkserverRequest = Attach | Fork | ForkShim
ForkserverReply = Attached | OtherRelease | Forked | ForkFailed | Ended


class _Numbered(msgspec.Struct, frozen=True):
    """A request, or the reply with the request's number."""

    id: int


class MapBuffer(msgspec.Struct, frozen=True, tag=True):
    """Name a buffer ``key`` from now on. Descriptor: the buffer.

    :param device: UUID of the buffer's GPU; empty for host memory.
    """

    key: int
    device: str = ""


class ForgetBuffer(msgspec.Struct, frozen=True, tag=True):
    key: int


class ProbeBuffer(_Numbered, frozen=True, tag=True):
    """Read a small buffer, to check that the sidecar can open the rank's memory."""

    buffer: int


class BuildGroup(_Numbered, frozen=True, tag=True):
    spec: GroupSpec


class RunCollective(_Numbered, frozen=True, tag=True):
    inputs: int | None
    outputs: int | None
    spec: CollectiveSpec


class Ping(_Numbered, frozen=True, tag=True):
    """Answered by :class:`Pong` immediately, before earlier requests."""


class Moved(msgspec.Struct, frozen=True):
    """Traffic of the current request, measured by :mod:`replicas.sidecar.traffic`.

    :ivar sent: bytes over TCP that peers have acknowledged.
    :ivar received: bytes over TCP.
    :ivar still_s: seconds without progress while waiting for the network.
    :ivar rtt_s: the longest round trip to a peer.
    :ivar held_up: addresses of peers whose link is broken, or slower than the data.
    """

    sent: int
    received: int
    still_s: float
    rtt_s: float = 0.0
    held_up: tuple[str, ...] = ()


class Pong(_Numbered, frozen=True, tag=True):
    """:ivar moved: traffic of the current request, or None without traffic."""

    moved: Moved | None = None


class Done(_Numbered, frozen=True, tag=True):
    """The group is formed, or the operation has run."""


class Probed(_Numbered, frozen=True, tag=True):
    """:ivar seen: all bytes of the buffer."""

    seen: bytes


class Failed(_Numbered, frozen=True, tag=True):
    """A request has failed.

    :ivar over: True if the group is unusable, and the sidecar exits; False if the
        request was refused, and nothing moved.
    :ivar kind: class name of an error of :mod:`replicas.errors`, with its ``members``
        and ``hint``; empty for any other error.
    :ivar links: pairs of addresses between which members could not connect.
    """

    error: str
    over: bool = True
    kind: str = ""
    members: tuple[str, ...] = ()
    hint: str = ""
    links: tuple[tuple[str, str], ...] = ()


Request = MapBuffer | ForgetBuffer | ProbeBuffer | BuildGroup | RunCollective | Ping
Reply = Done | Probed | Failed | Pong


decode_forkserver_request: Callable[[bytes], ForkserverRequest] = frames.decoder(ForkserverRequest)
decode_forkserver_reply: Callable[[bytes], ForkserverReply] = frames.decoder(ForkserverReply)
decode_request: Callable[[bytes], Request] = frames.decoder(Request)
decode_reply: Callable[[bytes], Reply] = frames.decoder(Reply)
