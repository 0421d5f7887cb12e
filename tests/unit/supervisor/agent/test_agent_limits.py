"""What an agent may cost its supervisor: all that it sends has a bound, and so has what
it does not read.

Covers: supervisor/fleet/agent_route.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from replicas.coordinator.sessions import OUTBOX_NBYTES
from replicas.coordinator.websocket import WebSocket
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.fleet.agent_route import _Link
from tests.support.agents import field
from tests.support.fleets import group_of
from tests.support.virtual import history


@history
async def test_a_node_that_names_too_many_shims_is_not_taken() -> None:
    async with field(group_of("a")) as made:
        made.join("n1")
        await asyncio.sleep(3)
        with mock.patch.object(wire, "SHIMS_MAX", 3):
            for number in range(2):
                made.cluster.receive("n1", wire.encode(shim_state(f"mark {number}")))
            with pytest.raises(msgspec.DecodeError, match="more than 3 shims"):
                made.cluster.receive("n1", wire.encode(shim_state("mark 2")))


def shim_state(nonce: str, **changes: Any) -> wire.ShimState:
    state = wire.ShimState(nonce=nonce, group="x", replica=0, generation=1, node=0, pid=7)
    return msgspec.structs.replace(state, **changes)


@pytest.mark.parametrize(
    "message",
    [
        shim_state("n" * 65),
        shim_state("n", group="g" * 257),
        shim_state("n", cgroup="c" * 4097),
        shim_state("n", report={"text": "x" * wire.STATE_NBYTES}),
        wire.Leaving("r" * (16 * 1024 + 1)),
        wire.Cleaned(("n" * 65,)),
        wire.Hello(release="1", node="n" * 257, incarnation="i", pid=1, start_time=1, scope="s"),
        wire.Hello(release="1", node="n", incarnation="i" * 65, pid=1, start_time=1, scope="s"),
        wire.Hello(release="1", node="n", incarnation="i", pid=1, start_time=1, scope="s", labels={"l": "v" * 257}),
    ],
)
def test_whatever_an_agent_sends_has_a_bound(message: wire.AgentMessage) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_agent(wire.encode(message))


class FullConnection:
    """A connection whose peer does not read."""

    def __init__(self, unread_nbytes: int) -> None:
        self.unread_nbytes = unread_nbytes
        self.done: list[str] = []

    def write(self, messages: Sequence[bytes]) -> None:
        self.done.append("write")

    def cut(self) -> None:
        self.done.append("cut")


@history
async def test_an_agent_that_does_not_read_is_disconnected() -> None:
    refused: list[str] = []
    for unread_nbytes, done in ((OUTBOX_NBYTES, ["write", "write"]), (OUTBOX_NBYTES + 1, ["cut"])):
        connection = FullConnection(unread_nbytes)
        link = _Link(cast("WebSocket", connection), refused.append)
        link.send(b"x")
        link.send(b"x")
        assert connection.done == done
        assert link.over.is_set() == (done == ["cut"])
    assert refused == ["overflow"]
