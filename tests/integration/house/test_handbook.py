"""The handbook's quickstart and the first part of its tutorial, played to the letter:
their files are written, their commands typed, their output compared."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

from tests.support.house.pages import Terminal, commands, files, section
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked, shared_memory
from tests.support.waits import eventually

BIN = Path(sys.executable).parent
LIMIT_S = 200.0
ANY_PORT = '[control]\nlisten = "127.0.0.1:0"\n'
"""The only change: other tests run beside this one, and would want the same port."""


def play(text: str, folder: Path) -> Terminal:
    """The files and commands of a page up to the end of its run; environments are made
    by the tests."""
    for name, content in files(text).items():
        (folder / name).write_text(content + (ANY_PORT if name == "run.toml" else ""))
    mark, before = secrets.token_hex(8), shared_memory()
    terminal = Terminal(folder, BIN, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **{MARK: mark})
    with terminal.leaving():
        todo = [one for one in commands(text) if "venv" not in one.text and not one.text.startswith("pip ")]
        while todo:
            # what reads the whole log is typed when the run is over
            if terminal.run is not None and (todo[0].text == "replicas logs" or "plot.py" in todo[0].text):
                assert terminal.wait(LIMIT_S) == 0, terminal.said()
            terminal.type(todo.pop(0), LIMIT_S)
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=10)
    assert shared_memory() <= before
    return terminal


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
