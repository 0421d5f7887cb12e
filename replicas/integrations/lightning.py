"""Publish the weights of a Lightning ``Trainer`` on a channel.

::

    from replicas.integrations.lightning import PublishCallback
    from replicas.sources import hf

    publish = PublishCallback("policy", weights=lambda module: hf(module.model))
    trainer = Trainer(..., callbacks=[publish])

Lightning's module holds the model under an attribute, whose name would prefix each
tensor's: ``weights`` takes the model out. Without it a module that holds a model of
transformers or PEFT is refused when training begins. The callback runs on every rank,
and joins with the identity of the rank's environment.

Figures of each sync go to the trainer's loggers under ``replicas/``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback

import replicas
from replicas.integrations.weight_sync import StepSync, Wait, newest
from replicas.sources import hf

__all__ = ["PublishCallback"]


class PublishCallback(Callback):
    """Publishes the model when training begins, every N optimizer steps, and at the
    end.

    A publish that fails is logged and training goes on. Receivers find the step in
    ``update.meta["step"]``. Training that is resumed joins again and publishes the
    checkpoint's weights as the next version.

    :param channel: name of the channel, of which this trainer is a source.
    :param every: optimizer steps from one publish to the next; default 1.
    :param wait: before training continues: ``"loaded"``, all live targets serve the new
        version; ``"committed"``, all have its bytes; None (the default): the weights
        are copied.
    :param deadline: seconds for each of the two; default: the channel's for the commit,
        60 for the loads.
    :param weights: returns the weights to publish of the LightningModule, on every
        rank. Default: :func:`replicas.sources.hf`, which names tensors as the module's
        ``state_dict`` does, and refuses a module that holds a model of transformers or
        PEFT: pass ``lambda module: hf(module.model)`` then.
    :param dtype: cast plain floating tensors to this dtype; default: no cast.
    :param first: False: do not publish the weights with which training begins.
    :param join: further arguments of :func:`replicas.join`, where no supervisor has
        set the environment.
    :raises replicas.errors.UsageError: ``every`` or ``wait`` is not valid; when
        training begins: this rank's group is not a source of the channel, or the module
        cannot be published.
    :raises replicas.errors.ReplicasError: when training begins: the join failed.
    """

    def __init__(
        self,
        channel: str = "policy",
        every: int = 1,
        *,
        wait: Wait = None,
        deadline: float | None = None,
        weights: Callable[[Any], object] = hf,
        dtype: torch.dtype | None = None,
        first: bool = True,
        **join: Any,
    ) -> None:
        """Check ``every`` (optimizer steps between publishes) and ``wait`` (what to
        wait for after each); join nothing before training.

        :param deadline: seconds for the commit, and for the loads; None: their
            defaults.
        :param weights: returns the weights to publish of the LightningModule.
        :param dtype: cast plain floating tensors to it; None: no cast.
        :param first: publish the weights with which training begins, too.
        :param join: further arguments of :func:`replicas.join`.
        """
        self._sync = StepSync(channel, wait, deadline, join, every=every, weights=weights, dtype=dtype, first=first)

    @property
    def channel(self) -> replicas.Channel | None:
        """The channel during training, else None."""
        return self._sync.channel

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the channel, and publish the first weights, or with ``first=False`` only
        reserve memory.

        :raises replicas.errors.UsageError: this group is not a source of the channel,
            or the weights cannot be published.
        :raises replicas.errors.ReplicasError: the join failed.
        """
        self._sync.begin_training(trainer.global_step, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Publish if ``every`` optimizer steps have passed, and block until the version
        is committed or loaded if the callback's ``wait`` asks for that; log the figures
        (metrics) of the syncs that have ended."""
        self._sync.step(trainer.global_step, pl_module)
        _log(trainer, self._sync.figures())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the last step unless that is done, wait for open publishes, and leave
        the channel; log their figures (metrics)."""
        self._sync.end(trainer.global_step, pl_module)
        _log(trainer, [*self._sync.figures(), *self._sync.leave()])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training was interrupted: leave the channel without waiting for open
        publishes, and log the figures (metrics) so far."""
        _log(trainer, [*self._sync.figures(), *self._sync.leave(wait=False)])


def _log(trainer: Any, figures: list[dict[str, float]]) -> None:
    """Give the newest value of each figure (a metric of the syncs) to the trainer's
    loggers; do nothing without figures.

    :param figures: one dict for each sync that has ended.
    """
    for logger in trainer.loggers if figures else ():
        logger.log_metrics(newest(figures), step=trainer.global_step)
