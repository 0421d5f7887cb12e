"""What a target reads, and when, through a real coordinator; all members in this
process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import replicas
from replicas import errors
from replicas.channel import Channel, Receipt
from replicas.coordinator import GroupShape
from replicas.weights.copies.digest import digest_of
from tests.support.channels import channel_world
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


async def publish(channel: Channel, value: float, **options: Any) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, weights(value), **options))


async def test_who_asks_ahead_of_time_stops_nobody_and_gets_the_newest() -> None:
    async with channel_world({"deadline": "10s"}) as world:
        trainer, rollout = await world.trainer_and_rollouts()
        ahead = rollout.receive()
        for version in range(1, 7):
            assert (await publish(trainer, version)).version == version
            await wait_until(ahead.done, f"version {version} or a newer one was granted")
        await wait_until(lambda: rollout.latest == 6, "the last commit is heard of")
        model = weights(0)
        with await ahead as update:
            update.load_into(model)
        assert (update.version, model["w"][0].item()) == (6, 6)


async def test_nor_does_one_rank_of_two_and_both_get_the_same() -> None:
    async with channel_world({"deadline": "10s"}, rollout=GroupShape(replicas=1, world_size=2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        ahead = ranks[0].receive()
        for version in range(1, 6):
            await publish(trainer, version)
        late = await ranks[1].receive()
        again = await ahead
        assert late.version == again.version >= 4  # the last commit may be on its way
        for update in (late, again):
            update.loaded()
        assert await trainer.loaded(late.version) == late.version


async def test_at_least_makes_a_replica_that_was_started_again_wait_for_the_version_that_is_committing() -> None:
    async with channel_world({"deadline": "30s"}) as world:
        trainer, old, other = await world.trainer_and_rollouts(2)
        await publish(trainer, 1, meta={"step": 10})
        go_on = threading.Event()

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights(2).items()
            assert go_on.wait(60)

        committing = asyncio.create_task(asyncio.to_thread(trainer.publish, walk(), meta={"step": 20}))
        await asyncio.to_thread(old.close, wait=False)
        again = await world.join("rollout", 0)
        with pytest.raises(errors.DeadlineExceeded, match=r"at_least=2.*the newest is 1"):
            await again.receive(at_least=2, deadline=0.3)
        by_step, any_version = again.receive(at_least=("step", 20)), other.receive()
        assert (await any_version).version == 1
        assert not by_step.done()
        go_on.set()
        assert (await (await committing)).version == 2
        with await by_step as update:
            assert (update.version, update.meta) == (2, {"step": 20})


async def test_at_least_counts_for_all_ranks_of_a_replica() -> None:
    async with channel_world(rollout=GroupShape(replicas=1, world_size=2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        await publish(trainer, 1)
        rounds = world.coordinator.engine.channels["policy"].load_rounds
        higher = ranks[1].receive(at_least=2)
        await wait_until(lambda: rounds.asks(ranks[1].member), "the higher bound is known")
        lower = ranks[0].receive(at_least=1)
        await wait_until(lambda: rounds.asks(ranks[0].member), "so is the lower one")
        assert not lower.done()
        await publish(trainer, 2)
        for ask in (lower, higher):
            with await ask as update:
                assert update.version == 2
        await publish(trainer, 3)
        begun = await ranks[0].receive()
        with pytest.raises(errors.DeadlineExceeded, match="version 3"):
            await ranks[1].receive(at_least=4, deadline=0.3)
        higher = ranks[1].receive(at_least=4)
        begun.loaded()
        lower = ranks[0].receive()
        await publish(trainer, 4)
        assert [(await ask).version for ask in (lower, higher)] == [4, 4]


async def test_an_observer_needs_no_identity_also_inside_a_replica_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with channel_world(rollout=GroupShape(replicas=1, world_size=2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        where: dict[str, Any] = {"endpoint": world.endpoint, "token": world.coordinator.token, "observe": True}
        nobody = await asyncio.to_thread(replicas.join, "policy", **where)
        world.joined.append(nobody)
        for name, value in {"REPLICAS_GROUP": "rollout", "REPLICA_ID": "0", "RANK": "3"}.items():
            monkeypatch.setenv(name, value)
        for more in ({}, {"group": "rollout"}, {"rank": 0}):
            world.joined.append(await asyncio.to_thread(replicas.join, "policy", **where, **more))
        await publish(trainer, 1)
        for observer in world.joined[3:]:
            await wait_until(lambda observer=observer: observer.latest == 1, "it hears of the commit")  # type: ignore[misc]  # bound in the loop
        assert nobody.role == "observer"
        asks = [rank.receive() for rank in ranks]
        assert [(await ask).version for ask in asks] == [1, 1], "nobody was fenced"


async def test_meta_may_be_asked_for_when_the_weights_were_walked() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        norms: list[float] = []

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in (("a", 3.0), ("b", 4.0)):
                yield name, torch.full((1,), value)
                norms.append(value**2)

        receipt = await publish_with(trainer, walk(), lambda: {"norm": sum(norms) ** 0.5, "count": len(norms)})
        with await rollout.receive(at_least=("norm", 5)) as update:
            assert update.meta == {"norm": 5.0, "count": 2}
            assert update.digest == receipt.digest != ""
            held = rollout._hub.arena.find(1)
            assert held is not None
            assert update.digest == digest_of(held.data, held.digest_kind)


async def test_a_meta_that_raises_or_is_of_no_use_fails_that_publish_alone() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        walked: list[str] = []

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            for name in "ab":
                yield name, torch.ones(1)
                walked.append(name)

        def fails() -> dict[str, Any]:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            await publish_with(trainer, walk(), fails)
        for useless in (lambda: {"x": object()}, lambda: 3, lambda: {"x": "y" * 2**20}):
            with pytest.raises(errors.UsageError, match="the result of meta\\(\\)"):
                await publish_with(trainer, walk(), useless)
        assert walked == ["a", "b"] * 4
        receipt = await publish_with(trainer, walk(), lambda: {"step": 5})
        with await rollout.receive() as update:
            assert (update.version, update.meta) == (receipt.version, {"step": 5})


async def publish_with(channel: Channel, given: object, meta: Callable[[], Any]) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, given, meta=meta))
