"""The example that shows the whole idea runs, tells its story, and stays short.

Covers: nothing of the package.
"""

from __future__ import annotations

import runpy

import pytest

from tests.support.root import ROOT

PROGRAM = ROOT / "examples" / "whole_idea" / "story.py"
LINES_MAX = 150
STORY = """\
- version 1 is committed after both rollouts have verified it; both serve step 1
- rollout/1/0 is killed while version 2 is published; rollout/0/0 gets version 2, and the trainer its receipt
- version 3 is committed without the dead rollout
- calls on the channel of the dead rollout/1/0 raise Fenced
- rollout/1/0 is back, and its first version is the newest: version 3, from the trainer's slot
- version 4 reaches both rollouts
- a version with a NaN is rejected: version 5 has values that are not finite, in 'layer.bias' (1)
- version 6 follows; no rollout has seen the rejected version 5
"""


@pytest.mark.slow
def test_it_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert capsys.readouterr().out == STORY


def test_it_is_short() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= LINES_MAX
