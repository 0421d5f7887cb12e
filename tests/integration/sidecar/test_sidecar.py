"""Sidecars as they are: a forkserver process, forked children, a TCPStore, Gloo over
loopback."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence

import pytest
import torch

from replicas.messages import OperationKind, ReduceOp, Segment
from replicas.sidecar.rank_side.forkserver_client import Forkserver, Unusable
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.memory.buffers import Buffer
from tests.support.processes import name_of
from tests.support.sidecars import (
    Lane,
    children_of,
    descriptors_of,
    gone,
    lane,
    mapped_by,
    read_segments,
    segments_of,
    start_forkserver,
    threads_of,
)
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "int64", "complex64", "float16", "int16"]


def some_tensors(seed: int) -> list[torch.Tensor]:
    """Random bits in many dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    for number, name in enumerate(DTYPES):
        dtype: torch.dtype = getattr(torch, name)
        shape = [(), (3,), (2, 5), (0, 4)][number % 4]
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if name == "bool" else 120, (count,), dtype=torch.uint8, generator=generator)
        found.append(raw.view(dtype).view(shape))
    return found


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
        for a, b in pairs
    )


# ---------------------------------------------------------------- collectives


async def test_every_collective_on_three_sidecars(server: str) -> None:
    async with lane(3, server) as three:
        await check_moves(three, order=(0, 1, 2))
        await check_moves(three, order=(2, 0, 1))
        await check_reductions(three)
        await check_pairs(three)
        await three.run("barrier", [[], [], []])
        with pytest.raises(SidecarFailed, match="gloo cannot reduce float8_e4m3fn tensors") as caught:
            await three.run("all_reduce", [[torch.zeros(2), torch.zeros(2).to(torch.float8_e4m3fn)]] * 3)
        assert not caught.value.over
        with pytest.raises(SidecarFailed, match="the mean of int32 tensors is not defined"):
            await three.run("all_reduce", [[torch.zeros(2, dtype=torch.int32)]] * 3, op="mean")
        await check_reductions(three)  # a refusal leaves the group as it was


async def check_moves(three: Lane, order: Sequence[int]) -> None:
    """Operations that move bytes, on ragged segments of every dtype."""
    given = [some_tensors(1), some_tensors(2)[:4], [*some_tensors(3), torch.arange(1000)]]
    flat = [segment for tensors in given for segment in segments_of(tensors)]
    everything = [tensor for tensors in given for tensor in tensors]
    for _, outputs in await three.run("all_gather", given, order=order):
        assert same(read_segments(outputs, flat), everything)
    pairs = await three.run("gather", given, root=1, order=order)
    assert same(read_segments(pairs[1][1], flat), everything)
    alike = [some_tensors(seed) for seed in (1, 2, 3)]
    for me, pair in enumerate(await three.run("broadcast", alike, root=2, order=order)):
        assert same(read_segments(pair[0 if me == 2 else 1], segments_of(alike[2])), alike[2])
        assert same(read_segments(pair[0], segments_of(alike[me])), alike[me]), "the inputs stay as they were"
    scattered = [torch.arange(3), torch.zeros(0), torch.ones(2, 2).to(torch.float8_e5m2)]
    pairs = await three.run("scatter", [scattered, [], []], root=0, order=order)
    for tensor, (_, outputs) in zip(scattered, pairs, strict=True):
        assert same(read_segments(outputs, segments_of([tensor])), [tensor])


async def check_reductions(three: Lane) -> None:
    base = [torch.arange(5.0), torch.ones(2, 2), torch.tensor(3), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)]
    given = [[tensor * (rank + 1) for tensor in base] for rank in range(3)]
    expected: dict[ReduceOp, float] = {"sum": 6.0, "min": 1.0, "max": 3.0}
    for op, factor in expected.items():
        for me, (inputs, outputs) in enumerate(await three.run("all_reduce", given, op=op)):
            assert same(read_segments(outputs, segments_of(base)), [(t * factor).to(t.dtype) for t in base])
            assert same(read_segments(inputs, segments_of(base)), given[me]), "the inputs stay as they were"
    floats = [tensors[:2] for tensors in given]
    for _, outputs in await three.run("all_reduce", floats, op="mean"):
        assert same(read_segments(outputs, segments_of(base[:2])), [tensor * 2 for tensor in base[:2]])
    pairs = await three.run("reduce", floats, op="mean", root=1)
    assert same(read_segments(pairs[1][1], segments_of(base[:2])), [tensor * 2 for tensor in base[:2]])
    assert all(
        same(read_segments(pair[0], segments_of(base[:2])), one) for pair, one in zip(pairs, floats, strict=True)
    )
    shards = [[torch.full((rank + 2,), float(index * 10 + rank)) for rank in range(3)] for index in range(3)]
    for rank, (inputs, outputs) in enumerate(await three.run("reduce_scatter", shards, op="sum")):
        total = torch.full((rank + 2,), float(sum(index * 10 + rank for index in range(3))))
        assert same(read_segments(outputs, segments_of(shards[0]))[rank : rank + 1], [total])
        assert same(read_segments(inputs, segments_of(shards[rank])), shards[rank])


