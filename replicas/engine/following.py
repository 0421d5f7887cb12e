"""The follower of one inference server: it loads each committed version of a channel.

Theory of operation
===================

One version after the other is loaded by ``pause, load, reset the caches, resume``. Only
this server is paused, only for its own load, and only when the version is on this host
and verified. If the manifest differs from that of the last good version, the version is
*checked* first, without a pause: if it does not fit, it is refused, and the server
continues with its current version. A load that fails nevertheless leaves the server
paused and its gate shut, as its model may be a mixture of two versions. The load is
repeated once as a whole; then the follower reports the failure and ends, and its
supervisor restarts the server. The follower never resumes a server that it has not
paused. It refuses a version older than the engine's own, if the engine reports one.

On a channel with ``adopt_together`` the version is loaded when all targets have
reported that they can load it; this target reports so after the check.

A load counts when the engine's own tensors have been compared with the version
(``verify_load``); a difference is a failed load.

Between two loads the server serves for a share of the time (``min_serving``): versions
that come faster than it loads them would otherwise leave no time to compute.

Meanwhile a thread asks the engine for its health. When the engine is gone, the thread
aborts the current verb, so that no verb hangs.
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
from replicas.engine.protocol import DemandGate, Engine, GateLike, Identity, PauseMode, Refused, VerifyLoad

if TYPE_CHECKING:
    from replicas.channel import Channel, Update

logger = logging.getLogger("replicas.engine")

START_TIMEOUT_S = 900.0
JOIN_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 300.0
USUAL_LOAD_MIN_S = 20.0
USUAL_LOADS = 10
"""A load may take this many times as long as the longest before it."""
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
    :param every: least difference between the numbers of a loaded version and of the
        next one. Of several that satisfy it, only the newest is loaded. Default: 1.
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
    """The arguments of :func:`follow` that say when and how to load."""

    mode: PauseMode = "keep"
    every: int = 1
    min_serving: float = MIN_SERVING
    verify_load: VerifyLoad = "first"

    def __post_init__(self) -> None:
        """Raise UsageError for a field that is not valid."""
        for what, given, known in (("mode", self.mode, PauseMode), ("verify_load", self.verify_load, VerifyLoad)):
            if given not in get_args(known):
                names = ", ".join(f'"{name}"' for name in get_args(known))
                raise errors.UsageError(f"follow: {what} cannot be {given!r}", hint=f"pass one of {names}")
        if self.every < 1:
            raise errors.UsageError(f"follow: every must be 1 or more, not {self.every}", hint="1 loads each version")
        if not 0 <= self.min_serving < 1:
            text = f"follow: min_serving must be from 0 to below 1, not {self.min_serving}"
            raise errors.UsageError(text, hint="0.5 serves for as long as each load takes")


class _Watch:
    """Context manager: a thread aborts the engine's verbs when the engine is gone, or
    when ``stop`` is set before the engine is up."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        """Store the arguments; the thread starts in :meth:`__enter__`.

        :param engine: asked for its health; aborted once if it is gone, and closed at
            the end.
        :param stop: if it is set before the engine is up, the wait for the engine is
            aborted.
        """
        self._engine, self._stop = engine, stop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas-engine-watch", daemon=True)
        self.is_starting = True

    def __enter__(self) -> Self:
        """Start the watching thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine; end the thread, for which it waits 0.5 s at most."""
        self._over.set()
        self._engine.close()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        """On the thread: ask for the engine's health four times a second, until the
        exit.

        When the engine is gone, or when ``stop`` is set before it is up, call its
        ``abort`` once, and return.
        """
        while not self._over.wait(BEAT_S / 2):
            stopped = "it was stopped" if self.is_starting and self._stop.is_set() else ""
            if reason := stopped or self._engine.health():
                self._engine.abort(reason)
                return


class Follower:
    """Loads the versions of one channel into one server that is up."""

    def __init__(self, engine: Engine, plan: Plan, gate: GateLike | None, stop: threading.Event) -> None:
        """Store the arguments; :meth:`run` does the work.

        :param engine: the verbs of a server that is up.
        :param plan: when and how to load.
        :param gate: opened with each loaded version; None: there is no gate.
        :param stop: ends :meth:`run` when it is set.
        """
        self._engine, self._plan, self._gate, self._stop = engine, plan, gate, stop
        self._longest_s = self._serves_until = 0.0
        self._fitting = self._proven = ""

    def run(self, name: str, identity: dict[str, Any]) -> None:
        """Join the channel ``name``, load its versions, in this thread, until ``stop``
        is set, and leave it, also after an error. The engine stays open.

        :param identity: further arguments of :func:`replicas.join`, also for the
            server's own workers.
        :raises replicas.errors.SyncError: the server is gone, or a load failed twice.
        """
        engine = self._engine
        world_size, info = engine.workers + 1, {"url": engine.url} if engine.url else {}
        with replicas.join(name, rank=0, world_size=world_size, info=info, **identity) as channel:
            known = Identity(channel=name, replica=channel.member.replica, world_size=world_size, join=identity)
            engine.attach(known, JOIN_TIMEOUT_S)
            while (update := self._next(channel)) is not None:
                try:
                    loads = self._fits(update) and self._wait_for_lockstep(update)
                except BaseException as error:
                    with contextlib.suppress(errors.UsageError):  # already refused, as no target loads it
                        update.failed(error)
                    raise
                if self._stop.is_set():
                    return
                if loads:
                    with update:
                        self._load_or_refuse(update, channel.latest)

    def _raise_if_gone(self) -> None:
        """Ask for the engine's health; raise SyncError if it is gone."""
        if reason := self._engine.health():
            raise _lost(reason)

    def _next(self, channel: Channel) -> Update | None:
        """Wait for the next version to load.

        Return its update, or None once ``stop`` is set.

        First the server serves for its share of the time (``min_serving``). There is no
        deadline. Meanwhile the gate is told the channel's labels.

        :raises replicas.errors.SyncError: the engine is gone.
        :raises replicas.errors.ReplicasError: the membership of the channel has ended.
        """
        while (rest_s := self._serves_until - time.monotonic()) > 0 and not self._stop.wait(min(rest_s, BEAT_S)):
            self._raise_if_gone()
        served = channel.version
        pending = channel.receive(at_least=served + self._plan.every if served else 1)
        while not self._stop.is_set():
            self._raise_if_gone()
            if isinstance(self._gate, DemandGate):
                self._gate.set_labels(channel.versions.labels)
            with contextlib.suppress(TimeoutError):
                return pending.wait(timeout=BEAT_S)
        return None

    @property
    def _load_timeout_s(self) -> float:
        """Seconds for each verb of the next load: 10 times the longest load so far, but
        20 at least; 300 before the first load."""
        return max(USUAL_LOAD_MIN_S, USUAL_LOADS * self._longest_s) if self._longest_s else LOAD_TIMEOUT_S

    def _fits(self, update: Update) -> bool:
        """Return True if the engine can load the version; load nothing.

        If not, report it to the channel as refused (which ends the update), and return
        False. The engine is asked unless names, shapes and dtypes are those of the last
        loaded version.
        """
        if update.manifest.hash == self._fitting:
            return True
        misfit = self._engine.check(update, self._load_timeout_s)
        if misfit:
            self._refuse(update, misfit)
        return not misfit

    def _wait_for_lockstep(self, update: Update) -> bool:
        """Report that this target can load the version, and wait for the decision.

        The coordinator decides, within the channel's deadline. On a channel without
        ``adopt_together`` there is no wait.

        :returns: True if the version is to be loaded now. False if no target loads it
            (the engine then drops it), or if ``stop`` was set.
        :raises replicas.errors.SyncError: the engine is gone.
        """
        pending = update.adopt(whole=True)
        while not self._stop.is_set():
            self._raise_if_gone()
            try:
                pending.wait(timeout=BEAT_S)
            except TimeoutError:
                continue
            except errors.NotAdopted as error:
                logger.warning("not loading version %d: %s", update.version, error)
                self._engine.drop(update, error.message, self._load_timeout_s)
                return False
            return True
        return False

    def _refuse(self, update: Update, misfit: errors.SyncError | str) -> None:
        """Report to the channel that this target refuses the version and keeps its own.

        Log it.

        :param misfit: the reason.
        """
        logger.warning("refusing version %d, and serving the one before: %s", update.version, misfit)
        update.refuse(misfit)

    def _load_or_refuse(self, update: Update, latest: int) -> None:
        """Load the version into the server.

        If the engine refuses it, report that to the channel, and raise nothing: the
        server then continues with its version.

        :param latest: number of the channel's newest version.
        :raises replicas.errors.ReplicasError: the load failed; the gate is shut, and
            the server left paused.
        """
        try:
            self._refuse_older(update.version, latest)
            self._load(update)
            self._fitting = update.manifest.hash
        except Refused as error:
            self._refuse(update, error)

    def _refuse_older(self, version: int, latest: int) -> None:
        """Raise Refused if the engine reports a newer version than ``version``.

        That version must come from another program, which loads into the same server.
        Before the first load, a number above ``latest`` (the newest of this run) is
        ignored: the server has it from an earlier run.
        """
        said = self._engine.version()
        if said is not None and said > version and (self._fitting or said <= latest):
            text = f"{self._engine.name} has version {said} already: another program loads versions into it"
            raise Refused(text, phase="load", hint="let one follower alone load versions into a server")

    def _load(self, update: Update) -> None:
        """Pause the engine, load the version, reset the caches, resume, open the gate.

        Each step blocks, and has a time limit. Record how long the load and the pause
        took, for the limit and the time of the next load.

        :raises Refused: the model is unchanged; the server was resumed with it.
        :raises replicas.errors.ReplicasError: any other failure. The gate is shut then,
            and the server left paused; only a failed warm-up comes after the resume.
        """
        engine, gate, mode, began = self._engine, self._gate, self._plan.mode, time.monotonic()
        limit_s = self._load_timeout_s
        if isinstance(gate, DemandGate):
            gate.load(update.version)
        try:
            engine.pause(mode, LOAD_TIMEOUT_S if mode == "wait" else limit_s)
            paused = time.monotonic()
            self._replace(update, limit_s)
            loaded = time.monotonic()
            engine.reset_caches(limit_s)
            if (said := engine.version()) not in (None, update.version):
                raise _lost(f"{engine.name} reports version {said} instead of {update.version}")
            engine.resume(limit_s)
        except Refused:
            engine.resume(limit_s)
            if isinstance(gate, DemandGate):
                gate.load(0)
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
        """Load the version into the paused engine and verify it.

        After a failure do both again.

        Before the second attempt the gate is shut. It stays shut after a success: the
        caller opens it when the engine has resumed.

        :param limit_s: seconds for each call of the engine (load or comparison), in
            each attempt.
        :raises Refused: the first load was refused: the model is unchanged.
        :raises replicas.errors.SyncError: the second attempt failed, too, or the engine
            is gone. The model may be a mixture of versions.
        """
        try:
            self._engine.load(update, limit_s)
            self._prove(update, limit_s)
        except Refused:
            raise
        except errors.ReplicasError as error:
            self._raise_if_gone()
            logger.warning("loading version %d again, as it failed to load: %s", update.version, error)
            if self._gate is not None:
                self._gate.shut()
            try:
                self._engine.load(update, limit_s)
            except Refused as again:  # unchanged since the first load, which failed
                raise _lost(again.message) from again
            self._prove(update, limit_s)

    def _prove(self, update: Update, limit_s: float) -> None:
        """Compare the engine's tensors with the version if ``verify_load`` asks for it
        now.

        An engine that cannot compare is logged, and passes.

        :param limit_s: seconds for the comparison.
        :raises replicas.errors.SyncError: they differ.
        """
        when, manifest = self._plan.verify_load, update.manifest.hash
        if when == "never" or (when == "first" and manifest == self._proven):
            return
        found = self._engine.checksum(update, limit_s)
        if found:
            raise errors.SyncError(
                f"{self._engine.name} has loaded other tensors than version {update.version}: {found}",
                version=update.version,
                phase="load",
                hint="see the server's own log",
            )
        self._proven = manifest
        if found is None:
            logger.info(
                "%s cannot compare its tensors with version %d: not verified", self._engine.name, update.version
            )

    def _open_gate(self, version: int) -> None:
        """Open the gate with this version, if there is a gate.

        Before its first version, first wait until the engine has warmed up, for 300 s
        at most.

        :raises replicas.errors.SyncError: the engine is gone; the gate is not opened.
        """
        gate = self._gate
        if gate is None:
            return
        if not gate.version:
            self._engine.warm_up(LOAD_TIMEOUT_S)
        gate.open(version)


def _lost(reason: str) -> errors.SyncError:
    """Return (do not raise) a SyncError with this reason, for a server that is gone."""
    return errors.SyncError(reason, phase="load", hint="see the server's own log")
