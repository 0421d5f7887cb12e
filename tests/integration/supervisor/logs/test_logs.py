"""Logs of real processes, whatever happens to the pump, the disk and the terminal."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from replicas.linux.processes import MARK
from replicas.supervisor.cleanup.sweeping import Sweep, by_mark
from replicas.supervisor.logs.pump import READ_NBYTES
from tests.support.machine.disks import fill, small_disk
from tests.support.processes import kill
from tests.support.programs import group
from tests.support.runs import alive, running
from tests.support.shims import ShimUnderTest, pump_of, shim
from tests.support.waits import eventually

FLOODS = """
import os
def flood(fd, name):
    with os.fdopen(fd, "wb", buffering=8192) as out:
        for n in range(100_000):
            out.write(b"%s %d %s\\n" % (name, n, name * 90))
open("go").read()
if os.fork() == 0:
    flood(2, b"E")
    os._exit(0)
flood(os.dup(1), b"O")
os.wait()
"""
"""Two processes, one on stdout and one on stderr, in blocks that end in the middle of
lines: 20 MB, when ``go`` is read."""


GAP = b"replicas: the log pump was killed: a line may be torn here, or missing"
MOST_LOST = READ_NBYTES // 92 + 1
"""Lines of the flood in one read, and one that had begun."""


def between_gaps(log: bytes) -> list[dict[bytes, list[int]]]:
    """Numbers of each stream's lines, all whole but for those beside a gap."""
    parts: list[dict[bytes, list[int]]] = [{b"E": [], b"O": []}]
    lines = log.splitlines()
    for line, following in zip(lines, [*lines[1:], b""], strict=True):
        found = re.fullmatch(rb"([EO]) (\d+) (?:E{90}|O{90})", line)
        if line == GAP:
            parts.append({b"E": [], b"O": []})
        elif found:
            parts[-1][found[1]].append(int(found[2]))
        elif following != GAP:  # the end of a line whose beginning is lost
            assert len(parts) > 1, line
            assert not parts[-1].get(line[-1:]), line
    return parts


def test_only_what_a_pump_had_under_way_is_lost_when_it_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with shim(tmp_path, FLOODS, log_max_nbytes=1 << 20, log_keep=100) as one:
        main = one.started()
        victims = [one.pump()]
        kill(victims[0], signal.SIGTERM)  # as systemd does to every process of a unit: it goes on
        kill(victims[0], signal.SIGKILL)
        (tmp_path / "go").write_text("")

        def killed_enough() -> bool:
            pump = pump_of(one.popen.pid)
            if pump not in (0, victims[-1]):
                with suppress(ProcessLookupError):
                    kill(pump, signal.SIGKILL)
                victims.append(pump)
            return len(victims) > 10 or not alive(main)

        eventually(killed_enough, "ten dead pumps", timeout_s=60.0)
        assert one.report().outcome == "ok"
        assert one.gone() == 0
        parts = between_gaps(one.log())
        assert 1 < len(parts) <= len(victims) + 1
        for name in (b"E", b"O"):
            expected = lost = 0
            for part in parts:
                numbers = part[name]
                if numbers:
                    assert numbers == list(range(numbers[0], numbers[-1] + 1))
                    assert 0 <= numbers[0] - expected <= lost  # none comes twice
                    expected, lost = numbers[-1] + 1, 0
                lost += MOST_LOST
            assert 0 <= 100_000 - expected <= lost
        sizes = [path.stat().st_size for path in one.folder.glob("rank-0.log*") if path.suffix != ".times"]
        assert max(sizes) <= 1 << 20
        assert len(sizes) >= 18


def ping_until_another_pump(one: ShimUnderTest, pump: int) -> bool:
    one.send({"type": "ping"})
    one.wait_for("pong")
    return not alive(pump)


def test_a_pump_that_hangs_is_replaced_and_logs_go_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    command = ("sh", "-c", f'read line < {tmp_path}/go; seq 1 20000; echo "done"; sleep 600')
    with shim(tmp_path, "", command=command) as one:
        pump = one.pump()
        eventually((one.folder / "rank-0.log").exists, "the pump at work")
        kill(pump, signal.SIGSTOP)
        (tmp_path / "go").write_text("go on\n")
        eventually(lambda: ping_until_another_pump(one, pump), "the end of the pump that was stopped")
        eventually(lambda: one.log().endswith(b"\ndone\n"), "the last line")
        assert one.log().splitlines() == [GAP, *(b"%d" % n for n in range(1, 20001)), b"done"]
        one.send({"type": "stop", "timeout_s": 5.0})
        assert one.gone() == 0


def test_a_stop_that_comes_while_the_last_output_is_read_is_obeyed(tmp_path: Path) -> None:
    """Also one that asks for stacks: nobody is left to show any."""
    os.mkfifo(tmp_path / "go")
    with shim(tmp_path, "import sys; open('go').read(); sys.exit(3)") as one:
        main = one.started()
        pump = one.pump()
        eventually((one.folder / "rank-0.log").exists, "the pump at work")
        kill(pump, signal.SIGSTOP)  # it reads no last output
        (tmp_path / "go").write_text("go on\n")
        eventually(lambda: not Path(f"/proc/{main}").exists(), "the end of the program")
        one.send({"type": "stop", "timeout_s": 5.0, "stacks": True})
        assert one.report().outcome == "stopped"
        assert one.gone() == 0


