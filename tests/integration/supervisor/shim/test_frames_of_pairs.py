"""Mutated messages on the socketpairs between agent, shim, launcher and log pump.

Both ends are processes of one run, so that a message can only be broken by a bug or by
other code under a running supervisor. No reader may end with a traceback or harm a
process that it was not told of. What is no message is told in one sentence and changes
nothing; at the launcher, whose only order it is, it ends the launcher.

Covers: supervisor/shim/launcher.py, supervisor/shim/pump_watcher.py,
supervisor/shim/log_pipes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.linux.processes import MARK
from replicas.supervisor.logs.pump import LogSource, OutputLog, Pump
from replicas.supervisor.shim import launcher
from replicas.supervisor.shim.pump_watcher import PumpWatcher
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import ExitReport, LogLoss, RankExit
from tests.support.channel.frames import MANY, mutants
from tests.support.programs import SLEEPS
from tests.support.runs import alive
from tests.support.shims import shim

MESSAGES = max(300, MANY)
SPEC = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), {}, "/", "/", 1.0, "nonce")


def send(control: socket.socket, data: bytes) -> None:
    """One packet, as long as it may be, and not the end of the stream. Waits until it
    is taken."""
    control.settimeout(30)
    control.send(data[: orders.MAX_NBYTES // 4] or b"x")


def kind_of(data: bytes) -> str:
    """Of which type it still is; empty: it is no message any more."""
    try:
        return str(orders.decode(data)["type"])
    except orders.Malformed:
        return ""


@contextlib.contextmanager
def bystander(mark: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the same user, under a mark as those of a shim."""
    command = [sys.executable, "-c", SLEEPS]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def dropped(loss: LogLoss) -> orders.Message:
    return {"type": "dropped", "loss": plain(loss)}


def reported(report: ExitReport) -> orders.Message:
    return {"type": "report", "report": plain(report)}


# ------------------------------------------------------------ supervisor and shim


def test_what_a_shim_is_told(tmp_path: Path) -> None:
    """What is no order changes nothing, and is told in its log."""
    real = [orders.encode({"type": kind}) for kind in ("ping", "stacks", "drain")]
    real += [orders.encode({"type": "stop", "timeout_s": 1.0}), orders.encode({"type": "rendezvous", "port": 1})]
    with shim(tmp_path, SLEEPS) as one:
        pid = one.started()
        for data in mutants(real, seed=10):
            if kind_of(data) not in ("stop", "start", "stacks"):
                send(one._control, data)
        one.send({"type": "ping"})
        one.wait_for("pong")
        assert alive(pid)
        one.send({"type": "stop", "timeout_s": 5.0})
        one.gone()
    said = (tmp_path / "logs" / "shim-0.log").read_text()
    assert "Traceback" not in said
    assert "malformed message" in said


# ------------------------------------------------------------ shim and log pump


def test_what_a_log_pump_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The lines of the ranks are logged all the same, each once."""
    ours, theirs = orders.pair()
    reader, writer = os.pipe()
    pump = Pump([OutputLog(LogSource("rank-0", (reader,)), tmp_path, 1 << 20, 3)], theirs, None, "a/0")
    thread = threading.Thread(target=pump.run)
    thread.start()
    try:
        real = [orders.encode({"type": "drain", "number": 1}), orders.encode({"type": "drained", "number": 7})]
        for number, data in enumerate(mutants(real, seed=12, many=MESSAGES)):
            os.write(writer, b"%d\n" % number)
            send(ours, data)
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while orders.receive(ours):
                    pass
        ours.settimeout(30)
        assert orders.send(ours, {"type": "drain", "number": "last"})
        while (answer := orders.receive(ours)) is not None and answer["number"] != "last":
            pass
        assert answer == {"type": "drained", "number": "last"}
        assert (tmp_path / "rank-0.log").read_text().split() == [str(number) for number in range(MESSAGES)]
    finally:
        os.close(writer)
        thread.join(30)
        ours.close()
        theirs.close()
        os.close(reader)
    assert not thread.is_alive()
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "malformed message" in said


def test_what_a_log_pump_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shim goes on, and hears what comes rightly."""
    losses: list[LogLoss] = []
    ours, theirs = orders.pair()
    drained: list[int] = []
    with selectors.DefaultSelector() as selector, theirs:
        keeper = PumpWatcher(SPEC._replace(log_dir=str(tmp_path)), selector, None, losses.append)
        keeper._control = orders.MessageSocket(ours, "the log pump", keeper._take, selector.unregister)
        selector.register(ours, selectors.EVENT_READ, keeper._control.read)
        real = [dropped(LogLoss(3, "file", "full")), {"type": "drained", "number": 0}]
        for data in mutants([orders.encode(message) for message in real], seed=13, many=MESSAGES):
            send(theirs, data)
            for key, _ in selector.select(0):
                key.data()
        keeper.drain(then=lambda: drained.append(1))
        assert orders.send(theirs, dropped(LogLoss(8, "tee", "slow")))
        assert orders.send(theirs, {"type": "drained", "number": keeper._drains})
        while not drained:
            for key, _ in selector.select(30):
                key.data()
        assert losses[-1] == LogLoss(8, "tee", "slow")
        keeper._control.close()
        for pipe in (*keeper.pipes.readers, *(fd for pair in keeper.pipes.of_ranks() for fd in pair)):
            os.close(pipe)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "malformed message" in said


