"""An agent's life in its table (core/lives/tenancy.py).

Covers: core/lives/tenancy.py.
"""

from __future__ import annotations

import pytest

from replicas.common.table import InvalidStep
from replicas.core.lives.tenancy import TENANCY, Tenancy, TenancyEvent


def after(*events: TenancyEvent) -> Tenancy:
    tenancy = Tenancy()
    for event in events:
        tenancy.step(event)
    return tenancy


def test_an_agent_whose_lease_is_over_joins_only_when_nothing_is_left() -> None:
    ending = after("welcome", "lease_over")
    assert not ending.serves
    with pytest.raises(InvalidStep, match="that is ending cannot take welcome"):
        ending.step("welcome")
    ending.step("empty")
    ending.step("welcome")
    assert ending.serves


def test_one_that_leaves_goes_on_leaving_at_another_supervisor_and_never_rejoins() -> None:
    leaving = after("welcome", "leave", "welcome")
    assert (leaving.state, leaving.serves) == ("leaving", True)
    with pytest.raises(InvalidStep, match="possible: welcome, end"):
        leaving.step("lease_over")


def test_each_state_can_end_and_only_once() -> None:
    states = [state for state in TENANCY.states if state != "over"]
    assert all(TENANCY.allows(state, "end") for state in states)
    assert after("end").ended
    with pytest.raises(InvalidStep, match="possible: nothing"):
        after("end").step("end")


def test_it_has_a_lease_from_the_first_welcome_with_one_to_the_next_without() -> None:
    tenancy = Tenancy()
    assert not tenancy.leased
    tenancy.granted(10.0, 5.0)
    assert (tenancy.leased, tenancy.until) == (True, 15.0)
    tenancy.granted(0.0, 6.0)
    assert (tenancy.leased, tenancy.until) == (False, None)
