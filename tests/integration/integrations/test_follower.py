"""The follower of an inference server, against a look-alike of vLLM's control routes.

(The released vLLM: ``make test-engines``.)

Covers: engine/following.py, engine/protocol.py, integrations/http_engine.py,
integrations/vllm_verbs.py, integrations/vllm_adapters.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import replicas
from replicas import errors
from replicas.engine import following as loop
from replicas.integrations import engine_health, engine_server, http_engine, vllm_adapters
from replicas.integrations.engine_health import ProcessorTime
from replicas.integrations.vllm import follow
from replicas.integrations.vllm_verbs import VllmServer
from replicas.linux.processes import start_time
from tests.support.channels import POLICY, ChannelWorld, channel_world
from tests.support.engines import FakeEngine
from tests.support.waits import eventually, wait_until

pytestmark = pytest.mark.anyio

LOAD = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/resume"]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((64,), value) for name in ("a", "b", "c")}


async def publish(trainer: replicas.Channel, value: float) -> replicas.Receipt:
    """On a thread, as the coordinator is on this loop."""
    return await (await asyncio.to_thread(trainer.publish, weights(value)))


@asynccontextmanager
async def following(world: ChannelWorld, engine: FakeEngine, **more: Any) -> AsyncIterator[asyncio.Task[None]]:
    """The follower of ``engine`` on a thread of its own."""
    stop = threading.Event()
    identity: dict[str, Any] = {
        "endpoint": world.endpoint,
        "token": world.coordinator.token,
        "group": "rollout",
        "replica": 0,
    }
    options: dict[str, Any] = {"channel": world.channel, "stop": stop, **identity, **more}
    task = asyncio.create_task(asyncio.to_thread(follow, engine.url, **options))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task])


async def served(engine: FakeEngine, version: int) -> None:
    await wait_until(lambda: engine.version == str(version) and not engine.paused, f"version {version} is served")


class Followed(NamedTuple):
    trainer: replicas.Channel
    engine: FakeEngine
    task: asyncio.Task[None]
    """The follower's."""


@asynccontextmanager
async def followed(version: int = 0, workers: int = 1, **more: Any) -> AsyncIterator[Followed]:
    """A trainer, and a follower with its engine, which serves ``version`` (0: none was
    published)."""
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")
        async with FakeEngine(workers) as engine, following(world, engine, **more) as task:
            if version:
                await publish(trainer, version)
                await served(engine, version)
            yield Followed(trainer, engine, task)


@pytest.mark.parametrize("workers", [1, 3])
async def test_each_version_is_loaded_by_every_worker_and_tagged(workers: int) -> None:
    async with followed(workers=workers) as (trainer, engine, _):
        for number in (1, 2, 3):
            await publish(trainer, number)
            await served(engine, number)
            await trainer.loaded(number, deadline=10)  # workers and follower have reported it
            for worker in engine.workers:
                assert all(tensor.eq(number).all() for tensor in worker.model.values())
        control = [path for path in engine.calls if path not in ("/health", "/is_paused", "/weight_info")]
        assert control[-len(LOAD + RESUME) :] == LOAD + RESUME
        assert "reset_external=true" in engine.queries["/reset_prefix_cache"]


async def test_an_update_that_dies_half_way_is_loaded_again_as_a_whole() -> None:
    async with followed(1) as (trainer, engine, _):
        engine.fail_updates = 1
        await publish(trainer, 2)
        await served(engine, 2)
        assert all(tensor.eq(2).all() for tensor in engine.workers[0].model.values())


async def test_a_load_that_left_a_tensor_wrong_in_silence_is_found_and_done_again() -> None:
    async with followed(1, verify_load="always") as (trainer, engine, _):
        engine.lose_tensors = 1
        await publish(trainer, 2)
        await served(engine, 2)
        assert all(tensor.eq(2).all() for tensor in engine.workers[0].model.values())
        assert engine.calls.count("prove") == 3


