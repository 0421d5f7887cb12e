"""What a caller may pass: a call of no use is refused there and then, by the argument's
name, and the channel goes on.

Covers: channel/joining.py.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from replicas import errors
from replicas.channel import Channel, Update
from tests.support.channels import ChannelWorld, channel_world
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

WEIGHTS = {"w": torch.ones(4)}
PEERS = {"peers": ["peer"], "deadline": "10s"}
ODD = os.fsdecode(b"caf\xe9")
"""A text that UTF-8 cannot say."""


async def publish(trainer: Channel, weights: object = WEIGHTS, **more: Any) -> int:
    pending = await asyncio.to_thread(trainer.publish, weights, **more)
    return (await pending).version


async def goes_on(trainer: Channel, rollout: Channel) -> None:
    """The next version is committed, received and loaded."""
    version = await publish(trainer)
    with await rollout.receive() as update:
        assert update.version == version
    assert await trainer.loaded(version, deadline=10) >= version


async def test_publishes_of_no_use_fail_alone() -> None:
    bad: list[dict[str, Any]] = [
        {"meta": {"seed": np.random.SeedSequence(2**70).entropy}},
        {"meta": {"name": ODD}},
        {"meta": {"big": "x" * 2**21}},
        {"version": 2**63},
        {"version": 2**62},
        {"version": 1.5},
        {"version": True},
        {"deadline": 1e10},
        {"deadline": math.nan},
        {"new_manifest": "yes"},
        {"hold": "no"},
        {"dtype": "bfloat16"},
    ]
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        for more in bad:
            with pytest.raises(errors.UsageError, match=next(iter(more))):
                await publish(trainer, **more)
            await goes_on(trainer, rollout)
        meta = {"tag": np.str_("a"), "loss": np.float32(0.5), "n": np.int64(3), "t": torch.tensor(4)}
        assert await publish(trainer, version=np.int64(99), meta=meta, deadline=np.float32(9)) == 99
        with await rollout.receive() as update:
            assert update.meta == {"tag": "a", "loss": 0.5, "n": 3, "t": 4}
        with pytest.raises(errors.ManifestMismatch):
            await publish(trainer, [], deadline=1e9)  # its verdict is waited for a little longer than that
        await asyncio.to_thread((await world.join("rollout", 2, timeout=1e9)).close)
        assert await publish(trainer, version=2**53) == 2**53
        await goes_on(trainer, rollout)
        await world.join("rollout", 1)


async def test_numbers_of_no_use_fail_alone() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        odd: Any
        calls: list[Callable[[], object]] = []
        for odd in (1.5, None, 2**63, -1, "x", True):
            calls.append(partial(rollout.progress, odd))
        for odd in (1.5, [], 2**70, "x"):
            calls += [partial(trainer.loaded, odd), partial(trainer.committed, after=odd)]
        for odd in (math.inf, 1e10, 0, "x"):
            calls.append(partial(rollout.receive, deadline=odd))
        for odd in (1.5, -1, "x", ("step",), ("step", math.nan), ("step", "x")):
            calls.append(partial(rollout.receive, at_least=odd))
        for call in calls:
            with pytest.raises(errors.UsageError):
                call()
        for odd in (np.int64(3), torch.tensor(4), 2**62):
            rollout.progress(odd)
        await goes_on(trainer, rollout)


@pytest.mark.parametrize("text", ["y" * 2_000_000, ODD], ids=["long", "odd"])
async def test_an_exception_of_any_text_makes_a_load_partial_and_a_publish_fail(text: str) -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await fails_by(world, trainer, rollout, RuntimeError(text))


async def test_an_exception_without_a_text_makes_a_load_partial_and_a_publish_fail() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await fails_by(world, trainer, rollout, Silent())


async def fails_by(world: ChannelWorld, trainer: Channel, rollout: Channel, error: Exception) -> None:
    """``error`` is raised in a load, and then in a publish; each is told of, and both
    go on."""
    await publish(trainer)
    with pytest.raises(type(error)), await rollout.receive():
        raise error
    rounds = world.coordinator.engine.channels["policy"].load_rounds
    await wait_until(lambda: rounds.of("rollout", 0).partial, "the load is known to have failed")

    def weights() -> Any:
        yield "w", torch.ones(4)
        raise error

    with pytest.raises(type(error)):
        await publish(trainer, weights())
    await goes_on(trainer, rollout)


async def test_a_name_that_cannot_travel_is_refused_as_a_manifest() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        with pytest.raises(errors.ManifestMismatch, match="caf"):
            await publish(trainer, {ODD: torch.ones(4)})
        assert await publish(trainer, {np.str_("w"): torch.ones(4)}) == 2  # the number of the first was used
        await goes_on(trainer, rollout)


async def test_parameters_that_end_like_an_extra_state_are_published() -> None:
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder_extra_state = torch.nn.Parameter(torch.ones(3))
            self.inner = torch.nn.Linear(2, 2)

        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None: ...

    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, Decoder())
        target = Decoder()
        torch.nn.init.zeros_(target.decoder_extra_state)
        with await rollout.receive() as update:
            assert set(update.tensors()) == {"decoder_extra_state", "inner.weight", "inner.bias"}
            update.load_into(target)
        assert target.decoder_extra_state.tolist() == [1, 1, 1]


# ------------------------------------------------------------ waiting


async def test_a_wait_has_a_finite_time_or_none() -> None:
    async with channel_world() as world:
        trainer = await world.join("trainer")
        pending = trainer.committed()
        odd: Any
        for odd in (math.nan, math.inf, 1e10, "1", True):
            with pytest.raises(errors.UsageError, match="timeout"):
                await asyncio.to_thread(pending.wait, odd)
        for odd in (-1, 0, np.float32(0.01)):
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(pending.wait, odd)
        with pytest.raises(errors.UsageError, match="timeout"):
            await world.join("trainer", timeout=math.inf)
        await publish(trainer)
        assert await asyncio.to_thread(pending.wait, 1e9) == 1


async def test_a_join_names_what_is_wrong() -> None:
    async with channel_world() as world:
        bad: list[dict[str, Any]] = [
            {"replica": 1.5},
            {"rank": -1},
            {"world_size": 0},
            {"replica": 2**70},
            {"replica": "any"},
            {"replica": np.arange(2)},
            {"group": "a/b"},
            {"group": ODD},
            {"run": ODD},
            {"token": "geh€im"},
            {"endpoint": "somewhere"},
            {"info": {"url": 7}},
            {"info": {"url": ODD}},
            {"observe": "yes"},
            {"timeout": "soon"},
            {"channel": 7},
        ]
        for more in bad:
            with pytest.raises(errors.UsageError, match=next(iter(more))):
                await world.join(**{"group": "rollout", "timeout": 5, **more})
        odd: Any = (np.int64(1), torch.tensor(0), np.uint8(1))
        rollout = await world.join("rollout", *odd, timeout=np.float32(10))
        assert rollout.member.name == "rollout/1/0"


# ------------------------------------------------------------ collectives


async def test_operations_of_no_use_fail_alone() -> None:
    async with channel_world(PEERS, name="outer", peer=2) as world:
        a, b = [await world.join("peer", replica) for replica in range(2)]
        x = torch.ones(2)
        odd: Any
        for odd in (1.5, "a", True, 2**63, -1):
            with pytest.raises(errors.UsageError, match="step"):
                a.all_reduce(x, step=odd)
        with pytest.raises(errors.UsageError, match="deadline"):
            a.all_reduce(x, deadline=1e10)
        for odd in (np.array(["sum", "min"]), "median", 7):
            with pytest.raises(errors.UsageError, match="op"):
                a.all_reduce(x, odd)
        for odd in (f"{ODD}/0", "peer/٣", "peer", 7):
            with pytest.raises(errors.UsageError, match="src"):
                a.broadcast(x, src=odd)
        odd = np.int64(7)
        for pending in [peer.all_reduce(x.clone(), step=odd) for peer in (a, b)]:
            assert (await pending).members


async def test_what_overlaps_itself_is_not_written() -> None:
    async with channel_world(PEERS, name="outer", peer=2) as world:
        a, b = [await world.join("peer", replica) for replica in range(2)]
        one = torch.ones(1)
        for tensor in (one.expand(3), torch.ones(4).as_strided((3, 2), (1, 1)), torch.ones(3).unfold(0, 2, 1)):
            calls: list[Callable[[], object]] = [
                partial(b.all_reduce, [torch.ones(2), tensor]),
                partial(b.broadcast, tensor, src="peer/0"),
                partial(b.reduce, tensor, dst=b.member),
                partial(b.all_gather, torch.ones(3), out=[torch.ones(3), tensor]),
                partial(b.recv, tensor, src="peer/0"),
                partial(b.scatter, None, src="peer/0", out=tensor),
            ]
            for call in calls:
                with pytest.raises(errors.UsageError, match="share memory"):
                    call()
        y = torch.zeros(3)
        for pending in (a.broadcast(one.expand(3), src=a.member), b.broadcast(y, src="peer/0")):  # it is only read
            await pending
        assert y.tolist() == [1, 1, 1]
        z = torch.zeros(2, 3).t()  # neither contiguous nor overlapping
        for pending in (a.broadcast(torch.ones(3, 2), src="peer/0"), b.broadcast(z, src="peer/0")):
            await pending
        assert z.tolist() == [[1, 1]] * 3


def imaginary(tensor: torch.Tensor) -> torch.Tensor:
    """A negative view."""
    return tensor.conj().imag


@pytest.mark.parametrize("view", [torch.Tensor.conj, imaginary])
async def test_lazy_views_are_written(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    async with channel_world(PEERS, name="outer", peer=2) as world:
        a, b = [await world.join("peer", replica) for replica in range(2)]
        x, y = view(torch.tensor([1 + 2j])), view(torch.tensor([5 + 6j]))
        wanted = x.clone().resolve_conj()
        for pending in (a.broadcast(x, src="peer/0"), b.broadcast(y, src="peer/0")):
            await pending
        assert torch.equal(y.clone().resolve_conj(), wanted)
        assert torch.equal(x.clone().resolve_conj(), wanted)


async def test_one_root_may_be_named_in_several_ways() -> None:
    async with channel_world(PEERS, name="outer", peer=2) as world:
        a, b = [await world.join("peer", replica) for replica in range(2)]
        y = torch.zeros(2)
        for pending in (a.broadcast(torch.ones(2), src=a.member), b.broadcast(y, src="peer/0")):
            await pending
        assert y.tolist() == [1, 1]


# ------------------------------------------------------------ things of others


async def test_a_slot_of_another_channel_is_refused_and_stays_its_owners() -> None:
    async with channel_world() as one, channel_world(name="lora") as other:
        (trainer, _), (stranger, rollout) = await one.trainer_and_rollouts(), await other.trainer_and_rollouts()
        for _ in range(3):
            with await asyncio.to_thread(trainer.arena_like, WEIGHTS) as slot:
                slot["w"].fill_(2)
                with pytest.raises(errors.UsageError, match="another channel"):
                    await publish(stranger, slot)
                assert slot["w"].tolist() == [2] * 4
                await publish(trainer, slot)
        await goes_on(stranger, rollout)


async def test_load_into_an_expanded_parameter_changes_nothing() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer, {"a": torch.ones(3), "w": torch.ones(4)})
        update: Update = await rollout.receive()
        target = {"a": torch.zeros(3), "w": torch.zeros(1).expand(4)}
        with pytest.raises(errors.ManifestMismatch, match="'w'"):
            update.load_into(target)
        assert target["a"].tolist() == [0, 0, 0]
        with pytest.raises(errors.UsageError, match="failed: error"):
            update.failed(7)  # type: ignore[arg-type]
        update.loaded()


def in_a_child(function: Callable[[], object]) -> str:
    """Name of the error that ``function`` raises in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            function()
            os.write(writer, b"nothing")
        except BaseException as error:  # noqa: BLE001  # it is told
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = told.read()
    os.waitpid(pid, 0)
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_is_told_that_it_is_one() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        await publish(trainer)
        update = await rollout.receive()
        pending = trainer.committed()

        def enter() -> None:
            with update:
                pass

        for call in (lambda: pending.wait(5), update.loaded, lambda: update.failed("x"), enter, trainer.receive):
            assert await asyncio.to_thread(in_a_child, call) == "UsageError"
        with update:
            tensors = dict(update)
            assert await asyncio.to_thread(in_a_child, lambda: tensors["w"].sum()) == "nothing"
            assert await asyncio.to_thread(in_a_child, lambda: dict(update)) == "UsageError"
            assert await asyncio.to_thread(in_a_child, lambda: update.load_into(tensors)) == "UsageError"
        await goes_on(trainer, rollout)