async def test_a_repeated_operation_uses_the_segments_of_those_that_are_left(server: str) -> None:
    async with lane(2, server) as two:
        shards = [[torch.full((place + 2,), float(place + 10 * me)) for place in range(4)] for me in range(2)]
        pairs = await two.run("reduce_scatter", shards, op="mean", places=(3, 1))
        for place, (_, outputs) in zip((3, 1), pairs, strict=True):
            mine = read_segments(outputs, segments_of(shards[0]))[place]
            assert same([mine], [torch.full((place + 2,), float(place + 5))])
        pairs = await two.run("scatter", [shards[0], []], root=0, places=(0, 2))
        for place, (_, outputs) in zip((0, 2), pairs, strict=True):
            assert same(read_segments(outputs, segments_of([shards[0][place]])), [shards[0][place]])
        with pytest.raises(SidecarFailed, match=r"scatter has 2 segments for 2 participants"):
            await two.run("scatter", [shards[0][:2], []], root=0, places=(0, 2))
        with pytest.raises(SidecarFailed, match=r"places \(1, 1\) do not fit 2 participants"):
            await two.run("all_reduce", shards, places=(1, 1))


async def check_pairs(three: Lane) -> None:
    sent = some_tensors(9)
    kinds: list[OperationKind] = ["send", "recv"]
    pairs = await three.run("send", [sent, []], order=(2, 0), kinds=kinds)
    assert same(read_segments(pairs[1][1], segments_of(sent)), sent)


async def test_one_sidecar_alone_is_a_group(server: str) -> None:
    async with lane(1, server) as alone:
        given = [torch.arange(4.0)]
        for kind in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"):
            pairs = await alone.run(kind, [given], root=0)
            place = 0 if kind == "broadcast" else 1
            assert same(read_segments(pairs[0][place], [Segment("float32", (4,))]), given), kind
        await alone.run("barrier", [[]])


async def test_arguments_that_do_not_fit_are_refused_and_harm_nothing(server: str) -> None:
    async with lane(2, server) as two:
        with pytest.raises(SidecarFailed, match=r"all_reduce of 1 participants in a group of 2") as caught:
            await two.run("all_reduce", [[torch.zeros(1)]])
        assert not caught.value.over
        with pytest.raises(SidecarFailed, match="reduce needs a root among its 2 participants"):
            await two.run("reduce", [[torch.zeros(1)]] * 2, root=2)
        with pytest.raises(SidecarFailed, match="scatter has 1 segments for 2 participants"):
            await two.run("scatter", [[torch.zeros(1)], []], root=0)
        with pytest.raises(SidecarFailed, match="this sidecar has a group already"):
            await two.sidecars[0].build(two.spec("again", 0))
        await two.run("barrier", [[], []])


# ---------------------------------------------------------------- versions


def slots_for(nbytes: int, count: int) -> list[Buffer]:
    return [Buffer.allocate(nbytes, "test") for _ in range(count)]


async def test_a_version_of_several_pieces_reaches_every_slot(server: str) -> None:
    slots = slots_for((72 << 20) + 5, 3)
    slots[0].tensor()[: 72 << 20].view(torch.int64).copy_(torch.arange(9 << 20))
    async with lane(3, server) as three:
        for _ in range(2):
            slots[0].tensor()[-1] += 1
            await asyncio.gather(*three.broadcast(slots))
            assert all(torch.equal(slot.tensor(), slots[0].tensor()) for slot in slots)


async def test_the_memory_of_an_operation_may_be_empty_but_not_too_small(server: str) -> None:
    async with lane(2, server) as two:
        await asyncio.gather(*two.broadcast(slots_for(0, 2)))
        spec = CollectiveSpec(1, "broadcast", "sum", (0, 1), ((Segment("uint8", (4116,)),),) * 2, 0, 0, 5.0)
        with pytest.raises(SidecarFailed, match="broadcast needs 4116 bytes, but its buffer has 4112") as caught:
            await two.sidecars[0].collective(spec, slots_for(4112, 1)[0], None)
        assert not caught.value.over
        await two.run("barrier", [[], []])


