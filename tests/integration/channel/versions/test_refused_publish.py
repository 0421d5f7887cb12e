"""A publish that is refused or fails here walks the weights to their end: its steps may
be collectives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.channel import Channel
from replicas.weights.feed import Feed
from tests.support.channels import channel_world
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")]

STEPS = 3


class Gather:
    """Weights of which each step is a collective; ``odd``: what its second step gives
    in place of a tensor."""

    def __init__(self, odd: object = None) -> None:
        self.walked = 0
        self.odd = odd

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number in range(STEPS):
            self.walked += 1
            yield f"w{number}", torch.ones(2) if self.odd is None or number != 1 else self.odd


BAD_CALLS: dict[str, dict[str, Any]] = {
    "deadline must": {"deadline": 0},
    "deadline must be": {"deadline": float("nan")},
    "meta": {"meta": {"a": object()}},
    "cannot cast to torch.float8": {"dtype": torch.float8_e4m3fn},
    "cannot cast to bfloat16": {"dtype": "bfloat16"},
    "version": {"version": 0},
}


async def refused(source: Channel, kind: type[BaseException], text: str, **given: Any) -> None:
    weights = Gather()
    with pytest.raises(kind, match=text):
        await asyncio.to_thread(lambda: source.publish(weights, **given))
    assert weights.walked == STEPS, text


async def test_a_refused_publish_walks_the_weights() -> None:
    async with channel_world() as world:
        source = await world.join("trainer")
        for text, given in BAD_CALLS.items():
            await refused(source, errors.UsageError, text, **given)
        inside, go = threading.Event(), threading.Event()

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            inside.set()
            assert go.wait(20)
            yield "w", torch.ones(2)

        first = asyncio.create_task(asyncio.to_thread(source.publish, slow()))
        assert await asyncio.to_thread(inside.wait, 20)
        await refused(source, errors.UsageError, "another thread")
        go.set()
        await first
        again = await world.join("trainer")
        await wait_until(lambda: source._hub.over, "it is fenced")
        await refused(source, errors.Fenced, "Fenced|fenced|joined|another")
        await asyncio.to_thread(again.close)
        await refused(again, errors.UsageError, "closed")


async def test_what_cannot_be_published_is_told_once_and_walked_past() -> None:
    class Declared(Gather):
        def metadata(self) -> Any:
            raise KeyError("mine")

    odd: list[object] = [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nn.parameter.UninitializedParameter(),
        3,
    ]
    async with channel_world() as world:
        source = await world.join("trainer")
        for value in odd:
            weights = Gather(value)
            with pytest.raises(errors.ManifestMismatch, match="w1"):
                await asyncio.to_thread(partial(source.publish, weights, new_manifest=True))
            assert weights.walked == STEPS
            with pytest.raises(errors.ManifestMismatch, match="w1"):
                await asyncio.to_thread(partial(source.publish, dict(weights), new_manifest=True))
            await (await asyncio.to_thread(source.publish, {"w": torch.ones(2)}))  # it is not told again
        with pytest.raises(KeyError, match="mine"):
            await asyncio.to_thread(source.publish, Declared())
        await (await asyncio.to_thread(source.publish, {"w": torch.ones(2)}))


def test_draining_ends_with_what_the_users_code_raises() -> None:
    def weights() -> Iterator[tuple[str, object]]:
        yield "w", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        raise errors.UsageError("the user's own")

    feed = Feed(weights())
    with pytest.raises(errors.UsageError, match="the user's own"):
        feed.drain()
    assert feed.user_failed
    no_weights = Feed(3)
    no_weights.drain()
    assert not no_weights.user_failed
