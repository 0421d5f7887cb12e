"""The mark by which a rank shows that the supervisor has started it.

Covers: supervisor/state/marks.py.
"""

from __future__ import annotations

import msgspec
import pytest

from replicas.errors import Fenced
from replicas.messages.identity import proof_of
from replicas.supervisor.state.marks import check_mark
from replicas.supervisor.state.run_state import ShimRecord
from tests.support.channel.members import Client

SHIMS = [ShimRecord(nonce=f"{node}" * 32, group="a", replica=0, generation=2, node=node) for node in range(2)]
GOOD = proof_of(SHIMS[0].nonce, "one")
HELLO = msgspec.structs.replace(Client.hello_of("a"), generation=2)


@pytest.mark.parametrize("node", [0, 1])
def test_each_shim_of_a_generation_has_its_own(node: int) -> None:
    check_mark(msgspec.structs.replace(HELLO, proof=proof_of(SHIMS[node].nonce, "one")), SHIMS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "a/0/0 cannot join: REPLICAS_SHIM is not set, which the supervisor sets for its processes"),
        ({"proof": proof_of("2" * 32, "one")}, "its generation 2 is over, or this run's supervisor has not started it"),
        ({"proof": GOOD, "generation": 1}, "its generation 1 is over"),
        ({"proof": GOOD, "replica": 1}, "a/1/0 cannot join: its generation 2 is over"),
        ({"proof": GOOD, "incarnation": "two"}, "a/0/0 cannot join: its generation 2 is over"),
        ({"proof": "é"}, "a/0/0 cannot join: its generation 2 is over"),
    ],
)
def test_another_one_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(Fenced) as refused:
        check_mark(msgspec.structs.replace(HELLO, **change), SHIMS)
    assert text in refused.value.message


def test_a_replica_that_the_group_does_not_have_is_no_old_generation() -> None:
    with pytest.raises(Fenced) as refused:
        check_mark(msgspec.structs.replace(HELLO, proof=GOOD, replica=9), None)
    assert refused.value.message == "a/9/0 cannot join: group a has no replica 9"
    assert "join without `replica`, as REPLICA_ID has it" in refused.value.hint
