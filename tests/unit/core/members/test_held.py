"""What a member holds is a dict that tells of each version that comes and goes.

Covers: core/members/member_state.py.
"""

from __future__ import annotations

import pytest

from replicas.core.members.member_state import Held


@pytest.fixture
def told() -> list[tuple[int, bool]]:
    return []


@pytest.fixture
def held(told: list[tuple[int, bool]]) -> Held:
    held = Held({1: "a", 2: "b"})
    held.on_change = lambda version, there: told.append((version, there))
    return held


def test_another_digest_of_a_version_is_no_change(held: Held, told: list[tuple[int, bool]]) -> None:
    held[1] = "other"
    assert held.setdefault(2, "x") == "b"
    assert held.pop(7, None) is None
    assert told == []


def test_each_way_in_and_out_is_told(held: Held, told: list[tuple[int, bool]]) -> None:
    assert held.setdefault(3, "c") == "c"
    held.update({3: "c", 4: "d"})
    assert held.popitem() == (1, "a")
    assert held.pop(3) == "c"
    del held[2]
    held.clear()
    assert told == [(3, True), (4, True), (1, False), (3, False), (2, False), (4, False)]
    assert held == {}


def test_nobody_need_listen() -> None:
    held = Held()
    held[1] = "a"
    held.update({2: "b"})
    held.clear()
    held[3] = "c"
    assert held.popitem() == (3, "c")
    with pytest.raises(KeyError):
        held.pop(3)
