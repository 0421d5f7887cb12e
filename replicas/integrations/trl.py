"""Publish the weights of TRL's trainers on a channel, in place of TRL's own NCCL group.

::

    from replicas.integrations.trl import WeightTransfer, server_mode

    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer())

    with server_mode() as figures:  # for GRPOTrainer(vllm_mode="server")
        trainer = GRPOTrainer(..., callbacks=[figures])

TRL asks its weight transfer to pause the server, to send an iterator of (name, tensor),
and to resume. Here the servers pause themselves, each for its own load
(:mod:`replicas.integrations.vllm`), so sending is one ``publish``: it returns when the
weights are copied. What the trainer waits for before it samples again is ``wait``.

Figures of each sync go into TRL's own logs (``trainer.state.log_history``) under
``replicas/``. TRL gives its weight transfer no trainer; its iterator is a generator
method of the trainer, which is found through the generator's frame. In ``server_mode``
the iterator belongs to TRL's client: there a callback logs the figures, and leaves the
channel at the end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import replicas
from replicas.integrations.router import WorkerList
from replicas.integrations.shared import releases
from replicas.integrations.weight_sync import Wait, WeightSync, newest
from replicas.sources import hf

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["Wait", "WeightTransfer", "server_mode"]

logger = logging.getLogger("replicas.integrations")

WRAPPED = 3
"""Most generators that may wrap the one of TRL's trainer."""


class WeightTransfer:
    """A weight transfer of TRL's ``AsyncGRPOTrainer``.

    :param channel: name of the channel, of which this trainer is a source.
    :param wait: before the trainer continues: ``"loaded"``, all live servers answer
        with the new version; ``"committed"``, all have its bytes; None (the default):
        the weights are copied.
    :param deadline: seconds for each of the two; default: the channel's for the commit,
        60 for the loads.
    :param join: further arguments of :func:`replicas.join`, where no supervisor has
        set the environment.
    """

    def __init__(
        self, channel: str = "policy", *, wait: Wait = None, deadline: float | None = None, **join: Any
    ) -> None:
        """Check TRL's release and ``wait``; join nothing yet.

        :param wait: what the trainer waits for after a publish: "loaded", "committed"
            or None.
        :param deadline: seconds for the commit, and for the loads; None: their
            defaults.
        :param join: further arguments of :func:`replicas.join`.
        """
        releases.check("trl")
        self._sync = WeightSync(channel, wait, deadline, join)
        self._logs: dict[str, list[float]] | None = None
        self._warned = False

    @property
    def channel(self) -> replicas.Channel | None:
        """The channel, from :meth:`init_weight_transfer` to :meth:`destroy`, else
        None."""
        return self._sync.channel

    def init_weight_transfer(self) -> None:
        """Join the channel.

        :raises replicas.errors.UsageError: this trainer may not publish on the channel.
        :raises replicas.errors.ReplicasError: the join failed.
        """
        self._sync.join()

    def pause(self) -> None:
        """Do nothing: each server pauses for its own load only."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish; return when the weights are copied.

        A publish that fails is logged, now or with the next one, and training goes on:
        the servers keep their version.

        :raises replicas.errors.UsageError: the first publish is wrong, as every later
            one would be.
        """
        self._logs = _logs_of(iterator)
        if self._logs is None and not self._warned:
            self._warned = True
            logger.warning("not logging the times of syncs: the weights do not come from a trainer of TRL")
        self._sync.publish(iterator)
        self._log(self._sync.figures())

    def resume(self) -> None:
        """Block until the last publish has committed or is loaded by all servers, if
        ``wait`` asks for that; no server was paused. A failure is logged."""
        self._sync.wait_for_last()
        self._log(self._sync.figures())

    def destroy(self) -> None:
        """Wait for open publishes, log their figures (metrics), and leave the
        channel."""
        self._log(self._sync.leave())

    def _log(self, figures: list[dict[str, float]]) -> None:
        """Put figures into the trainer's logs, if these are known: of each figure the
        newest value, of failures the sum. Each is put there as a list of this one
        value, as TRL logs the mean of a list.

        :param figures: metrics by name, one dict for each sync.
        """
        logs = self._logs
        if logs is not None:
            known = {name: logs[name][-1] for name in logs if name.startswith("replicas/") and logs[name]}
            logs.update((name, [value]) for name, value in newest([known, *figures]).items())


def _logs_of(iterator: object, depth: int = WRAPPED) -> dict[str, list[float]] | None:
    """Return the trainer's metric lists by name, if ``iterator`` is a generator method
    of a trainer of TRL, or wraps one; else None.

    :param depth: number of generators to look into.
    """
    frame = getattr(iterator, "gi_frame", None)
    if frame is None or not depth:
        return None
    metrics = getattr(frame.f_locals.get("self"), "_metrics", None)
    if isinstance(metrics, dict) and "train" in metrics:
        return metrics["train"]  # type: ignore[no-any-return]  # TRL's
    inner = (_logs_of(one, depth - 1) for one in list(frame.f_locals.values()))
    return next((found for found in inner if found is not None), None)


