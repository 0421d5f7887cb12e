"""When a process counts as frozen; frames as they come; who is to blame. Virtual time
throughout.

Covers: sidecar/meeting.py, sidecar/rank_side/forkserver_client.py,
sidecar/rank_side/sidecar_handle.py,
linux/helper_process.py, linux/frames.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replicas import errors
from replicas.channel.session.hub import as_wire_error
from replicas.common.patience import PAUSE_S
from replicas.linux import frames
from replicas.linux.helper_process import IDLE_S as PING_S
from replicas.linux.helper_process import INTERVAL_S, SILENCE_S, Pulse
from replicas.linux.sockets import SocketAddress
from replicas.linux.stalls import IDLE_S, LOOK_INTERVAL_S, STOPPED_S, StallWatch
from replicas.sidecar import building, wire
from replicas.sidecar.meeting import blame
from replicas.sidecar.rank_side import forkserver_client
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed
from tests.support.waits import eventually

# ---------------------------------------------------------------- pings


class Rank:
    """Looks when it is due; the clock is the test's."""

    def __init__(self, busy: bool = True) -> None:
        self.now = 100.0
        self.busy = busy
        self.pulse = Pulse(self.now)
        self._due = self.now + self.pulse.interval_s(self.now, busy=busy)

    def look(self, late_s: float = 0.0) -> str:
        self.now = self._due + late_s
        verdict = self.pulse.next_action(self.now)
        self._due = self.now + self.pulse.interval_s(self.now, busy=self.busy)
        return verdict


def test_a_busy_sidecar_is_asked_often_and_an_idle_one_seldom() -> None:
    for busy, interval in ((True, INTERVAL_S), (False, PING_S)):
        rank = Rank(busy)
        for number in range(1, 4):
            assert rank.look() == "ping"
            assert rank.now == pytest.approx(100.0 + number * interval)
            rank.pulse.answered()
            rank._due = rank.now + rank.pulse.interval_s(rank.now, busy=busy)


@pytest.mark.parametrize("busy", [True, False])
def test_silence_is_told_in_time(busy: bool) -> None:
    rank = Rank(busy)
    assert rank.look() == "ping"
    asked = rank.now
    while (verdict := rank.look()) == "wait":
        assert rank.now - asked < SILENCE_S
    assert verdict == "frozen"
    assert SILENCE_S <= rank.now - asked + 0.01 <= SILENCE_S + INTERVAL_S


def test_nobody_is_judged_after_our_own_pause() -> None:
    rank = Rank()
    assert rank.look() == "ping"
    assert rank.look() == "wait"
    assert rank.look(late_s=60.0) == "wait"  # the answer may lie unread
    woke = rank.now
    while (verdict := rank.look()) == "wait":
        pass
    assert verdict == "frozen"
    assert rank.now - woke >= SILENCE_S - 0.01


@pytest.mark.slow
def test_a_pause_of_the_rank_counts_not_against_the_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver_client, "FORK_TIMEOUT_S", 0.2)

    async def fork() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop, forkserver = asyncio.get_running_loop(), Forkserver(ours)

        def pause() -> None:
            time.sleep(PAUSE_S + 0.5)  # blocks the loop beyond the timeout
            loop.call_later(0.15, frames.write_packet, theirs, wire.ForkFailed("no process is left"))

        loop.call_soon(pause)
        with theirs, pytest.raises(SidecarFailed, match="no process is left"):
            await forkserver.fork()
        forkserver.close()

    asyncio.run(fork())


