"""NeMo-RL's refit transport over a channel: many refits, a rollout that is born again,
and a policy worker that dies in the middle.

Covers: integrations/nemo.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests.engines.programs.nemo_workers import TRANSPORT, Policy, Rollout, Synchronizer
from tests.engines.programs.ray_cluster import raylets

AGAIN = {"num_cpus": 0, "max_restarts": -1}


@pytest.fixture(scope="module")
def sync() -> Iterator[Synchronizer]:
    with raylets(4) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            policies = [ray.remote(Policy).options(**AGAIN).remote(rank, TRANSPORT, slots=3) for rank in range(2)]
            rollouts = [ray.remote(Rollout).options(**AGAIN).remote(rank, TRANSPORT) for rank in range(2)]
            found = Synchronizer(policies, rollouts)
            found.init_communicator()
            yield found
        finally:
            ray.shutdown()
            cluster.wait_until_free()


def wait_for(worker: Any) -> None:
    """Until it lives again."""
    ray.get(worker.who.options(max_task_retries=-1).remote(), timeout=120)


def test_refits_after_one_set_up(sync: Synchronizer) -> None:
    for value in (1.0, 2.0, 3.0):
        assert sync.sync_weights(value) == [{value}] * 2
    sync.shutdown()
    sync.init_communicator()  # with release_after_refit it is so around each refit
    assert sync.sync_weights(4.0) == [{4.0}] * 2


def test_a_rollout_that_dies_in_a_refit_is_born_again(sync: Synchronizer) -> None:
    ray.get(sync.rollouts[1].doom.remote())
    with pytest.raises(RayActorError):
        sync.sync_weights(5.0)
    survivors = Synchronizer(sync.policies, sync.rollouts[:1])
    survivors.init_communicator()
    assert survivors.sync_weights(6.0) == [{6.0}]
    wait_for(sync.rollouts[1])
    sync.init_communicator()
    assert sync.sync_weights(7.0) == [{7.0}] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_policy_worker_that_dies_in_a_refit_is_born_again(sync: Synchronizer, rank: int) -> None:
    """Worker 0 publishes, and owns the coordinator."""
    ray.get(sync.policies[rank].doom.remote())
    with pytest.raises(RayActorError):
        sync.sync_weights(8.0)
    wait_for(sync.policies[rank])
    sync.init_communicator()
    assert sync.sync_weights(9.0 + rank) == [{9.0 + rank}] * 2
    assert sync.sync_weights(11.0) == [{11.0}] * 2
