"""The follower of one inference server: it loads each committed version of a channel.

Theory of operation
===================

One version after the other is loaded by ``pause, load, reset the caches, resume``. Only
this server is paused, only for its own load, and only when the version is on this host
and verified. A version of another manifest than the last good one is *checked* first,
without a pause: if it does not fit, it is refused, and the server goes on with the
version that it has. A load that fails nevertheless leaves the server paused and its
gate shut, as its model may be a mixture of two versions. It is tried once more as a
whole; then the follower reports the failure and ends, and whoever supervises it starts
the server anew. A server that this follower has not paused is never resumed by it. A
version older than the engine's own, if it tells that, is refused.

On a channel with ``adopt_together`` the version is loaded when all targets have said
that they can load it, which this one says after the check.

A load counts when the engine's own tensors have been compared with the version
(``verify_load``); one that differs is a load that failed.

Between two loads the server serves for a share of the time (``min_serving``): versions
that come faster than it loads them would leave it no time to compute.

Meanwhile a thread asks the engine for its health, and aborts the verb under way of one
that is gone, so that no verb hangs on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

import replicas
from replicas import errors
from replicas.engine.protocol import Engine, GateLike, Identity, PauseMode, Refused, VerifyLoad

if TYPE_CHECKING:
    from replicas.channel import Channel, Update

logger = logging.getLogger("replicas.engine")

START_TIMEOUT_S = 900.0
JOIN_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 300.0
USUAL_LOAD_MIN_S = 20.0
USUAL_LOADS = 10
"""A load may take so many times as long as the longest before it."""
BEAT_S = 0.5
MIN_SERVING = 0.5


def follow(
    engine: Engine,
    channel: str,
    *,
    mode: PauseMode = "keep",
    every: int = 1,
    min_serving: float = MIN_SERVING,
    verify_load: VerifyLoad = "first",
    gate: GateLike | None = None,
    stop: threading.Event | None = None,
    timeout: float = START_TIMEOUT_S,
    **identity: Any,
) -> None:
    """Load each committed version of a channel into a server; block until ``stop``.

    :param engine: the server's verbs; it is closed at the end.
    :param channel: name of the channel.
    :param mode: requests in flight during a load are kept (frozen, and continued with
        the new weights), waited for, or aborted.
    :param every: load every n-th version at most; 1: each, unless a newer one is there.
    :param min_serving: the least share of the time in which the server computes, from 0
        to below 1; default 0.5: after a load it serves for as long as that took, and
        then loads the newest version.
    :param verify_load: when the engine's own tensors are compared with the version:
        ``"always"``, after the ``"first"`` load of each manifest, or ``"never"``.
    :param gate: opened with each version, shut when a load has failed.
    :param stop: ends the call when it is set; a load under way is finished. Default:
        never.
    :param timeout: seconds until the server must be up; default 900.
    :param identity: ``endpoint``, ``token``, ``run``, ``group`` and ``replica`` as for
        :func:`replicas.join`; default: the environment.
    :raises replicas.errors.SyncError: the server is gone, or a version failed to load
        twice; the server is left paused then.
    :raises replicas.errors.Preflight: another target of the channel follows the server.
    :raises replicas.errors.Disconnected: no coordinator answered for 60 s.
    :raises replicas.errors.UsageError: an argument is wrong.
    """
    plan = Plan(mode=mode, every=every, min_serving=min_serving, verify_load=verify_load)
    ending = threading.Event() if stop is None else stop
    with _Watch(engine, ending) as watch:
        try:
            engine.wait_until_up(timeout)
        except errors.SyncError:
            if ending.is_set():
                return
            raise
        watch.is_starting = False
        Follower(engine, plan, gate, ending).run(channel, identity)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How versions are followed: arguments of :func:`follow`."""

    mode: PauseMode = "keep"
    every: int = 1
    min_serving: float = MIN_SERVING
    verify_load: VerifyLoad = "first"

    def __post_init__(self) -> None:
        for what, given, known in (("mode", self.mode, PauseMode), ("verify_load", self.verify_load, VerifyLoad)):
            if given not in get_args(known):
                names = ", ".join(f'"{name}"' for name in get_args(known))
                raise errors.UsageError(f"follow: {what} {given!r}", hint=f"one of {names}")
        if self.every < 1:
            raise errors.UsageError(f"follow: every must be 1 or more, not {self.every}", hint="1 loads each version")
        if not 0 <= self.min_serving < 1:
            text = f"follow: min_serving must be from 0 to below 1, not {self.min_serving}"
            raise errors.UsageError(text, hint="0.5 serves for as long as each load takes")


