"""The rank's side of sidecars, for the asyncio loop of its session thread.

Theory of operation
===================

A :class:`Forkserver` (:mod:`replicas.sidecar.rank_side.forks`) makes :class:`Sidecar`
objects (:mod:`replicas.sidecar.rank_side.handle`); a sidecar has one process group.
Requests are matched with replies by number, so that a reply that comes after its caller
gave up is dropped and never taken for another's. A sidecar's end is seen by pidfd,
which no inherited socket delays.

**Two ways to be stuck.** A sidecar whose group hangs is alive: it answers pings, and
its deadlines are the rank's business; one that does not answer a request in time is
killed (a second after it should have given up by itself), as it may be in native code
that knows no timeout. A sidecar that is frozen answers no ping: it is killed after two
seconds (:mod:`replicas.sidecar.rank_side.pulse`), long before any deadline, and its
lane is replaced.

**Ahead of need.** A forkserver connection keeps one spare sidecar once it was asked to
(:meth:`Forkserver.prefork`), so that a lane does not wait for the fork. ``ps`` calls it
``replica-spare`` until it has a group to build.

Memory goes to a sidecar once, as a descriptor, and is unmapped there when its buffer is
closed here. A slot that a sidecar may be writing is safe to reuse only after
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
