"""Publish the weights of any ``transformers.Trainer`` on a channel.

::

    from replicas.integrations.transformers import PublishCallback

    trainer = Trainer(..., callbacks=[PublishCallback("policy", every=10)])

TRL's trainers (SFT, DPO, ...) are such trainers, and so are DDP, DeepSpeed and FSDP
under them: the callback runs on every rank, joins with the identity of the rank's
environment, and publishes :func:`replicas.sources.hf` of the model.

Figures of each sync go into ``trainer.state.log_history`` under ``replicas/``, with the
trainer's own. (A reporter sees them if it comes later in the trainer's list of
callbacks; see docs/integrations.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

import replicas
from replicas.integrations.weight_sync import StepSync, Wait, WeightSync, newest
from replicas.sources import hf

__all__ = ["PublishCallback", "SyncCallback"]


class SyncCallback(TrainerCallback):
    """Adds the figures of a trainer's syncs to its logs, and leaves the channel when
    training ends.

    :param sync: the trainer's membership, which publishes.
    """

    def __init__(self, sync: WeightSync) -> None:
        """Use this trainer's membership of a channel; join nothing yet."""
        self._sync = sync

    @property
    def channel(self) -> replicas.Channel | None:
        """The channel during training, else None."""
        return self._sync.channel

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the figures (metrics) of the syncs that have ended since the last call to
        ``logs`` and to the trainer's newest log entry: the newest value of each figure,
        and of ``replicas/failed`` the sum."""
        figures = newest(self._sync.figures())
        if logs is not None:
            logs.update(figures)
        state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for open publishes, leave the channel, and add their figures to the
        trainer's log."""
        figures = newest([*self._sync.figures(), *self._sync.leave()])
        if figures:
            state.log_history.append({**figures, "step": state.global_step})


class PublishCallback(SyncCallback):
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
    :param weights: returns the weights to publish of the trainer's model, on every
        rank; default: :func:`replicas.sources.hf`.
    :param dtype: cast plain floating tensors to this dtype; default: no cast.
    :param first: False: do not publish the weights with which training begins.
    :param join: further arguments of :func:`replicas.join`, where no supervisor has
        set the environment.
    :raises replicas.errors.UsageError: ``every`` or ``wait`` is not valid; when
        training begins: this rank's group is not a source of the channel, or
        ``weights`` refuses the model.
    :raises replicas.errors.ReplicasError: when training begins: the join failed.
    """

    def __init__(
        self,
        channel: str = "policy",
        every: int = 1,
        *,
        wait: Wait = None,
        deadline: float | None = None,
        weights: Callable[[torch.nn.Module], object] = hf,
        dtype: torch.dtype | None = None,
        first: bool = True,
        **join: Any,
    ) -> None:
        """Check ``every`` (optimizer steps between publishes) and ``wait`` (what to
        wait for after each); join nothing before training.

        :param deadline: seconds for the commit, and for the loads; None: their
            defaults.
        :param weights: returns the weights to publish of the model.
        :param dtype: cast plain floating tensors to it; None: no cast.
        :param first: publish the weights with which training begins, too.
        :param join: further arguments of :func:`replicas.join`.
        """
        self._steps = StepSync(channel, wait, deadline, join, every=every, weights=weights, dtype=dtype, first=first)
        super().__init__(self._steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Join the channel, and publish the first weights, or with ``first=False`` only
        reserve memory.

        :raises replicas.errors.UsageError: this group is not a source of the channel,
            or the weights cannot be published.
        :raises replicas.errors.ReplicasError: the join failed.
        """
        self._steps.begin_training(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Publish if ``every`` optimizer steps have passed, and block until the version
        is committed or loaded if the callback's ``wait`` asks for that."""
        self._steps.step(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Publish the model of the last step unless that is done. With the trainer's
        ``load_best_model_at_end`` publish in any case: the model is the best one then.
        Wait for open publishes, leave the channel, and log their figures (metrics)."""
        self._steps.end(state.global_step, model, changed=args.load_best_model_at_end)
        super().on_train_end(args, state, control)
