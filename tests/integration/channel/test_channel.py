"""Weights from a source to targets, all members in this process: through a real
coordinator, store and sidecars, and through the fake run of `replicas.testing`, which
must behave alike.

Covers: channel/channel.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file

import replicas
from replicas import errors
from replicas.channel import Pending, Shard, Update
from replicas.coordinator import GroupShape
from replicas.weights.memory.arena import Arena
from replicas.weights.memory.buffers import Buffer
from tests.support.channels import channel_world, fake_world, publish
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["run", "fake_run"], autouse=True)
def _kind_of_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fake_run":
        monkeypatch.setitem(globals(), "channel_world", fake_world)


def weights(step: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of many kinds, different at each step."""
    generator = torch.Generator().manual_seed(step)
    base = torch.randn(64, 48, generator=generator)
    return {
        "plain": base,
        "strided": base.t()[::2],
        "half": base.half(),
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "int8": base.to(torch.int8),
        "bool": base > 0,
        "scalar": torch.tensor(step),
        "empty": torch.zeros(0, 7),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return left.keys() == right.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in ((left[name], right[name]) for name in left)
    )


async def ended(pending: Pending[Any]) -> None:
    """Wait for the end of an operation without taking its outcome."""
    event = threading.Event()
    pending._ended.add(event.set)
    assert await asyncio.to_thread(event.wait, 30)


async def test_publish_receive_load() -> None:
    async with channel_world(rollout=2) as world:
        trainer, *rollouts = await world.trainer_and_rollouts(2)
        assert (trainer.role, rollouts[0].role) == ("source", "target")
        for step in (1, 2, 3, 4):
            sent = weights(step)
            receipt = await publish(trainer, sent, meta={"step": step, "tags": ["a"]})
            assert receipt.version == trainer.version == trainer.latest == step
            assert {member.name for member in receipt.members} == {"rollout/0/0", "rollout/1/0"}
            assert not receipt.lost
            assert {"pack", "transfer", "commit"} <= receipt.phases.keys()
            for rollout in rollouts:
                assert rollout.version == step - 1
                with await rollout.receive() as update:
                    assert (update.version, update.meta) == (step, {"step": step, "tags": ["a"]})
                    assert same(dict(update), sent)
                    assert same(load_file(update.path), sent)
                assert rollout.version == step
            assert await trainer.loaded(step) == step
        assert [member.name for member in trainer.members] == ["rollout/0/0", "rollout/1/0", "trainer/0/0"]


async def test_the_round_trip_to_each_member_is_known() -> None:
    async with channel_world() as world:
        await world.join("rollout")
        roster = world.coordinator.engine.channels["policy"].roster
        await wait_until(lambda: all(0 < state.rtt_s < 0.2 for state in roster), "it was measured")


async def test_a_module_with_tied_parameters_and_a_cast() -> None:
    def model() -> torch.nn.Module:
        layers = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False))
        layers[1].weight = layers[0].weight
        layers.register_buffer("steps", torch.arange(3))
        return layers

    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        source, target = model(), model()
        await publish(trainer, source, dtype=torch.bfloat16)
        with await rollout.receive() as update:
            assert {name for name, _ in update} == set(update.tensors()) == {"steps", "0.weight", "1.weight"}
            update.load_into(target)
        assert torch.equal(target[0].weight, source[0].weight.bfloat16().float())  # type: ignore[index]  # Sequential
        assert target[0].weight is target[1].weight  # type: ignore[index]  # Sequential


async def test_updates_are_private_copies() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, {"w": torch.ones(5000)})
        update = await rollout.receive()
        next(iter(update))[1].zero_()
        assert next(iter(update))[1].sum() == 5000
        assert load_file(update.path)["w"].sum() == 5000
        update.loaded()
        update.loaded()
        with pytest.raises(errors.UsageError, match="version 1"):
            update.failed("late")
        with pytest.raises(errors.UsageError, match="the update of version 1 has ended"):
            dict(update)


async def test_a_plain_iterable_is_walked_once_and_in_order() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        for step in (1, 2):
            walked: list[str] = []

            def walk(step: int = step, walked: list[str] = walked) -> Iterator[tuple[str, torch.Tensor | None]]:
                scratch = torch.empty(10)
                for name in ("a", "b", "c"):
                    walked.append(name)
                    yield name, scratch.fill_(step * 10 + len(walked))
                    scratch.fill_(-1)  # a yielded tensor may be reused when the iterator goes on
                yield "skipped", None

            await publish(trainer, walk())
            assert walked == ["a", "b", "c"]
            with await rollout.receive() as update:
                assert [tensor[0].item() for _, tensor in update] == [step * 10 + 1, step * 10 + 2, step * 10 + 3]


