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
from replicas.supervisor.fleet.handle import AgentLink
from replicas.supervisor.wire.orders import plain
from replicas.supervisor.wire.part_state import ExitReport, PartState
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
                made.cluster.receive("n1", wire.encode(news(f"mark {number}")))
            with pytest.raises(msgspec.DecodeError, match="more than 3 shims"):
                made.cluster.receive("n1", wire.encode(news("mark 2")))


def news(nonce: str, **changes: Any) -> wire.PartNews:
    return wire.PartNews(plain(PartState(nonce, "x", 0, 1, 0, pid=7)._replace(**changes)))


@pytest.mark.parametrize(
    "message",
    [
        news("n" * 65),
        news("n", group="g" * 257),
        news("n", cgroup="c" * 4097),
        news("n", pid=-1),
        news("n", rendezvous=("h", 1 << 16)),
        news("n", report=ExitReport("failed", "x" * wire.STATE_NBYTES)),
        wire.Leaving("r" * (16 * 1024 + 1)),
        wire.Cleaned(("n" * 65,)),
        wire.Hello(release="1", node="n" * 257, incarnation="i", pid=1, start_time=1, scope="s"),
        wire.Hello(release="1", node="n", incarnation="i" * 65, pid=1, start_time=1, scope="s"),
        wire.Hello(release="1", node="n", incarnation="i", pid=1, start_time=1, scope="s", labels={"l": "v" * 257}),
    ],
)
def test_whatever_an_agent_sends_has_a_bound(message: wire.AgentMessage) -> None:
    with pytest.raises(msgspec.DecodeError):
        received(wire.encode(message))


def received(data: bytes) -> None:
    if isinstance(message := wire.decode_from_agent(data), wire.PartNews):
        wire.part_state(message.state)


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
        link = AgentLink(cast("WebSocket", connection), refused.append)
        link.send(b"x")
        link.send(b"x")
        assert connection.done == done
        assert link.over.is_set() == (done == ["cut"])
    assert refused == ["overflow"]
