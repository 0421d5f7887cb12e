"""``replicas top`` in a real terminal, on a real run: what an operator sees at 80x24,
which keys do what, and that the terminal is given back whatever ends it.

Covers: cli/top.py.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.programs import SLEEPS, group
from tests.support.runs import ROOT, Run, running
from tests.support.showing.terminal import ALTERNATE, NORMAL, Terminal, in_terminal
from tests.support.waits import eventually

REPLICAS = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]
TOP = [*REPLICAS, "top"]
GROUPS = group("trainer", SLEEPS) + group("rollout", SLEEPS, "replicas = 14")
STARTS_S = 150.0


def top(run: Run, *arguments: str) -> AbstractContextManager[Terminal]:
    return in_terminal([*TOP, *arguments], run.folder, PYTHONPATH=str(ROOT))


def test_what_an_operator_sees_and_presses(tmp_path: Path) -> None:
    with running(tmp_path, GROUPS) as run:
        run.wait_line("rollout/13: ready", timeout_s=STARTS_S)
        eventually(lambda: run.status().ready, "a ready run", timeout_s=STARTS_S)
        with top(run) as terminal:
            terminal.shows(
                "All is well: 15 replicas ready", "rollout/5", "(generation 1)", "q quit", "lines 1 to 15 of 19"
            )
            assert ALTERNATE in terminal.written
            assert len(terminal.lines) == 24
            assert terminal.lines[0].startswith("test  127.0.0.1:")
            top_line = terminal.lines[3]

            terminal.press(b"j")
            terminal.until(lambda: terminal.lines[3] != top_line, "a line less")
            terminal.press(b"G")
            terminal.shows("rollout/13 ", "lines 5 to 19 of 19")
            terminal.press(b"\x1b[5~g")
            terminal.shows("lines 1 to 15 of 19")

            victim = run.status().groups[1].replicas[2]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            terminal.shows("rollout/2 has ended", "SIGKILL")

            terminal.resize(120, 40)
            terminal.until(
                lambda: len(terminal.lines[-1]) > 0 and "rollout/13 " in terminal.text, "all in a larger terminal"
            )
            assert len(terminal.lines) == 40
            terminal.press(b"q")
            assert terminal.ended() == 0
            terminal.assert_given_back()

        with in_terminal([*REPLICAS, "status", "--watch"], run.folder, PYTHONPATH=str(ROOT)) as terminal:
            terminal.shows("q quit")  # the same view
            terminal.press(b"\x03")
            assert terminal.ended() == 130
            terminal.assert_given_back()

        with top(run, "--endpoint", run.endpoint(), "--token-file", str(run.state_dir / "operator-token")) as terminal:
            events = re.compile(r"^\d\d:\d\d:\d\d +\d+ ", re.MULTILINE)  # over TCP, too
            terminal.until(lambda: "rollout/2 " in terminal.text and events.search(terminal.text), "events below")
            terminal.process.terminate()
            assert terminal.ended() == 143
            terminal.assert_given_back()

        with top(run) as terminal:
            terminal.shows("q quit")
            run.signal(signal.SIGTERM)
            assert run.wait(timeout_s=60) == 0
            assert terminal.ended(timeout_s=60) == 0
            terminal.assert_given_back()
            assert b"the run is over: " in terminal.written


def test_a_supervisor_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS)) as run:
        run.wait_line("a/0: ready", timeout_s=STARTS_S)
        with top(run, "--interval", "0.2") as terminal:
            terminal.shows("All is well: 1 replica ready")
            run.kill()
            terminal.shows("No answer for")
            run.start()
            terminal.shows("All is well: 1 replica ready", timeout_s=STARTS_S)
            terminal.press(b"q")
            assert terminal.ended() == 0


def test_it_is_suspended_and_goes_on_in_a_shell(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS)) as run:
        run.wait_line("a/0: ready", timeout_s=STARTS_S)
        shell = ["bash", "--noprofile", "--norc", "-i"]
        with in_terminal(shell, run.folder, PYTHONPATH=str(ROOT)) as terminal:
            terminal.press(f"{shlex.join(TOP)}\n".encode())
            terminal.shows("All is well: 1 replica ready")
            terminal.press(b"\x1a")
            terminal.until(lambda: b"Stopped" in terminal.written.rpartition(NORMAL)[2], "the shell's prompt")
            terminal.press(b"fg\n")
            terminal.until(
                lambda: b"All is well" in b"".join(terminal.written.split(ALTERNATE)[2:]), "its screen again"
            )
            terminal.press(b"q")
            terminal.until(lambda: terminal.written.count(NORMAL) == 2, "its end")
            terminal.press(b"exit\n")
            assert terminal.ended() == 0


@pytest.mark.parametrize("arguments", [[], ["--endpoint", "127.0.0.1:1"]])
def test_without_a_run_there_is_no_screen(arguments: list[str], tmp_path: Path) -> None:
    with in_terminal([*TOP, *arguments], tmp_path, PYTHONPATH=str(ROOT)) as terminal:
        assert terminal.ended() == 69
        assert ALTERNATE not in terminal.written