async def test_an_engine_that_always_has_something_else_never_serves_it_and_the_tensor_is_named() -> None:
    async with followed() as (trainer, engine, task):
        engine.lose_tensors = 5
        await publish(trainer, 1)
        with pytest.raises(
            errors.SyncError, match=r"vLLM 0\.32\.0\+cpu has loaded other tensors than version 1: .*: c"
        ):
            await asyncio.wait_for(task, 20)
        assert engine.paused


@pytest.mark.parametrize(("when", "proofs"), [("never", 0), ("first", 2), ("always", 3)])
async def test_loads_are_proven_as_often_as_is_asked_and_anew_with_other_names(when: str, proofs: int) -> None:
    async with followed(verify_load=when) as (trainer, engine, _):
        for number, more in enumerate(({}, {}, {"d": torch.ones(1)}), 1):
            send = partial(trainer.publish, {**weights(number), **more}, new_manifest=True)
            await (await asyncio.to_thread(send))
            await served(engine, number)
        assert engine.calls.count("prove") == proofs


async def test_a_version_that_never_loads_leaves_the_server_paused_and_ends_the_follower() -> None:
    async with followed(1) as (trainer, engine, task):
        engine.fail_updates = 5
        receipt = await publish(trainer, 2)  # the trainer is not held up
        assert receipt.version == 2
        with pytest.raises(errors.SyncError, match="dies after 1 tensors"):
            await task
        assert engine.paused
        assert engine.version == "1"


async def test_a_version_that_does_not_fit_is_refused_and_the_server_goes_on_with_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with followed(1) as (trainer, engine, task):
        pauses = engine.calls.count("/pause")
        bad = {**weights(2), "misfit": torch.ones(2)}
        await (await asyncio.to_thread(partial(trainer.publish, bad, new_manifest=True)))
        with pytest.raises(errors.SyncError, match=r"refused by rollout/0: .*no parameter is called misfit"):
            await trainer.loaded(2, deadline=20)
        assert not engine.paused
        assert engine.calls.count("/pause") == pauses
        assert all(tensor.eq(1).all() for worker in engine.workers for tensor in worker.model.values())
        receipt = await (await asyncio.to_thread(partial(trainer.publish, weights(3), new_manifest=True)))
        assert "no parameter is called misfit" in receipt.not_loaded["rollout/0"]
        await served(engine, 3)
        assert not task.done()
        assert "refusing version 2, and serving the one before" in caplog.text


async def test_with_several_workers_no_version_is_tried_as_its_end_is_an_error() -> None:
    """An error of one worker spoils the server's later calls."""
    async with followed(1, workers=2) as (_, engine, _):
        assert engine.calls.index("/pause") < engine.calls.index("/start_weight_update")
        assert engine.calls.count("/start_weight_update") == 1


CHECKS = [(False, "/update_weights"), (True, "/v1/load_lora_adapter")]


async def publish_as(trainer: replicas.Channel, lora: bool, value: float) -> None:
    """Weights with a manifest of their own, or an adapter."""
    if lora:
        send = partial(trainer.publish, Adapter(weights(value)), adapter="m")
    else:
        another = {**weights(value), f"of {value}": torch.ones(2)}
        send = partial(trainer.publish, another, new_manifest=True)
    await (await asyncio.to_thread(send))


async def shows(engine: FakeEngine, lora: bool) -> None:
    """Until the first version is served."""
    if lora:
        await wait_until(lambda: "m@1" in engine.adapters, "the first adapter is served")
    else:
        await served(engine, 1)


@pytest.mark.parametrize("last_words", [True, False])
@pytest.mark.parametrize(("lora", "call"), CHECKS)
async def test_a_version_is_not_refused_when_the_engine_dies_of_something_else(
    caplog: pytest.LogCaptureFixture, lora: bool, call: str, last_words: bool
) -> None:
    async with followed(lora=lora) as (trainer, engine, task):
        await publish_as(trainer, lora, 1)
        await shows(engine, lora)
        engine.dies_at, engine.last_words = call, last_words
        await publish_as(trainer, lora, 2)
        with pytest.raises(errors.SyncError):
            await asyncio.wait_for(task, 20)
        assert "is refused" not in caplog.text


