"""What processes have, and who holds it afterwards.

Covers: supervisor/cleanup/inventory.py, supervisor/cleanup/still_held.py.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from replicas.linux.processes import start_time
from replicas.linux.smi import _stuck as smi_stuck
from replicas.supervisor.cleanup import still_held
from replicas.supervisor.cleanup.inventory import InventoryTimer, take_inventory
from replicas.supervisor.cleanup.still_held import StartObstacles, gpu_memory
from replicas.supervisor.wire.orders import plain, read
from replicas.supervisor.wire.part_state import Inventory
from replicas.telemetry.events import Event, HeldUp

OLD = Inventory(gpu=True, processes=((4000001, 5),))


def test_processes_are_found_with_their_start() -> None:
    found = take_inventory([os.getpid(), 4_000_001])
    assert found == Inventory(processes=((os.getpid(), start_time(os.getpid()) or 0),))
    assert read(Inventory, plain(found)) == found


def test_gpu_memory_that_the_driver_counts_for_the_old_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '4000001, GPU-a, 512\n77, GPU-b, 3\n[N/A], GPU-c, 1'\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    assert gpu_memory({4000001}) == {("512 MiB on GPU GPU-a", "process 4000001 (gone)")}
    assert gpu_memory({5}) == set()


def test_a_driver_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 600\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    monkeypatch.setattr(still_held, "_SMI_TIMEOUT_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)  # no signal reaches it
        patch.setattr("replicas.linux.smi._KILL_S", 0.0)
        ((_, holder),) = gpu_memory({1})
        assert holder == "the driver, as nvidia-smi does not answer within 0.01 s"
        (stuck,) = smi_stuck
        assert {who for _, who in gpu_memory({1})} == {holder}
        assert smi_stuck == [stuck]  # no other one was started
    stuck.kill()
    stuck.wait()
    smi.write_text("#!/bin/sh\n")
    monkeypatch.setattr(still_held, "_SMI_TIMEOUT_S", 60.0)
    assert gpu_memory({1}) == set()
    assert smi_stuck == []


HELD = ("512 MiB on GPU 0", "process 4000001 (gone)")
EVENT = HeldUp(group="a", replica=0, generation=2, what=HELD[0], holder=HELD[1])


def waited(old: Inventory, pause: Callable[[StartObstacles], bool]) -> list[Event]:
    """The events of a wait; ``pause``: called between looks, False: give up."""
    said: list[Event] = []
    waits = StartObstacles(said.append, "a", 0, 2)

    async def sleep(seconds: float) -> bool:
        assert 0 < seconds <= 0.1
        return pause(waits)

    anyio.run(waits.wait_until_clear, [old], sleep)
    assert waits.text == ""
    return said


def test_the_wait_ends_when_it_is_clear_given_up_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {HELD}
    monkeypatch.setattr(still_held, "gpu_memory", lambda pids: {*there})
    gave_up = msgspec.structs.replace(EVENT, gave_up=True)

    def frees(_: StartObstacles) -> bool:
        there.clear()
        return True

    assert waited(OLD, lambda _: False) == [EVENT, gave_up]
    assert waited(OLD, frees) == [EVENT]
    there.add(HELD)
    assert waited(Inventory(processes=OLD.processes), lambda _: False) == [], "it has used no GPU"
    monkeypatch.setattr(still_held, "CLEAR_S", 0.0)
    assert waited(OLD, lambda _: True) == [EVENT, gave_up]


def test_what_is_waited_for_is_shown_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still_held, "gpu_memory", lambda pids: {HELD})
    shown: list[str] = []

    def looks(waits: StartObstacles) -> bool:
        shown.append(waits.text)
        return False

    waited(OLD, looks)
    assert shown == ["waits for 512 MiB on GPU 0, held by process 4000001 (gone)"]


def test_what_cannot_be_looked_for_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(still_held, "gpu_memory", no_descriptor)
    unknown = "an unknown process, as they cannot be listed (Too many open files)"
    event = msgspec.structs.replace(EVENT, what="GPU memory", holder=unknown)
    assert waited(OLD, lambda _: False) == [event, msgspec.structs.replace(event, gave_up=True)]


def test_stock_is_taken_when_due_and_told_when_changed() -> None:
    pids = [os.getpid()]
    told: list[Inventory] = []
    stock = InventoryTimer(lambda: pids, 100.0, told.append)
    stock.on_time(104.9)
    assert told == []
    stock.on_time(105.0)
    assert len(told) == 1
    assert stock.due == 165.0
    stock.on_time(165.0)
    assert len(told) == 1
    pids.append(os.getppid())
    stock.on_time(225.0)
    assert [pid for pid, _ in told[1].processes] == pids
    pids.clear()
    stock.take_final(226.0)
    assert len(told) == 2  # what it had counts, too
