"""When a whole is written, what is read, and what is deleted, for any history.

Covers: archive/plan.py.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import errors
from replicas.archive.format import Entry, Link, Range, name_of
from replicas.archive.plan import WALK_MAX, Rules, doomed, is_whole_due, route_to
from tests.unit.archive.test_format import HASH, entry

Sizes = list[int]


def place(version: int, suffix: str, nbytes: int) -> Range:
    return Range(object=name_of("data", version, HASH, suffix), nbytes=nbytes, sha256=HASH)


def link(version: int) -> Link:
    return Link(version=version, entry=name_of("entries", version, HASH, "json"), sha256=f"{version:064x}")


def history(sizes: Sizes, *, whole: int = 1000, rules: Rules = Rules()) -> dict[int, Entry]:
    """Entries of versions 1, 2, ...: each step of such a size, and those from the whole
    add up."""
    found: dict[int, Entry] = {}
    base, since, deltas = place(1, "safetensors", whole), 0, list[int]()
    for number, size in enumerate(sizes, 1):
        since += size
        before = link(number - 1) if found else None
        step = place(number, "delta", size) if found else None
        if not found or is_whole_due(rules, deltas, since, whole):
            base, since, deltas = place(number, "safetensors", whole), 0, []
            found[number] = entry(version=number, whole=base, from_before=step, before=before)
        else:
            deltas.append(since)
            joined = place(number, "delta", since)
            found[number] = entry(version=number, whole=base, from_whole=joined, from_before=step, before=before)
    return found


def test_a_whole_is_due_when_the_deltas_have_taken_as_much() -> None:
    assert not is_whole_due(Rules(), [], 500, 1000)
    assert is_whole_due(Rules(), [], 501, 1000), "a delta of more than half"
    assert not is_whole_due(Rules(), [300, 300], 400, 1000)
    assert is_whole_due(Rules(), [300, 300], 401, 1000)
    assert not is_whole_due(Rules(), [1] * 18, 1, 1000)
    assert is_whole_due(Rules(), [1] * 19, 1, 1000), "20 versions share a whole"
    assert is_whole_due(Rules(chain=1), [], 1, 1000)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=70), st.integers(1, 30))
def test_a_new_reader_needs_two_objects_and_not_much_more_than_a_whole(sizes: Sizes, chain: int) -> None:
    entries = history(sizes, rules=Rules(chain=chain))
    for one in entries.values():
        whole, deltas = route_to(one, None, lambda wanted: pytest.fail("it has no version before"))
        assert whole is not None
        assert len(deltas) <= 1
        assert whole.nbytes + sum(delta.nbytes for delta in deltas) <= 1500
    wholes = [number for number, one in entries.items() if one.from_whole is None]
    assert all(second - first <= chain for first, second in itertools.pairwise(wholes))
    stored = sum(one.whole.nbytes if one.from_whole is None else one.from_whole.nbytes for one in entries.values())
    assert stored <= 2000 * len(wholes), "deltas take more than the wholes that they save"


@given(st.lists(st.integers(0, 400), min_size=2, max_size=40), st.data())
def test_a_reader_goes_the_shorter_way_from_what_it_has(sizes: Sizes, data: st.DataObject) -> None:
    entries = history(sizes)
    newest = entries[len(sizes)]
    held = data.draw(st.integers(1, len(sizes) - 1))
    gone = data.draw(st.sets(st.integers(1, len(sizes) - 1)))

    def read(wanted: Link) -> Entry:
        assert held < wanted.version < newest.version
        if wanted.version in gone:
            raise errors.ArchiveError("it was deleted")
        return entries[wanted.version]

    whole, deltas = route_to(newest, link(held), read)
    steps = [one.from_before for number, one in entries.items() if number > held]
    new_nbytes = newest.whole.nbytes + (newest.from_whole.nbytes if newest.from_whole is not None else 0)
    pays = sum(one.nbytes for one in steps if one is not None) <= new_nbytes
    if pays and not gone & set(range(held + 1, newest.version)):
        assert (whole, list(deltas)) == (None, steps)
    else:
        assert (whole, len(deltas)) == (newest.whole, int(newest.from_whole is not None))


def test_a_long_way_is_not_walked() -> None:
    entries = history([0] * (WALK_MAX + 3))
    newest = entries[WALK_MAX + 3]
    assert route_to(newest, link(3), lambda one: entries[one.version])[0] is None
    assert route_to(newest, link(2), lambda one: entries[one.version])[0] == newest.whole


def test_a_version_that_follows_another_one_is_refused() -> None:
    entries = history([1, 1, 1])
    held = Link(version=1, entry=link(1).entry, sha256="f" * 64)
    with pytest.raises(errors.ArchiveTampered, match="version 2 follows another 1 than was read"):
        route_to(entries[3], held, lambda one: entries[one.version])


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=40),
    st.integers(0, 10),
    st.sets(st.integers(1, 40)),
    st.floats(0, 1000),
)
def test_what_a_kept_version_needs_is_never_deleted(sizes: Sizes, keep: int, pinned: set[int], now: float) -> None:
    entries = {link(number).entry: one for number, one in history(sizes).items()}
    data = {name for one in entries.values() for name in one.objects} | {"data/orphan"}
    rules = Rules(keep=keep, grace_s=100)
    gone, over, due = doomed(entries, data, pinned, rules, {}, now)
    kept = {one.version for name, one in entries.items() if name not in gone}
    newest = set(range(len(sizes) - keep + 1, len(sizes) + 1)) if keep else set(range(1, len(sizes) + 1))
    assert kept == (newest | pinned) & set(range(1, len(sizes) + 1))
    assert over == set(), "data outlives the last entry that needs it"
    assert "data/orphan" in due
    left = {name: one for name, one in entries.items() if name not in gone}
    needed = {name for one in left.values() for name in one.objects}
    assert not needed & due.keys()
    gone, over, due = doomed(left, data, pinned, rules, due, now + 99)
    assert (gone, over) == (set(), set())
    gone, over, due = doomed(left, data, pinned, rules, due, now + 100)
    assert (gone, over) == (set(), data - needed)