async def test_memory_is_mapped_once_and_unmapped_when_it_is_closed(server: str) -> None:
    async with lane(1, server) as alone:
        pid = alone.sidecars[0].pid
        pairs = await alone.run("all_gather", [[torch.ones(4)]])
        assert mapped_by(pid, "test") == 2
        for buffer in pairs[0]:
            buffer.close()
        await alone.run("barrier", [[]])  # without memory; requests are handled in order
        assert mapped_by(pid, "test") == 0


# ---------------------------------------------------------------- failures


async def test_a_killed_peer_fails_every_other_member_at_once(server: str) -> None:
    reasons: list[str] = []
    async with lane(4, server) as four:
        for sidecar in four.sidecars:
            sidecar.on_exit = reasons.append
        os.kill(four.sidecars[3].pid, signal.SIGSTOP)  # so that the operation is under way when it dies
        task = asyncio.ensure_future(four.run("all_reduce", [[torch.zeros(1 << 20)]] * 4, timeout_s=60.0))
        await asyncio.wait([task], timeout=0.3)
        started = time.monotonic()
        os.kill(four.sidecars[3].pid, signal.SIGKILL)
        with pytest.raises((SidecarFailed, SidecarDied)):
            await task
        # A failed group is of no use: all its sidecars have gone, and the rank has been
        # told.
        assert all([await sidecar.wait_dead() for sidecar in four.sidecars])
        assert time.monotonic() - started < 5.0
        assert len(reasons) == 4


async def test_a_receiver_killed_in_mid_transfer_hangs_nobody(server: str) -> None:
    slots = slots_for(96 << 20, 3)
    async with lane(3, server) as three:
        task = asyncio.gather(*three.broadcast(slots, timeout_s=60.0))
        await asyncio.wait([task], timeout=0.02)
        started = time.monotonic()
        os.kill(three.sidecars[1].pid, signal.SIGKILL)
        with pytest.raises((SidecarFailed, SidecarDied)):
            await task
        assert time.monotonic() - started < 5.0


