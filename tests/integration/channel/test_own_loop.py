"""Calls that block, made on the event loop on which a coordinator runs, which alone
could answer them.

Covers: common/own_loop.py.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replicas
from replicas import errors
from replicas.common import own_loop
from tests.support.channels import channel_world

pytestmark = pytest.mark.anyio

AT_ONCE_S = 5.0
"""Without the check each took its deadline, or 30 s."""


def refused(call: Callable[[], object], *, awaitable: bool = False) -> None:
    began = time.monotonic()
    with pytest.raises(errors.UsageError, match=r"would block") as found:
        call()
    assert time.monotonic() - began < AT_ONCE_S
    assert found.value.hint.startswith("await it, or call it" if awaitable else "call it in a worker thread: `await ")


async def test_each_is_refused_at_once_and_the_channel_goes_on() -> None:
    async with channel_world() as world:
        where: dict[str, Any] = {"endpoint": world.endpoint, "token": world.coordinator.token}
        refused(lambda: replicas.join("policy", **where, group="trainer", replica=0))
        trainer, rollout = await world.trainer_and_rollouts()
        walked: list[str] = []

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            for name in "ab":
                yield name, torch.ones(1)
                walked.append(name)

        refused(lambda: trainer.publish(walk()))
        assert walked == ["a", "b"], "its gathers have other ranks in them"
        receiving = rollout.receive()
        refused(receiving.wait, awaitable=True)
        refused(lambda: receiving.wait(1), awaitable=True)
        with pytest.raises(TimeoutError):
            receiving.wait(0)  # that only looks
        refused(trainer.close)
        with trainer.arena_like(walked_weights()), trainer.arena_like(walked_weights()):
            refused(lambda: trainer.arena_like(walked_weights()))
        pending = await asyncio.to_thread(trainer.publish, walked_weights())
        assert (await pending).version == 1
        assert pending.wait().version == 1, "it has ended: nothing is waited for"
        with await receiving as update:
            assert update.version == 1
        await asyncio.to_thread(trainer.close)
        trainer.close()


def walked_weights() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(1), "b": torch.ones(1)}


async def test_on_another_loop_and_after_its_end_nothing_is_refused() -> None:
    async with channel_world() as world:
        trainer, _ = await world.trainer_and_rollouts()

        async def elsewhere() -> int:
            own_loop.must_not_block("this")
            return trainer.publish({"w": torch.ones(1)}).wait(20).version

        assert await asyncio.to_thread(asyncio.run, elsewhere()) == 1
    own_loop.must_not_block("this")


def test_a_program_that_blocks_has_the_coordinator_in_a_thread() -> None:
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
    threads = threading.active_count()
    with replicas.Coordinator(channels).in_thread() as coordinator:
        where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        with (
            replicas.join("policy", **where, group="trainer") as trainer,
            replicas.join("policy", **where, group="rollout") as rollout,
        ):
            pending = trainer.publish(walked_weights())
            with rollout.receive().wait(timeout=20) as update:
                assert update.version == 1
            assert pending.wait(timeout=20).members == (rollout.member,)
    assert not [one for one in threading.enumerate() if "portal" in one.name.lower()]
    assert threading.active_count() <= threads + 1  # the session thread of this process stays
    with pytest.raises(errors.Disconnected):
        replicas.join("policy", **where, group="trainer", timeout=0.2)


def test_a_coordinator_in_a_thread_lives_until_it_is_closed() -> None:
    """Also after a bare ``__enter__`` whose object nobody keeps."""
    channels = {"policy": {"sources": ["trainer"]}}
    started, entered = replicas.Coordinator(channels), replicas.Coordinator(channels)
    assert started.start() is started
    entered.in_thread().__enter__()
    gc.collect()
    for one in (started, entered):
        where: dict[str, Any] = {"endpoint": one.endpoint, "token": one.token}
        with replicas.join("policy", **where, group="trainer") as trainer:
            assert trainer.publish(walked_weights()).wait(timeout=60).version == 1
    with pytest.raises(errors.UsageError, match="was started before"):
        started.start()
    for one in (started, entered, started):
        one.close()
    assert not [one for one in threading.enumerate() if one.name == "replicas-coordinator"]
    replicas.Coordinator(channels).close()


def test_what_callbacks_of_the_program_raise_ends_no_coordinator() -> None:
    called = threading.Event()

    def fail(event: object) -> None:
        called.set()
        raise SystemExit("of the program")

    coordinator = replicas.Coordinator({"policy": {"sources": ["trainer"]}})
    coordinator.subscribe(fail)
    with coordinator.in_thread():
        where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        with replicas.join("policy", **where, group="trainer") as trainer:
            assert trainer.publish(walked_weights()).wait(timeout=60).version == 1
    assert called.is_set()


def test_the_end_of_its_event_loop_is_told() -> None:
    coordinator = replicas.Coordinator({"policy": {"sources": ["trainer"]}}).start()

    def leave() -> None:
        raise SystemExit("of the program")

    thread = coordinator._thread
    assert thread is not None
    assert thread._loop is not None
    thread._loop.call_soon_threadsafe(leave)
    assert thread._over.wait(60)
    with pytest.raises(errors.InternalError, match="SystemExit: of the program"):
        coordinator.close()


def test_an_error_of_its_start_reaches_the_thread_that_waits() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        coordinator = replicas.Coordinator({}, port=taken.getsockname()[1])
        with pytest.raises(errors.WorldError), coordinator.in_thread():
            pass


def test_another_async_library_is_named(tmp_path: Path) -> None:
    trio = pytest.importorskip("trio")
    groups = {"a": {"command": ["sleep", "1"], "launcher": "exec"}}
    config = {"schema_version": 1, "run": {"name": "a", "state_dir": str(tmp_path)}, "groups": groups}
    for made in (replicas.Supervisor(config), replicas.Coordinator({"policy": {"peers": ["a"]}})):

        async def enter(made: Any = made) -> None:
            async with made:
                pytest.fail("it runs")

        with pytest.raises(errors.UsageError, match="needs an asyncio event loop") as caught:
            trio.run(enter)
        assert "asyncio.run()" in (caught.value.hint or "")
