"""The allowance for pauses of this process, as all that watch others have it.

Covers: common/patience.py.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.common.patience import PAUSE_S, Patience, PauseClock, Silence
from replicas.supervisor.shim.pump_watcher import STUCK_S, PumpWatcher
from replicas.supervisor.wire.orders import PartSpec


def test_a_late_look_is_a_pause_and_a_look_a_little_late_is_none() -> None:
    clock = PauseClock(10.0)
    assert clock.measure_pause(9.0) == clock.measure_pause(10.0) == clock.measure_pause(10.0 + PAUSE_S) == 0.0
    assert clock.measure_pause(17.0) == 7.0
    clock.due = 18.0
    assert clock.measure_pause(18.0) == 0.0
    assert PauseClock(1.0, slack_s=0.25).measure_pause(1.5) == 0.5


def test_what_lasts_is_counted_from_the_first_look_that_found_it() -> None:
    patience = Patience(0.0, 1.0)
    assert [patience.measure_duration(float(now), so) for now, so in ((1, False), (2, True), (3, True), (4, True))] == [
        0,
        0,
        1,
        2,
    ]
    assert patience.measure_duration(5.0, False) == 0.0
    assert [patience.measure_duration(now, True) for now in (6.0, 7.0)] == [0.0, 1.0]


def test_what_lasts_is_counted_anew_after_a_pause() -> None:
    patience = Patience(0.0, 1.0)
    assert [patience.measure_duration(now, True) for now in (1.0, 2.0, 3.0 + PAUSE_S)] == [0.0, 1.0, 2.0 + PAUSE_S]
    assert [patience.measure_duration(now, True) for now in (60.0, 61.0, 62.0)] == [0.0, 1.0, 2.0]


@pytest.fixture
def pump(tmp_path: Path) -> Iterator[PumpWatcher]:
    """A watcher whose pump reads nothing; a line waits for it."""
    spec = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), {}, str(tmp_path), str(tmp_path), 1.0, "nonce")
    with selectors.DefaultSelector() as selector, subprocess.Popen(["sleep", "60"]) as process:
        watcher = PumpWatcher(spec, selector, None, lambda _: None)
        watcher._life.start(0.0)
        watcher._life.ready()
        pidfd = watcher._pidfd = os.pidfd_open(process.pid)
        os.write(watcher.pipes.streams("rank 0")[0], b"a line\n")
        yield watcher
        os.close(pidfd)
        process.kill()
        for pipe in (*watcher.pipes.readers, *watcher.pipes.streams("rank 0")):
            os.close(pipe)


def test_a_silence_counts_from_the_oldest_question_and_anew_after_a_pause() -> None:
    silence = Silence(1.0)
    assert silence.measure_silence(1.0) == 0.0
    silence.due = 2.0
    silence.ask(1.0)
    silence.ask(1.5)
    assert silence.measure_silence(2.0) == 1.0
    silence.due = 3.0
    assert silence.measure_silence(10.0) == 0.0, "a pause"
    silence.due = 11.0
    assert silence.measure_silence(11.0) == 1.0
    silence.answered()
    assert not silence.asked
    assert silence.measure_silence(11.0) == 0.0


def test_a_pump_is_not_killed_for_a_pause_of_its_shim(pump: PumpWatcher, capfd: pytest.CaptureFixture[str]) -> None:
    def looks(start: float, seconds: int) -> str:
        for step in range(seconds + 1):
            pump.kill_if_stuck(start + step)
        return capfd.readouterr().err

    assert not looks(100.0, int(STUCK_S) - 1)
    assert not looks(200.0, int(STUCK_S) - 1), "time in which the shim did not run counts"
    assert "killing the process that writes the logs of the ranks, which has read nothing for 3 s" in looks(
        300.0, int(STUCK_S) + 1
    )
