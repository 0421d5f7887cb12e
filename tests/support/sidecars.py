"""Sidecars of a real forkserver over a real store on loopback, for integration
tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from replicas.channel import Channel
from replicas.channel.versions.carried import Transfer
from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import segment_layout
from replicas.linux.sockets import SocketAddress
from replicas.messages import GroupSpec, OperationGo, OperationKind, ReduceOp, Segment, TransferDone
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import Sidecar
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.copies.tensors import dtype_name, torch_dtype, typed
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.buffers import Buffer

__all__ = [
    "Lane",
    "LoopbackStore",
    "children_of",
    "descriptors_of",
    "gone",
    "kept_forkserver",
    "kill_next",
    "lane",
    "mapped_by",
    "read_segments",
    "segments_of",
    "shared_forkserver",
    "start_forkserver",
    "threads_of",
    "write_segments",
]

_prefixes = itertools.count()


def kill_next(victim: Channel, how: int = signal.SIGKILL) -> None:
    """Kill the sidecar of this member, or freeze it by SIGSTOP, as soon as it is to
    broadcast a version."""
    transfers = victim._transfers
    broadcast = transfers._broadcast

    async def kill_first(transfer: Transfer, slot: Slot, go: OperationGo) -> TransferDone:
        transfers._broadcast = broadcast  # type: ignore[method-assign]  # only the first one is hit
        sidecar = victim._lanes.get(go.lane).sidecar
        assert sidecar is not None
        os.kill(sidecar.pid, how)
        return await broadcast(transfer, slot, go)

    transfers._broadcast = kill_first  # type: ignore[method-assign]  # see above


class LoopbackStore:
    """A master TCPStore that listens on 127.0.0.1 only."""

    def __init__(self, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        self.port: int = listener.getsockname()[1]
        store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's annotations leave it out
        self.store = store(
            "127.0.0.1",
            self.port,
            None,
            True,
            timedelta(seconds=10),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Lane:
    """A few sidecars with one process group.

    :ivar devices: UUID of the GPU of each, on which its buffers are; empty: they are in
        host memory.
    """

    def __init__(
        self, store: LoopbackStore, forkserver: Forkserver, sidecars: Sequence[Sidecar], devices: Sequence[str] = ()
    ) -> None:
        self.store = store
        self.forkserver = forkserver
        self.sidecars = list(sidecars)
        self.devices = tuple(devices) or ("",) * len(sidecars)

    @property
    def forkserver_pid(self) -> int:
        """The parent of the sidecars."""
        return int(Path(f"/proc/{self.sidecars[0].pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])

    def spec(self, prefix: str, rank: int, **changes: Any) -> GroupSpec:
        fields: dict[str, Any] = {
            "prefix": prefix,
            "store_host": "127.0.0.1",
            "store_port": self.store.port,
            "rank": rank,
            "size": len(self.sidecars),
            "backend": "gloo",
            "address": "127.0.0.1",
            "timeout_s": 20.0,
            "device": self.devices[rank],
        }
        return GroupSpec(**fields | changes)

    async def build(self) -> None:
        prefix = f"lane-{next(_prefixes)}"
        await asyncio.gather(*[sidecar.build(self.spec(prefix, rank)) for rank, sidecar in enumerate(self.sidecars)])

    async def run(
        self,
        kind: OperationKind,
        given: Sequence[Sequence[torch.Tensor]],
        *,
        op: ReduceOp = "sum",
        root: int = -1,
        timeout_s: float = 20.0,
        order: Sequence[int] | None = None,
        kinds: Sequence[OperationKind] | None = None,
        places: tuple[int, ...] = (),
    ) -> list[tuple[Buffer, Buffer]]:
        """One operation; participant ``i`` is lane rank ``order[i]`` and posts
        ``given[i]``. Inputs and outputs of each."""
        ranks = tuple(order if order is not None else range(len(given)))
        segments = tuple(segments_of(tensors) for tensors in given)
        pairs: list[tuple[Buffer, Buffer]] = []
        _, room = segment_layout([segment for one in segments for segment in one])
        for rank, tensors in zip(ranks, given, strict=True):
            where = self.devices[rank]
            inputs = Buffer.allocate(segment_layout(segments_of(tensors))[1], "test-inputs", device=where)
            write_segments(inputs, tensors)
            pairs.append((inputs, Buffer.allocate(room, "test-outputs", device=where)))
        await asyncio.gather(
            *[
                self.sidecars[rank].collective(
                    CollectiveSpec(1, kinds[me] if kinds else kind, op, ranks, segments, me, root, timeout_s, places),
                    *pairs[me],
                )
                for me, rank in enumerate(ranks)
            ]
        )
        return pairs

    def broadcast(
        self, slots: Sequence[Buffer], *, root: int = 0, order: Sequence[int] | None = None, timeout_s: float = 30.0
    ) -> list[asyncio.Future[None]]:
        """Begin the broadcast of a version, as ranks do: participant ``i`` is lane rank
        ``order[i]``, and its slot ``slots[i]``."""
        ranks = tuple(order if order is not None else range(len(slots)))
        segments = tuple((Segment("uint8", (slot.nbytes,)),) for slot in slots)

        def move(me: int, slot: Buffer) -> asyncio.Future[None]:
            spec = CollectiveSpec(1, "broadcast", "sum", ranks, segments, me, root, timeout_s)
            given = (slot, None) if me == root else (None, slot)
            return asyncio.ensure_future(self.sidecars[ranks[me]].collective(spec, *given))

        return [move(me, slot) for me, slot in enumerate(slots)]


def segments_of(tensors: Sequence[torch.Tensor]) -> tuple[Segment, ...]:
    return tuple(Segment(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def write_segments(buffer: Buffer, tensors: Sequence[torch.Tensor]) -> None:
    segments = segments_of(tensors)
    for offset, segment, tensor in zip(segment_layout(segments)[0], segments, tensors, strict=True):
        raw = tensor.contiguous().flatten().view(torch.uint8)
        buffer.tensor()[offset : offset + prod(segment.shape) * item_nbytes(segment.dtype)].copy_(raw)


def read_segments(buffer: Buffer, segments: Sequence[Segment]) -> list[torch.Tensor]:
    offsets, _ = segment_layout(segments)
    return [
        typed(buffer.tensor(), offset, torch_dtype(segment.dtype), segment.shape).clone()
        for offset, segment in zip(offsets, segments, strict=True)
    ]


def children_of(pid: int) -> set[int]:
    """Processes whose parent is ``pid``."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.add(int(path.parent.name))
    return found


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def descriptors_of(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


def mapped_by(pid: int, name: str) -> int:
    """How many mappings of buffers called ``name`` a process has."""
    return Path(f"/proc/{pid}/maps").read_text(errors="replace").count(f"memfd:{name}")


async def gone(pidfds: Sequence[int], timeout_s: float = 5.0) -> bool:
    """Whether all these processes end in time; closes the pidfds."""
    loop = asyncio.get_running_loop()
    events = [asyncio.Event() for _ in pidfds]
    for pidfd, event in zip(pidfds, events, strict=True):
        loop.add_reader(pidfd, event.set)
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    _, pending = await asyncio.wait(waits, timeout=timeout_s)
    for wait in pending:
        wait.cancel()
    for pidfd in pidfds:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return not pending


def start_forkserver(name: str, command: Callable[..., list[str]] = lambda *words: [*words]) -> subprocess.Popen[str]:
    """A forkserver behind the door ``name``, which goes with it; it dies with this
    process. ``command``: what else is to start it."""
    with SocketAddress.parse(name).listen() as listener:
        return subprocess.Popen(
            command(sys.executable, "-m", "replicas.sidecar.forkserver", "--listener", str(listener.fileno())),
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[listener.fileno()],
            env={**os.environ, "REPLICAS_FORKSERVER": name},
        )


@contextmanager
def shared_forkserver() -> Iterator[str]:
    """Name of a forkserver that several tests share."""
    name = f"replicas-test-{secrets.token_hex(8)}"
    process = start_forkserver(name)
    try:
        yield name
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def kept_forkserver() -> AsyncIterator[KeptForkserver]:
    """A forkserver that this process keeps, as a rank without an agent does."""
    given_up: list[str] = []
    kept = KeptForkserver(os.environ, given_up.append)
    try:
        yield kept
    finally:
        await kept.aclose()
    assert given_up == []
    assert kept.pid == 0


@asynccontextmanager
async def lane(size: int, name: str = "", *, build: bool = True, devices: Sequence[str] = ()) -> AsyncIterator[Lane]:
    """``size`` sidecars with their group, of the forkserver ``name``, or of one that
    this process keeps; see :attr:`Lane.devices`."""
    async with AsyncExitStack() as stack:
        forkserver = await Forkserver.connect(
            name or (await stack.enter_async_context(kept_forkserver())).address, timeout_s=60.0
        )
        stack.callback(forkserver.close)
        sidecars = await asyncio.gather(*[forkserver.fork() for _ in range(size)])
        made = Lane(LoopbackStore(), forkserver, sidecars, devices)
        if build:
            await made.build()
        yield made
