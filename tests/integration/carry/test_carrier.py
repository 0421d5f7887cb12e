"""Carriers as processes: served and pulled slots, deaths, and the end.

Covers: carry/carrier.py, carry/rank_side.py, carry/wire.py.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import xxhash

from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.rank_side import Carrier, CarrierDied, PullFailed
from replicas.linux.processes import start_time
from replicas.messages import HolderAddress
from replicas.trust.certificate import make_pem
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"
SECRET = bytes(range(32))
OFFSET = 4096
_keys = itertools.count(1)


class Memory:
    """A slot: a header of :data:`OFFSET` bytes, and an image."""

    def __init__(self, data: bytes | int) -> None:
        nbytes = data if isinstance(data, int) else len(data)
        self.key, self.nbytes = next(_keys), nbytes
        self.fd = os.memfd_create("test-slot")
        os.ftruncate(self.fd, OFFSET + nbytes)
        self.mapped = mmap.mmap(self.fd, OFFSET + nbytes)
        self.watchers: weakref.WeakSet[Carrier] = weakref.WeakSet()
        if isinstance(data, bytes):
            self.mapped[OFFSET:] = data

    @property
    def place(self) -> tuple[int, int]:
        return OFFSET, self.nbytes


@asynccontextmanager
async def carriers(
    count: int, host: str = HERE, port: int = 0, *, encrypt: bool = False
) -> AsyncIterator[list[Carrier]]:
    found = await asyncio.gather(*(Carrier.start(host, port) for _ in range(count)))
    for one in found if encrypt else ():
        one.certify(make_pem())
    try:
        yield found
    finally:
        for one in found:
            one.kill()
            assert await one.wait_dead()
            one.process.wait()


def address(carrier: Carrier, name: str, host: str = HERE) -> HolderAddress:
    return HolderAddress(name, host, carrier.port, carrier.certificate_hash)


def digest_of(data: bytes) -> str:
    return combined(digests(data))


def digests(data: bytes) -> list[bytes]:
    return [xxhash.xxh3_128_digest(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)]


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(2 * BLOCK_NBYTES + 4321)


@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_version_goes_down_a_chain_while_it_is_packed(data: bytes, encrypt: bool) -> None:
    async with carriers(3, encrypt=encrypt) as (source, middle, last):
        packed, *slots = Memory(data), Memory(len(data)), Memory(len(data))
        source.serve(1, SECRET, packed, packed.place, 0, encrypt=encrypt)
        pulls = [
            asyncio.ensure_future(
                taker.pull(1, SECRET, slot, slot.place, [address(giver, name)], 30.0, encrypt=encrypt)
            )
            for taker, slot, giver, name in ((middle, slots[0], source, "t/0/0"), (last, slots[1], middle, "r/0/0"))
        ]
        for filled in (1 << 20, BLOCK_NBYTES + 5, len(data)):
            await asyncio.sleep(0)
            source.filled(1, filled)
        found = await asyncio.gather(*pulls)
        assert {one.digest for one in found} == {digest_of(data)}
        assert [one.received for one in found] == [{"t/0/0": len(data)}, {"r/0/0": len(data)}]
        assert all(slot.mapped[OFFSET:] == data for slot in slots)
        sent = [await one.withdraw(1, "over") for one in (source, middle, last)]
        assert sent == [len(data), len(data), 0]


async def test_a_holder_that_is_killed_costs_what_was_not_received_yet(data: bytes) -> None:
    async with carriers(3) as (first, second, taker):
        packed, slot = Memory(data), Memory(len(data))
        first.serve(1, SECRET, packed, packed.place, BLOCK_NBYTES)
        second.serve(1, SECRET, packed, packed.place, len(data))
        holders = [address(first, "t/0/0"), address(second, "r/0/0")]
        pulling = asyncio.ensure_future(taker.pull(1, SECRET, slot, slot.place, holders, 30.0))
        await wait_until(lambda: slot.mapped[OFFSET + BLOCK_NBYTES - 1] == data[BLOCK_NBYTES - 1], "the first block")
        first.kill()
        found = await pulling
        assert found.digest == digest_of(data)
        assert slot.mapped[OFFSET:] == data
        assert list(found.why) == ["t/0/0"]
        assert found.received["r/0/0"] < len(data)


async def test_a_pull_goes_on_with_holders_that_come_later(data: bytes) -> None:
    async with carriers(2) as (source, taker):
        packed, slot = Memory(data), Memory(len(data))
        nobody = HolderAddress("r/9/0", HERE, 9)
        with pytest.raises(PullFailed, match=r"r/9/0: 127.0.0.1:9 cannot be reached: connection refused"):
            await taker.pull(1, SECRET, slot, slot.place, [nobody], 30.0)
        source.serve(1, SECRET, packed, packed.place, len(data))
        found = await taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0, "", digest_of(data))
        assert (found.digest, found.again) == (digest_of(data), 0)


async def test_forged_bytes_are_found_and_asked_for_elsewhere(data: bytes) -> None:
    forged = bytearray(data)
    forged[BLOCK_NBYTES + 9] ^= 0xFF
    async with carriers(3) as (liar, source, taker):
        packed, false, slot = Memory(data), Memory(bytes(forged)), Memory(len(data))
        liar.serve(1, SECRET, false, false.place, len(data))
        source.serve(1, SECRET, packed, packed.place, len(data))
        alone = await taker.pull(1, SECRET, slot, slot.place, [address(liar, "r/3/0")], 30.0)
        assert alone.digest == digest_of(bytes(forged))
        both = [address(liar, "r/3/0"), address(source, "t/0/0")]
        found = await taker.pull(1, SECRET, slot, slot.place, both, 30.0, "", digest_of(data))
        assert (found.digest, found.again) == (digest_of(data), 1)
        assert found.received["t/0/0"] == BLOCK_NBYTES
        assert found.why == {"r/3/0": "block 1 is not what was published"}
        assert slot.mapped[OFFSET:] == data


@pytest.mark.parametrize("encrypt", [False, True])
async def test_nobody_uses_a_slot_once_its_transfer_has_ended(data: bytes, encrypt: bool) -> None:
    async with carriers(2, encrypt=encrypt) as (source, taker):
        packed, slot = Memory(data), Memory(len(data))
        source.serve(1, SECRET, packed, packed.place, BLOCK_NBYTES, encrypt=encrypt)
        pulling = asyncio.ensure_future(
            taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0, encrypt=encrypt)
        )
        await wait_until(lambda: slot.mapped[OFFSET] == data[0], "the first bytes")
        assert await taker.withdraw(1, "a newer version is there") == 0
        with pytest.raises(PullFailed, match="a newer version is there"):
            await pulling
        slot.mapped[OFFSET:] = bytes(len(data))
        source.filled(1, len(data))
        await source.withdraw(1, "over")
        assert slot.mapped[OFFSET:] == bytes(len(data))


async def test_a_frozen_carrier_is_killed(data: bytes) -> None:
    async with carriers(2) as (source, taker):
        packed, slot = Memory(data), Memory(len(data))
        source.serve(1, SECRET, packed, packed.place, 0)
        pulling = asyncio.ensure_future(taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0))
        await asyncio.sleep(0)
        taker.process.send_signal(signal.SIGSTOP)
        with pytest.raises(CarrierDied, match="did not respond"):
            await pulling


async def test_one_that_serves_and_is_frozen_is_killed_soon(data: bytes) -> None:
    """Nobody waits for a reply of it, but others for its bytes."""
    async with carriers(1) as (source,):
        ended = asyncio.Event()
        source.ends.append(ended.set)
        packed = Memory(data)
        source.serve(1, SECRET, packed, packed.place, len(data))
        source.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(6.0):
            await ended.wait()


async def test_who_asked_for_one_is_told_of_its_end_however_it_ends(data: bytes) -> None:
    async with carriers(1) as (one,):
        ended = asyncio.Event()
        one.ends.append(ended.set)
        one.kill("it did not answer within 5 s and was killed")
        async with asyncio.timeout(10.0):
            await ended.wait()


async def test_one_that_is_frozen_does_not_outlive_its_rank() -> None:
    program = "import asyncio, sys\nfrom replicas.carry.rank_side import Carrier\n"
    program += "async def main():\n    one = await Carrier.start('127.0.0.1')\n    print(one.pid, flush=True)\n"
    program += "    one.process.send_signal(19)\n    print('stopped', flush=True)\n    await asyncio.sleep(60)\n"
    program += "asyncio.run(main())"
    rank = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert rank.stdout is not None
    pid = int(await rank.stdout.readline())
    assert await rank.stdout.readline() == b"stopped\n"
    rank.kill()
    await rank.wait()
    await wait_until(lambda: start_time(pid) is None, "its end")


@asynccontextmanager
async def out_of_descriptors(one: Carrier) -> AsyncIterator[None]:
    """It has those that it has, and gets no other one."""
    count = len(os.listdir(f"/proc/{one.pid}/fd"))  # noqa: PTH208
    soft, hard = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (soft, hard))


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_holder_out_of_descriptors_rests_and_goes_on(data: bytes) -> None:
    """What waits at its door does not keep a processor busy, and is taken later."""
    async with carriers(2) as (source, taker):
        packed, slot = Memory(data), Memory(len(data))
        source.serve(1, SECRET, packed, packed.place, len(data))
        await source.withdraw(9, "it has read all that was said to it")
        async with out_of_descriptors(source):
            pulling = asyncio.ensure_future(taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0))
            before = processor_s(source.pid)
            await asyncio.sleep(1.0)  # the time in which it is measured
            assert processor_s(source.pid) - before < 0.3
        assert (await pulling).digest == digest_of(data)


async def test_a_puller_out_of_descriptors_says_so(data: bytes) -> None:
    async with carriers(2) as (source, taker):
        packed, slot = Memory(data), Memory(len(data))
        source.serve(1, SECRET, packed, packed.place, len(data))
        taker._memories.map(slot)
        await taker.withdraw(9, "it has the memory")
        async with out_of_descriptors(taker):
            with pytest.raises(PullFailed) as failed:
                await taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0)
            assert (failed.value.why, failed.value.cut) == ({"": "Too many open files"}, {})
        found = await taker.pull(1, SECRET, slot, slot.place, [address(source, "t/0/0")], 30.0)
        assert found.digest == digest_of(data)


async def test_one_whose_rank_is_gone_ends(data: bytes) -> None:
    async with carriers(1) as (one,):
        os.close(os.dup(one._sock.fileno()))
        one._loop.remove_reader(one._sock)
        one._sock.close()
        await wait_until(lambda: start_time(one.pid) is None, "its end")


async def test_memory_that_is_closed_here_is_let_go_there(data: bytes) -> None:
    async with carriers(1) as (one,):
        memory = Memory(data)
        one.serve(1, SECRET, memory, memory.place, len(data))
        inode = os.fstat(memory.fd).st_ino

        def is_open() -> bool:
            folder = f"/proc/{one.pid}/fd"
            return any(os.stat(f"{folder}/{fd}").st_ino == inode for fd in os.listdir(folder))  # noqa: PTH116, PTH208

        await wait_until(is_open, "it is open there")
        await one.withdraw(1, "over")
        one._memories.buffer_closed(memory.key)
        await wait_until(lambda: not is_open(), "it is closed there")


async def test_what_cannot_be_is_refused(data: bytes) -> None:
    async with carriers(1) as (one,):
        memory = Memory(data)
        with pytest.raises(Exception, match=f"the slot has {OFFSET + len(data)} bytes"):
            await one.pull(1, SECRET, memory, (OFFSET, len(data) + 1), [], 5.0)
        with pytest.raises(PullFailed, match="no member can send it"):
            await one.pull(1, SECRET, memory, memory.place, [], 5.0)
