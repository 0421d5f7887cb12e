"""What processes have, and who holds it afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import anyio
import msgspec
import pytest

from replicas.linux.processes import start_time
from replicas.linux.smi import _stuck as smi_stuck
from replicas.supervisor.cleanup import still_held
from replicas.supervisor.cleanup.inventory import Belongings, Stocktaking, take
from replicas.supervisor.cleanup.still_held import HoldUps, StillHeld, held, wait_clear
from replicas.telemetry.events import Event, HeldUp

OLD = Belongings(gpu=True, processes=((4000001, 5),))


def test_processes_are_found_with_their_start() -> None:
    found = take([os.getpid(), 4_000_001])
    assert found == Belongings(processes=((os.getpid(), start_time(os.getpid()) or 0),))
    assert Belongings.of(found.message()) == found


def test_gpu_memory_that_the_driver_counts_for_the_old_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '4000001, GPU-a, 512\n77, GPU-b, 3\n[N/A], GPU-c, 1'\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    assert held([Belongings(gpu=True, processes=((4000001, 5),))]) == [
        StillHeld("512 MiB on GPU GPU-a", "process 4000001 (gone)")
    ]
    assert held([Belongings(processes=((4000001, 5),))]) == []


def test_a_driver_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 600\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    monkeypatch.setattr(still_held, "_SMI_TIMEOUT_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)  # no signal reaches it
        patch.setattr("replicas.linux.smi._KILL_S", 0.0)
        (one,) = held([Belongings(gpu=True)])
        assert one.holder == "the driver: nvidia-smi does not answer within 0.01 s"
        (stuck,) = smi_stuck
        assert held([Belongings(gpu=True)]) == [one]
        assert smi_stuck == [stuck]  # no other one was started
    stuck.kill()
    stuck.wait()
    smi.write_text("#!/bin/sh\n")
    monkeypatch.setattr(still_held, "_SMI_TIMEOUT_S", 60.0)
    assert held([Belongings(gpu=True)]) == []
    assert smi_stuck == []


def test_the_wait_ends_when_it_is_clear_given_up_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [StillHeld("512 MiB on GPU 0", "process 4000001 (gone)")]
    monkeypatch.setattr(still_held, "held", lambda old: [*there])
    said: list[StillHeld] = []
    pauses: list[float] = []

    async def waits(seconds: float) -> bool:
        pauses.append(seconds)
        return True

    async def gives_up(seconds: float) -> bool:
        return False

    async def frees(seconds: float) -> bool:
        there.clear()
        return True

    async def main() -> None:
        assert await wait_clear([OLD], said.append, waits, timeout_s=0.0) == there
        assert await wait_clear([OLD], said.append, gives_up) == there
        assert await wait_clear([OLD], said.append, frees) == []
        assert await wait_clear([Belongings()], said.append, gives_up) == []

    anyio.run(main)
    assert [one.what for one in said] == ["512 MiB on GPU 0"] * 3
    assert pauses == []


def test_what_is_waited_for_is_told_and_shown_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still_held, "held", lambda old: [StillHeld("512 MiB on GPU 0", "process 4000001 (gone)")])
    said: list[Event] = []
    shown: list[str] = []
    waits = HoldUps(said.append, "a", 0, 2)

    async def gives_up(seconds: float) -> bool:
        shown.append(waits.text)
        return False

    anyio.run(waits.until_clear, [OLD], gives_up)
    event = HeldUp(group="a", replica=0, generation=2, what="512 MiB on GPU 0", holder="process 4000001 (gone)")
    assert said == [event, msgspec.structs.replace(event, gave_up=True)]
    assert shown == ["waits for 512 MiB on GPU 0, held by process 4000001 (gone)"]
    assert waits.text == ""


def test_what_cannot_be_looked_for_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def gives_up(seconds: float) -> bool:
        return False

    monkeypatch.setattr(still_held, "held", no_descriptor)
    said: list[StillHeld] = []
    assert anyio.run(wait_clear, [OLD], said.append, gives_up) == said
    assert [one.holder for one in said] == ["unknown: it cannot be looked for (Too many open files)"]


def test_stock_is_taken_when_due_and_told_when_changed() -> None:
    pids = [os.getpid()]
    stock = Stocktaking(lambda: pids, 100.0)
    assert stock.on_time(104.9) is None
    before = stock.on_time(105.0)
    assert before is not None
    assert stock.wakes == [165.0]
    assert stock.on_time(165.0) is None
    pids.append(os.getppid())
    after = stock.on_time(225.0)
    assert after is not None
    assert [pid for pid, _ in after.processes] == pids
    pids.clear()
    assert stock.last_time(226.0) is None  # what it had counts, too
