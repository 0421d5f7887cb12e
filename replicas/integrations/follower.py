"""The follower of one vLLM server: it loads each committed version of a channel, as
weights or as a LoRA adapter.

Theory of operation
===================

*Weights*: one version after the other is loaded by ``pause, start, update(version),
finish(weight_version), reset the caches, resume``. Only this server is paused, and only
for its own load. A version of another manifest than the last good one is *checked*
first, on all workers and without a pause: if it does not fit, it is refused, and the
server goes on with the version that it has. A load that fails nevertheless leaves the
server paused and its gate shut, as its model may be a mixture of two versions. It is
tried once more as a whole, unless the server did not answer in time; then the follower
reports the failure and ends, and whoever supervises it starts the server anew.

Between two loads the server serves for a share of the time (``min_serving``): versions
that come faster than it loads them would leave it no time to compute.

*Adapters*: each version is written as a PEFT checkpoint into a folder of its own, and
loaded under a name of its own, ``NAME@VERSION``: vLLM keeps what it computed with an
adapter by the adapter's name. Nothing is paused. Requests that began with the version
before end with it, so the name before is unloaded, and its folder, which vLLM may read
once more for them, stays until the next version. An adapter that vLLM does not take is
refused: the server goes on with the one before.

Meanwhile threads watch the server (:mod:`replicas.integrations.engine_health`). vLLM's
``/health`` is answered by its API process, also when its engine is frozen;
``/is_paused`` is answered by the engine, but only between two steps, and not during a
load. So both are asked, each call of a load has a time of its own, and a server that
exceeds one while its processes do nothing is given up: its connections are broken, so
that no call of the follower hangs on it.

A first request that asks for log-probabilities makes vLLM compile, for a minute on a
busy machine. So a server with a gate gets one before its gate opens.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import replicas
from replicas import errors
from replicas.integrations.engine_health import API, EngineHealth, Spent, processor_time, serving_process
from replicas.integrations.engine_server import EngineServer, Refused
from replicas.integrations.gate import GatePage

__all__ = ["Following", "PauseMode", "release_of", "run"]

logger = logging.getLogger("replicas.integrations.vllm")

PauseMode = Literal["keep", "wait", "abort"]
START_BEAT_S = 0.2
JOIN_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 300.0
USUAL_LOAD_MIN_S = 20.0
USUAL_LOADS = 10
"""A load may take so many times as long as the longest before it."""
BEAT_S = 0.5
WATCHED = {API: 15.0, "/is_paused": 30.0}
"""Seconds for which a path of a server may go without an answer while its processes do
nothing."""
ENGINE_TIMEOUT_S = 600.0
MIN_SERVING = 0.5
OLDEST = (0, 29)
"""The first release of vLLM whose control routes these are."""
BACKSTOP_S = 60.0
WARM_UP = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 1.0, "logprobs": 1}


@dataclass(frozen=True, kw_only=True)
class Following:
    """What is followed, and how.

    :ivar lora: the channel's versions are LoRA adapters.
    :ivar identity: keyword arguments of :func:`replicas.join`; empty: the environment.
    :ivar min_serving: the least share of the time in which the server serves, 0 to 1.
    :ivar patches: the workers may write what has changed alone.
    :ivar folder: where adapters are written, which the server can read.
    :ivar url: the server's address for routers.
    :ivar gate: the server's gate, if it has one.
    :ivar is_gone: returns why the server is gone, or an empty text.
    :ivar engine_timeout_s: how long the engine may answer nothing while its
        processes are at work (it compiles), or cannot be seen from here.
    :ivar process: the pid of the server's API process; None: the one that listens on
        the port, if that is of this machine's loopback.
    """

    channel: str
    lora: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    mode: PauseMode = "keep"
    every: int = 1
    min_serving: float = MIN_SERVING
    complete: bool = True
    patches: bool = False
    folder: Path | None = None
    url: str
    gate: GatePage | None = None
    is_gone: Callable[[], str] = lambda: ""
    engine_timeout_s: float = ENGINE_TIMEOUT_S
    process: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("keep", "wait", "abort"):
            raise errors.UsageError(f"follow: mode {self.mode!r}", hint='one of "keep", "wait", "abort"')
        if self.every < 1:
            raise errors.UsageError(f"follow: every must be 1 or more, not {self.every}", hint="1 loads each version")
        if not 0 <= self.min_serving < 1:
            text = f"follow: min_serving must be from 0 to below 1, not {self.min_serving}"
            raise errors.UsageError(text, hint="0.5 serves for as long as each load takes")
        if not self.engine_timeout_s > 0:
            text = f"follow: engine_timeout must be above 0, not {self.engine_timeout_s}"
            raise errors.UsageError(text, hint="seconds for which a busy engine may answer nothing")


def run(server: EngineServer, following: Following, stop: threading.Event, start_timeout_s: float) -> None:
    """Load the versions of all channels until ``stop`` is set.

    :raises replicas.errors.ReplicasError: the server is gone, or a load failed twice.
    """
    if not _wait_until_healthy(server, following, stop, start_timeout_s):
        return
    _check_release(server)
    process = following.process
    if process is None and server.local_port is not None:
        process = serving_process(server.local_port)

    def spent() -> Spent | None:
        return None if process is None else processor_time(process)

    with EngineHealth(
        server,
        following.is_gone,
        WATCHED,
        while_loading=(API,),
        limit_s=following.engine_timeout_s,
        spent=spent,
    ) as health:
        (Adapters if following.lora else Weights)(server, following, health, stop).run()


def _wait_until_healthy(server: EngineServer, following: Following, stop: threading.Event, timeout_s: float) -> bool:
    """False: it is time to stop."""
    until = time.monotonic() + timeout_s
    while not server.answers("/health"):
        if gone := following.is_gone():
            raise _lost(gone)
        if time.monotonic() > until:
            raise _lost(f"{server.url} was not healthy within {timeout_s:.0f} s")
        if stop.wait(START_BEAT_S):
            return False
    return True


def _check_release(server: EngineServer) -> None:
    answer = server.call("GET", "/version")
    release_of(str(answer.get("version", "")) if isinstance(answer, dict) else "")


def release_of(version: str) -> tuple[int, ...]:
    """First two numbers of vLLM's version; of an unknown one, those of none.

    :raises UsageError: it is too old: its control routes are others.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if len(found) < 2 or found == (0, 0):  # built from source, perhaps
        return ()
    if found < OLDEST:
        raise errors.UsageError(
            f"the server is vLLM {version}, which has other control routes",
            hint=f"install vLLM {'.'.join(map(str, OLDEST))} or newer (tested: 0.32)",
        )
    return found


