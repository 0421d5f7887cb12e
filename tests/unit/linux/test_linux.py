"""On another system: one sentence, wherever one comes in. Simulated by its name and
what it lacks.

Covers: cli/entry.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ELSEWHERE = """
import os, signal, sys
sys.platform = {system!r}
sys.modules["fcntl"] = None
del os.sched_getaffinity, os.pidfd_open, signal.SIGRTMIN
import replicas
assert replicas.errors.UsageError and replicas.__version__
"""
SENTENCE = "replicas runs on Linux only, and this is {system}: use a Linux machine, virtual machine or container"


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize(
    "line",
    [
        "from replicas import join",
        "replicas.Supervisor",
        "replicas.Coordinator",
        "import replicas.channel",
        "import replicas.supervisor.shim.shim",
    ],
)
def test_what_needs_linux_says_so(system: str, line: str) -> None:
    code = ELSEWHERE.format(system=system) + line
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == f"replicas.linux.LinuxOnly: {SENTENCE.format(system=system)}"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_command_says_so_and_nothing_else(system: str) -> None:
    code = ELSEWHERE.format(system=system) + "from replicas.cli.entry import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"replicas: {SENTENCE.format(system=system)}\n")
