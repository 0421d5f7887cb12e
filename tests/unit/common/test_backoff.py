"""Every backoff of ours: from where, to where, and that no count of failures is too
many.

Covers: common/backoff.py, core/moving/stragglers.py.
"""

from __future__ import annotations

import pytest

from replicas.common.backoff import Backoff
from replicas.core.members import roster
from replicas.core.moving import channel_context, links, stragglers
from replicas.core.versions import catch_up
from replicas.sidecar import building
from replicas.sidecar import kept_forkserver as keeper
from replicas.supervisor.agent import agent
from replicas.supervisor.fleet import local_agent
from replicas.supervisor.shim import pump_watcher as logkeeper


@pytest.mark.parametrize(
    ("backoff", "seconds"),
    [
        (stragglers.SLOW, [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (catch_up.RETRY, [1, 2, 4, 8, 16, 30, 30]),
        (roster.PROBATION, [1, 2, 4, 8, 16, 30, 30]),
        (channel_context.REST, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (links.DOUBT, [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (building.STORE_CONNECT, [0.5, 1, 2, 4, 4]),
        (keeper.AGAIN, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]),
        (local_agent.AGAIN, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]),
        (agent.AGAIN, [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]),
        (logkeeper.AGAIN, [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2, 2]),
        (logkeeper.KILLED, [0.02, 0.04, 0.05, 0.05]),
    ],
)
def test_it_doubles_up_to_its_maximum(backoff: Backoff, seconds: list[float]) -> None:
    assert [backoff.after(failures) for failures in range(len(seconds))] == seconds
    assert backoff.after(10_000) == backoff.max_s == seconds[-1]


def test_a_first_delay_of_nothing_stays_nothing() -> None:
    assert Backoff(0.0, 60.0).after(10_000) == 0.0
