"""The property tests of the core for longer: among the fast tests they run a few examples only. No process, no clock.

The examples are the same in every run. ``make properties`` looks for other ones, by PROPERTY_SEED and PROPERTY_EXAMPLES (how
many times as many). A history that breaks an invariant is shown as it was found, with the line that repeats it: to make it
shorter would take minutes.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.unit import test_channel_properties, test_free_lane_properties, test_operation_properties

SEED = os.environ.get("PROPERTY_SEED", "")
TIMES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))

pytestmark = pytest.mark.timeout(300 * TIMES)


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
    if SEED:
        seed(int(SEED))(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * TIMES,
            stateful_step_count=50,
            deadline=None,
            derandomize=not SEED,
            database=None,
            phases=[Phase.generate],
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