async def test_sources_with_all_ranks_publish_their_shards() -> None:
    config = {"sources": [{"group": "trainer", "ranks": "all"}]}
    async with channel_world(config, trainer=GroupShape(1, 2)) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        rollout = await world.join("rollout")
        whole = torch.arange(40, dtype=torch.float32).view(8, 5)

        def part(rank: int, add: float) -> list[tuple[str, object]]:
            rows = slice(rank * 4, rank * 4 + 4)
            return [("w", Shard(whole[rows] + add, (rank * 4, 0), (8, 5))), ("same", torch.full((3,), add))]

        for step in (1, 2):
            receipts = await asyncio.gather(*(publish(t, part(r, float(step))) for r, t in enumerate(trainers)))
            assert [receipt.version for receipt in receipts] == [step, step]
            with await rollout.receive() as update:
                assert same(dict(update), {"w": whole + step, "same": torch.full((3,), float(step))})


async def test_a_late_target_is_caught_up() -> None:
    async with channel_world(rollout=2) as world:
        trainer, first = await world.trainer_and_rollouts(1)
        await publish(trainer, weights(1))
        with await first.receive():
            pass
        late = await world.join("rollout", 1)
        assert late.latest == 1
        with await late.receive(deadline=20) as update:
            assert same(dict(update), weights(1))
        await publish(trainer, weights(2))
        with await late.receive() as update:
            assert same(dict(update), weights(2))


async def test_no_targets_commits_on_the_source_alone() -> None:
    async with channel_world() as world:
        trainer = await world.join("trainer")
        receipt = await publish(trainer, weights(1))
        assert (receipt.version, receipt.members) == (1, ())
        rollout = await world.join("rollout")
        with await rollout.receive(deadline=20) as update:
            assert same(dict(update), weights(1))


async def test_the_coordinator_numbers_and_refuses_stale_versions() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        assert (await publish(trainer, weights(1), version=10)).version == 10
        walked: list[int] = []
        with pytest.raises(errors.StaleVersion, match="version 10"):
            await publish(trainer, _noting(weights(2), walked), version=10)
        assert walked == [9]  # to its end
        assert (await publish(trainer, weights(3))).version == 11
        with await rollout.receive() as update:
            assert update.version == 11


def _noting(given: dict[str, torch.Tensor], walked: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from given.items()
    walked.append(len(given))


async def test_a_changed_manifest_must_be_announced() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, {"w": torch.ones(4)})
        with pytest.raises(errors.ManifestMismatch, match=r"'w' was float32\[4\], is float32\[5\]"):
            await publish(trainer, {"w": torch.ones(5)})
        with pytest.raises(errors.ManifestMismatch, match="'w'"):
            await publish(trainer, iter([("w", torch.ones(5))]))
        receipt = await publish(trainer, iter([("w", torch.ones(5))]), new_manifest=True)
        with await rollout.receive() as update:
            assert update.version == receipt.version
            assert dict(update)["w"].shape == (5,)


async def test_the_users_own_exception_goes_through_and_fails_the_publish() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(4)
        raise KeyError("mine")

    config = {"sources": [{"group": "trainer", "ranks": "all"}]}
    async with channel_world(config, trainer=GroupShape(1, 2)) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        first = asyncio.create_task(publish(trainers[0], broken()))
        second = asyncio.create_task(publish(trainers[1], {"w": torch.ones(4)}))
        with pytest.raises(KeyError, match="mine"):
            await first
        with pytest.raises(errors.SyncError, match="trainer/0/0 raised KeyError: 'mine'"):
            await second
        receipts = await asyncio.gather(*(publish(t, {"w": torch.ones(4)}) for t in trainers))
        assert receipts[0].version == receipts[1].version


