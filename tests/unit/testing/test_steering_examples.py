"""The examples of steering say what happened, line by line.

Covers: examples/steering.
"""

from __future__ import annotations

import runpy

import pytest

from tests.support.root import ROOT

MOST_LINES = 60
SAID = {
    "evaluation": ["version 1 has the accuracy 1, the newest is version 6", "recorded with it: {'accuracy': 1.0}"],
    "bounded": [
        f"batch {step} is generated with the weights of step {weights}"
        for step, weights in enumerate((0, 0, 0, 3, 3, 3, 6, 6))
    ],
    "guarded": [
        "rollout/0 serves version 1: reward 0.8",
        "rollout/1 serves version 1: reward 0.8",
        "rollout/0 serves version 2: reward 0.1",
        "rollout/0 serves version 3, which is version 1 again: reward 0.8",
        "rollout/1 serves version 3, which is version 1 again: reward 0.8",
        "rollout/0 serves version 4: reward 0.9",
        "rollout/1 serves version 4: reward 0.9",
        "version 2 was rejected: reward 0.1 is below 0.5",
    ],
}


@pytest.mark.parametrize("name", SAID)
def test_an_example_tells_what_it_did(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "steering" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= MOST_LINES
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == SAID[name]
