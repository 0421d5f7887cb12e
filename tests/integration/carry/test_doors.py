"""The door of a carrier's process: who gets in, at which port, and what a flood costs.

Covers: carry/carrier.py, carry/serve.py, carry/endpoint.py, carry/tls.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.carry import serve
from replicas.carry.rank_side import Carrier, CarrierDied, PullFailed
from replicas.carry.serve import UNPROVEN
from replicas.messages import HolderAddress
from replicas.trust.certificate import make_pem
from tests.integration.carry.test_carrier import HERE, OFFSET, SECRET, Memory, address, carriers, digest_of
from tests.support.waits import wait_until
from tests.unit.carry.test_endpoint import HOSTS, free_ports

pytestmark = pytest.mark.anyio
CONNECTIONS = 10_000
FLOODED_NBYTES = 48 << 20
"""What a flood may cost a carrier in memory."""
FLOOD = """
import random, socket, sys
sys.stdin.readline()
address, count, kept = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), []
words = [b"", b"GET / HTTP/1.1", b"rplcarry" + b"\\0" * 24, b"\\x16\\x03\\x01\\x02\\0" + b"\\x01" * 40]
for number in range(count):
    try:
        kept.append(socket.create_connection(address, 5))
        kept[-1].sendall(words[number % len(words)])
    except OSError:
        pass
    if len(kept) > 500:
        kept.pop(0).close()
print("over", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes((16 << 20) + 4321)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def status(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0])


async def pull(
    taker: Carrier, source: Carrier, data: bytes, host: str = HERE, *, encrypt: bool, number: int = 1
) -> None:
    slot = Memory(len(data))
    holders = [address(source, "t/0/0", host)]
    found = await taker.pull(number, SECRET, slot, slot.place, holders, 30.0, host, encrypt=encrypt)
    assert found.digest == digest_of(data)
    assert slot.mapped[OFFSET:] == data


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.usefixtures("many_files")
async def test_pulls_go_on_under_a_flood_that_costs_little(data: bytes, encrypt: bool) -> None:
    async with carriers(2, encrypt=encrypt) as (source, taker):
        packed = Memory(data)
        source.serve(1, SECRET, packed, packed.place, len(data), encrypt=encrypt)
        await pull(taker, source, data, encrypt=encrypt)
        await taker.withdraw(1, "over")
        before = status(source.pid, "VmRSS")
        flood = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FLOOD, HERE, str(source.port), str(CONNECTIONS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert flood.stdin is not None
        assert flood.stdout is not None
        flood.stdin.write(b"\n")
        over = asyncio.ensure_future(flood.stdout.readline())
        pulls, threads, memory = 0, 0, before
        while not over.done() or not pulls:
            await pull(taker, source, data, encrypt=encrypt)
            await taker.withdraw(1, "over")
            pulls += 1
            threads = max(threads, status(source.pid, "Threads"))
            memory = max(memory, status(source.pid, "VmRSS"))
        flood.kill()
        await flood.wait()
        print(f"{pulls} pulls under {CONNECTIONS} connections; {threads} threads, {memory - before} KiB more")
        assert threads <= 2 * UNPROVEN + 64 + 8
        assert (memory - before) << 10 < FLOODED_NBYTES
        await wait_until(lambda: status(source.pid, "Threads") <= 8, "the threads of strangers end")
        await wait_until(lambda: len(os.listdir(f"/proc/{source.pid}/fd")) < 32, "and their connections")  # noqa: PTH208
        assert source.usable


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_carrier_listens_at_its_members_address_alone(data: bytes, host: str, encrypt: bool) -> None:
    async with carriers(2, host, encrypt=encrypt) as (source, taker):
        packed = Memory(data)
        source.serve(1, SECRET, packed, packed.place, len(data), encrypt=encrypt)
        await pull(taker, source, data, host, encrypt=encrypt)
        for other in {"127.0.0.1", "127.0.0.2", "::1"} - {host}:
            with pytest.raises(OSError, match=r"refused|assign|unreachable"):
                socket.create_connection((other, source.port), 5)


async def test_carriers_of_one_machine_take_the_next_ports(caplog: pytest.LogCaptureFixture) -> None:
    first = free_ports(4)
    with caplog.at_level(logging.WARNING, "replicas.channel"):
        async with carriers(3, port=first) as found:
            assert {one.port for one in found} == {first, first + 1, first + 2}
        await asyncio.sleep(0.1)
        assert "is taken" not in caplog.text


async def test_the_port_of_another_program_is_named(caplog: pytest.LogCaptureFixture) -> None:
    first = free_ports(4)
    with socket.create_server((HERE, first)), caplog.at_level(logging.WARNING, "replicas.channel"):
        async with carriers(1, port=first) as (one,):
            assert one.port == first + 1
            await wait_until(lambda: f"port {first} of {HERE}" in caplog.text, "the warning")
            assert f"(process {os.getpid()})" in caplog.text
            assert "set cluster.carry_port" in caplog.text


async def test_an_address_that_is_not_here_is_told_in_words() -> None:
    with pytest.raises(CarrierDied, match=r"cannot listen at 203\.0\.113\.9, which is not an address of this"):
        await Carrier.start("203.0.113.9")


async def test_who_cannot_be_reached_is_named_with_what_to_do() -> None:
    async with carriers(1) as (taker,):
        slot, nobody = Memory(10), HolderAddress("r/9/0", HERE, free_ports(1))
        with pytest.raises(PullFailed) as failed:
            await taker.pull(1, SECRET, slot, slot.place, [nobody], 30.0, HERE)
        (name, why), *_ = failed.value.why.items()
        assert name == "r/9/0"
        assert f"{HERE}:{nobody.port} cannot be reached from {HERE} (lo): connection refused" in why
        assert "open the TCP ports of carriers between these machines" in why


async def test_a_silent_network_is_told_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops packets, as a firewall does."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind((HERE, 0))
        full.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        async with carriers(1) as (taker,):
            slot, silent = Memory(10), HolderAddress("r/9/0", *full.getsockname())
            with pytest.raises(PullFailed, match=r"r/9/0: .* no answer in time: packets are lost on the way"):
                await taker.pull(1, SECRET, slot, slot.place, [silent], 30.0, HERE)


async def test_the_key_is_in_memory_only(data: bytes) -> None:
    pem = make_pem()
    async with carriers(1) as (one,):
        folder = Path(f"/proc/{one.pid}")
        before = {os.readlink(fd) for fd in (folder / "fd").iterdir()}  # noqa: PTH115
        one.certify(pem)
        packed = Memory(data)
        one.serve(1, SECRET, packed, packed.place, len(data), encrypt=True)
        await one.withdraw(1, "over")
        secret = pem.split(b"\n")[1]
        assert secret not in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        assert "cryptography" not in (folder / "maps").read_text()
        opened = {os.readlink(fd) for fd in (folder / "fd").iterdir()} - before  # noqa: PTH115
        assert {name.partition(" ")[0] for name in opened if name.startswith("/")} == {"/memfd:test-slot"}


async def test_a_carrier_is_small() -> None:
    async with carriers(1, encrypt=True) as (one,):
        assert await one.withdraw(1, "there is none") == 0
        memory = status(one.pid, "RssAnon")
        print(f"{memory} KiB of its own")
        assert memory << 10 < 25 << 20


def test_what_a_flood_may_cost_is_bounded() -> None:
    assert serve.PROOF_S <= 2.0
    assert serve.UNPROVEN <= 128