@pytest.mark.parametrize("ranks", ["leader", "all"])
async def test_no_memory_is_the_same_error_on_all_ranks(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"sources": [{"group": "trainer", "ranks": ranks}]}
    async with channel_world(config, trainer=GroupShape(1, 2)) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        acquire = Arena.acquire
        poor = trainers[0]._hub

        def refuse(self: Arena, *args: Any, **named: Any) -> Any:
            if self is poor.arena:
                raise errors.NoCapacity("the slot of 1 TB cannot be allocated", hint="buy more")
            return acquire(self, *args, **named)

        monkeypatch.setattr(Arena, "acquire", refuse)
        walked: list[int] = []
        tasks = [asyncio.create_task(publish(t, _noting(weights(1), walked))) for t in trainers]
        for task in tasks:
            with pytest.raises(errors.NoCapacity, match="the slot of 1 TB cannot be allocated") as caught:
                await task
            assert caught.value.unanimous
        assert walked == [9, 9]
        monkeypatch.undo()
        receipts = await asyncio.gather(*(publish(t, weights(2)) for t in trainers))
        assert {receipt.version for receipt in receipts} == {2}


async def test_no_free_slot_is_busy_after_the_deadline() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, weights(1))
        with await rollout.receive():
            await publish(trainer, weights(2))
            with pytest.raises(errors.Busy):
                await publish(trainer, weights(3), deadline=1.5)


async def test_unwaited_failures_surface_at_the_next_publish_and_at_close() -> None:
    async with channel_world() as world:
        trainer = await world.join("trainer")
        await publish(trainer, {"w": torch.ones(4)})
        await ended(await asyncio.to_thread(trainer.publish, {"w": torch.ones(5)}))
        walked: list[int] = []
        with pytest.raises(errors.ManifestMismatch, match="version 2"):
            await publish(trainer, _noting({"w": torch.ones(4)}, walked))
        assert walked == [1]
        assert (await publish(trainer, {"w": torch.ones(4)})).version == 4
        await asyncio.to_thread(trainer.publish, {"w": torch.ones(5)})
        with pytest.raises(errors.ManifestMismatch, match="version 5"):
            await asyncio.to_thread(trainer.close)
        await asyncio.to_thread(trainer.close)


async def test_close_lets_the_last_publish_end() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()

        def run() -> None:
            with trainer:
                trainer.publish(weights(1))

        await asyncio.to_thread(run)
        with await rollout.receive(deadline=10) as update:
            assert same(dict(update), weights(1))


async def test_receive_keeps_one_ask_and_waits_may_be_given_up() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        pending = rollout.receive()
        assert rollout.receive() is pending
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(pending.wait, 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pending
        await publish(trainer, weights(1))
        committed = await rollout.receive()
        assert pending.wait(0) is committed
        assert await rollout.receive() is committed  # nobody has looked into it yet: it may have been lost on its way
        assert dict(committed)
        with pytest.raises(errors.UsageError, match="the update of version 1 is still open"):
            rollout.receive()
        committed.loaded()
        with pytest.raises(errors.DeadlineExceeded, match=r"the receive did not end within its 0\.2 s"):
            await rollout.receive(deadline=0.2)
        after = rollout.receive()
        await publish(trainer, weights(2))
        assert (await after).version == 2


async def test_waits_that_were_abandoned_harm_no_later_operation() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()

        async def in_asyncio(pending: Pending[Any]) -> None:
            waiting = asyncio.ensure_future(pending)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        def in_a_thread(pending: Pending[Any]) -> None:
            with pytest.raises(TimeoutError):
                pending.wait(0)

        async def in_trio(pending: Pending[Any]) -> None:
            with trio.move_on_after(0) as scope:
                await pending
            assert scope.cancelled_caught

        for step in range(1, 4):
            asked = rollout.receive()
            in_a_thread(asked)
            await in_asyncio(asked)
            await asyncio.to_thread(trio.run, in_trio, asked)
            assert not asked._ended._wakers
            sent = await asyncio.to_thread(trainer.publish, weights(step))
            if not sent.done():
                in_a_thread(sent)
            await ended(sent)
            assert (await sent).version == step
            taken = await asked  # and then its taker is interrupted before he has looked into it
            assert await rollout.receive() is taken
            with await rollout.receive() as update:
                assert same(dict(update), weights(step))


async def test_await_under_trio() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()

        async def in_trio() -> Update:
            receipt = await trainer.publish(weights(1))
            assert receipt.version == 1
            return await rollout.receive()

        update = await asyncio.to_thread(trio.run, in_trio)
        update.loaded()


async def test_a_failed_load_makes_the_replica_partial() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, weights(1))
        with pytest.raises(errors.ManifestMismatch, match="do not fit the model"), await rollout.receive() as update:
            update.load_into({"other": torch.ones(3)})
        assert rollout.version == 0
        await wait_until(lambda: world.coordinator.readiness("rollout", 0, 1).partial, "the replica is partial")
        with await rollout.receive(deadline=10) as update:
            assert update.version == 1
        assert await trainer.loaded(1, deadline=10) == 1


