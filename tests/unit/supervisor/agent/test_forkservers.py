"""A kept forkserver: when it is started, replaced and given up; which ones a node has.

Covers: linux/rank_environment.py, sidecar/kept_forkserver.py,
supervisor/agent/forkservers.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicas import environ
from replicas.common.backoff import Backoff
from replicas.linux import stalls
from replicas.linux.processes import MARK, NO_MARK
from replicas.linux.rank_environment import lasting
from replicas.linux.sockets import SocketAddress
from replicas.sidecar import kept_forkserver
from replicas.sidecar.kept_forkserver import TRIES, KeptForkserver
from replicas.supervisor.agent.forkservers import Forkservers
from replicas.supervisor.agent.messages import Start
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN

pytestmark = pytest.mark.anyio


class Starter:
    """Starts ``command`` in place of forkservers; ``limit``: how many there may be."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.environments: list[Mapping[str, str]] = []
        self.news = asyncio.Event()
        self.command: tuple[str, ...] = ("sleep", "600")
        self.limit = 100

    def __call__(
        self, environment: Mapping[str, str], listener: int, command: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        if len(self.started) == self.limit:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.environments.append(environment)
        self.started.append(subprocess.Popen(self.command, pass_fds=(listener,)))
        self.news.set()
        return self.started[-1]


@pytest.fixture(autouse=True)
def starter(monkeypatch: pytest.MonkeyPatch) -> Starter:
    monkeypatch.setattr(kept_forkserver, "AGAIN", Backoff(0.001, 0.01))
    monkeypatch.setattr(kept_forkserver, "start_forkserver", found := Starter())
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    yield
    assert descriptors() == before


def connected(address: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.connect(f"\0{SocketAddress.parse(address).name}")
    except OSError:
        client.close()
        raise
    return client


async def until(starter: Starter, count: int) -> None:
    async with asyncio.timeout(30):
        while len(starter.started) < count:
            starter.news.clear()
            await starter.news.wait()


async def test_one_is_started_when_a_rank_connects_and_not_before(starter: Starter, no_leaks: None) -> None:
    given_up: list[str] = []
    kept = KeptForkserver({}, given_up.append)
    await asyncio.sleep(0.05)
    assert (kept.pid, starter.started) == (0, [])
    with connected(kept.address):
        await until(starter, 1)
        assert kept.pid == starter.started[0].pid
    kept._listener.accept()[0].close()  # in place of a forkserver
    starter.started[0].kill()
    await kept.gone.wait()
    await asyncio.sleep(0.05)
    assert kept.pid == 0, "nobody waits for another one"
    with connected(kept.address):
        await until(starter, 2)
        kept.kill()
        await kept.gone.wait()
    await asyncio.sleep(0.05)
    assert (kept.pid, len(starter.started), given_up) == (0, 2, [])


async def test_one_that_will_be_needed_is_started_at_once_and_after_each_end(starter: Starter, no_leaks: None) -> None:
    kept = KeptForkserver({}, lambda reason: pytest.fail(reason))
    kept.need()
    kept.need()
    assert len(starter.started) == 1
    starter.started[0].kill()
    await until(starter, 2)
    await kept.aclose()


@pytest.mark.parametrize("does", ["is stopped", "does nothing"])
async def test_one_that_stalls_is_replaced_if_a_client_waits(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None, does: str
) -> None:
    """While it starts, or later: nobody can tell which hangs, torch's import or it."""
    monkeypatch.setattr(kept_forkserver, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(stalls, "STOPPED_S", 0.3)
    monkeypatch.setattr(stalls, "IDLE_S", 0.3)
    kept = KeptForkserver({}, lambda reason: pytest.fail(reason))
    kept.need()
    if does == "is stopped":
        starter.started[0].send_signal(signal.SIGSTOP)
        await until(starter, 2)
    else:
        await asyncio.sleep(0.7)
        assert len(starter.started) == 1, "nobody waits for it"
        with connected(kept.address):
            await until(starter, 2)
            await until(starter, 3)
    assert f"it {'was stopped' if does == 'is stopped' else 'did nothing'} for 0.3 s" in caplog.text
    await kept.aclose()


@pytest.mark.parametrize("ahead", [True, False])
async def test_one_that_cannot_be_started_again_is_tried_again_and_given_up(
    starter: Starter, no_leaks: None, ahead: bool
) -> None:
    """A machine that is out of processes for a moment costs no replica."""
    starter.command, starter.limit = ("true",), 1
    told: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    servers = Forkservers(lambda *reason: told.set_result(reason))
    address = servers.address({}, ahead=ahead)
    with connected(address) as client:  # and nobody ever accepts it
        async with asyncio.timeout(30):
            where, reason = await told
        with pytest.raises(ConnectionError):  # it need not wait for its own deadline
            client.send(b"x")
    assert where == address
    assert f"{TRIES} times" in reason
    assert "cannot be started" in reason
    assert len(starter.started) == 1
    assert servers.address({}, ahead=False) != address, "the next replica gets another one"
    await servers.aclose()


async def test_replicas_share_one_unless_they_differ_in_what_is_read_at_the_start(
    starter: Starter, no_leaks: None
) -> None:
    servers = Forkservers(lambda *_: pytest.fail("given up"))
    run = {environ.STATE_ID: "run"}
    first = servers.address(run | {"A": "1", "LD_LIBRARY_PATH": "/x"}, ahead=True)
    assert servers.address(run | {"B": "2", "LD_LIBRARY_PATH": "/x"}, ahead=True) == first
    second = servers.address(run | {"LD_LIBRARY_PATH": "/y"}, ahead=True)
    assert second != first
    assert [one["LD_LIBRARY_PATH"] for one in starter.environments] == ["/x", "/y"]
    for environment in starter.environments:
        assert "A" not in environment
        assert MARK not in environment, "it belongs to no replica"
        assert environment[NO_MARK] == "0" * 32
        assert environment[environ.STATE_ID] == "run"
    servers.retain({second})
    assert await asyncio.to_thread(starter.started[0].wait, 30) == -9
    assert starter.started[1].poll() is None
    await servers.aclose()
    assert starter.started[1].returncode == -9


def test_a_mark_fits_into_the_room_for_it() -> None:
    assert len(NO_MARK) == len(MARK)
    assert lasting({"HOME": "/", "PYTHONPATH": "/x", "LD_PRELOAD": "y"}) == {"PYTHONPATH": "/x", "LD_PRELOAD": "y"}


class FakeNode:
    def __init__(self, spec: PartSpec) -> None:
        self.spec, self.state = spec, UNKNOWN.with_identity_of(spec)
        self.orders: list[tuple[float, str]] = []

    def stop(self, timeout_s: float, *, stacks: bool = False, broken: str = "") -> None:
        self.orders.append((timeout_s, broken))


class Node:
    """The shims of a node without processes."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[FakeNode] = []
        self.shims = Shims(mock.Mock(path=None), folder, begin=self._start)

    def _start(self, spec: PartSpec, *_: object) -> Any:
        self.nodes.append(FakeNode(spec))
        return self.nodes[-1]

    def begin(self, sidecars: str, **env: str) -> FakeNode:
        nonce = f"{len(self.nodes)}"
        spec = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), env, "/", "/", 3.0, nonce, sidecars)
        self.shims.obey(Start(spec=plain(spec)))
        return self.nodes[-1]


def address_of(node: FakeNode) -> str | None:
    return node.spec.env.get(environ.FORKSERVER)


async def test_a_replica_that_starts_again_finds_the_forkserver_that_it_had(tmp_path: Path, no_leaks: None) -> None:
    node = Node(tmp_path)
    assert address_of(node.begin("")) is None
    first = node.begin("later")
    first.state = first.state._replace(gone=True)
    again = node.begin("later")
    assert address_of(again) == address_of(first)
    other = node.begin("later", LD_PRELOAD="")
    assert address_of(other) != address_of(again)
    other.state = other.state._replace(gone=True)
    node.begin("later")
    with pytest.raises(ConnectionRefusedError):
        connected(address_of(other) or "")
    await node.shims.aclose()
    with pytest.raises(ConnectionRefusedError):
        connected(address_of(again) or "")


async def test_replicas_whose_forkserver_is_given_up_are_ended_and_say_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    works, breaks, needs_none = node.begin("later", LD_PRELOAD=""), node.begin("later"), node.begin("")
    node.shims._stop_users_of(address_of(breaks) or "", "died 8 times")
    assert breaks.orders == [(3.0, "the forkserver, which starts its sidecars, died 8 times")]
    assert works.orders == needs_none.orders == []
    await node.shims.aclose()