def test_a_fork_that_is_waited_for_no_more_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time goes on, too: a forkserver that answers nobody is left in time."""
    monkeypatch.setattr(forkserver_client, "FORK_TIMEOUT_S", 0.4)

    async def fork() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forkserver = Forkserver(ours)
        with theirs:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(forkserver.fork(), 0.1)
            assert forkserver.alive
            with pytest.raises(SidecarDied, match=r"the forkserver did not answer within 0\.4 s"):
                await forkserver.fork()
            request, fds = frames.read_packet(theirs)
            assert isinstance(wire.decode_forkserver_request(request), wire.Fork)
            frames.close_all(fds)
            assert frames.read_packet(theirs) == (b"", []), "it was asked once, and left"

    asyncio.run(fork())


def test_a_connection_that_ends_unanswered_is_made_again() -> None:
    """To a forkserver that froze while it started, and was replaced."""
    door = SocketAddress(f"replicas-test-{secrets.token_hex(8)}", "secret")

    async def connect() -> None:
        with door.listen() as listener:
            listener.settimeout(30.0)
            connecting = asyncio.ensure_future(Forkserver.connect(str(door)))
            (await asyncio.to_thread(listener.accept))[0].close()
            client, _ = await asyncio.to_thread(listener.accept)
            with client:
                request, fds = await asyncio.to_thread(frames.read_packet, client)
                assert wire.decode_forkserver_request(request) == wire.Attach("secret")
                assert len(fds) == 3
                frames.close_all(fds)
                frames.write_packet(client, wire.Attached())
                (await connecting).close()

    asyncio.run(connect())


# ----------------------------------------------------------- stopped and idle processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.read(1)
    stat = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: "(cat) S " in stat.read_text(), "a process that waits for input")
    yield process
    process.kill()
    process.communicate()


def looks(watch: StallWatch, start: float, seconds: float, *, awaited: bool) -> str:
    """The first verdict when it is looked at for so long."""
    for step in range(int(seconds / LOOK_INTERVAL_S) + 1):
        reason = watch.reason_to_give_up(start + step * LOOK_INTERVAL_S, awaited=awaited)
        if reason:
            return reason
    return ""


def test_a_stopped_process_is_given_up_and_one_that_waits_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(sleeper.pid, 0.0)
    assert looks(watch, 0.0, 100.0, awaited=False) == ""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert looks(watch, 100.5, STOPPED_S - LOOK_INTERVAL_S, awaited=False) == ""
    assert looks(watch, 103.5, STOPPED_S, awaited=False) == f"was stopped for {STOPPED_S:g} s"
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    assert looks(watch, 107.0, 100.0, awaited=False) == ""


def test_a_process_that_others_wait_for_and_that_does_nothing_is_given_up(sleeper: subprocess.Popen[bytes]) -> None:
    assert looks(StallWatch(sleeper.pid, 0.0), 0.0, IDLE_S - 1.0, awaited=True) == ""
    assert looks(StallWatch(sleeper.pid, 0.0), 0.0, IDLE_S + 1.0, awaited=True) == f"did nothing for {IDLE_S:g} s"


def test_our_own_pause_starts_the_time_again(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    watch = StallWatch(sleeper.pid, 0.0)
    assert looks(watch, 0.0, STOPPED_S - 1.0, awaited=True) == ""
    assert watch.reason_to_give_up(60.0, awaited=True) is None
    assert looks(watch, 60.5, STOPPED_S + 1.0, awaited=True) == f"was stopped for {STOPPED_S:g} s"


def test_a_process_that_is_gone_is_not_frozen(sleeper: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(sleeper.pid, 0.0)
    sleeper.kill()
    sleeper.communicate()
    assert looks(watch, 0.0, 10.0, awaited=True) == ""


# ---------------------------------------------------------------- frames


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, frames.FrameReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, frames.FrameReader(theirs)


def frame(message: object, fds: int = 0) -> bytes:
    body = frames.encode(message)
    return frames.frame_head(body, range(fds)) + body


def test_frames_come_in_pieces_and_together(pair: tuple[socket.socket, frames.FrameReader]) -> None:
    ours, reader = pair
    assert reader.receive() == []
    data = frame(wire.Ping(1)) + frame(wire.ForgetBuffer(2))
    found: list[wire.Request] = []
    for position in range(len(data)):
        ours.send(data[position : position + 1])
        came = reader.receive()
        assert came is not None
        found += [wire.decode_request(body) for body, _ in came]
    assert found == [wire.Ping(1), wire.ForgetBuffer(2)]
    ours.send(data + data[:3])
    came = reader.receive()
    assert came is not None
    assert len(came) == 2
    ours.close()
    assert reader.receive() is None


def test_each_frame_has_its_own_descriptors(pair: tuple[socket.socket, frames.FrameReader]) -> None:
    ours, reader = pair
    inodes: list[int] = []
    for key in range(3):
        fd = os.memfd_create(f"test-{key}")
        inodes.append(os.fstat(fd).st_ino)
        socket.send_fds(ours, [frame(wire.MapBuffer(key), 1)], [fd])
        os.close(fd)
        ours.send(frame(wire.Ping(key)))
    found: list[tuple[wire.Request, list[int]]] = []
    while len(found) < 6:
        came = reader.receive()
        assert came is not None
        found += [(wire.decode_request(body), fds) for body, fds in came]
    assert [len(fds) for _, fds in found] == [1, 0] * 3
    assert [os.fstat(fd).st_ino for _, fds in found for fd in fds] == inodes
    frames.close_all([fd for _, fds in found for fd in fds])


def test_a_frame_without_its_descriptor_is_an_error(pair: tuple[socket.socket, frames.FrameReader]) -> None:
    ours, reader = pair
    ours.send(frame(wire.MapBuffer(1), 1))
    with pytest.raises(ConnectionError, match="0 descriptors in place of 1"):
        reader.receive()


# ---------------------------------------------------------------- who it is up to


@pytest.mark.parametrize(
    ("edges", "guilty"),
    [
        (set(), []),
        ({(0, 1)}, [1]),
        ({(0, 1), (1, 0)}, [0, 1]),  # of two, nobody can say
        ({(0, 1), (2, 1), (1, 0), (1, 2)}, [1]),  # cut off in both directions
        ({(0, 1), (2, 1), (3, 1), (1, 0), (4, 3), (5, 3)}, [1, 3]),  # two at once: the worst first
        ({(0, 2), (1, 2), (0, 3), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)}, [0, 1, 2, 3]),  # two halves
    ],
)
def test_blame(edges: set[tuple[int, int]], guilty: list[int]) -> None:
    assert blame(edges) == guilty


def test_what_a_sidecar_says_reaches_the_coordinator_with_kind_members_and_hint() -> None:
    reply = wire.Failed(1, "rollout/1/0 cannot be reached", True, "Preflight", ("rollout/1/0",), "open it")
    failure = SidecarFailed(reply)
    error = as_wire_error(failure, channel="policy", phase="form")
    assert (error.kind, error.members, error.hint) == ("Preflight", ("rollout/1/0",), "open it")
    assert (error.channel, error.phase, error.message) == ("policy", "form", "rollout/1/0 cannot be reached")
    plain = as_wire_error(
        SidecarFailed(wire.Failed(1, "Connection reset by peer")), channel="policy", phase="transfer", version=3
    )
    assert (plain.kind, plain.version, plain.hint) == ("SyncError", 3, "")
    assert as_wire_error(SidecarDied("it died"), channel="policy", phase="lane").kind == "SyncError"
    assert (
        as_wire_error(SidecarFailed(wire.Failed(1, "?", kind="Nonsense")), channel="p", phase="form").kind
        == "InternalError"
    )
    assert isinstance(error.exception(), errors.Preflight)


# ---------------------------------------------------------------- probes


class Work:
    def wait(self) -> None:
        """Done at once."""


class Probed:
    """A group whose other members add what they should, or one value too many."""

    rank, size = 1, 3

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong

    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> Work:
        assert (tensor.nbytes, op) == (building.PROBE_NBYTES, "sum")
        tensor.mul_(3)  # 1 + 2 + 3 of what rank 1 sends twice
        tensor[: self._wrong] += 1
        return Work()


def test_a_probe_looks_at_every_value() -> None:
    building._probe(Probed(), 0.0)  # type: ignore[arg-type]  # a fake
    with pytest.raises(RuntimeError, match="2 of 8192 wrong values"):
        building._probe(Probed(wrong=2), 0.0)  # type: ignore[arg-type]  # a fake


def test_an_answer_to_no_request_ends_the_connection() -> None:
    """Else it would be taken for the answer to the next request."""

    async def receive() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            forkserver = Forkserver(ours)
            frames.write_packet(theirs, wire.ForkFailed("nobody asked"))
            theirs.setblocking(False)
            async with asyncio.timeout(10):
                assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"", "our end is closed"
            with pytest.raises(SidecarDied, match="a request that was not sent"):
                await forkserver.fork()

    asyncio.run(receive())


@pytest.mark.anyio
async def test_the_last_reply_of_a_sidecar_that_has_ended_is_why_a_request_fails() -> None:
    """Also when the request is written before that reply is read."""
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec("sleep", "600")
    sidecar = Sidecar(process.pid, os.pidfd_open(process.pid), ours)
    body = frames.encode(wire.Failed(0, "GPU FAKE-7 is not visible", over=True))
    theirs.sendall(frames.frame_head(body, ()) + body)
    theirs.close()
    with pytest.raises(SidecarDied, match="GPU FAKE-7 is not visible"):
        await sidecar._ask(wire.ProbeBuffer(1, 7), 5.0, wire.Probed)
    assert await sidecar.wait_dead()
    await process.wait()
