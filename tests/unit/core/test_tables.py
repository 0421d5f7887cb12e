"""The tables: every state can be reached and left, no other step is possible, and the
pictures are those of the code.

Covers: common/table.py, core/base/membership.py.
"""

from __future__ import annotations

import pytest

from replicas.common.table import InvalidStep, Table
from replicas.core.base.membership import LANE, MEMBER
from replicas.core.lives.lifecycle import REPLICA
from tests.support.diagrams import PAGE, TABLES, with_tables


@pytest.mark.parametrize("table", [one for one in TABLES if one is not REPLICA], ids=lambda table: table.what)
def test_every_state_is_reached_and_every_life_ends(table: Table[str, str]) -> None:
    reached = set(table.start)
    while more := {after for (before, _), after in table.rows.items() if before in reached} - reached:
        reached |= more
    assert reached == set(table.states)
    ends = {state for state in table.states if table.final(state)}
    assert ends
    while more := {before for (before, _), after in table.rows.items() if after in ends} - ends:
        ends |= more
    assert ends == set(table.states), "a state without a way to the end"


def test_a_step_without_a_row_is_refused_and_says_what_is_possible() -> None:
    assert LANE.next("forming", "formed_by_all") == "formed"
    with pytest.raises(InvalidStep, match="a lane that is dead cannot take close; possible: nothing"):
        LANE.next("dead", "close")
    with pytest.raises(InvalidStep, match="possible: admitted, lost"):
        MEMBER.next("joining", "left_behind")
    assert not MEMBER.allows("gone", "admitted")


def test_the_pictures_in_the_documentation_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run `make diagrams`"
    assert "behind --> live: admitted" in page