async def test_ranks_of_a_target_never_differ() -> None:
    async with channel_world(rollout=GroupShape(1, 2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        seen: list[list[int]] = [[], []]
        stop = threading.Event()

        def load(rank: int) -> None:
            while not stop.is_set():
                try:
                    with ranks[rank].receive().wait(0.5) as update:
                        value = {tensor[0].item() for _, tensor in update}
                        assert value == {update.version}
                        seen[rank].append(update.version)
                except TimeoutError:
                    continue

        loaders = [asyncio.create_task(asyncio.to_thread(load, rank)) for rank in range(2)]
        for version in range(1, 16):
            given = {name: torch.full((100,), float(version)) for name in "abc"}
            assert (await publish(trainer, given)).version == version
        assert await trainer.loaded(15, deadline=20) == 15
        stop.set()
        await asyncio.gather(*loaders)
        assert seen[0] == seen[1] == sorted(set(seen[0]))
        assert seen[0][-1] == 15


async def test_a_second_join_fences_the_first() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        waiting = rollout.receive()
        again = await world.join("rollout")
        with pytest.raises(errors.Fenced, match="this process joined again as rollout/0/0"):
            await waiting
        with pytest.raises(errors.Fenced):
            rollout.receive()
        await publish(trainer, weights(1))
        with await again.receive() as update:
            assert update.version == 1
        await asyncio.to_thread(rollout.close)


async def test_members_that_name_no_replica_are_given_the_lowest_that_is_free() -> None:
    async with channel_world() as world:
        trainer = await world.join("trainer")
        first, named, third = [await world.join("rollout", index) for index in ("auto", 1, "auto")]
        assert [one.member.name for one in (first, named, third)] == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]
        receipt = await publish(trainer, weights(1))
        assert {member.name for member in receipt.members} == {"rollout/0/0", "rollout/1/0", "rollout/2/0"}
        await asyncio.to_thread(first.close)
        again = await world.join("rollout", "auto")
        assert again.member.name == "rollout/0/0"
        with await again.receive(deadline=20) as update:
            assert update.version == 1
        with pytest.raises(errors.UsageError, match='replica="auto" is for rank 0 of a replica, not for rank 1'):
            await world.join("rollout", "auto", rank=1, world_size=2)
        leader = await world.join("rollout", "auto", world_size=2)
        other = await world.join("rollout", leader.member.replica, rank=1, world_size=2)
        assert [one.member.name for one in (leader, other)] == ["rollout/3/0", "rollout/3/1"]
        with pytest.raises(errors.UsageError, match="join: replica must be a whole number"):
            await world.join("rollout", "any")


async def test_an_observer_sees_commits_and_loads() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        observer = await world.join("router", observe=True, info={"url": "http://x"})
        assert observer.role == "observer"
        assert observer.info == {"url": "http://x"}
        committed, loaded = observer.committed(), observer.loaded(1)
        await publish(trainer, weights(1))
        assert await committed == 1
        assert await observer.committed(after=0) == 1
        assert not loaded.done()
        with await rollout.receive():
            pass
        assert await loaded == 1
        with pytest.raises(errors.UsageError, match="receive: this rank is a observer"):
            observer.receive()
        with pytest.raises(errors.UsageError, match="target"):
            rollout.publish({})


REFUSED: list[tuple[dict[str, Any], type[errors.ReplicasError], str]] = [
    ({"channel": "polcy"}, errors.UnknownChannel, 'there is no channel "polcy" in run "embedded"'),
    ({"group": "judge"}, errors.UnknownChannel, 'group "judge" has no part in channel "policy"'),
    ({"token": "wrong"}, errors.UsageError, "does not accept the token"),
    ({"rank": 3}, errors.UsageError, "rank 3 is not in a world of 1"),
    ({"run": "other"}, errors.UsageError, 'this program belongs to run "other"'),
    ({"endpoint": "nowhere"}, errors.UsageError, "join: endpoint must be host:port, not 'nowhere'"),
]


async def test_joins_that_are_refused() -> None:
    async with channel_world() as world:
        for changes, kind, text in REFUSED:
            given = {"group": "rollout"} | changes
            with pytest.raises(kind) as caught:
                await world.join(given.pop("group"), **given)
            assert text in str(caught.value)


def test_join_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPLICAS_ENDPOINT", "REPLICAS_TOKEN_FILE", "REPLICAS_GROUP"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.UsageError, match="REPLICAS_ENDPOINT"):
        replicas.join("policy")
    with pytest.raises(errors.UsageError, match="no token: REPLICAS_TOKEN_FILE is not set"):
        replicas.join("policy", endpoint="127.0.0.1:1")
    with pytest.raises(errors.UsageError, match="no group: REPLICAS_GROUP is not set"):
        replicas.join("policy", endpoint="127.0.0.1:1", token="x")


async def test_bad_arguments_of_publish() -> None:
    async with channel_world() as world:
        trainer = await world.join("trainer")
        with pytest.raises(errors.UsageError, match="version must be a whole number from 1"):
            trainer.publish({}, version=0)
        with pytest.raises(errors.UsageError, match="which cannot be sent"):
            trainer.publish({}, meta={"model": torch.nn.Linear(1, 1)})
        with pytest.raises(errors.UsageError, match="deadline"):
            trainer.publish({}, deadline=-1)
        with pytest.raises(errors.UsageError, match="publish cannot take a int"):
            await publish(trainer, 3)
        with pytest.raises(errors.UsageError, match="no peers"):
            trainer.barrier()
        assert (await publish(trainer, {})).nbytes == 0
        await asyncio.to_thread(trainer.close)
        with pytest.raises(errors.UsageError, match="channel policy is closed"):
            trainer.publish({})


async def test_buffers_are_closed_with_the_channel() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, weights(1))
        # A machine that stalls for long may leave the rollout behind; it catches up.
        await wait_until(lambda: bool(rollout._hub.arena.foreign), "the rollout's mapping")
        slots = [*trainer._hub.arena.slots, *rollout._hub.arena.foreign]
        buffers = [slot._buffer for slot in slots if isinstance(slot._buffer, Buffer)]
        assert len(buffers) == 2
        for channel in (trainer, rollout):
            await asyncio.to_thread(channel.close)
        assert [buffer.fd for buffer in buffers] == [-1, -1]


