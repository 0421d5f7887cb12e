"""The second part of the tutorial, played to the letter: TRL's GRPOTrainer, two vLLM
servers behind vLLM's router, and kill -9 of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engines.world import MODEL, START_S
from tests.support.house.pages import Terminal, commands, files, section
from tests.support.root import ROOT

TITLE = "Part two: a real engine"
INSTALLS = ("python3 -m venv", ". venv", "pip ")


@pytest.mark.long
@pytest.mark.timeout(3 * START_S)
def test_the_tutorial_with_a_real_engine(tmp_path: Path) -> None:
    text = section((ROOT / "docs/tutorial.md").read_text(), TITLE)
    text = text.replace("/path/to/SmolLM2-135M-Instruct", str(MODEL))
    for name, content in files(text).items():
        (tmp_path / name).write_text(content)
    terminal = Terminal(tmp_path, Path(sys.executable).parent, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    with terminal.leaving():
        for command in commands(text):
            if not command.text.startswith(INSTALLS):
                terminal.type(command, START_S)
        assert terminal.wait(START_S) == 0, terminal.said()
    assert "server/0: ready" in terminal.said().partition("killed by SIGKILL")[2]
    assert (tmp_path / "reward.png").stat().st_size > 5_000
