"""``groups.NAME.preload``: processes that a template forks are as those started anew.

But for a dump of faulthandler: it ends with the frames of the template's functions.

Covers: supervisor/agent/shim_fork.py, supervisor/shim/forked_starting.py,
supervisor/shim/forked_workers.py, supervisor/shim/forking.py,
supervisor/shim/program.py, supervisor/shim/template.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.linux.processes import LAUNCHER, SHIM, descendants, start_time
from replicas.supervisor.fleet.local_agent import AGENT
from tests.support.nodes import replicas_of
from tests.support.programs import DAEMONIZES
from tests.support.runs import WITHOUT_CGROUPS, Run, alive, running
from tests.support.waits import eventually

PROBE = Path(__file__).parent / "probe.py"
TEMPLATE = "shim/template.py"
ENDS = {
    "error": 'import torch\ndef f():\n    raise ValueError("three")\nf()\n',
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(4) from e\n",
    "text": 'import sys; sys.exit("a text")\n',
    "code": 'import atexit, sys; atexit.register(print, "last"); print("first", end=""); sys.exit(7)\n',
    "interrupt": "raise KeyboardInterrupt\n",
    "at once": 'import os; print("x", end=""); os._exit(9)\n',
    "syntax": "def f(:\n",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "aborted": "import signal, os; os.kill(os.getpid(), signal.SIGABRT)\n",
    "hook": "import sys; sys.excepthook = lambda *a: print(a[0].__name__, a[2].tb_lineno); 1 / 0\n",
    "thread": "import threading; threading.Thread(target=lambda: 1 / 0, name='mine').start()\n",
    "finalizer": "class A:\n    def __del__(self): print('freed')\na = A()\n",
    "nothing": "",
}
"""Programs that end in a way of their own."""


def group(name: str, command: list[str], more: str = "", *, warm: bool) -> str:
    preload = 'preload = ["numpy"]\n' if warm else ""
    head = f'[groups."{name}"]\ncommand = {json.dumps(command)}\non_failure = "replica"\n'
    return f'{head}restart = {{ policy = "never", initial_delay = 0 }}\n{preload}{more}\n'


def exits(run: Run) -> dict[str, Any]:
    """By group: exit codes of the ranks, and their reasons, from the events."""
    path = run.state_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[str, Any] = {}
    for event in (json.loads(line)["event"] for line in lines):
        if event["type"] == "ReplicaExited":
            found[event["group"]] = event
    return found


@pytest.mark.timeout(300)
def test_a_program_sees_no_difference(tmp_path: Path) -> None:
    more = f'nproc_per_node = 2\nenv = {{ OUT = "{tmp_path}", TMPDIR = "/tmp" }}'
    text = "".join(group(name, [str(PROBE), "3"], more, warm=name == "warm") for name in ("cold", "warm"))
    with running(tmp_path, text, stop_when='["cold", "warm"]') as run:
        run.wait(timeout_s=240)
        run.assert_nothing_left()
    seeds = []
    for rank in range(2):
        cold, warm = (json.loads((tmp_path / f"{name}-0-{rank}.json").read_text()) for name in ("cold", "warm"))
        assert len(cold["found"]) >= 60
        for name, one in cold["found"].items():
            assert json.dumps(warm["found"][name]).replace("warm", "cold") == json.dumps(one), name
        seeds += [cold["seeds"], warm["seeds"]]
        logs = [run.log(f"{name}/0", rank=rank).read_text() for name in ("cold", "warm")]
        assert logs[0].splitlines()[-3:] == ["to stderr", "thread ended", "atexit ran"]
        assert logs[0].splitlines()[-3:] == logs[1].splitlines()[-3:]
    for kind in zip(*seeds, strict=True):
        assert len({*kind}) == 4, "each process has random numbers of its own"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["exec", "torchrun"])
def test_a_program_ends_as_one_that_was_started_anew(tmp_path: Path, launcher: str) -> None:
    """Same last words, same exit code; also of a module, and one that is missing."""
    commands = {name: [f"{name.replace(' ', '_')}.py", "x"] for name in ENDS}
    for name, (path, _) in commands.items():
        (tmp_path / path).write_text(ENDS[name])
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv); 1 / 0\n")
    commands |= {"module": ["-m", "package", "y"], "no module": ["-m", "missing"]}
    commands |= {"own": ["/bin/sh", "-c", "echo $0 $REPLICAS_GROUP; exit 5"]}
    names = [*commands] if launcher == "exec" else ["error", "code", "killed", "module", "own", "nothing"]
    text = "".join(
        group(f"{name.replace(' ', '_')}-{kind}", commands[name], f'launcher = "{launcher}"', warm=kind == "warm")
        for name in names
        for kind in ("cold", "warm")
    )
    with running(tmp_path, text) as run:
        run.wait_line("control at", timeout_s=60)
        wanted = 2 * len(names)
        eventually(lambda: len(exits(run)) == wanted, "all ends", timeout_s=100)
        found = exits(run)
        for name in names:
            both = [f"{name.replace(' ', '_')}-{kind}" for kind in ("cold", "warm")]
            ends = [found[one]["ranks"] and found[one]["ranks"][0]["code"] for one in both]
            logs = [run.log(f"{one}/0").read_text().replace("-warm", "-cold") for one in both]
            if name == "aborted":
                logs = [re.sub("0x[0-9a-f]+", "", text.partition(" in <module>")[0]) for text in logs]
            assert (ends[0], logs[0]) == (ends[1], logs[1]), name
        run.signal(signal.SIGTERM)
        run.wait()
        run.assert_nothing_left()


READY = """
import os, sys, time, json
import torch, replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            pass
"""
PUBLISHER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    for number in range(1000):
        channel.publish({"w": torch.full((1000,), float(number))}).wait(60)
        time.sleep(0.2)
"""


