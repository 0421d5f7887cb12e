"""When a process counts as frozen; frames as they come; who is to blame. Virtual time
throughout.

Covers: sidecar/meeting.py, sidecar/rank_side/forkserver_client.py,
sidecar/rank_side/sidecar_handle.py,
linux/helper_process.py, linux/frames.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replicas import errors
from replicas.channel.session.hub import as_wire_error
from replicas.common.patience import PAUSE_S
from replicas.linux import frames
from replicas.linux.helper_process import IDLE_S, INTERVAL_S, SILENCE_S, Pulse
from replicas.linux.stalls import LOOK_INTERVAL_S, STARTING_S, STOPPED_S, StallWatch
from replicas.sidecar import building, wire
from replicas.sidecar.meeting import blame
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
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
    for busy, interval in ((True, INTERVAL_S), (False, IDLE_S)):
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
@pytest.mark.parametrize("busy_s", [20.0, 0.5], ids=["short", "long"])
def test_a_forkserver_is_not_killed_for_a_pause_of_the_rank(busy_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that was longer than the time for which it may be busy."""
    monkeypatch.setattr("replicas.sidecar.rank_side.forkserver_client.BUSY_TIMEOUT_S", busy_s)

    async def fork() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop, forkserver = asyncio.get_running_loop(), Forkserver(ours)

        def pause() -> None:
            time.sleep(PAUSE_S + 0.5)  # blocks the loop beyond the timeout
            loop.call_later(0.15, frames.write_packet, theirs, wire.ForkFailed(1, "no process is left"))

        loop.call_soon(pause)
        with theirs, pytest.raises(SidecarFailed, match="no process is left"):
            await forkserver.fork(timeout_s=0.2)
        await forkserver.aclose()

    asyncio.run(fork())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "answers_after_s", "outcome"),
    [("while True: pass", 2.0, "no process is left"), ("input()", 30.0, "did not answer within 0.5 s")],
    ids=["busy", "idle"],
)
def test_a_forkserver_that_serves_others_first_is_not_killed(does: str, answers_after_s: float, outcome: str) -> None:
    """64 ranks of a node that start at once wait for each other's forks."""

    async def fork() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forkserver = Forkserver(ours, process)
        answer = wire.ForkFailed(1, "no process is left")
        late = asyncio.get_running_loop().call_later(answers_after_s, frames.write_packet, theirs, answer)
        with theirs, pytest.raises((SidecarFailed, SidecarDied), match=outcome):
            await forkserver.fork(timeout_s=0.5)
        late.cancel()
        await forkserver.aclose()

    program = [sys.executable, "-c", f"print(flush=True)\n{does}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        asyncio.run(fork())


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


def looks(watch: StallWatch, start: float, seconds: float, *, starting: bool) -> str:
    """The first verdict when it is looked at for so long."""
    for step in range(int(seconds / LOOK_INTERVAL_S) + 1):
        reason = watch.reason_to_give_up(start + step * LOOK_INTERVAL_S, starting=starting)
        if reason:
            return reason
    return ""


def test_a_stopped_process_is_given_up_and_one_that_waits_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(sleeper.pid, 0.0)
    assert looks(watch, 0.0, 100.0, starting=False) == ""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert looks(watch, 100.5, STOPPED_S - LOOK_INTERVAL_S, starting=False) == ""
    assert looks(watch, 103.5, STOPPED_S, starting=False) == f"was stopped for {STOPPED_S:g} s"
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    assert looks(watch, 107.0, 100.0, starting=False) == ""


def test_a_process_that_should_start_and_does_nothing_is_given_up(sleeper: subprocess.Popen[bytes]) -> None:
    assert looks(StallWatch(sleeper.pid, 0.0), 0.0, STARTING_S - 1.0, starting=True) == ""
    assert (
        looks(StallWatch(sleeper.pid, 0.0), 0.0, STARTING_S + 1.0, starting=True) == f"did nothing for {STARTING_S:g} s"
    )


def test_our_own_pause_starts_the_time_again(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    watch = StallWatch(sleeper.pid, 0.0)
    assert looks(watch, 0.0, STOPPED_S - 1.0, starting=True) == ""
    assert watch.reason_to_give_up(60.0, starting=True) == ""
    assert looks(watch, 60.5, STOPPED_S + 1.0, starting=True) == f"was stopped for {STOPPED_S:g} s"


def test_a_process_that_is_gone_is_not_frozen(sleeper: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(sleeper.pid, 0.0)
    sleeper.kill()
    sleeper.communicate()
    assert looks(watch, 0.0, 10.0, starting=True) == ""


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
    with pytest.raises(RuntimeError, match="2 of 8192 values"):
        building._probe(Probed(wrong=2), 0.0)  # type: ignore[arg-type]  # a fake
