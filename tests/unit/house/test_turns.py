"""How `pytest --turn` deals the files of the slow suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MINUTES, _dealt, _minutes

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("suite", ["integration", "chaos", "engines", "field", "field/engines"])
def test_all_parts_together_are_all_files_and_none_is_much_longer(suite: str, count: int) -> None:
    files = set((TESTS / suite).rglob("test_*.py"))
    parts = _dealt(files, count)
    assert set.union(*parts) == files
    assert sum(map(len, parts)) == len(files)
    minutes = [sum(map(_minutes, part)) for part in parts]
    assert max(minutes) - min(minutes) <= max(map(_minutes, files))


@pytest.mark.slow
def test_each_file_whose_length_is_known_is_there() -> None:
    assert {name for name in MINUTES if not [*TESTS.rglob(f"{name}.py")]} == set()
