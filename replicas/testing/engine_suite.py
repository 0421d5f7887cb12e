"""Scenes that every :class:`replicas.engine.Engine` must pass.

::

    @pytest.mark.parametrize("scene", engine_suite.SCENES)
    def test_my_engine(scene):
        with my_server() as server:
            trial = Trial(connect=..., weights=..., answer=..., kill=...)
            engine_suite.play(scene, trial)

Each scene runs :func:`replicas.engine.follow` on the engine, with a trainer, in a run
without processes (:class:`replicas.testing.FakeRun`). The server is a real one or a
stand-in, new for each scene. A scene that fails raises AssertionError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from replicas import errors
from replicas.engine import Engine, follow
from replicas.testing.fake_run import FakeRun

__all__ = ["SCENES", "Trial", "play"]

LIMIT_S = 60.0
VERBS = ("pause", "load", "reset_caches", "resume")
"""The verbs called for each version, in this order."""
_LOGGED = (*VERBS, "check", "checksum")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A new server, and the functions by which a scene uses it.

    :ivar connect: makes an engine of the server; each follower gets its own.
    :ivar weights: makes a version that fits the server's model: tensors by name, all
        filled with one value.
    :ivar answer: asks the server; returns the value with which it computes, None while
        it is paused, and raises for a mixture. Called before and after each version: an
        answer through the server's caches reveals stale ones.
    :ivar kill: ends the server immediately, as SIGKILL does.
    :ivar limit_s: limit of each wait in a scene, in seconds; default 60.
    """

    connect: Callable[[], Engine]
    weights: Callable[[float], Mapping[str, torch.Tensor]]
    answer: Callable[[], float | None]
    kill: Callable[[], None]
    limit_s: float = LIMIT_S


class _Died(BaseException):
    """Raised inside a call of the engine, to have the follower end as if it died."""