async def test_reserved_memory_is_there_before_the_first_publish() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        pool, large = trainer._hub.arena.pool, {"w": torch.zeros(1 << 20)}
        trainer.reserve(large, dtype=torch.bfloat16, slots=1)
        await wait_until(lambda: len(pool._spare) == 1, "memory for one slot")
        trainer.reserve(large)
        await wait_until(lambda: pool._made == 1 + len(trainer._hub.arena.slots), "memory for all slots, as float32")
        made = pool._made
        for _ in trainer._hub.arena.slots:
            await publish(trainer, large)
        assert pool._made == made
        with pytest.raises(errors.UsageError, match="does not list its tensors"):
            trainer.reserve(iter(large.items()))
        with pytest.raises(errors.UsageError, match="target of channel policy"):
            rollout.reserve(large)
        with pytest.raises(errors.UsageError, match="slots"):
            trainer.reserve(large, slots=99)


async def test_a_slot_that_is_written_in_place_is_published_without_a_copy() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        given = {"w": torch.zeros(1000), "b": torch.zeros(3)}
        for value in (1.0, 2.0, 3.0):
            with trainer.arena_like(given) as slot:
                for tensor in slot.values():
                    tensor.fill_(value)
                kept = slot["w"]
                receipt = await (await asyncio.to_thread(trainer.publish, slot))
                assert kept.numel() == 0, "what was published is not the trainer's any more"
            with await rollout.receive(deadline=20) as update:
                assert update.version == receipt.version
                assert {number for _, tensor in update for number in tensor.tolist()} == {value}
        with trainer.arena_like(given) as slot:
            slot["w"].fill_(9.0)
        with pytest.raises(errors.UsageError, match="given back"):
            await asyncio.to_thread(trainer.publish, slot)
        with trainer.arena_like(given) as slot, pytest.raises(errors.UsageError, match="dtypes already"):
            await asyncio.to_thread(trainer.publish, slot, dtype=torch.bfloat16)
        with pytest.raises(errors.UsageError, match="does not list its tensors"):
            trainer.arena_like(iter(given.items()))
        with pytest.raises(errors.UsageError, match="target of channel policy"):
            rollout.arena_like(given)
        assert (await publish(trainer, given)).version > receipt.version