class _StreamWithMetadata:
    """A stream of tensors whose names, dtypes and shapes are known."""

    def __init__(self, metadata: list[tuple[str, str, list[int]]], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Wrap ``tensors``; ``metadata`` is (name, dtype, shape) of each, in their
        order."""
        self._metadata = metadata
        self._tensors = tensors

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of each tensor, as TRL has told them."""
        return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in self._metadata]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the iterator of (name, tensor): it can be used once."""
        return self._tensors


@contextlib.contextmanager
def server_mode(
    channel: str = "policy",
    *,
    wait: Wait = "loaded",
    deadline: float | None = None,
    first: torch.nn.Module | None = None,
    dtype: torch.dtype | None = None,
    **join: Any,
) -> Iterator[TrainerCallback]:
    """Context manager: have a ``GRPOTrainer(vllm_mode="server")`` that is built in the
    block publish on a channel.

    TRL builds its own client of the server, so the client's class is replaced within
    the block. This trainer samples right after each sync; ``wait`` is ``"loaded"`` by
    default. The other parameters are those of :class:`WeightTransfer`.

    :param first: a model to publish when TRL looks for its server. Behind a router no
        server is ready before the first version: TRL would wait for a server, and the
        servers for weights.
    :param dtype: cast plain floating tensors to this dtype; default: no cast.

    :raises replicas.errors.UsageError: from the trainer, when it makes its client or
        first syncs: ``first`` or its own model cannot be published.

    The block's value is a callback for the trainer: it adds the figures of each sync to
    its logs, and leaves the channel when training ends. Without it there are no figures
    and the channel is left with the process.
    """
    from trl.generation import vllm_generation

    from replicas.integrations.transformers import SyncCallback

    releases.check("trl")
    sync = WeightSync(channel, wait, deadline, join)
    theirs = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = _client(theirs, sync, first, dtype)
    try:
        yield SyncCallback(sync)
    finally:
        vllm_generation.VLLMClient = theirs


def _client(theirs: type, sync: WeightSync, first: torch.nn.Module | None, dtype: torch.dtype | None) -> type:
    """Return a subclass of TRL's client of a vLLM server that publishes by ``sync``.

    :param theirs: TRL's class.
    :param first: a model to publish before TRL looks for its server, or None.
    :param dtype: cast plain floating tensors to this dtype; None: no cast.
    """

    class ChannelClient(theirs):  # type: ignore[misc]  # a class of TRL's
        """TRL's client of vLLM's server, whose weights go over a channel."""

        base_url: str

        def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
            """Publish ``first``, if there is one, and run TRL's own check.

            Then wait for a server: a router is healthy before it has one.

            :param total_timeout: seconds for all of it. :param retry_interval: between
                two tries, in seconds.
            :raises ConnectionError: no server is ready in time.
            """
            until = time.monotonic() + total_timeout
            if first is not None:
                sync.publish(hf(first), dtype=dtype)
            super().check_server(total_timeout, retry_interval)
            while not self._has_server():
                if time.monotonic() > until:
                    raise ConnectionError(f"{self.base_url} has no server that is ready after {total_timeout:.0f} s")
                time.sleep(retry_interval)

        def _has_server(self) -> bool:
            """Request the server's list of models; return True if the answer is 200."""
            try:
                return bool(self.session.get(f"{self.base_url}/v1/models").status_code == 200)
            except OSError:  # raised by requests
                return False

        def get_server_info(self) -> dict[str, Any]:
            """Run TRL's own request; behind a router, which describes itself, send it
            to one of the servers."""
            mine = self.base_url
            try:
                info: dict[str, Any] = super().get_server_info()
                if not isinstance(info, dict) or not isinstance(info.get("model_config"), dict):
                    self.base_url = min(WorkerList(mine).workers(), default=mine)
                    info = super().get_server_info()
                return info
            finally:
                self.base_url = mine

        def init_communicator(self, device: Any = 0) -> None:
            """Join the channel unless that is done; ``device`` is not used."""
            sync.join()

        def update_named_params(
            self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            """Publish the parameters, and wait for the commit or the loads, as the
            ``wait`` of :func:`server_mode` says. A failure is logged.

            :param metadata: name, dtype and shape of each of ``named_params``.
            :raises replicas.errors.UsageError: the first publish is wrong, as every
                later one would be.
            """
            sync.publish(_StreamWithMetadata(metadata, named_params), dtype=dtype)
            sync.wait_for_last()

        def reset_prefix_cache(self) -> None:
            """Do nothing: each server resets its own cache with each load."""

        def close_communicator(self) -> None:
            """Wait for open publishes, and leave the channel."""
            sync.leave()

    return ChannelClient
