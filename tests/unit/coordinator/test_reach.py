"""A member of another machine, and a store that only this one reaches.

Covers: coordinator/addresses.py.
"""

from __future__ import annotations

import msgspec
import pytest

from replicas.coordinator.addresses import check_reach
from replicas.errors import Preflight
from replicas.memory.beacon import own_process
from replicas.messages import Hello
from tests.support.channel_world import World, channel_config

HERE = own_process()
ELSEWHERE = msgspec.structs.replace(HERE, boot_id="another")


def hello(*, here: bool = False, observe: bool = False) -> Hello:
    found = World(channel_config()).join("rollout/0/0").hello
    return msgspec.structs.replace(found, process=HERE if here else ELSEWHERE, observe=observe)


def test_who_could_be_in_no_process_group_is_told_why() -> None:
    with pytest.raises(Preflight) as caught:
        check_reach(hello(), HERE, "192.0.2.7", "192.0.2.1", "127.0.0.1")
    assert str(caught.value) == (
        "rollout/0/0 joins from 192.0.2.7, and the store listens on 127.0.0.1, which only this machine reaches "
        '(set bind = "192.0.2.1" in [store] (store_bind= of an embedded Coordinator))'
    )
    assert caught.value.members == ("rollout/0/0",)


@pytest.mark.parametrize(
    ("made", "address", "store"),
    [
        (hello(), "192.0.2.7", "192.0.2.1"),
        (hello(), "127.0.0.1", "127.0.0.1"),
        (hello(), "::1", "::1"),
        (hello(here=True), "192.0.2.7", "127.0.0.1"),
        (hello(observe=True), "192.0.2.7", "127.0.0.1"),
    ],
    ids=["the store is there for all", "loopback", "loopback 6", "shares memory with us", "observes"],
)
def test_who_can_is_let_in(made: Hello, address: str, store: str) -> None:
    check_reach(made, HERE, address, "192.0.2.1", store)
