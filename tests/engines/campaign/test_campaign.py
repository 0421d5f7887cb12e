"""Sampled answers of two released vLLM servers behind one URL, while versions come all
the time and processes are killed and frozen: each answer is of a version that might be
served then, and no request is lost that the other server could have answered.

    make engine-campaign ANSWERS=10000 FAULTS=50 SEED=1
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from replicas.engine import PauseMode
from tests.engines.campaign.judge import Answer, Judge, Verdict
from tests.engines.campaign.world import Clients, campaign_world

ANSWERS = int(os.environ.get("CAMPAIGN_ANSWERS", "200"))
FAULTS = int(os.environ.get("CAMPAIGN_FAULTS", "1"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "1"))
MODES = os.environ.get("CAMPAIGN_MODES", "keep").split()


@pytest.mark.long
@pytest.mark.timeout(0 if "CAMPAIGN_FAULTS" in os.environ else 1200)
@pytest.mark.parametrize("mode", MODES)
def test_no_answer_is_stale_or_torn_and_no_request_is_lost(tmp_path: Path, mode: str) -> None:
    """Faults hit one server at a time, so that there is always another."""
    answers, faults = -(-ANSWERS // len(MODES)), -(-FAULTS // len(MODES))
    choose = random.Random(f"{SEED} {mode}")
    with campaign_world(tmp_path, cast("PauseMode", mode)) as (world, url), Clients(url, answers, SEED) as clients:
        for number in range(faults):
            clients.wait_for(answers * number // faults)
            print(f"{mode}: {world.strike(choose)}; {len(clients.answers)} answers", flush=True)
        clients.wait_for(answers)
    judge, windows = Judge(one_version=mode != "keep"), world.windows(clients.answers)
    verdicts = judge.judge(clients.answers, windows)
    print(
        f"{mode}: {dict(Counter(one.kind for one in verdicts))}, {len(clients.lost)} lost, {clients.aborted} aborted, "
        f"{sum(len(set(one.seeds)) > 1 for one in verdicts)} of two versions and more, "
        f"at most {max(one.off for one in verdicts):.2f} off, {len({one.seeds for one in verdicts})} sets of versions"
    )
    assert clients.lost == []
    assert [(one, window) for one, window in zip(verdicts, windows, strict=True) if one.kind != "good"] == []
    assert len(verdicts) >= answers
    assert clients.aborted == 0 or mode == "abort"
    assert_it_would_be_seen(judge, clients.answers, verdicts)


def assert_it_would_be_seen(judge: Judge, answers: list[Answer], verdicts: list[Verdict]) -> None:
    """The same judge finds an answer of an older version stale, and one whose first
    half is of another answer's version torn."""
    first, last = answers[0], answers[-1]
    newer = range(verdicts[-1].seeds[0], verdicts[-1].seeds[-1] + 1)
    assert verdicts[0].seeds[-1] < newer.start, "the answers are of several versions"
    half = len(last.best) // 2
    mixed = replace(last, best=(*first.best[:half], *last.best[half:]))
    stale, torn = judge.judge([first, mixed], [newer, newer], older=newer.start)
    assert (stale.kind, torn.kind) == ("stale", "torn")
