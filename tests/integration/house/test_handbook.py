"""Pages of the handbook that have files and commands, played to the letter: the files
are written, the commands typed, their output compared."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.house.pages import Command, Terminal, blocks, commands, files, section
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked, shared_memory
from tests.support.waits import eventually

BIN = Path(sys.executable).parent
LIMIT_S = 200.0
ANY_PORT = '[control]\nlisten = "127.0.0.1:0"\n'
"""The only change: other tests run beside this one, and would want the same port."""


def play(text: str, folder: Path, then: Callable[[Terminal], None] = lambda terminal: None) -> Terminal:
    """The files and commands of a page, what comes ``then``, and the end of the run;
    environments are made by the tests."""
    for name, content in files(text).items():
        (folder / name).write_text(content + (ANY_PORT if name == "run.toml" else ""))
    mark, before = secrets.token_hex(8), shared_memory()
    terminal = Terminal(folder, BIN, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **{MARK: mark})
    with terminal.leaving():
        play_commands(terminal, text)
        then(terminal)
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=10)
    assert shared_memory() <= before
    return terminal


def play_commands(terminal: Terminal, text: str) -> None:
    for command in commands(text):
        if "venv" in command.text or command.text.startswith("pip "):
            continue
        # what reads the whole log is typed when the run is over
        if terminal.run is not None and (command.text == "replicas logs" or "plot.py" in command.text):
            assert terminal.wait(LIMIT_S) == 0, terminal.said()
        terminal.type(command, LIMIT_S)
        if command.text.startswith("replicas run "):  # a reader sees when it is up
            eventually(lambda: ": control at " in terminal.said(), "the start of the run", timeout_s=60)


def status(terminal: Terminal) -> Any:
    return json.loads(terminal.type(Command("replicas status --json", []), LIMIT_S))


def replicas_of(terminal: Terminal) -> dict[str, dict[str, Any]]:
    """The status of each replica, by its name."""
    return {one["name"]: one for group in status(terminal)["groups"] for one in group["replicas"]}


def committed(terminal: Terminal) -> int:
    return int(status(terminal)["channels"][0]["committed_version"])


@pytest.mark.timeout(240)
def test_the_quickstart(tmp_path: Path) -> None:
    text = (ROOT / "docs/start/quickstart.md").read_text()
    assert files(text) == {
        path.name: path.read_text() for path in (ROOT / "examples/quickstart").iterdir() if path.is_file()
    }
    play(text, tmp_path)


@pytest.mark.timeout(600)
def test_the_tutorial_up_to_its_picture(tmp_path: Path) -> None:
    text = section((ROOT / "docs/tutorial.md").read_text(), "Part one: your own two scripts")
    terminal = play(text, tmp_path)
    assert "rollout/0: rank 0 was killed by SIGKILL" in terminal.said()
    assert (tmp_path / "reward.png").stat().st_size > 5_000


@pytest.mark.timeout(240)
def test_a_fleet_without_a_trainer(tmp_path: Path) -> None:
    def lines(replica: int, generation: int) -> list[str]:
        found = tmp_path.glob(f".replicas/serving/logs/server/{replica}/gen-{generation}/**/rank-0.log")
        return [line for path in found for line in path.read_text().splitlines()]

    newest = "serving version 2: every weight is 20"

    def has_loaded(replica: int) -> bool:
        return newest in lines(replica, 1)

    def kill_one(terminal: Terminal) -> None:
        for replica in (0, 1):  # in their first generations: the reload was no restart
            eventually(partial(has_loaded, replica), newest)
        (pid,) = replicas_of(terminal)["server/0"]["pids"].values()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: lines(0, 2) == [newest], "the newest version, of the other server", timeout_s=60)
        assert newest not in lines(1, 2)
        terminal.type(Command("replicas drain", []), LIMIT_S)
        assert terminal.wait(LIMIT_S) == 0

    play((ROOT / "docs/howto/serve.md").read_text(), tmp_path, kill_one)


@pytest.mark.timeout(240)
def test_what_is_served_is_promoted_and_rolled_back(tmp_path: Path) -> None:
    def lines(replica: int) -> list[str]:
        found = tmp_path.glob(f".replicas/steered/logs/server/{replica}/gen-1/**/rank-0.log")
        text = "\n".join(path.read_text() for path in found)
        return [line for line in text.splitlines() if line.startswith("serving")]

    served = [f"serving version {version}: every weight is {weight}" for version, weight in ((1, 10), (2, 20), (3, 10))]

    def all_have_served(terminal: Terminal) -> None:
        for replica in (0, 1):
            eventually(lambda one=replica: lines(one) == served, "the three versions, in order")  # type: ignore[misc]
        shown = terminal.type(Command("replicas versions policy", []), LIMIT_S)
        assert "content of 1" in shown
        terminal.type(Command("replicas drain", []), LIMIT_S)
        assert terminal.wait(LIMIT_S) == 0

    text = (ROOT / "docs/howto/promote.md").read_text()
    assert files(text) == {
        path.name: path.read_text() for path in (ROOT / "examples/fleet").iterdir() if path.is_file()
    }
    play(text, tmp_path, all_have_served)


STUCK = {
    "trainer.py": """
