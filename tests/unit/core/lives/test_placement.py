"""Where replicas are placed, on any offers, and what is said when they are not.

Covers: core/lives/lease_times.py, core/lives/placement.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.core.lives.lease_times import END_S, MARGIN_S, lost_after_s
from replicas.core.lives.placement import Need, Offer, Share, place
from replicas.core.lives.tenancy import Tenancy


def node(name: str, gpus: int = 0, **more: Any) -> Offer:
    return Offer(node=name, gpus=tuple(map(str, range(gpus))), memory_nbytes=8 << 30, **more)


def nodes_of(found: tuple[Share, ...] | str) -> list[str]:
    assert not isinstance(found, str), found
    return [share.node for share in found]


def test_replicas_are_packed_or_spread() -> None:
    offers = [node("a", 4), node("b", 2), node("c", 4)]
    packed, spread = Need(group="g", gpus=1), Need(group="g", gpus=1, spread=True)
    for need, expected in ((packed, "bbaaaacccc"), (spread, "abcabcacac")):
        taken: list[Share] = []
        for _ in range(10):
            found = place(need, offers, taken)
            assert not isinstance(found, str)
            taken += found
        assert "".join(share.node for share in taken) == expected
        assert place(need, offers, taken) == "1 GPU (0 free on a, 0 free on b, 0 free on c)"


def test_what_asks_for_nothing_is_packed_on_the_first_node() -> None:
    offers = [node("a"), node("b")]
    first = place(Need(group="g"), offers, ())
    assert nodes_of(first) == ["a"]
    assert nodes_of(place(Need(group="g"), offers, first)) == ["a"]  # type: ignore[arg-type]  # it is no text
    assert nodes_of(place(Need(group="g", spread=True), offers, first)) == ["b"]  # type: ignore[arg-type]  # see above


def test_the_nodes_of_one_replica() -> None:
    offers = [node("a", 4), node("b", 4)]
    assert nodes_of(place(Need(group="g", parts=2, gpus=4), offers, ())) == ["a", "b"]
    assert nodes_of(place(Need(group="g", parts=2, gpus=2), offers, ())) == ["a", "a"]
    assert nodes_of(place(Need(group="g", parts=2, gpus=2, spread=True), offers, ())) == ["a", "b"]
    assert place(Need(group="g", parts=3, gpus=3), offers, ()) == (
        "9 GPUs, 3 on each of 3 nodes (4 free on a, 4 free on b)"
    )


def test_no_node_takes_more_than_it_may() -> None:
    offers = [node("a"), node("b")]
    need = Need(group="g", per_node=1, labels={})
    taken = place(need, offers, ())
    assert nodes_of(taken) == ["a"]
    taken += place(need, offers, taken)  # type: ignore[operator, arg-type]  # they are no texts
    assert nodes_of(taken) == ["a", "b"]
    assert place(need, offers, taken) == "a node with fewer than 1 of the group"  # type: ignore[arg-type]  # see above
    assert nodes_of(place(Need(group="other", per_node=1), offers, taken)) == ["a"]  # type: ignore[arg-type]  # see above
    assert nodes_of(place(Need(group="g", parts=2, per_node=1), offers, ())) == ["a", "b"]
    assert place(Need(group="g", parts=3, per_node=1), offers, ()) == "a node with fewer than 1 of the group"


@pytest.mark.parametrize(
    ("need", "offers", "says"),
    [
        ({}, [], "a node: no agent has joined"),
        ({"labels": {"pool": "x"}}, [node("a", labels={"pool": "y"})], "a node with pool=x"),
        ({"labels": {"pool": "x"}}, [node("a", labels={"pool": "x"}, open=False)], "a node with pool=x that is not "),
        ({"gpus": 2}, [node("a", 1)], "2 GPUs (1 free)"),
        ({"memory_nbytes": 9 << 30}, [node("a")], "9 GiB of memory (at most 8 GiB free)"),
        (
            {"cpus": 16, "labels": {"p": "x"}},
            [node("a", cpus=32), node("b", labels={"p": "x"}, cpus=8), node("c", labels={"p": "x"}, cpus=12)],
            "16 CPUs (at most 12 on a node) with p=x",
        ),
        (
            {"cpus": 16, "gpus": 1, "labels": {"p": "x"}},
            [node("a", 1, labels={"p": "x"}, cpus=8), node("b", labels={"p": "x"}, cpus=16)],
            "1 GPU (0 free on b) with 16 CPUs, p=x",
        ),
        (
            {"gpus": 1, "labels": {"p": "x"}},
            [node("a", labels={"p": "x"}), node("b", 1)],
            "1 GPU (0 free on a) with p=x",
        ),
    ],
)
def test_what_is_missing_is_said(need: dict[str, Any], offers: list[Offer], says: str) -> None:
    found = place(Need(group="g", **need), offers, ())
    assert isinstance(found, str)
    assert found.startswith(says)


def test_cpus_are_asked_for_and_shared() -> None:
    offers, need = [node("a", cpus=7), node("b", cpus=8), node("c")], Need(group="g", cpus=8, spread=True)
    taken: list[Share] = []
    for _ in range(4):
        found = place(need, offers, taken)
        assert not isinstance(found, str)
        taken += found
    assert "".join(share.node for share in taken) == "bcbc", "c's do not matter"
    assert nodes_of(place(Need(group="g", cpus=7), offers, ())) == ["a"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from("xy")), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans(), st.sampled_from(["", "x", "y"])), max_size=9
    ),
)
def test_no_gpu_has_two_owners_and_no_label_is_ignored(
    sizes: list[tuple[int, bool, str]], replicas: list[tuple[int, int, bool, str]]
) -> None:
    offers = [node(f"n{i}", gpus, open=is_open, labels={"p": label}) for i, (gpus, is_open, label) in enumerate(sizes)]
    taken: list[Share] = []
    for number, (gpus, parts, spread, label) in enumerate(replicas):
        labels = {"p": label} if label else {}
        need = Need(group=f"g{number % 2}", gpus=gpus, parts=parts, spread=spread, labels=labels)
        found = place(need, offers, taken)
        assert found == place(need, offers, taken), "the same again"
        if isinstance(found, str):
            assert found
            continue
        by_name = {offer.node: offer for offer in offers}
        assert all(by_name[share.node].open and need.accepts(by_name[share.node]) for share in found)
        assert all(len(share.gpus) == gpus for share in found)
        taken += found
    owners = Counter((share.node, gpu) for share in taken for gpu in share.gpus)
    assert all(count == 1 for count in owners.values())


# ---------------------------------------------------------------- leases


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2), st.booleans()), min_size=1, max_size=20), st.floats(2, 30))
def test_the_agent_has_always_ended_before_its_replicas_start_elsewhere(
    beats: list[tuple[float, float, bool]], lease_s: float
) -> None:
    """Beats that take any time, of which any are lost, or their answers."""
    tenancy = Tenancy()
    now, received_at = 0.0, 0.0
    tenancy.granted(lease_s, 0.0)
    for pause_s, way_s, answered in beats:
        now += pause_s
        if tenancy.over(now):
            break
        number = tenancy.next_beat(now)
        received_at = max(received_at, now + way_s)
        if answered:
            tenancy.extend_lease(number)
    assert tenancy.until is not None
    assert tenancy.until + END_S + MARGIN_S <= received_at + lost_after_s(lease_s) + 1e-6


def test_an_agent_alone_goes_on_as_long_as_it_was_told() -> None:
    tenancy = Tenancy()
    tenancy.granted(0.0, 0.0)
    assert tenancy.until is None
    assert not tenancy.over(1e9)
    tenancy.limit_without_supervisor(10.0, 5.0)
    assert (tenancy.over(14.9), tenancy.over(15.0)) == (False, True)
    tenancy.granted(0.0, 20.0)
    assert tenancy.until is None
    tenancy.granted(3.0, 20.0)
    tenancy.extend_lease(7)  # of another supervisor
    assert tenancy.until == 23.0


def test_shares_are_data() -> None:
    share = Share(group="g", node="n", gpus=("0",), memory_nbytes=5)
    assert msgspec.json.decode(msgspec.json.encode(share), type=Share) == share