# ------------------------------------------------------------ shim and launcher

FAKE_LAUNCHER = """
import socket, subprocess, sys
from replicas.supervisor.shim import shim, starting
from replicas.linux.processes import Child

def launcher(spec, pipes, scratch):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    return Child(subprocess.Popen(command, start_new_session=True)), socket.socket(fileno=int(sys.argv[1]))

starting.start_launcher = launcher
sys.exit(shim.main(sys.argv[2:]))
"""


def test_what_a_launcher_says(tmp_path: Path) -> None:
    """The shim goes on, and tells of the end of its main process as ever, with what it
    was last told of the ranks."""
    ours, theirs = orders.pair()
    failed = ExitReport("failed", "why", (RankExit(0, 1, 7, "text", 1.5, "error", ("a", "b"), "after"),))
    program = ("-c", FAKE_LAUNCHER, str(theirs.fileno()))
    with ours, shim(tmp_path, "", launcher="torchrun", program=program, pass_fds=[theirs.fileno()]) as one:
        theirs.close()
        pid = one.started()
        reports = [reported(failed), reported(ExitReport("ok"))]
        for data in mutants([orders.encode(message) for message in reports], seed=14, many=MESSAGES):
            send(ours, data)
        send(ours, orders.encode(reported(failed)))
        one.send({"type": "ping"})
        one.wait_for("pong")
        assert alive(pid)
        one.send({"type": "stop", "timeout_s": 5.0})
        report = one.report()
        assert (report.outcome, report.text, report.ranks[0].text) == ("failed", "why", "text")
        assert one.gone() == 0
    said = (tmp_path / "logs" / "shim-0.log").read_text()
    assert "Traceback" not in said, said
    assert "malformed message" in said


def test_what_a_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its spec, or nothing that it could start with: that it says in one line, with
    which it ends."""
    met: list[tuple[str, int]] = []
    monkeypatch.setattr(launcher, "TCPStore", lambda host, port, **_: met.append((host, port)))
    other_node = SPEC._replace(node=1, nnodes=2)
    meeting = orders.encode({"type": "rendezvous", "host": "127.0.0.1", "port": 1})
    ours, theirs = orders.pair()
    with ours, theirs:
        told = 0
        start = {"type": "start", "spec": plain(SPEC._replace(env={"A": "b"}))}
        for data in mutants([orders.encode(start)], seed=16, many=MESSAGES):
            send(ours, data)
            try:
                spec = orders.receive_spec(theirs)
            except (orders.Malformed, orders.OtherOrders) as error:
                told += 1
                told_lines = str(error).splitlines()
                assert len(told_lines) == 1
            else:
                assert spec is not None
                assert isinstance(spec.env, dict)
                assert isinstance(spec.command, tuple)
        assert told > MESSAGES // 3
        for data in mutants([meeting], seed=17, many=MESSAGES):
            send(ours, data)
            with contextlib.suppress(orders.Malformed):
                launcher._workers_store(other_node, theirs)
        send(ours, meeting)
        launcher._workers_store(other_node, theirs)
        assert met[-1] == ("127.0.0.1", 1)
        send(ours, b'{"type": "start", "spec": {"run": 7}}')
        command = [sys.executable, "-m", "replicas.supervisor.shim.launcher", "--control", str(theirs.fileno())]
        done = subprocess.run(
            [*command, "--parent", str(os.getpid())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "malformed order" in done.stderr


@pytest.mark.parametrize("last", ["only", "first of many"])
def test_reports_that_can_be_read_can_be_shown(last: str) -> None:
    """What is left of a report has fields of the right types: the shim, and the
    supervisor, work with them."""
    ranks = (RankExit(0, 1, 7, "text", 1.5, "error", ("a", "b"), "after"),) * (1 if last == "only" else 3)
    real = json.dumps(plain(ExitReport("failed", "why", ranks)))
    read = 0
    for data in mutants([real.encode()], seed=15, many=MESSAGES):
        try:
            report = orders.read(ExitReport, orders.decode(b'{"type": "report", "report": ' + data + b"}")["report"])
        except orders.Malformed:
            continue
        read += 1
        assert isinstance(report.text, str)
        assert isinstance(report.outcome, str)
        for rank in report.ranks:
            for value, kind in zip(rank, (int, int, int, str, float, str, tuple, str), strict=True):
                assert isinstance(value, kind), rank
            assert all(isinstance(line, str) for line in rank.lines)
    assert read > 5