def test_a_full_disk_holds_nobody_up_and_the_last_lines_are_known(tmp_path: Path) -> None:
    code = "import pathlib, sys\nprint('first')\nsys.stdin = open(sys.argv[1])\ninput()\n"
    code += "for n in range(20_000): print('line', n)\nprint('all written')\npathlib.Path(sys.argv[3]).touch()\n"
    code += "sys.stdin = open(sys.argv[2])\ninput()\nprint('late')\nraise ValueError('boom')"
    fifos = [tmp_path / "one", tmp_path / "two"]
    done = tmp_path / "done"
    for fifo in fifos:
        os.mkfifo(fifo)
    with small_disk(tmp_path / "disk", 1 << 20) as mounted:
        if not mounted:
            pytest.skip("takes the right to mount")
        command = (sys.executable, "-u", "-c", code, *map(str, (*fifos, done)))
        with shim(tmp_path, "", command=command, log_dir=str(tmp_path / "disk" / "logs")) as one:
            eventually(lambda: (one.folder / "rank-0.log").exists() and one.log() == b"first\n", "the first line")
            with fill(tmp_path / "disk"):
                fifos[0].write_text("go on\n")
                one.wait_until(lambda state: state.losses)
                eventually(done.exists, "the end of what it writes")
            eventually(lambda: accounted_for(one) == 20_002, "the log to go on")
            fifos[1].write_text("go on\n")
            report = one.report()
            assert report.ranks[0].lines[-1] == "ValueError: boom"
            assert report.ranks[0].text == "ValueError: boom"
            assert one.gone() == 0
            losses = one.state.losses
            assert {(loss.where, loss.reason) for loss in losses} == {("file", "No space left on device")}
            lines = one.log().decode().splitlines()
            assert (lines[0], lines[-1]) == ("first", "ValueError: boom")
            written = sum(not line.startswith("replicas: ") for line in lines[: lines.index("late")])
            assert written + sum(loss.lines for loss in losses) == 20_002


def test_a_disk_that_stays_full_costs_the_log_only(tmp_path: Path) -> None:
    """The shim's own log is there too: what it has to say must not be its end."""
    os.mkfifo(tmp_path / "go")
    with small_disk(tmp_path / "disk", 1 << 20) as mounted:
        if not mounted:
            pytest.skip("takes the right to mount")
        command = ("sh", "-c", f"read line < {tmp_path}/go; echo boom; exit 3")
        with shim(tmp_path, "", command=command, log_dir=str(tmp_path / "disk" / "logs")) as one:
            pump = one.pump()
            with fill(tmp_path / "disk"):
                kill(pump, signal.SIGKILL)  # of which the shim speaks
                one.pump(besides=pump)
                (tmp_path / "go").write_text("go on\n")
                report = one.report()
                assert [(rank.code, rank.lines) for rank in report.ranks] == [(3, ("boom",))]
                assert one.gone() == 0


def test_the_last_lines_of_a_shim_that_was_killed_are_in_the_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    nonce = secrets.token_hex(8)
    command = (
        "sh",
        "-c",
        f"read line < {tmp_path}/go; seq 1 5000; sleep 600 & echo $! > {tmp_path}/.new; "
        f"mv {tmp_path}/.new {tmp_path}/left; wait",
    )
    with shim(tmp_path, "", command=command, nonce=nonce, env={**os.environ, MARK: nonce}) as one:
        pump = one.pump()
        kill(pump, signal.SIGSTOP)
        (tmp_path / "go").write_text("go on\n")
        eventually((tmp_path / "left").exists, "the end of what it writes")
        left = int((tmp_path / "left").read_text())
        kill(one.popen.pid, signal.SIGKILL)
        one.popen.wait(30)
        with ThreadPoolExecutor() as threads:
            swept = threads.submit(Sweep(by_mark([nonce])).run, 20.0)
            eventually(lambda: not alive(left), "the end of what the shim left behind")
            kill(pump, signal.SIGCONT)
            assert swept.result(30) == []
        assert not alive(pump)
        assert one.log().split() == [b"%d" % number for number in range(1, 5001)]


def accounted_for(one: ShimUnderTest) -> int:
    """Lines in the log, and lines that it says are missing."""
    lines = one.log().decode().splitlines()
    missing = [int(line.split()[1]) for line in lines if "are missing here: No space left on device" in line]
    return len(lines) - len(missing) + sum(missing)


def test_lines_of_all_replicas_come_whole_and_with_their_names(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.reconfigure(line_buffering=True); [print(n, 'x' * n) for n in range(600)]"
    head = '[logs]\ntee = "always"\nmax_size = "1MiB"\n'
    with running(tmp_path, group("a", code, "replicas = 3"), head=head) as run:
        assert run.wait() == 0
    shown: dict[str, list[str]] = {}
    for line in run.lines:
        name, bar, text = line.partition("| ")
        if bar:
            shown.setdefault(name, []).append(text)
    assert shown == {f"a/{index}/0": [f"{n} {'x' * n}" for n in range(600)] for index in range(3)}


def test_a_terminal_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        flags = fcntl.fcntl(theirs, fcntl.F_GETFL)
        code = "import sys\nsys.stdout.buffer.write(b'\\x1b[2Jhello \\x1b[31mred\\n\\xff\\n')\n"
        code += "for n in range(20_000): print('line', n, 'x' * 80)"
        with shim(tmp_path, code, tee=theirs) as one:
            assert one.report().outcome == "ok"
            losses = one.state.losses
            assert {loss.where for loss in losses} == {"tee"}
            assert len(one.log().splitlines()) == 20_002
            assert fcntl.fcntl(theirs, fcntl.F_GETFL) == flags
            shown = os.read(ours, 1 << 16)
        assert shown.startswith(b"a/0/0| hello \x1b[31mred\x1b[0m\r\na/0/0| \xef\xbf\xbd\r\na/0/0| line 0 xx")
    finally:
        os.close(ours)
        os.close(theirs)
