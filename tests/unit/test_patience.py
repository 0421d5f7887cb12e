"""The allowance for pauses of this process, as all that watch others have it."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from replicas.common.patience import PAUSE_S, Patience, PauseClock, Silence
from replicas.integrations import engine_server
from replicas.integrations.engine_server import HEALTH_TIMEOUT_S, EngineServer, Health
from replicas.supervisor.logs.pump_watcher import STUCK_S, PumpWatcher
from replicas.supervisor.shim.orders import NodeSpec


def test_a_late_look_is_a_pause_and_a_look_a_little_late_is_none() -> None:
    clock = PauseClock(10.0)
    assert clock.look(9.0) == clock.look(10.0) == clock.look(10.0 + PAUSE_S) == 0.0
    assert clock.look(17.0) == 7.0
    clock.due = 18.0
    assert clock.look(18.0) == 0.0
    assert PauseClock(1.0, slack_s=0.25).look(1.5) == 0.5


def test_what_lasts_is_counted_from_the_first_look_that_found_it() -> None:
    patience = Patience(0.0, 1.0)
    assert [patience.lasts(float(now), so) for now, so in ((1, False), (2, True), (3, True), (4, True))] == [0, 0, 1, 2]
    assert patience.lasts(5.0, False) == 0.0
    assert [patience.lasts(now, True) for now in (6.0, 7.0)] == [0.0, 1.0]


def test_what_lasts_is_counted_anew_after_a_pause() -> None:
    patience = Patience(0.0, 1.0)
    assert [patience.lasts(now, True) for now in (1.0, 2.0, 3.0 + PAUSE_S)] == [0.0, 1.0, 2.0 + PAUSE_S]
    assert [patience.lasts(now, True) for now in (60.0, 61.0, 62.0)] == [0.0, 1.0, 2.0]


@pytest.fixture
def pump(tmp_path: Path) -> Iterator[PumpWatcher]:
    """A watcher whose pump reads nothing; a line waits for it."""
    spec = NodeSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), {}, str(tmp_path), str(tmp_path), 1.0, "nonce")
    with selectors.DefaultSelector() as selector, subprocess.Popen(["sleep", "60"]) as process:
        watcher = PumpWatcher(spec, selector, None, lambda _: None)
        watcher._life.start(0.0)
        watcher._life.ready()
        watcher._pidfd = os.pidfd_open(process.pid)
        os.write(watcher.streams("rank 0")[0], b"a line\n")
        yield watcher
        watcher._forget()
        process.kill()
        for pipe in (*watcher._readers(), *watcher.streams("rank 0")):
            os.close(pipe)


def test_a_silence_counts_from_the_oldest_question_and_anew_after_a_pause() -> None:
    silence = Silence(1.0)
    assert silence.lasts(1.0) == 0.0
    silence.due = 2.0
    silence.ask(1.0)
    silence.ask(1.5)
    assert silence.lasts(2.0) == 1.0
    silence.due = 3.0
    assert silence.lasts(10.0) == 0.0, "a pause"
    silence.due = 11.0
    assert silence.lasts(11.0) == 1.0
    silence.answered()
    assert not silence.asked
    assert silence.lasts(11.0) == 0.0


def test_a_pump_is_not_killed_for_a_pause_of_its_shim(pump: PumpWatcher, capfd: pytest.CaptureFixture[str]) -> None:
    def looks(start: float, seconds: int) -> str:
        for step in range(seconds + 1):
            pump.look(start + step)
        return capfd.readouterr().err

    assert not looks(100.0, int(STUCK_S) - 1)
    assert not looks(200.0, int(STUCK_S) - 1), "time in which the shim did not run counts"
    assert "the log pump does nothing for 3 s" in looks(300.0, int(STUCK_S) + 1)


class Engine:
    """A server that answers until it hangs, and the clock by which it is watched.

    :ivar pauses: of the watching process, by when they begin, in seconds.
    """

    def __init__(self, hangs_at: float, pauses: dict[float, float]) -> None:
        self.now, self._hangs_at, self._pauses = 0.0, hangs_at, pauses
        self.given_up_at: float | None = None

    def monotonic(self) -> float:
        return self.now

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self._pauses if at <= self.now]:
            self.now += self._pauses.pop(at)

    def wait(self, seconds: float) -> bool:
        self._pass(seconds)
        return self.now > 300.0

    def answers(self, path: str) -> bool:
        hangs = self.now >= self._hangs_at
        self._pass(HEALTH_TIMEOUT_S if hangs else 0.01)
        return not hangs

    def give_up(self, reason: str) -> None:
        self.given_up_at = self.now


@pytest.mark.parametrize(
    ("hangs_at", "pauses", "given_up_s"),
    [
        (1000.0, {}, None),
        (1000.0, {20.5: 3600.0, 70.5: 40.0}, None),
        (100.0, {}, (115.0, 122.0)),
        (100.0, {100.5: 30.0}, (145.0, 157.0)),  # in the wait between two looks, or in a request
        (100.0, {104.0: 30.0}, (149.0, 161.0)),
        (100.0, {112.0: 30.0}, (157.0, 169.0)),
    ],
)
def test_a_server_is_not_given_up_for_a_pause_of_its_follower(
    monkeypatch: pytest.MonkeyPatch, hangs_at: float, pauses: dict[float, float], given_up_s: tuple[float, float] | None
) -> None:
    engine = Engine(hangs_at, pauses)
    monkeypatch.setattr(engine_server, "time", engine)
    health = Health(cast("EngineServer", engine), lambda: "", {"/health": 15.0}, while_loading=())
    monkeypatch.setattr(health, "_over", engine)
    health._watch()
    if given_up_s is None:
        assert engine.given_up_at is None
    else:
        assert engine.given_up_at is not None
        assert given_up_s[0] <= engine.given_up_at <= given_up_s[1]
        assert health.reason.startswith("the server has not answered /health for ")
