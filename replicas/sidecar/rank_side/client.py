"""The rank's client of sidecars, for the asyncio loop of its session thread.

Theory of operation
===================

A :class:`Forkserver` (:mod:`replicas.sidecar.rank_side.forks`) makes :class:`Sidecar`
objects (:mod:`replicas.sidecar.rank_side.handle`); a sidecar has one process group.
Requests and replies are matched by number, so that a reply that comes after its caller
gave up is dropped and never taken for another's. The end of a sidecar is detected by
its pidfd, which no inherited socket delays.

**Hung and frozen.** A sidecar whose group hangs still answers pings. It may be in
native code without a timeout, so it is killed when it has not answered a request one
second after its deadline. A frozen sidecar answers no ping: it is killed after two
seconds (:mod:`replicas.sidecar.rank_side.pulse`), long before any deadline, and its
lane is replaced.

**Ahead of need.** After :meth:`Forkserver.prefork`, a forkserver connection has one
spare sidecar, so that a lane does not wait for the fork. ``ps`` calls it
``replica-spare`` until it builds a group.

Memory is sent to a sidecar once, as a descriptor, and is unmapped there when its buffer
is closed here. A slot that a sidecar may be writing is safe to reuse only after
:meth:`Sidecar.wait_dead`, or after the reply.
"""

from __future__ import annotations

from replicas.sidecar.rank_side.answers import SidecarDied, SidecarFailed
from replicas.sidecar.rank_side.forks import Forkserver
from replicas.sidecar.rank_side.handle import Sidecar
from replicas.sidecar.wire import CollectiveSpec, GroupSpec, Moved, TransferResult, TransferSpec

__all__ = [
    "CollectiveSpec",
    "Forkserver",
    "GroupSpec",
    "Moved",
    "Sidecar",
    "SidecarDied",
    "SidecarFailed",
    "TransferResult",
    "TransferSpec",
]
