"""NeMo-RL's refit transport ``replicas.integrations.nemo:CheckpointEngine``.

One setting: ``policy.generation.refit_transport`` is that text. NeMo-RL's
``CheckpointEngineWeightSynchronizer`` makes one engine in each policy worker and each
worker of vLLM's, calls ``prepare`` and ``init_..._process_group`` once, and then for
each refit ``send_weights`` and ``receive_weight_batches`` (the rest is
:mod:`replicas.integrations.shared.refit`). This module does not import NeMo-RL.

**The coordinator** is a Ray actor beside policy worker 0, which owns it. ``prepare``
does not know the worker's number yet, so each worker *offers* the address, the key and
the token that a coordinator of its own would have; that of policy worker 0 is started.
vLLM's workers need not be Ray's. If ``REPLICAS_ENDPOINT`` is in the workers'
environment, that coordinator is used; its channel has the source group ``trainer`` and
the target group ``rollout``.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Literal

import torch

from replicas import errors
from replicas.integrations.shared.refit import (
    DEADLINE_S,
    CoordinatorAddress,
    Refit,
    channel_settings,
    first_sync,
    seats,
)

__all__ = ["CheckpointEngine"]

NAME = "replicas-nemo"
"""Name of the coordinator's run, and prefix of its actor's name."""


class CheckpointEngine:
    """NeMo-RL's engine of one worker: it moves weights from the policy workers to the
    rollouts, over a channel. The parameters after ``release_after_refit`` may be set in
    ``policy.generation.refit_cfg``, under the transport's own name.

    :param bucket_size: bytes of tensors that vLLM is given at a time.
    :param release_after_refit: whether NeMo-RL calls ``finalize`` and ``prepare``
        around each refit; workers stay on the channel in any case.
    :param channel: name of the channel.
    :param ranks: ``"leader"``: policy worker 0 publishes; ``"all"``: each one publishes
        its share.
    :param dtype: cast floating tensors to it; default: no cast.
    :param deadline: seconds for a publish, and for a receive.
    :param options: further keys of the channel, such as ``slots`` or ``staging``.
    :raises replicas.errors.UsageError: an argument is wrong.
    """

    shard_expert_weights = False
    cleanup_after_load = True

    def __init__(
        self,
        bucket_size: int,
        release_after_refit: bool = False,
        *,
        channel: str = "policy",
        ranks: Literal["leader", "all"] = "leader",
        dtype: torch.dtype | str | None = None,
        deadline: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        """Check the arguments; join nothing yet.

        :param bucket_size: bytes of tensors that vLLM is given at a time.
        :param release_after_refit: not used: workers stay on the channel.
        :param ranks: whether policy worker 0 alone publishes, or each worker its share.
        :param dtype: cast floating tensors to it; None: no cast.
        :param deadline: seconds for a publish, and for a receive.
        :param options: further keys of the channel, such as ``slots``.
        """
        self._bucket_nbytes = bucket_size
        self._refit = Refit(
            channel=channel, ranks=ranks, dtype=dtype, deadline=deadline, options=options, loaded_at_end=True
        )
        self._coordinator: Any = None
        self._offer: _Offer | None = None

    def prepare(self) -> dict[str, Any]:
        """Begin a sync; return the metadata that this worker sends to all others. A
        receive or version of an earlier sync that is still open ends as failed.

        The metadata are those of :meth:`Refit.prepare`, and ``offer``: in a Ray worker
        the address of a coordinator, chosen by the first call, else None. Nothing is
        started here: worker 0 may start its own when it joins.
        """
        if self._offer is None:
            self._offer = _Offer.create()
        return {**self._refit.prepare(), "offer": None if self._offer is None else self._offer.place}

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return None: every rollout receives whole tensors."""
        return None

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> None:
        """Join the channel as a trainer, unless joined; worker 0 first starts the
        coordinator, unless it runs or the environment names one.

        :param metadata: of all workers, the policy workers first.
        :raises replicas.errors.UsageError: worker 0 can start no coordinator, and the
            environment names none.
        """
        if worker_rank == 0 and not metadata[0]["outside"] and self._offer is not None and self._coordinator is None:
            self._coordinator = self._offer.started(channel_settings(metadata))
        self._join(worker_rank, train_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> None:
        """Join the channel as a rollout, unless joined.

        :param metadata: of all workers, the policy workers first.
        :raises replicas.errors.UsageError: worker 0 can start no coordinator, and the
            environment names none.
        """
        self._join(train_world_size + rollout_rank, train_world_size, metadata)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish if this worker is a publisher; return when all live rollouts have the
        bytes. The weights are iterated to their end in any case.

        :raises replicas.errors.ReplicasError: the publish failed.
        """
        await self._refit.send_weights(weights)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Wait for this refit's version; yield its (name, tensor) pairs in lists of
        about ``bucket_size`` bytes, one tensor at least. After the last one it counts
        as loaded; an error in the loop reports it as failed.

        :raises replicas.errors.SyncError: there is no trainer, or the next sync has
            begun.
        :raises replicas.errors.DeadlineExceeded: no version came by the deadline.
        """
        batch: list[tuple[str, torch.Tensor]] = []
        nbytes = 0
        async for name, tensor in self._refit.receive_weights():
            if batch and nbytes + tensor.nbytes > self._bucket_nbytes:
                yield batch
                batch, nbytes = [], 0
            batch.append((name, tensor))
            nbytes += tensor.nbytes
        if batch:
            yield batch

    def finalize(self) -> None:
        """Do nothing: a version read to its end counts as loaded, and workers stay on
        the channel."""

    def _join(self, number: int, policies: int, metadata: Sequence[dict[str, Any]]) -> None:
        """Join the channel as worker ``number`` of all workers, unless joined: its
        group, replica and rank follow from the metadata.

        :param policies: number of policy workers.
        :param metadata: of all workers, the policy workers first.
        :raises replicas.errors.UsageError: worker 0 can start no coordinator, and the
            environment names none.
        """
        offer = metadata[0]["offer"]
        if offer is None and not metadata[0]["outside"]:
            text = "no coordinator: policy worker 0 is not a Ray actor, and REPLICAS_ENDPOINT is not set"
            raise errors.UsageError(text, hint="start one, and give the workers its address (docs/nemo-rl.md)")
        place = None if metadata[0]["outside"] else CoordinatorAddress(*offer)
        seat, sync = seats(metadata, policies)[number], first_sync(metadata)
        self._refit.init_process_group(seat=seat, place=place, sync=sync)


class _Offer:
    """A coordinator that this process could start, with its future address."""

    def __init__(self, place: CoordinatorAddress, port: int, secret: str, pem: bytes) -> None:
        """Keep what a coordinator would be started with; start nothing.

        :param place: its address, token and run, for members. :param port: to listen
            on.
        :param secret: the token's secret. :param pem: its key and certificate.
        """
        self.place, self._port, self._secret, self._pem = place, port, secret, pem

    @classmethod
    def create(cls) -> _Offer | None:
        """Choose the key, token and free port of a coordinator, without starting it;
        return None if this process is not a Ray worker."""
        try:
            import ray
        except ImportError:
            return None
        if not ray.is_initialized():
            return None
        from replicas.integrations.ray import free_port
        from replicas.trust.certificate import PortKey, make_pem
        from replicas.trust.tokens import JoinToken, new_secret

        pem, secret, port = make_pem(), new_secret(), free_port()
        token = str(JoinToken(PortKey.of_pem(pem).hash, secret))
        return cls(CoordinatorAddress(f"{ray.util.get_node_ip_address()}:{port}", token, NAME), port, secret, pem)

    def started(self, channels: dict[str, Any]) -> Any:
        """Start the coordinator of these channels, as offered: a Ray actor, on the
        offered port. Wait, and return its handle, without which Ray ends the actor.

        :param channels: settings by the channel's name.
        """
        from replicas.integrations.ray import coordinator

        name = f"{NAME}-{secrets.token_hex(4)}"  # the actor of a dead worker may still exist
        return coordinator(channels, name=name, run=NAME, port=self._port, token=self._secret, pem=self._pem)