async def test_a_frozen_peer_costs_the_deadline_and_no_more(server: str) -> None:
    async with lane(2, server) as two:
        os.kill(two.sidecars[1].pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises((SidecarFailed, SidecarDied)):
            await two.run("all_reduce", [[torch.zeros(1)]] * 2, timeout_s=0.5)
        assert time.monotonic() - started < 5.0
        two.sidecars[1].kill()
        assert await two.sidecars[1].wait_dead()


async def test_a_sidecar_that_does_not_answer_is_killed_at_the_deadline(server: str) -> None:
    async with lane(1, server) as alone:
        (sidecar,) = alone.sidecars
        exits: list[str] = []
        sidecar.on_exit = exits.append
        os.kill(sidecar.pid, signal.SIGSTOP)
        with pytest.raises(SidecarDied, match=r"did not answer within 0\.2 s"):
            await alone.run("barrier", [[]], timeout_s=0.2)
        assert await sidecar.wait_dead()
        assert exits == []  # we did it ourselves
        with pytest.raises(SidecarDied, match="was killed"):
            await alone.run("barrier", [[]])


async def test_a_peer_that_never_comes_fails_the_group_in_time(server: str) -> None:
    async with lane(2, server, build=False) as two:
        started = time.monotonic()
        with pytest.raises((SidecarFailed, SidecarDied)):
            await two.sidecars[0].build(two.spec("lonely", 0, timeout_s=0.5))
        assert time.monotonic() - started < 5.0


async def test_an_address_of_another_machine_is_an_error(server: str) -> None:
    async with lane(1, server, build=False) as alone:
        with pytest.raises(SidecarFailed):
            await alone.sidecars[0].build(alone.spec("elsewhere", 0, address="203.0.113.1", timeout_s=5.0))


async def test_a_cancelled_caller_does_not_disturb_the_next_one(server: str) -> None:
    async with lane(2, server) as two:
        pending = asyncio.ensure_future(two.run("all_reduce", [[torch.ones(1 << 20)]] * 2))
        await asyncio.sleep(0)
        await asyncio.wait([pending], timeout=0.002)
        pending.cancel()
        await asyncio.wait([pending])
        if not any(sidecar.dead for sidecar in two.sidecars):
            pairs = await two.run("all_reduce", [[torch.ones(3)]] * 2)
            assert read_segments(pairs[0][1], [Segment("float32", (3,))])[0].tolist() == [2.0] * 3


# ---------------------------------------------------------------- lives and deaths


async def test_forking_takes_milliseconds_and_leaves_one_thread_and_few_descriptors(server: str) -> None:
    async with lane(2, server, build=False) as two:
        times: list[float] = []
        for _ in range(5):
            started = time.monotonic()
            sidecar = await two.forkserver.fork()
            times.append(time.monotonic() - started)
            sidecar.kill()
        assert sorted(times)[2] < 0.5  # 16 ms on a quiet machine
        assert threads_of(two.forkserver_pid) == 1
        # its channel, the rank's pidfd, an eventfd; it closes inherited ones first
        await wait_until(lambda: len(descriptors_of(two.sidecars[0].pid) - {0, 1, 2}) == 3, "few descriptors")


async def test_the_end_of_the_forkserver_is_the_end_of_its_sidecars() -> None:
    async with lane(2) as two:
        exits: list[str] = []
        for sidecar in two.sidecars:
            sidecar.on_exit = exits.append
        os.kill(two.forkserver_pid, signal.SIGKILL)
        assert all([await sidecar.wait_dead() for sidecar in two.sidecars])
        with pytest.raises(SidecarDied):
            await two.forkserver.fork()
        assert not two.forkserver.alive
        assert len(exits) == 2


async def test_closing_the_connection_leaves_no_process() -> None:
    before = children_of(os.getpid())
    async with lane(3) as three:
        server = three.forkserver_pid
        sidecars = three.sidecars
        assert children_of(server) == {sidecar.pid for sidecar in sidecars}
    assert all([await sidecar.wait_dead() for sidecar in sidecars])
    assert children_of(os.getpid()) == before


RANK = """
import asyncio, os, signal, sys
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.sidecar.rank_side.forkserver_client import Forkserver

async def main():
    name = sys.argv[1]
    kept = None if name else KeptForkserver(os.environ, print)
    forkserver = await Forkserver.connect(name or kept.address)
    sidecars = [await forkserver.fork() for _ in range(2)]
    if os.fork() == 0:  # like a DataLoader worker: it inherits the sockets and lives on
        signal.pause()
    print(*[sidecar.pid for sidecar in sidecars], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start_rank(name: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(RANK), name],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("shared", [True, False], ids=["the node's", "its own"])
async def test_sidecars_go_with_their_rank_though_its_children_keep_the_sockets(shared: bool) -> None:
    name = f"replicas-test-{secrets.token_hex(8)}" if shared else ""
    server = start_forkserver(name) if shared else None
    try:
        rank, sidecars = await asyncio.to_thread(start_rank, name)
        children = children_of(rank.pid)
        kept = {pid for pid in children if name_of(pid) == "replica-forksrv"}
        assert len(kept) == int(not shared)
        pidfds = [os.pidfd_open(pid) for pid in (*sidecars, *kept)]
        workers = [os.pidfd_open(pid) for pid in children - kept]
        rank.send_signal(signal.SIGKILL)
        assert await gone(pidfds)
        for worker in workers:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        assert await gone(workers)
        await asyncio.to_thread(rank.wait)
        assert rank.stdout is not None
        rank.stdout.close()
        if server is not None:
            assert server.poll() is None  # it serves others
            connection = await Forkserver.connect(name)
            assert isinstance(await connection.fork(), Sidecar)
            connection.close()
    finally:
        if server is not None:
            server.kill()
            await asyncio.to_thread(server.communicate)


async def test_a_named_forkserver_survives_garbage() -> None:
    name = f"replicas-test-{secrets.token_hex(8)}"
    server = start_forkserver(name)
    try:
        connection = await Forkserver.connect(name)
        for junk in (b"\x00", b"\xff" * 3000, b"\x81\xa4type\xa4Fork"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(5.0)
                sock.connect("\0" + name)
                sock.send(junk)
                assert await asyncio.to_thread(sock.recv, 100) == b""
        assert isinstance(await connection.fork(), Sidecar)
        connection.close()
    finally:
        server.kill()
        await asyncio.to_thread(server.communicate)


async def test_nobody_listening_is_an_error_in_time() -> None:
    with pytest.raises(Unusable, match=r"'replicas-test-nobody'"):
        await Forkserver.connect("replicas-test-nobody", timeout_s=0.1)


async def test_a_closed_buffer_is_refused(server: str) -> None:
    async with lane(1, server) as alone:
        buffer = Buffer.allocate(64, "test")
        buffer.close()
        with pytest.raises(ValueError, match="the buffer is closed"):
            await asyncio.gather(*alone.broadcast([buffer]))
