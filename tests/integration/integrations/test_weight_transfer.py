"""The weight transfer that TRL's trainers are given, as they call it.

(The released TRL: ``make test-engines``.)

Covers: integrations/trl.py, integrations/weight_sync.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.integrations.trl import Wait, WeightTransfer
from tests.support.channels import POLICY, ChannelWorld, channel_world

pytestmark = pytest.mark.anyio


class Trainer:
    """What the transfer sees of TRL's trainer: a generator method and its metrics."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            yield name, torch.full((8,), self.value)

    def sync(self, transfer: WeightTransfer) -> None:
        """As ``AsyncGRPOTrainer._sync_weight``."""
        transfer.pause()
        transfer.send_weights(self._streaming_iter())
        transfer.resume()


def transfer_to(world: ChannelWorld, wait: Wait) -> WeightTransfer:
    return WeightTransfer(
        world.channel, wait=wait, endpoint=world.endpoint, token=world.coordinator.token, group="trainer"
    )


@pytest.mark.parametrize("wait", ["loaded", "committed", None])
async def test_a_sync_is_a_publish_whose_figures_are_logged(wait: Wait) -> None:
    async with channel_world(POLICY) as world:
        rollout = await world.join("rollout")
        transfer, trainer = transfer_to(world, wait), Trainer(3.0)
        await asyncio.to_thread(transfer.init_weight_transfer)
        syncing = asyncio.create_task(asyncio.to_thread(trainer.sync, transfer))
        update = await rollout.receive(deadline=20)
        with update:
            assert all(tensor.eq(3.0).all() for _, tensor in update)
            assert wait != "loaded" or not syncing.done()
        await syncing
        assert rollout.version == 1
        logged = trainer._metrics["train"]
        while wait is None and not logged:  # told with a later sync
            await asyncio.to_thread(trainer.sync, transfer)
        assert logged["replicas/version"][0] == 1.0
        assert {"replicas/seconds", "replicas/copied_seconds", "replicas/lost"} <= logged.keys()
        await asyncio.to_thread(transfer.destroy)


@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_figures_survive_a_wrapped_iterator_or_their_loss_is_said(
    is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with channel_world(POLICY) as world:
        transfer, trainer = transfer_to(world, "committed"), Trainer(3.0)

        def wrapped(inner: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            yield from inner

        def sync() -> None:
            weights = trainer._streaming_iter()
            transfer.send_weights(wrapped(weights) if is_wrapped else iter(list(weights)))
            transfer.resume()

        for _ in range(2):
            await asyncio.to_thread(sync)
        assert ("replicas/version" in trainer._metrics["train"]) == is_wrapped
        assert caplog.text.count("not logging the times of syncs") == (not is_wrapped)
        await asyncio.to_thread(transfer.destroy)


async def test_training_goes_on_after_a_sync_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    async with channel_world({**POLICY, "on_lost": "raise", "min_targets": 1}) as world:
        transfer, trainer = transfer_to(world, "committed"), Trainer(1.0)
        transfer._sync._deadline = 1.0
        with caplog.at_level(logging.WARNING, "replicas.integrations"):
            await asyncio.to_thread(trainer.sync, transfer)  # no target ever joins
        assert "training goes on" in caplog.text
        assert trainer._metrics["train"]["replicas/failed"] == [1.0]
        await asyncio.to_thread(transfer.destroy)


async def test_no_free_slot_is_a_failed_sync_and_no_error_of_the_trainer() -> None:
    async with channel_world({**POLICY, "deadline": "1s"}) as world:
        rollout = await world.join("rollout")
        transfer, trainer = transfer_to(world, "committed"), Trainer(1.0)
        await asyncio.to_thread(trainer.sync, transfer)
        channel = transfer.channel
        assert channel is not None
        slot = await asyncio.to_thread(channel.arena_like, dict(trainer._streaming_iter()))  # the rollout has the other
        with slot:
            await asyncio.to_thread(trainer.sync, transfer)
        assert trainer._metrics["train"]["replicas/failed"] == [1.0]
        await asyncio.to_thread(trainer.sync, transfer)
        await asyncio.to_thread(trainer.sync, transfer)
        newest = float(rollout.latest)
        assert trainer._metrics["train"]["replicas/version"] == [newest]  # TRL logs the mean of such a list
        assert trainer._metrics["train"]["replicas/failed"] == [1.0]
        assert rollout.latest > 1
        await asyncio.to_thread(transfer.destroy)


async def test_a_load_that_was_refused_is_logged_and_is_a_figure(caplog: pytest.LogCaptureFixture) -> None:
    async with channel_world(POLICY) as world:
        rollout = await world.join("rollout")
        transfer, trainer = transfer_to(world, "loaded"), Trainer(3.0)
        with caplog.at_level(logging.WARNING, "replicas.integrations"):
            for refuses in (True, False):
                syncing = asyncio.create_task(asyncio.to_thread(trainer.sync, transfer))
                with await rollout.receive(deadline=20) as update:
                    if refuses:
                        update.refuse("no weights for b")
                await syncing
        assert "is not loaded everywhere" in caplog.text
        assert (
            "going on without rollout/0, which keeps older weights or is restarted: version 1: no weights for b"
            in caplog.text
        )
        logged = trainer._metrics["train"]
        assert logged["replicas/load_failed"] == logged["replicas/not_loaded"] == [1.0]
        await asyncio.to_thread(transfer.destroy)


def test_an_unknown_wait_names_those_that_there_are() -> None:
    with pytest.raises(errors.UsageError, match="committed"):
        WeightTransfer(wait="sent")  # type: ignore[arg-type]
