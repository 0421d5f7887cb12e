"""Lines that a node loses from its logs are reported once, whoever is there.

Covers: supervisor/agent/shims.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from replicas.supervisor.agent.messages import Hello, Start
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.fleet.handle import NodeEntry, ShimHandle
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN, LogLoss

pytestmark = pytest.mark.anyio

SPEC = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), {}, "/", "/", 3.0, "nonce")


def started(folder: Path) -> tuple[Shims, Callable[..., None]]:
    """The shims of an agent, one of them, and what makes it lose lines."""
    shim = mock.Mock(spec=SPEC, state=UNKNOWN.with_identity_of(SPEC), stacks=None)
    shims = Shims(mock.Mock(path=None), folder, begin=lambda *_: shim)
    shims.obey(Start(spec=plain(SPEC)))

    def lose(*losses: LogLoss) -> None:
        shim.state = shim.state._replace(losses=losses)
        shims._update_empty()

    return shims, lose


def handle(*, adopted: bool) -> ShimHandle:
    hello = Hello(release="", node="n", incarnation="", pid=1, start_time=1, scope="")
    node = NodeEntry(hello, local=True, now=0.0)
    return ShimHandle("nonce", node, start=None if adopted else Start(spec={}))


async def test_what_is_lost_while_no_supervisor_is_there_is_reported_to_the_next_one(tmp_path: Path) -> None:
    shims, lose = started(tmp_path)
    first = handle(adopted=False)
    first.update_state(shims.take_all_states()[0])
    lose(LogLoss(3, "file", "full"))
    for state in shims.take_changed_states():
        first.update_state(state)
    assert first.losses == [LogLoss(3, "file", "full")]
    lose(LogLoss(7, "file", "full"), LogLoss(1, "tee", "slow"))  # nobody is told
    second = handle(adopted=True)
    second.update_state(shims.take_all_states()[0])
    assert second.losses == [LogLoss(4, "file", "full"), LogLoss(1, "tee", "slow")]
    third = handle(adopted=True)
    third.update_state(shims.take_all_states()[0])
    assert third.losses == [], "it has been reported"


async def test_a_supervisor_whose_connection_broke_is_told_what_it_missed_once(tmp_path: Path) -> None:
    shims, lose = started(tmp_path)
    supervisor = handle(adopted=False)
    supervisor.update_state(shims.take_all_states()[0])
    lose(LogLoss(3, "file", "full"))
    supervisor.update_state(shims.take_all_states()[0])
    supervisor.update_state(shims.take_all_states()[0])
    assert supervisor.losses == [LogLoss(3, "file", "full")]
