"""A trainer that goes on from an earlier step: it is told once, where people look.

Covers: core/versions/steps.py.
"""

from __future__ import annotations

import pytest
import torch

from replicas.core.base.effects import Event, StepFell
from replicas.core.versions.steps import Steps, number_in
from replicas.testing import FakeRun

ONE = {"weight": torch.ones(3)}


def test_a_fall_is_told_once_until_the_steps_have_come_that_far_again() -> None:
    steps = Steps("policy")
    told = [
        steps.committed(version, {} if step is None else {"step": step})
        for version, step in enumerate([None, 5, 5, None, 812, 0, 1, "813", True, float("nan"), 811, 812, 813, 2.5], 1)
    ]
    assert [one for one in told if one is not None] == [StepFell("policy", 6, 0, 812), StepFell("policy", 14, 2.5, 813)]
    assert steps.fell == told[-1]
    assert number_in(None, "step") is None


def test_a_trainer_that_has_loaded_its_checkpoint_has_not_lost_it() -> None:
    steps = Steps("policy")
    metas: list[dict[str, object]] = [{"step": 17}, {"step": 10, "resumed": True}, {"step": 11}, {"step": 12}]
    assert [steps.committed(version, meta) for version, meta in enumerate(metas, 1)] == [None] * 4
    assert steps.reached == 12
    assert steps.committed(5, {"step": 0, "resumed": False}) == StepFell("policy", 5, 0, 12)


@pytest.mark.slow
def test_it_is_an_event_a_line_of_the_log_and_a_part_of_the_status(caplog: pytest.LogCaptureFixture) -> None:
    with FakeRun() as run:
        found: list[Event] = []
        trainer = run.join("trainer")
        run._coordinator.subscribe(found.append)
        for step in (7, 8):
            trainer.publish(ONE, meta={"step": step}, deadline=20).wait(30)
        assert (run.status().step, run.status().step_before) == (8, None)
        run.restart_coordinator()
        run._coordinator.subscribe(found.append)
        for step in (0, 1):
            trainer.publish(ONE, meta={"step": step}, deadline=20).wait(30)
        assert [event for event in found if isinstance(event, StepFell)] == [StepFell("policy", 3, 0, 8)]
        assert (run.status().step, run.status().step_before) == (1, 8)
        trainer.publish(ONE, meta={"step": 8}, deadline=20).wait(30)
        assert run.status().step_before is None
    assert caplog.text.count('version 3 has meta["step"] = 0, an earlier one had 8') == 1