@pytest.mark.parametrize(("lora", "call"), CHECKS)
async def test_a_version_is_not_refused_when_a_call_is_not_answered_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lora: bool, call: str
) -> None:
    monkeypatch.setattr(engine_health, "EVERY_S", 600.0)  # so the call itself is the first to notice
    monkeypatch.setattr(loop, "USUAL_LOAD_MIN_S", 0.5)
    monkeypatch.setattr(loop, "USUAL_LOADS", 1)
    monkeypatch.setattr(http_engine, "BACKSTOP_S", 0.0)
    async with followed(lora=lora, engine_timeout=2.0) as (trainer, engine, task):
        await publish_as(trainer, lora, 1)
        await shows(engine, lora)
        engine.freeze_at = call
        await publish_as(trainer, lora, 2)
        with pytest.raises(errors.SyncError, match=f"no answer to {call} within"):
            await asyncio.wait_for(task, 20)
        assert "is refused" not in caplog.text


async def test_versions_that_come_faster_than_loads_leave_the_server_time_to_compute() -> None:
    async with followed(min_serving=0.9) as (trainer, engine, _):
        engine.pause_s = 0.5
        for number in (1, 2):
            await publish(trainer, number)
            await served(engine, number)
            resumed = time.monotonic()
            if number == 1:
                first = resumed
        assert resumed - first > 9 * 0.5


@pytest.mark.parametrize(("release", "accepted"), [("0.28.3", False), ("0.29.0", True), ("dev", True), ("0.0.0", True)])
async def test_a_release_of_other_routes_is_refused(release: str, accepted: bool) -> None:
    async with channel_world(POLICY) as world, FakeEngine() as engine:
        engine.release = release
        async with following(world, engine) as task:
            if accepted:
                await wait_until(lambda: "/init_weight_transfer_engine" in engine.calls, "the follower begins")
            else:
                with pytest.raises(errors.UsageError, match=r"is vLLM 0\.28\.3"):
                    await task


async def test_requests_that_were_kept_do_not_keep_the_old_versions_prefixes() -> None:
    async with followed() as (trainer, engine, _):
        engine.kept_requests = True
        await publish(trainer, 1)
        await served(engine, 1)
        assert engine.calls.count("/reset_prefix_cache") == 2  # the second one reaches running requests, too