def _lost(reason: str) -> errors.SyncError:
    return errors.SyncError(reason, phase="load", hint="see the server's own log")


class Follower:
    """Brings the versions of one channel into one server."""

    def __init__(self, server: EngineServer, following: Following, health: EngineHealth, stop: threading.Event) -> None:
        self._server = server
        self._following = following
        self._health = health
        self._stop = stop
        self._longest_s = self._called_s = 0.0
        self._serves_until = 0.0

    def run(self) -> None:
        """Load versions until it is time to stop."""
        raise NotImplementedError

    def _join(self, world_size: int) -> replicas.Channel:
        following = self._following
        info = {"url": following.url}
        return replicas.join(following.channel, rank=0, world_size=world_size, info=info, **following.identity)

    def _raise_if_given_up(self) -> None:
        """By the watch, or by a call that has not been answered in time."""
        if reason := self._health.reason or self._server.broken:
            raise _lost(reason)

    def _raise_if_dying(self) -> None:
        """:raises replicas.errors.SyncError: the server has refused because its engine
        is dead: it may say so for a moment."""
        while (answer := self._server.ask(API)) != "good":
            self._raise_if_given_up()
            if answer == "dead" or self._stop.wait(START_BEAT_S):
                raise _lost("the server has died while it looked at a new version")

    def _next(self, channel: replicas.Channel) -> replicas.Update | None:
        """Wait for a version; None: it is time to stop."""
        while (rest_s := self._serves_until - time.monotonic()) > 0 and not self._stop.wait(min(rest_s, BEAT_S)):
            self._raise_if_given_up()
        served = channel.version
        pending = channel.receive(at_least=served + self._following.every if served else 1)
        while not self._stop.is_set():
            self._raise_if_given_up()
            with contextlib.suppress(TimeoutError):
                return pending.wait(timeout=BEAT_S)
        return None

    @property
    def _load_timeout_s(self) -> float:
        return max(USUAL_LOAD_MIN_S, USUAL_LOADS * self._longest_s) if self._longest_s else LOAD_TIMEOUT_S

    def _post(
        self, path: str, body: Any = None, *, query: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> Any:
        patience_s = self._load_timeout_s if timeout_s is None else timeout_s
        longest_s = max(patience_s, self._following.engine_timeout_s) + BACKSTOP_S
        began = time.monotonic()
        try:
            with self._health.calling(path, patience_s):
                return self._server.call("POST", path, body, query=query, timeout_s=longest_s)
        finally:
            self._called_s += time.monotonic() - began

    def _open_gate(self, version: int, model: str = "") -> None:
        """Let requests in, from the first version on.

        :param model: the name to ask for in the first request; default: the server's
            own.
        """
        gate = self._following.gate
        if gate is None:
            return
        if not gate.version:
            self._warm_up(model)
        gate.open(version)

    def _warm_up(self, model: str) -> None:
        """Have the server compile what a first request needs."""
        began = time.monotonic()
        try:
            name = model or self._server.call("GET", "/v1/models")["data"][0]["id"]
            self._post("/v1/completions", {"model": name, **WARM_UP}, timeout_s=LOAD_TIMEOUT_S)
        except (errors.SyncError, KeyError, IndexError, TypeError) as error:
            self._raise_if_given_up()
            logger.info("the server could not be warmed up (it may serve no completions): %s", error)
        else:
            logger.info("the server's first request took %.1f s", time.monotonic() - began)


class Weights(Follower):
    """Loads versions of the model itself; the server's workers are ranks 1 to N of its
    replica."""

    def run(self) -> None:
        following, server = self._following, self._server
        world_size = server.call("GET", "/get_world_size")["world_size"] + 1
        init = {"channel": following.channel, "world_size": world_size, "complete": following.complete}
        if following.patches:
            init["patches"] = True
        with self._join(world_size) as channel:
            if following.gate is None:  # a server that is older than this follower
                self._end_open_update()
            init_info = {"init_info": {**init, **following.identity, "replica": channel.member.replica}}
            with self._health.loading():  # the engine answers nothing while its workers join
                self._post("/init_weight_transfer_engine", init_info, timeout_s=JOIN_TIMEOUT_S)
            fitting = ""
            while (update := self._next(channel)) is not None:
                with update:
                    # vLLM does not read the replies of other workers after an error,
                    # and takes them for those to its next calls. With several workers
                    # the load itself finds a misfit, and the server starts anew.
                    tried = world_size > 2 or update.manifest.hash == fitting
                    if not tried and (misfit := self._misfit(update.version)):
                        update.refuse(misfit)
                        continue
                    fitting = update.manifest.hash
                    self._load(update.version)

    def _misfit(self, version: int) -> str:
        """Why the version does not fit the model; empty: it does. Nothing is loaded."""
        with self._health.loading():
            self._post("/start_weight_update")
            try:
                self._update(version, check=True)
            except Refused as error:
                self._raise_if_dying()
                logger.warning("version %d is refused, the server goes on without it: %s", version, error)
                self._end_open_update(refuse="it does not fit another worker of the server")
                return error.message
            self._end_open_update()
            return ""

    def _load(self, version: int) -> None:
        gate, began = self._following.gate, time.monotonic()
        mode = self._following.mode
        usual_s = LOAD_TIMEOUT_S if mode == "wait" else self._load_timeout_s
        self._post("/pause", query={"mode": mode}, timeout_s=usual_s)
        paused, self._called_s = time.monotonic(), 0.0
        pausing = paused if mode == "wait" else began  # that mode serves until its requests are done
        with self._health.loading():
            try:
                self._replace(version)
            except errors.ReplicasError as error:
                logger.warning("version %d did not load, once more: %s", version, error)
                if gate is not None:
                    gate.shut()
                self._end_open_update()
                self._replace(version)
            loaded = time.monotonic()
            self._reset_caches()
            self._post("/resume")
        now = time.monotonic()
        self._serves_until = now + (now - pausing) * self._following.min_serving / (1 - self._following.min_serving)
        if gate is not None:
            gate.paused(now - pausing)
        self._longest_s = max(self._longest_s, now - paused)
        between_s = now - paused - self._called_s
        self._open_gate(version)  # the first time it makes a call of its own
        logger.info(
            "version %d is served: paused in %.4f s, loaded in %.4f s, resumed in %.4f s, between the calls %.4f s",
            *(version, paused - began, loaded - paused, now - loaded, between_s),
        )

    def _replace(self, version: int) -> None:
        self._post("/start_weight_update")
        self._update(version)
        self._post("/finish_weight_update", {"weight_version": str(version)})

    def _end_open_update(self, refuse: str = "") -> None:
        """End an update that an earlier call, or a follower that died, left open."""
        with contextlib.suppress(errors.SyncError):  # the answer is the error that ends it, or that there is none
            self._update(0, refuse=refuse)

    def _update(self, version: int, **more: Any) -> None:
        info = {"version": version, "timeout_s": self._load_timeout_s / 2, **more}
        self._post("/update_weights", {"update_info": info})

    def _reset_caches(self) -> None:
        """Forget what was computed with the old weights.

        Requests that were kept hold some of it: they are computed anew then. A store
        of other machines is cleared, too (``reset_external``).
        """
        self._post("/reset_encoder_cache")
        for running in ("false", "true"):
            query = {"reset_running_requests": running, "reset_external": "true"}
            answer = self._post("/reset_prefix_cache", query=query)
            if isinstance(answer, dict) and answer.get("success"):
                return
        raise _lost("the prefix cache of the old version could not be reset")


class Adapters(Follower):
    """Loads versions of a LoRA adapter, each under a name of its own."""

    def run(self) -> None:
        loaded: list[tuple[str, Path]] = []
        with self._join(1) as channel:
            while (update := self._next(channel)) is not None:
                with update:
                    try:
                        loaded.append(self._load(update))
                    except Refused as error:
                        self._raise_if_dying()
                        logger.warning("adapter version %d is refused: %s", update.version, error)
                        update.refuse(error)
                        continue
                for name, _ in loaded[:-1][-1:]:
                    self._post("/v1/unload_lora_adapter", {"lora_name": name})
                while len(loaded) > 2:
                    shutil.rmtree(loaded.pop(0)[1])

    def _load(self, update: replicas.Update) -> tuple[str, Path]:
        name = f"{update.meta.get('adapter')}@{update.version}"
        folder = self._write(update, name)
        began = time.monotonic()
        try:
            with self._health.loading():
                self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except errors.SyncError:
            shutil.rmtree(folder)
            raise
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        logger.info("adapter %s is served: loaded in %.3f s", name, time.monotonic() - began)
        self._open_gate(update.version, name)
        return name, folder

    def _write(self, update: replicas.Update, name: str) -> Path:
        """The adapter as PEFT saves it.

        :raises Refused: the version is no adapter.
        """
        from safetensors.torch import save_file

        config = update.meta.get("adapter_config")
        if not isinstance(config, str) or self._following.folder is None:
            what = f"version {update.version} of channel {self._following.channel!r} is no adapter"
            raise Refused(what, phase="load", hint="publish(..., adapter=)")
        folder = self._following.folder / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        save_file({one: tensor.contiguous() for one, tensor in update}, folder / "adapter_model.safetensors")
        return folder