def template(run: Run, besides: int = 0) -> int:
    return run.find(TEMPLATE, besides=besides)


def generation(run: Run) -> tuple[str, int]:
    found = replicas_of(run.status(), "rollout")["rollout/0"]
    return found[0], found[1]


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Run]:
    """A run whose rollouts are forked; ``extra`` is a module of theirs."""
    (tmp_path / "extra.py").write_text("VALUE = 1\n")
    (tmp_path / "rollout.py").write_text(READY)
    (tmp_path / "trainer.py").write_text(PUBLISHER)
    more = 'replicas = 2\npreload = ["torch", "extra"]\nrestart = { initial_delay = 0, max_restarts = 100 }\n'
    text = f'[groups.trainer]\ncommand = ["trainer.py"]\n[groups.rollout]\ncommand = ["rollout.py"]\n{more}'
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with running(tmp_path, text) as run:
        run.wait_line("control at", timeout_s=60)
        eventually(lambda: run.status().ready, "all replicas", timeout_s=60)
        yield run
        run.end()


def kill_rollout(run: Run, number: int) -> None:
    """Kill the rank of rollout/0, and wait until its generation ``number`` is ready."""
    pid = replicas_of(run.status(), "rollout")["rollout/0"][2]
    os.kill(pid or 0, signal.SIGKILL)
    eventually(lambda: generation(run) == ("ready", number), f"generation {number}", timeout_s=60)


def is_forked(run: Run, above: int) -> bool:
    """Whether the rank of rollout/0 is below this template."""
    pid = replicas_of(run.status(), "rollout")["rollout/0"][2]
    return pid in descendants(above)


def said(run: Run) -> str:
    return "\n".join(run.said())


