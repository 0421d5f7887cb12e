"""verl's checkpoint-engine backend ``replicas`` (verl 0.9).

One setting: ``actor_rollout_ref.rollout.checkpoint_engine.backend=replicas``. verl
finds this module by the entry point ``replicas`` in the group ``verl.plugins``; where
plugins are off (``VERL_USE_EXTERNAL_PLUGINS=none``) it is named by
``checkpoint_engine.custom_backend_module=replicas.integrations.verl``.

verl's manager begins each sync with ``prepare``, ``build_topology`` and
``init_process_group``. Here ``build_topology`` starts a coordinator at the first sync,
a Ray actor beside the manager that ends with it, and gives each worker its seat;
workers join once (the rest is :mod:`replicas.integrations.shared.refit`). Under a
supervisor, or with ``REPLICAS_ENDPOINT`` in the workers' environment, that coordinator
is used; its channel has the source group ``trainer`` and the target group ``rollout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from replicas import errors
from replicas.integrations.ray import Handle, coordinator, find
from replicas.integrations.shared import releases
from replicas.integrations.shared.refit import (
    DEADLINE_S,
    CoordinatorAddress,
    Refit,
    channel_settings,
    first_sync,
    seats,
)

__all__ = ["ReplicasCheckpointEngine"]

NAME = "replicas-verl"
"""Prefix of the name of a coordinator's actor, before the channel's name."""
_HANDLES: dict[tuple[str, str], Handle] = {}
"""Handles of this process, by Ray job and name: Ray ends an actor when no handle is
left."""


@CheckpointEngineRegistry.register("replicas")
class ReplicasCheckpointEngine(Refit, CheckpointEngine):
    """verl's checkpoint engine of one worker: it moves weights from trainers to
    rollouts, over a channel. The parameters after ``is_master`` may be set in
    ``checkpoint_engine.engine_kwargs.replicas``.

    :param bucket_size: not used: memory for two versions is made once, in the trainer
        and on each host of rollouts.
    :param is_master: not used: the first worker is the leader.
    :param channel: name of the channel.
    :param ranks: ``"leader"``: rank 0 publishes; ``"all"``: each trainer publishes its
        share.
    :param rollout_dtype: cast floating tensors to it; default: no cast.
    :param deadline: seconds for a publish, and for a receive.
    :param options: further keys of the channel, such as ``slots`` or ``staging``.
    :raises replicas.errors.UsageError: an argument is wrong, or verl is of a release
        with another interface.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        channel: str = "policy",
        ranks: Literal["leader", "all"] = "leader",
        rollout_dtype: torch.dtype | str | None = None,
        deadline: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        """Check verl's release and the arguments; join nothing yet. ``bucket_size`` and
        ``is_master`` are not used.

        :param ranks: whether rank 0 alone publishes, or each trainer its share.
        :param rollout_dtype: cast floating tensors to it; None: no cast.
        :param deadline: seconds for a publish, and for a receive.
        :param options: further keys of the channel, such as ``slots``.
        """
        releases.check("verl")
        super().__init__(channel=channel, ranks=ranks, dtype=rollout_dtype, deadline=deadline, options=options)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """On the manager: find or start the coordinator, unless the first worker's
        environment names one; assign each worker its seat (identity on the channel).

        :param metadata: of all workers, the trainers first, from their ``prepare``.
        :returns: for trainers and for rollouts, lists by worker of the arguments of
            ``init_process_group``: ``seat``, ``place`` (the coordinator's address;
            None: the environment has it) and ``sync``.
        """
        place = None if metadata[0]["outside"] else _place(channel_settings(metadata))
        count, sync = len(metadata), first_sync(metadata)
        whole: dict[str, list[Any]] = {
            "seat": list(seats(metadata, actor_wg_world_size)),
            "place": [place] * count,
            "sync": [sync] * count,
        }
        actors = {key: values[:actor_wg_world_size] for key, values in whole.items()}
        return actors, {key: values[actor_wg_world_size:] for key, values in whole.items()}


def _place(channels: dict[str, Any]) -> CoordinatorAddress:
    """Return the address of the coordinator of these channels in this Ray job; find its
    actor or, if there is none, start it, and keep its handle in this process.

    :param channels: settings by the channel's name, for a new coordinator.
    """
    name = "-".join([NAME, *channels])
    key = ray.get_runtime_context().get_job_id(), name
    if key not in _HANDLES:
        try:
            _HANDLES[key] = find(name)
        except errors.UsageError:
            _HANDLES[key] = coordinator(channels, name=name)
    handle = _HANDLES[key]
    return CoordinatorAddress(handle.endpoint, handle.token, handle.run)
