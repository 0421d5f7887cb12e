"""The property tests of the core for longer: among the fast tests they run a few examples only. No process, no clock."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.unit import test_channel_properties, test_free_lane_properties, test_operation_properties

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (test_channel_properties.Channel, 200),
        (test_free_lane_properties.FreeLanes, 60),
        (test_free_lane_properties.RaisingFreeLanes, 60),
        (test_operation_properties.Peers, 150),
    ],
)
def test_whatever_happens_the_invariants_hold(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