async def test_a_follower_that_was_replaced_ends_the_update_that_the_first_left_open() -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")
        async with FakeEngine() as engine:
            engine.active = True  # a follower died after its start
            async with following(world, engine):
                await publish(trainer, 1)
                await served(engine, 1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "ASK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(engine_health, "EVERY_S", 0.1)
    monkeypatch.setattr(VllmServer, "watched", {"/health": 1.0, "/is_paused": 1.0})
    monkeypatch.setattr(engine_health, "serving_process", lambda port: None)  # it is this one, which is at work


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_stops_answering_is_given_up() -> None:
    async with followed(1, engine_timeout=1.0) as (trainer, engine, task):
        engine.answers.clear()
        receipt = await publish(trainer, 2)  # a load begins, and hangs in the server
        assert receipt.version == 2
        with pytest.raises(errors.SyncError, match="has not answered"):
            await task


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_is_frozen_behind_a_healthy_server_is_given_up() -> None:
    async with followed(1, engine_timeout=1.0) as (trainer, engine, task):
        engine.engine_answers.clear()
        with pytest.raises(errors.SyncError, match="has not answered /is_paused"):
            await task
        assert (await publish(trainer, 2)).version == 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_an_engine_that_freezes_in_a_load_misses_the_loads_deadline(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(loop, "USUAL_LOAD_MIN_S", 0.5)
    monkeypatch.setattr(loop, "USUAL_LOADS", 1)
    async with followed(1, engine_timeout=1.0) as (trainer, engine, task):
        engine.freeze_at = call
        assert (await publish(trainer, 2)).version == 2
        with pytest.raises(errors.SyncError, match=f"no answer to {call} within|has not answered /is_paused"):
            await task


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_is_at_work_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles within a step, in which it answers nothing."""
    monkeypatch.setattr(engine_health, "serving_process", lambda port: os.getpid())
    monkeypatch.setattr(engine_health, "processor_time", lambda pid: ProcessorTime(0.0, time.monotonic()))
    async with followed(1) as (trainer, engine, task):
        engine.engine_answers.clear()
        await asyncio.wait([task], timeout=4 * VllmServer.watched["/is_paused"])
        assert not task.done()
        engine.engine_answers.set()
        await publish(trainer, 2)
        await served(engine, 2)


@pytest.mark.usefixtures("impatient")
async def test_a_server_whose_engine_has_died_is_given_up_at_once_though_a_call_hangs() -> None:
    async with followed(1) as (_, engine, task):
        engine.engine_answers.clear()  # /is_paused hangs
        engine.is_dead = True  # and /health is 503
        with pytest.raises(errors.SyncError, match="no longer answers /health"):
            await asyncio.wait_for(task, 20)


async def test_a_servers_api_key_is_sent_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")
        async with FakeEngine() as engine:
            engine.api_key = "sesame"
            for given in ({"api_key": "sesame"}, {}):
                if not given:
                    monkeypatch.setenv("VLLM_API_KEY", "sesame")
                async with following(world, engine, lora=True, **given):
                    receipt = await (
                        await asyncio.to_thread(partial(trainer.publish, Adapter(weights(1)), adapter="m"))
                    )
                    name = f"m@{receipt.version}"
                    await wait_until(partial(engine.adapters.__contains__, name), f"{name} is served")


async def test_a_prefix_of_the_servers_paths_is_kept() -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")
        async with FakeEngine() as engine:
            engine.prefix = "/engine"
            async with following(world, engine):
                await publish(trainer, 1)
                await served(engine, 1)


def serves_alone(engine: FakeEngine, adapter: str) -> bool:
    return list(engine.adapters) == [adapter]


class Adapter(dict[str, torch.Tensor]):
    adapter_config = '{"r": 8}'


async def test_each_version_of_an_adapter_is_loaded_under_a_name_of_its_own() -> None:
    async with followed(lora=True) as (trainer, engine, _):
        folders = []
        for version in (1, 2, 3):
            sent = Adapter(weights(version))
            sent["tied"] = next(iter(sent.values()))
            receipt = await (await asyncio.to_thread(partial(trainer.publish, sent, adapter="math")))
            name = f"math@{receipt.version}"
            await wait_until(partial(serves_alone, engine, name), f"{name} alone is served")
            folders.append(engine.adapters[name])
            assert (folders[-1] / "adapter_config.json").read_text() == '{"r": 8}'
            found = load_file(folders[-1] / "adapter_model.safetensors")
            assert found.keys() == sent.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in sent.items())
        assert folders[1].exists()  # requests that began with it may need it
        await wait_until(lambda: not folders[0].exists(), "older ones are gone")
        assert "/pause" not in engine.calls
    assert not folders[2].exists()


async def test_an_adapters_folder_stays_while_a_request_in_flight_may_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads it once more where it has no room for all adapters in use."""
    monkeypatch.setattr(vllm_adapters, "KEPT_UNSEEN", 1)
    async with followed(lora=True) as (trainer, engine, _):

        async def load(version: int) -> Path:
            await (await asyncio.to_thread(partial(trainer.publish, Adapter(weights(1)), adapter="math")))
            await wait_until(partial(serves_alone, engine, f"math@{version}"), f"{version} alone is served")
            return engine.adapters[f"math@{version}"]

        def there() -> list[bool]:
            return [folder.exists() for folder in folders]

        engine.adapters_in_use = ["math@1", "math@2"]
        folders = [await load(version) for version in (1, 2, 3, 4, 5)]
        await wait_until(lambda: there() == [True, True, False, True, True], "nobody needs the third")
        engine.adapters_in_use = ["math@2"]
        folders.append(await load(6))
        await wait_until(lambda: there() == [False, True, False, False, True, True], "the requests of the first ended")
        engine.adapters_in_use = None  # the server does not say
        folders.append(await load(7))
        await wait_until(lambda: there() == [False] * 4 + [True] * 3, "only so many stay")


async def test_a_follower_takes_over_the_adapter_that_an_earlier_one_has_left() -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")

        async def publish_adapter() -> None:
            await (await asyncio.to_thread(partial(trainer.publish, Adapter(weights(1)), adapter="math")))

        async with FakeEngine() as engine:
            async with following(world, engine, lora=True):
                await publish_adapter()
                await wait_until(partial(serves_alone, engine, "math@1"), "the first adapter is served")
                left = engine.adapters["math@1"]
            assert not left.exists()
            async with following(world, engine, lora=True):
                await wait_until(lambda: engine.adapters.get("math@1", left).exists(), "it is loaded anew")
            async with following(world, engine, lora=True):
                await publish_adapter()
                await wait_until(partial(serves_alone, engine, "math@2"), "the next one alone is served")


async def test_an_adapter_that_the_server_does_not_take_is_refused_and_the_one_before_stays() -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")

        async def publish_adapter() -> replicas.Receipt:
            return await (await asyncio.to_thread(partial(trainer.publish, Adapter(weights(1)), adapter="math")))

        async with FakeEngine() as engine, following(world, engine, lora=True) as task:
            await publish_adapter()
            await wait_until(partial(serves_alone, engine, "math@1"), "the first adapter is served")
            engine.bad_adapter = True
            await publish_adapter()
            with pytest.raises(errors.SyncError, match="max_lora_rank 16"):
                await trainer.loaded(2, deadline=20)
            engine.bad_adapter = False
            receipt = await publish_adapter()
            assert "max_lora_rank 16" in receipt.not_loaded["rollout/0"]
            await wait_until(partial(serves_alone, engine, "math@3"), "the next adapter is served")
            assert not task.done()


async def test_an_adapter_whose_configuration_is_not_known_is_refused() -> None:
    async with channel_world(POLICY) as world:
        trainer = await world.join("trainer")
        with pytest.raises(errors.UsageError, match="without adapter_config"):
            await asyncio.to_thread(partial(trainer.publish, weights(1), adapter="math"))


async def test_only_every_nth_version_is_loaded() -> None:
    async with followed(every=3) as (trainer, engine, _):
        for number in (1, 2, 3, 4):
            await publish(trainer, number)
            if number in (1, 4):
                await served(engine, number)
        assert engine.calls.count("/finish_weight_update") == 2


@pytest.mark.parametrize("wrong", [{"mode": "stop"}, {"every": 0}])
def test_an_argument_that_is_wrong_is_refused_before_anything_is_asked(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        follow("http://127.0.0.1:1", "policy", **wrong)


ENGINE = """
import os, sys, time
from replicas.integrations.vllm import _end_with
_end_with(int(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_processes_of_an_engine_die_with_the_follower_and_so_do_forked_ones() -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(owner.pid)], stdout=subprocess.PIPE, text=True)
        with engine:
            try:
                assert engine.stdout is not None
                forked = int(engine.stdout.readline())
                assert engine.poll() is None
                assert start_time(forked) is not None
                owner.kill()
                assert engine.wait(20) == -signal.SIGKILL
                eventually(lambda: start_time(forked) is None, "the end of the forked one")
                late = [sys.executable, "-c", ENGINE, str(owner.pid)]  # one that starts when it has gone
                owner.wait()
                assert subprocess.run(late, timeout=60, check=False).returncode == -signal.SIGKILL
            finally:
                owner.kill()
                engine.kill()