@pytest.mark.timeout(200)
def test_a_killed_template_is_replaced_and_its_children_live(rollouts: Run) -> None:
    first = template(rollouts)
    assert is_forked(rollouts, first)
    pids = {name: found[2] for name, found in replicas_of(rollouts.status(), "rollout").items()}
    os.kill(first, signal.SIGKILL)
    second = template(rollouts, first)
    kill_rollout(rollouts, 2)
    assert replicas_of(rollouts.status(), "rollout")["rollout/1"][2] == pids["rollout/1"]
    kill_rollout(rollouts, 3)
    assert is_forked(rollouts, second)


@pytest.mark.timeout(200)
def test_a_frozen_template_is_replaced(rollouts: Run) -> None:
    first = template(rollouts)
    os.kill(first, signal.SIGSTOP)
    kill_rollout(rollouts, 2)
    second = template(rollouts, first)
    assert not alive(first)
    kill_rollout(rollouts, 3)
    eventually(lambda: is_forked(rollouts, second), "a rank of the next template")


@pytest.mark.timeout(200)
def test_a_file_that_has_changed_makes_another_template(rollouts: Run) -> None:
    first = template(rollouts)
    (rollouts.folder / "extra.py").write_text("VALUE = 2  # another size\n")
    kill_rollout(rollouts, 2)
    assert "extra.py has changed since it was loaded" in said(rollouts)
    second = template(rollouts, first)
    kill_rollout(rollouts, 3)
    assert is_forked(rollouts, second)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(900,), daemon=True).start()",
            "starts threads",
        ),
        ("import socket\nkept = socket.socket()", "opens a socket"),
        ("raise ValueError('mine')", "cannot be imported: ValueError: mine"),
    ],
)
def test_a_module_that_cannot_be_shared_is_named_and_the_group_starts_cold(
    tmp_path: Path, source: str, why: str
) -> None:
    (tmp_path / "unfit.py").write_text(source)
    (tmp_path / "a.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    with running(tmp_path, '[groups.a]\ncommand = ["a.py"]\nlauncher = "exec"\npreload = ["unfit"]\n') as run:
        eventually(lambda: run.log("a/0").exists() and run.log("a/0").read_text() == "up\n", "a start", timeout_s=60)
        assert f"without its template: unfit {why}" in said(run)
        run.end()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("who", ["shim", "launcher", "agent"])
def test_who_forks_others_is_killed_with_the_template_and_nothing_is_left(rollouts: Run, who: str) -> None:
    words = {"shim": SHIM, "launcher": LAUNCHER, "agent": AGENT}[who]
    first = template(rollouts)
    below = {pid: start_time(pid) for pid in descendants(first)}
    assert len(below) >= 8, "two shims, pumps, launchers and ranks"
    for pid in [first, *(pid for pid, line in rollouts.processes().items() if words in line)]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not [pid for pid, began in below.items() if start_time(pid) == began], "ends", timeout_s=30)
    eventually(lambda: rollouts.status().ready and generation(rollouts)[1] > 1, "all replicas again", timeout_s=90)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", ["", SHIM])
def test_daemons_of_a_forked_program_end_without_control_groups(tmp_path: Path, victim: str) -> None:
    """Found by their mark, which a process forked without exec shows, too."""
    fork = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n"
    (tmp_path / "a.py").write_text(DAEMONIZES.replace("os.wait()", fork))
    text = '[groups.a]\ncommand = ["a.py"]\nlauncher = "exec"\npreload = ["json"]\n'
    with running(tmp_path, text, command=WITHOUT_CGROUPS) as run:
        eventually(lambda: run.log("a/0").exists() and run.log("a/0").read_text(), "its daemons", timeout_s=60)
        shims = [pid for pid, line in run.processes().items() if SHIM in line]
        below = {pid: start_time(pid) for one in shims for pid in descendants(one)}
        assert len(below) >= 5
        if victim:
            for pid in shims:
                os.kill(pid, signal.SIGKILL)
            eventually(
                lambda: not [pid for pid, began in below.items() if start_time(pid) == began], "ends", timeout_s=30
            )
        run.end()
