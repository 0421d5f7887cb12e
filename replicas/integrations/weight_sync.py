"""Publish, wait and report: the common part of the integrations of trainers.

The library's trainer decides when to call. :class:`WeightSync` is its membership of a
channel; :class:`StepSync` also counts the optimizer steps.

A failed sync does not end the training: it is logged, with the figure
``replicas/failed``, and the targets keep their version. Failed loads are reported by
the next receipt, and logged with the figure ``replicas/not_loaded``. Only errors that
no later sync can escape are raised, when training begins: no coordinator at the join, a
group that is not a source of the channel, or a wrong call
(:class:`replicas.errors.UsageError`), such as a model that cannot be published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

import replicas
from replicas import errors

__all__ = ["LOADED_S", "StepSync", "Wait", "WeightSync", "newest"]

logger = logging.getLogger("replicas.integrations")

Wait = Literal["loaded", "committed"] | None
LOADED_S = 60.0
"""Seconds for the loads, without a given deadline."""


class _Sync(NamedTuple):
    pending: replicas.Pending[replicas.Receipt]
    figures: dict[str, float]


class WeightSync:
    """A trainer's membership of a channel of which it is a source.

    :param channel: its name.
    :param wait: the state to wait for after a publish: ``"loaded"``, all live targets
        serve the new version; ``"committed"``, all have its bytes; None: immediately.
    :param deadline: seconds for each of the two; None: the channel's for the commit,
        60 for the loads.
    :param join: further arguments of :func:`replicas.join`.
    :raises replicas.errors.UsageError: ``wait`` is not one of these.
    """

    def __init__(self, channel: str, wait: Wait, deadline: float | None, join: dict[str, Any]) -> None:
        """Check ``wait``; join nothing yet.

        :param channel: its name.
        :param wait: the state to wait for after a publish: ``"loaded"``, all live
            targets serve the new version; ``"committed"``, all have its bytes; None:
            immediately.
        :param deadline: seconds for the commit, and again for the loads; None: the
            channel's deadline for the commit, 60 for the loads.
        :param join: further arguments of :func:`replicas.join`.
        """
        if wait not in ("loaded", "committed", None):
            raise errors.UsageError(f"wait={wait!r}", hint='pass "loaded", "committed" or None')
        self._name = channel
        self._wait = wait
        self._deadline = deadline
        self._join = join
        self._open: list[_Sync] = []
        self._last: _Sync | None = None
        self._figures: list[dict[str, float]] = []
        self._works = False
        self.channel: replicas.Channel | None = None

    def join(self) -> replicas.Channel:
        """Join the channel unless that is done; return it.

        :raises replicas.errors.UsageError: this group is not a source of the channel.
        :raises replicas.errors.ReplicasError: as :func:`replicas.join`.
        """
        if self.channel is not None:
            return self.channel
        channel = replicas.join(self._name, **self._join)
        if channel.role not in ("source", "both"):
            channel.close(wait=False)
            text = f"{self._name}: {channel.member.name} is a {channel.role} of the channel, and cannot publish"
            raise errors.UsageError(text, channel=self._name, hint="name its group in the channel's sources")
        self.channel = channel
        return channel

    def publish(self, weights: object, **options: Any) -> None:
        """Join the channel unless joined, and publish ``weights``; return when they are
        copied. A failure other than those below is only logged, and counted as a
        metric.

        :param options: of :meth:`replicas.Channel.publish`.
        :raises replicas.errors.UsageError: no publish has worked yet, and this one is
            wrong, as every later one would be; the channel is left.
        :raises replicas.errors.ReplicasError: the join failed, as :meth:`join`.
        """
        channel = self.join()
        began = time.monotonic()
        self._last = None
        try:
            pending = channel.publish(weights, deadline=self._deadline, **options)
        except errors.ReplicasError as error:
            if isinstance(error, errors.UsageError) and not self._works:
                self.leave(wait=False)
                raise
            self._failed(error)
            return
        self._works = True
        self._last = _Sync(pending, {"replicas/copied_seconds": time.monotonic() - began})
        self._open.append(self._last)

    def wait_for_last(self) -> None:
        """Wait for the last publish as the ``wait`` of the constructor says: until it
        has committed, until all live targets have also loaded its version, or (None)
        not at all. A failure or a passed deadline is logged, not raised."""
        if self.channel is None or self._last is None or self._wait is None:
            return
        began = time.monotonic()
        (last, self._last) = (self._last, None)
        receipt = self._receipt(last)
        if receipt is not None and self._wait == "loaded":
            try:
                self.channel.loaded(receipt.version, deadline=self._deadline or LOADED_S).wait()
            except errors.ReplicasError as error:
                logger.warning("training goes on, version %s is not loaded everywhere: %s", receipt.version, error)
                last.figures["replicas/load_failed"] = 1.0
        last.figures["replicas/waited_seconds"] = time.monotonic() - began

    def figures(self) -> list[dict[str, float]]:
        """Return the figures (metrics by name, ``replicas/...``) of each sync that has
        ended since the last call, as one dict for each; do not wait."""
        for sync in [sync for sync in self._open if sync.pending.done()]:
            self._receipt(sync)
        found, self._figures = self._figures, []
        return found

    def leave(self, *, wait: bool = True) -> list[dict[str, float]]:
        """Leave the channel; return the figures (metrics by name) of syncs that were
        not reported yet. Another :meth:`join` joins again.

        :param wait: first wait for open publishes, by their own deadlines; False: do
            not, and return no figures of publishes that :meth:`figures` has not seen
            end.
        """
        channel, self.channel, self._last, self._works = self.channel, None, None, False
        if channel is None:
            return []
        for sync in [*self._open] if wait else []:
            self._receipt(sync)
        self._open.clear()
        channel.close(wait=False)
        return self.figures()

    def _receipt(self, sync: _Sync) -> replicas.Receipt | None:
        """Block until a sync (one publish) has ended; keep its figures, and return its
        receipt (the commit's details). Return None if it failed, which is logged."""
        try:
            receipt = sync.pending.wait()
        except errors.ReplicasError as error:
            self._failed(error)
            receipt = None
        if sync in self._open:
            self._open.remove(sync)
            if receipt is not None:
                for name, why in receipt.not_loaded.items():
                    logger.warning("going on without %s, which keeps older weights or is restarted: %s", name, why)
                sync.figures.update(receipt.metrics())
                self._figures.append(sync.figures)
        return receipt

    def _failed(self, error: errors.ReplicasError) -> None:
        """Log a failed publish, and count it in the figures (metrics by name) as
        ``replicas/failed``."""
        logger.warning("training goes on after a failed publish: %s", error)
        self._figures.append({"replicas/failed": 1.0})


class StepSync(WeightSync):
    """A :class:`WeightSync` that publishes a model every N optimizer steps.

    ``update.meta["step"]`` is the step at the receivers. A step that goes back (a
    resumed training) is published like any other, under the next version.

    :param every: N.
    :param weights: returns the weights to publish of the trainer's model, at each
        publish.
    :param dtype: cast plain floating tensors to this dtype; None: no cast.
    :param first: publish the weights with which training begins, too.
    :raises replicas.errors.UsageError: ``every`` is not a whole number from 1.
    """

    def __init__(
        self,
        channel: str,
        wait: Wait,
        deadline: float | None,
        join: dict[str, Any],
        *,
        every: int,
        weights: Callable[[Any], object],
        dtype: torch.dtype | None,
        first: bool,
    ) -> None:
        """Check the arguments; join nothing yet.

        :param every: optimizer steps from one publish to the next.
        :param weights: returns the weights to publish of the trainer's model.
        :param dtype: cast plain floating tensors to this dtype; None: no cast.
        :param first: publish the weights with which training begins, too.
        """
        super().__init__(channel, wait, deadline, join)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise errors.UsageError(f"every={every!r}", hint="pass a number of steps, 1 or more")
        self._every = every
        self._weights = weights
        self._dtype = dtype
        self._first = first
        self._published = -1
        self._begun = 0

    def begin_training(self, step: int, model: Any) -> None:
        """Join the channel, and publish the model or, with ``first=False``, only
        reserve memory for it: training begins or resumes at this step.

        :raises replicas.errors.UsageError: the model cannot be published as it is, and
            the channel is left; the hint has the ``weights`` that would work, if any.
        :raises replicas.errors.ReplicasError: as :meth:`join`.
        """
        self.join()
        self._begun, self._published = step, -1
        try:
            if self._first:
                self._sync(step, model)
            else:
                self._reserve(model)
        except errors.UsageError as error:
            self.leave(wait=False)
            error.hint = error.hint.replace("hf(module.", "weights=lambda module: hf(module.")
            raise

    def _reserve(self, model: Any) -> None:
        """Have the channel reserve memory for weights like the model's, without a wait,
        so that the first publish is faster. Raise UsageError for weights that cannot be
        published; only log any other error."""
        channel, weights = self.join(), self._weights(model)
        if not isinstance(weights, (torch.nn.Module, Mapping)) and not hasattr(weights, "metadata"):
            return  # a stream has no metadata
        try:
            channel.reserve(weights, dtype=self._dtype)
        except errors.UsageError:
            raise
        except errors.ReplicasError as error:  # the first publish raises it again, or works without
            logger.info("going on without memory reserved before the first publish: %s", error)

    def step(self, step: int, model: Any) -> None:
        """Publish the model if a multiple of ``every`` steps has been reached since the
        last publish, and wait for it by :meth:`wait_for_last`; else do nothing.

        :param step: number of optimizer steps so far.
        """
        if step // self._every > max(self._published, self._begun) // self._every:
            self._sync(step, model)

    def end(self, step: int, model: Any, *, changed: bool = False) -> None:
        """Publish the model of the last step unless it was published, and wait for it
        by :meth:`wait_for_last`. Stay on the channel; do nothing if it was left.

        :param step: number of optimizer steps at the end of training.
        :param changed: the model has changed since the last step: publish in any case.
        """
        if self.channel is not None and (changed or step != self._published):
            self._sync(step, model)

    def _sync(self, step: int, model: Any) -> None:
        """Publish the model with ``meta["step"]`` = ``step``, and block until the
        version is committed or loaded, as ``wait`` of the class says."""
        self.publish(self._weights(model), dtype=self._dtype, meta={"step": step})
        self._published = step
        self.wait_for_last()


def newest(all_figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the newest value of each figure (a metric by name), and the sum of
    ``replicas/failed``.

    :param all_figures: one dict for each sync, the oldest first.
    """
    found: dict[str, float] = {}
    for figures in all_figures:
        found.update(figures)
    if "replicas/failed" in found:
        found["replicas/failed"] = sum(figures.get("replicas/failed", 0.0) for figures in all_figures)
    return found