class _Watched:
    """Wraps an engine, and records the calls of its verbs (``load``, ``pause``, ...).

    :ivar calls: names of the verbs, in order.
    :ivar before, after: called around a verb, by its name; may raise.
    """

    def __init__(self, engine: Engine, calls: list[str]) -> None:
        """Wrap ``engine``: each call of one of its verbs (the methods of
        :class:`replicas.engine.Engine`) appends the verb's name to ``calls``.
        """
        self._engine, self.calls = engine, calls
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self._under_way = 0

    def __getattr__(self, name: str) -> Any:
        """Return the engine's attribute; a verb is wrapped by :meth:`_call`."""
        found = getattr(self._engine, name)
        return partial(self._call, name, found) if name in _LOGGED else found

    def _call(self, name: str, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Append ``name`` to ``calls``, and call the engine's method ``verb``; before
        and after it call the functions of this name that the scene has put into
        ``before`` and ``after``. Return the result. Assert that no other method is
        under way."""
        self.calls.append(name)
        self._under_way += 1
        assert self._under_way == 1, f"{name} is called during another verb"
        try:
            self.before.get(name, lambda: None)()
            found = verb(*arguments)
            self.after.get(name, lambda: None)()
        finally:
            self._under_way -= 1
        return found


class _Gate:
    """Stands in for a server's gate, which admits requests; records its calls."""

    def __init__(self) -> None:
        """Begin shut, before any version was opened."""
        self.versions: list[int] = []
        self.is_open = False

    @property
    def version(self) -> int:
        """The version of the last :meth:`open`; 0 before."""
        return self.versions[-1] if self.versions else 0

    def open(self, version: int) -> None:
        """Record that the gate is open, with this version; no request is involved."""
        self.versions.append(version)
        self.is_open = True

    def shut(self) -> None:
        """Record that the gate is shut."""
        self.is_open = False

    def paused(self, seconds: float) -> None:
        """Assert that a load has not paused the server for a negative time; record
        nothing."""
        assert seconds >= 0


class _Stage:
    """A trainer, a server, and the followers that feed the server, in one scene.

    :ivar error: how the last follower ended; None: it was stopped.
    """

    def __init__(self, trial: Trial, run: FakeRun) -> None:
        """Join the channel of ``run`` as its trainer; start no follower before
        :meth:`following`."""
        self.trial, self.run = trial, run
        self.trainer = run.join("trainer")
        self.gate = _Gate()
        self.calls: list[str] = []
        self.error: BaseException | None = None

    @contextmanager
    def following(self, **options: Any) -> Iterator[_Watched]:
        """Context manager: run a follower of a new engine in a thread; on leaving, stop
        and join it, and assert that it ends. The value is the engine, with recorded
        calls; :attr:`error` then says how the follower ended.

        :param options: arguments of :func:`replicas.engine.follow`, which override
            those that this method sets.
        """
        engine: Any = _Watched(self.trial.connect(), self.calls)
        stop, self.error = threading.Event(), None
        where = {"endpoint": self.run.endpoint, "token": self.run.token, "group": "rollout", "replica": 0}
        given: dict[str, Any] = {"gate": self.gate, "stop": stop, "min_serving": 0.0, **where, **options}

        def work() -> None:
            """Thread: follow the channel until stopped; keep the error that ended
            it."""
            try:
                follow(engine, "policy", verify_load="always", **given)
            except BaseException as error:  # noqa: BLE001  # the scene checks it
                self.error = error

        self.thread = threading.Thread(target=work, name="replicas-engine-suite", daemon=True)
        self.thread.start()
        try:
            yield engine
        finally:
            stop.set()
            self.thread.join(self.trial.limit_s)
        assert not self.thread.is_alive(), "the follower does not end"

    def publish(self, value: float, more: Mapping[str, torch.Tensor] | None = None) -> int:
        """Publish tensors filled with this value, and wait for the commit.

        :param more: further tensors of the version.
        :returns: the version's number.
        """
        sent = {**self.trial.weights(value), **(more or {})}
        return self.trainer.publish(sent, new_manifest=True).wait(self.trial.limit_s).version

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until the condition is true; at the trial's limit, raise AssertionError.

        :param what: what is waited for, for the error.
        """
        until = time.monotonic() + self.trial.limit_s
        while not condition():
            assert time.monotonic() < until, (
                f"not within {self.trial.limit_s:g} s: {what}; {self.error!r}, {self.calls}"
            )
            time.sleep(0.005)

    def wait_until_served(self, value: float) -> None:
        """Wait until the gate is open with the newest version, and check that the
        server computes with this value."""
        newest = self.trainer.latest
        self.until(lambda: self.gate.is_open and self.gate.version == newest, f"version {newest} is served")
        found = self.trial.answer()
        assert found == value, f"the server computes with {found}, and version {newest} is {value}"

    def ends(self) -> BaseException | None:
        """Wait until the follower ends unasked; return the error that ended it, or
        None. Do not stop it; after the trial's limit raise AssertionError."""
        self.until(lambda: not self.thread.is_alive(), "the end of the follower")
        return self.error


def play(scene: str, trial: Trial) -> None:
    """Run one of :data:`SCENES`, by its name, with the trial's server.

    Blocks, for less than a second with a fast engine.

    :raises AssertionError: the engine does not do what it should, or a wait has taken
        longer than the trial's limit.
    """
    # as many slots as a channel needs whose engine may hang in a load
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": 3}}) as run:
        stage = _Stage(trial, run)
        SCENES[scene](stage)
        paused = 0
        for call in stage.calls:
            paused = {"pause": 1, "resume": paused - 1}.get(call, paused)
            assert paused >= 0, f"resumed an engine that was not paused: {stage.calls}"


def _serves_each_version(stage: _Stage) -> None:
    """Scene: publish three versions, each when the one before is served; assert that
    the follower calls the verbs in order, and that the server computes with each
    version, and with the last one after the follower was stopped."""
    with stage.following():
        for value in (1.0, 2.0, 3.0):
            stage.publish(value)
            stage.wait_until_served(value)
    assert stage.error is None
    assert [call for call in stage.calls if call in VERBS] == [*VERBS] * 3
    assert stage.trial.answer() == 3.0, "a follower that is stopped leaves its server serving"


def _a_load_fails_once(stage: _Stage, when: str) -> None:
    """Scene: raise one error in a load, ``when``: "before" or "after" the engine has
    loaded; assert that the follower loads again, and that the version is served."""
    with stage.following() as engine:
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        failures = iter([errors.SyncError("it fails once", hint="")])
        getattr(engine, when)["load"] = partial(_raise_next, failures)
        stage.publish(2.0)
        stage.wait_until_served(2.0)
    assert stage.error is None
    assert [call for call in stage.calls if call in VERBS][4:] == ["pause", "load", "load", "reset_caches", "resume"]


def _raise_next(failures: Iterator[BaseException]) -> None:
    """Raise the iterator's next error, and so consume it; do nothing when none is
    left."""
    for error in failures:
        raise error


def _a_load_fails_for_good(stage: _Stage) -> None:
    """Scene: have all loads of a version fail; assert that after two the follower ends
    with the error, the server stays paused, the gate shut, and the trainer is told."""
    with stage.following() as engine:
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        failures = iter([errors.SyncError("it always fails", hint="") for _ in range(9)])
        engine.after["load"] = partial(_raise_next, failures)
        stage.publish(2.0)
        assert isinstance(stage.ends(), errors.SyncError)
    assert stage.calls[-3:].count("load") == 2
    assert stage.calls.count("resume") == 1, "it is left paused"
    assert not stage.gate.is_open
    assert stage.trial.answer() is None
    told = stage.trainer.publish(stage.trial.weights(3.0)).wait(stage.trial.limit_s).not_loaded
    assert "it always fails" in str(told), "the trainer is not told that the version did not load"


def _does_not_fit(stage: _Stage, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    """Scene: publish a version with one wrong tensor; assert that it is refused without
    a pause of the server, that the trainer is told, and the next version is served.

    :param change: takes name and tensor of one tensor; returns a wrong name or tensor.
    """
    with stage.following():
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        calls = len(stage.calls)
        name, tensor = next(iter(stage.trial.weights(2.0).items()))
        bad = dict([change(name, tensor)])
        others = {one: value for one, value in stage.trial.weights(2.0).items() if one != name}
        version = stage.trainer.publish({**others, **bad}, new_manifest=True).wait(stage.trial.limit_s).version
        told = ""
        try:
            stage.trainer.loaded(version, deadline=stage.trial.limit_s).wait(2 * stage.trial.limit_s)
        except errors.ReplicasError as error:
            told = error.message
        assert "refused" in told, f"the version is not refused: {told or 'it was loaded'}"
        assert name in told, f"the trainer is not told which tensor does not fit: {told}"
        assert "pause" not in stage.calls[calls:], "the server was paused for a version that does not fit"
        assert stage.trial.answer() == 1.0
        stage.publish(3.0)
        stage.wait_until_served(3.0)
    assert stage.error is None


def _killed(stage: _Stage, verb: str) -> None:
    """Scene: publish a version, and kill the server just before the follower calls the
    engine's method ``verb`` (its name, such as "load"); assert that the follower ends
    with a SyncError, and never opens the gate with that version."""
    with stage.following() as engine:
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        engine.before[verb] = stage.trial.kill
        # other names, so that the version is checked; the server dies before the result
        stage.publish(2.0, {"another": torch.ones(1)} if verb == "check" else None)
        ended = stage.ends()
        assert isinstance(ended, errors.SyncError), f"the server was killed, and the follower ends with {ended!r}"
    if verb != "check":
        assert not stage.gate.is_open
    assert stage.gate.version == 1


def _the_follower_dies(stage: _Stage, verb: str) -> None:
    """Scene: publish a version, and let the follower die right after it has called the
    engine's method ``verb`` (its name, such as "load"); assert that with a second
    follower the server serves that version, and the next one."""
    with stage.following() as engine:
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        engine.after[verb] = partial(_raise_next, iter([_Died()]))
        stage.publish(2.0)
        assert isinstance(stage.ends(), _Died)
    with stage.following():
        stage.until(lambda: stage.trial.answer() == 2.0, "the next follower has the server serve again")
        stage.publish(3.0)
        stage.wait_until_served(3.0)
    assert stage.error is None


def _versions_are_faster_than_loads(stage: _Stage) -> None:
    """Scene: publish eight versions, seven of them during the first load; assert that
    the last one is served, and that others were skipped."""
    with stage.following() as engine:
        go = threading.Event()
        engine.before["load"] = partial(go.wait, stage.trial.limit_s)
        stage.publish(1.0)
        stage.until(lambda: "load" in stage.calls, "a load")
        for value in range(2, 9):
            stage.publish(float(value))
        go.set()
        stage.wait_until_served(8.0)
    assert stage.gate.versions == sorted(set(stage.gate.versions))
    assert len(stage.gate.versions) < 8, "each was loaded, though newer ones were there"


def _it_is_watched(stage: _Stage) -> None:
    """Scene: kill the server between loads, and publish one more version; assert that
    the follower ends with a SyncError."""
    with stage.following():
        stage.publish(1.0)
        stage.wait_until_served(1.0)
        stage.trial.kill()
        stage.publish(2.0)  # the trainer goes on
        assert isinstance(stage.ends(), errors.SyncError)


SCENES: Mapping[str, Callable[[_Stage], None]] = {
    "it serves each version": _serves_each_version,
    "a load fails once, before": partial(_a_load_fails_once, when="before"),
    "a load fails once, after": partial(_a_load_fails_once, when="after"),
    "a load fails for good": _a_load_fails_for_good,
    "a name does not fit": partial(_does_not_fit, change=lambda name, tensor: (f"{name}_of_nobody", tensor)),
    "a shape does not fit": partial(_does_not_fit, change=lambda name, tensor: (name, torch.cat([tensor, tensor]))),
    **{f"the server is killed in {verb}": partial(_killed, verb=verb) for verb in ("check", *VERBS)},
    **{f"the follower dies after {verb}": partial(_the_follower_dies, verb=verb) for verb in VERBS[:3]},
    "versions are faster than loads": _versions_are_faster_than_loads,
    "the server is killed between loads": _it_is_watched,
}
"""The scenes by their names."""