class _Watch:
    """A thread that aborts the verbs of an engine that is gone, in a ``with`` block; or
    of one that is not up when it is time to stop."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        self._engine, self._stop = engine, stop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas-engine-watch", daemon=True)
        self.is_starting = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._engine.close()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._over.wait(BEAT_S / 2):
            stopped = "it was stopped" if self.is_starting and self._stop.is_set() else ""
            if reason := stopped or self._engine.health():
                self._engine.abort(reason)
                return


class Follower:
    """Brings the versions of one channel into one server that is up."""

    def __init__(self, engine: Engine, plan: Plan, gate: GateLike | None, stop: threading.Event) -> None:
        self._engine, self._plan, self._gate, self._stop = engine, plan, gate, stop
        self._longest_s = self._serves_until = 0.0
        self._fitting = self._proven = ""

    def run(self, name: str, identity: dict[str, Any]) -> None:
        """Load versions until it is time to stop."""
        engine = self._engine
        world_size, info = engine.workers + 1, {"url": engine.url} if engine.url else {}
        with replicas.join(name, rank=0, world_size=world_size, info=info, **identity) as channel:
            known = Identity(channel=name, replica=channel.member.replica, world_size=world_size, join=identity)
            engine.attach(known, JOIN_TIMEOUT_S)
            while (update := self._next(channel)) is not None:
                try:
                    loads = self._fits(update) and self._all_load(update)
                except BaseException as error:
                    with contextlib.suppress(errors.UsageError):  # it was refused, as no target loads it
                        update.failed(error)
                    raise
                if self._stop.is_set():
                    return
                if loads:
                    with update:
                        self._bring(update, channel.latest)

    def _raise_if_gone(self) -> None:
        if reason := self._engine.health():
            raise _lost(reason)

    def _next(self, channel: Channel) -> Update | None:
        """Wait for a version; None: it is time to stop."""
        while (rest_s := self._serves_until - time.monotonic()) > 0 and not self._stop.wait(min(rest_s, BEAT_S)):
            self._raise_if_gone()
        served = channel.version
        pending = channel.receive(at_least=served + self._plan.every if served else 1)
        while not self._stop.is_set():
            self._raise_if_gone()
            with contextlib.suppress(TimeoutError):
                return pending.wait(timeout=BEAT_S)
        return None

    @property
    def _load_timeout_s(self) -> float:
        return max(USUAL_LOAD_MIN_S, USUAL_LOADS * self._longest_s) if self._longest_s else LOAD_TIMEOUT_S

    def _fits(self, update: Update) -> bool:
        if update.manifest.hash == self._fitting:
            return True
        misfit = self._engine.check(update, self._load_timeout_s)
        if misfit:
            self._refuse(update, misfit)
        return not misfit

    def _all_load(self, update: Update) -> bool:
        """Wait until all targets may load it, where they do so together; False: none
        does, or it is time to stop."""
        pending = update.adopt(whole=True)
        while not self._stop.is_set():
            self._raise_if_gone()
            try:
                pending.wait(timeout=BEAT_S)
            except TimeoutError:
                continue
            except errors.NotAdopted as error:
                logger.warning("version %d is not loaded: %s", update.version, error)
                self._engine.drop(update, error.message, self._load_timeout_s)
                return False
            return True
        return False

    def _refuse(self, update: Update, misfit: errors.SyncError | str) -> None:
        logger.warning("version %d is refused, the server goes on without it: %s", update.version, misfit)
        update.refuse(misfit)

    def _bring(self, update: Update, latest: int) -> None:
        """Load the version, or refuse it."""
        try:
            self._refuse_older(update.version, latest)
            self._load(update)
            self._fitting = update.manifest.hash
        except Refused as error:
            self._refuse(update, error)

    def _refuse_older(self, version: int, latest: int) -> None:
        """:raises Refused: the engine has a newer version, and not from this follower.

        A server that has outlived its run has a number of that one, which tells
        nothing: it may be above ``latest``, the newest of this run, before the first
        load.
        """
        said = self._engine.version()
        if said is not None and said > version and (self._fitting or said <= latest):
            text = f"{self._engine.name} has version {said} already: another program loads versions into it"
            raise Refused(text, phase="load", hint="let one follower alone load versions into a server")

    def _load(self, update: Update) -> None:
        """Pause, load, forget, resume.

        :raises Refused: the server goes on with the version before.
        """
        engine, gate, mode, began = self._engine, self._gate, self._plan.mode, time.monotonic()
        limit_s = self._load_timeout_s
        try:
            engine.pause(mode, LOAD_TIMEOUT_S if mode == "wait" else limit_s)
            paused = time.monotonic()
            self._replace(update, limit_s)
            loaded = time.monotonic()
            engine.reset_caches(limit_s)
            if (said := engine.version()) not in (None, update.version):
                raise _lost(f"{engine.name} says that it has version {said}, and not {update.version}")
            engine.resume(limit_s)
        except Refused:
            engine.resume(limit_s)
            raise
        except BaseException:
            if gate is not None:
                gate.shut()
            raise
        now = time.monotonic()
        pausing = paused if mode == "wait" else began  # that mode serves until its requests are done
        if engine.pauses:
            self._serves_until = now + (now - pausing) * self._plan.min_serving / (1 - self._plan.min_serving)
            if gate is not None:
                gate.paused(now - pausing)
        self._longest_s = max(self._longest_s, now - paused)
        self._open_gate(update.version)
        logger.info(
            "version %d is served: paused in %.4f s, loaded in %.4f s, resumed in %.4f s",
            *(update.version, paused - began, loaded - paused, now - loaded),
        )

    def _replace(self, update: Update, limit_s: float) -> None:
        """Load the version, and once more if that fails."""
        try:
            self._engine.load(update, limit_s)
            self._prove(update, limit_s)
        except Refused:
            raise
        except errors.ReplicasError as error:
            self._raise_if_gone()
            logger.warning("version %d did not load, once more: %s", update.version, error)
            if self._gate is not None:
                self._gate.shut()
            try:
                self._engine.load(update, limit_s)
            except Refused as again:  # what it is as before is what the first load has left
                raise _lost(again.message) from again
            self._prove(update, limit_s)

    def _prove(self, update: Update, limit_s: float) -> None:
        """:raises replicas.errors.SyncError: the engine has something else."""
        when, manifest = self._plan.verify_load, update.manifest.hash
        if when == "never" or (when == "first" and manifest == self._proven):
            return
        found = self._engine.checksum(update, limit_s)
        if found:
            raise errors.SyncError(
                f"version {update.version} is not what {self._engine.name} has loaded: {found}",
                version=update.version,
                phase="load",
                hint="see the server's own log",
            )
        self._proven = manifest
        if found is None:
            logger.info("what %s has loaded of version %d cannot be compared", self._engine.name, update.version)

    def _open_gate(self, version: int) -> None:
        """Let requests in, from the first version on."""
        gate = self._gate
        if gate is None:
            return
        if not gate.version:
            self._engine.warm_up(LOAD_TIMEOUT_S)
        gate.open(version)


def _lost(reason: str) -> errors.SyncError:
    return errors.SyncError(reason, phase="load", hint="see the server's own log")