import time, torch, replicas
with replicas.join("policy") as channel:
    for step in range(1_000_000):
        print("step", step, flush=True)
        channel.publish({"weight": torch.ones(3)}, meta={"step": step}).wait()
        time.sleep(0.2)
""",
    "rollout.py": """
import time, replicas
def ask_a_judge_that_never_answers():
    time.sleep(3600)
with replicas.join("policy") as channel:
    with channel.receive().wait() as update:
        print("loaded", update.version, flush=True)
    ask_a_judge_that_never_answers()
""",
    "run.toml": """
schema_version = 1
[run]
name = "stuck"
[groups.trainer]
command = ["trainer.py"]
[groups.rollout]
command = ["rollout.py"]
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""
    + ANY_PORT,
}


@pytest.mark.timeout(240)
def test_a_program_that_hangs_is_found(tmp_path: Path) -> None:
    """Each command of the page works on a run whose rollout hangs outside of the
    channel, changes nothing, and together they name the line."""
    said: dict[str, str] = {}

    def look(terminal: Terminal) -> None:
        def shown(text: str) -> str:
            said[text] = terminal.type(Command(text, []), LIMIT_S)
            return said[text]

        logs = tmp_path.glob
        eventually(lambda: any("loaded" in one.read_text() for one in logs("**/rank-0.log")), "a load", timeout_s=60)
        before = replicas_of(terminal)
        for command in commands((ROOT / "docs/howto/stuck.md").read_text()):
            shown(command.text)
        after = replicas_of(terminal)
        assert {name: (one["pids"], one["state"]) for name, one in before.items()} == {
            name: (one["pids"], "ready") for name, one in after.items()
        }

    for name, text in STUCK.items():
        (tmp_path / name).write_text(text)
    play("```console\n$ replicas run run.toml\n```\n", tmp_path, look)
    assert "ask_a_judge_that_never_answers" in said["replicas stacks rollout/0"]
    assert "ask_a_judge_that_never_answers" not in said["replicas stacks trainer"]
    assert "committed" in said["replicas events --type SyncEnded --lines 5"]
    assert "step" in said["replicas logs trainer --since 10m"]


@pytest.mark.timeout(240)
def test_replicas_outlive_an_upgrade_of_the_supervisor(tmp_path: Path) -> None:
    text = (ROOT / "docs/howto/upgrades.md").read_text()
    (adopt,) = [block.text for block in blocks(text) if block.language == "toml"]

    def upgrade(terminal: Terminal) -> None:
        eventually(lambda: any("loaded" in one.read_text() for one in tmp_path.glob("**/rank-0.log")), "a load")
        before, first = replicas_of(terminal), terminal.run
        play_commands(terminal, text)
        assert first is not None
        assert first.wait(LIMIT_S) == 0
        after = replicas_of(terminal)
        for name in ("trainer/0", "rollout/0"):
            assert (after[name]["generation"], after[name]["pids"]) == (1, before[name]["pids"])
        version = committed(terminal)
        eventually(lambda: committed(terminal) > version, "a version under the new supervisor")

    for name, content in STUCK.items():
        (tmp_path / name).write_text(content.replace('name = "stuck"', f'name = "stuck"{adopt.replace("[run]", "")}'))
    play("```console\n$ replicas run run.toml\n```\n", tmp_path, upgrade)
