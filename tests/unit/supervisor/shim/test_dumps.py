"""How a shim collects stacks: the parts without signals.

Covers: linux/stacks.py, supervisor/shim/dumps.py.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import threading
from pathlib import Path

import pytest

from replicas.linux import stacks
from replicas.linux.processes import catches, is_below, start_time
from replicas.supervisor.shim.dumps import Stack, StackDump, _state, short
from replicas.supervisor.wire import orders


def test_the_name_of_a_file_tells_whose_it_is(tmp_path: Path) -> None:
    asked = stacks.parse(tmp_path / "3.1234.777")
    assert asked is not None
    assert (asked.rank, asked.pid, asked.start) == (3, 1234, 777)
    assert stacks.parse(tmp_path / "rank-3.txt") is None
    assert stacks.parse(tmp_path / "3.1234") is None


def test_a_process_writes_its_stacks_when_asked_and_its_own_handler_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_open", {})
    heard: list[int] = []
    me = os.getpid()
    before = signal.signal(stacks.SIGNUM, lambda signum, _: heard.append(signum))
    try:
        for _ in range(2):
            stacks.register(tmp_path, 3, start_time(me) or 0)
        assert catches(me, stacks.SIGNUM)
        signal.raise_signal(stacks.SIGNUM)
        faulthandler.unregister(stacks.SIGNUM)
    finally:
        signal.signal(stacks.SIGNUM, before)
        for file in stacks._open.values():
            file.close()
    (path,) = stacks.folder(tmp_path).iterdir()
    assert path.name == f"3.{me}.{start_time(me)}"
    assert "in test_a_process_writes_its_stacks_when_asked_and_its_own_handler_still_runs" in path.read_text()
    assert heard == [stacks.SIGNUM]


def test_a_file_of_a_process_that_is_gone_or_not_ours_is_no_reason_to_signal(tmp_path: Path) -> None:
    folder = stacks.folder(tmp_path)
    folder.mkdir()
    me = os.getpid()
    start = start_time(me)
    for name in (f"0.{me}.{start}", f"1.{me}.1", "2.4000001.5", "notes.txt"):
        (folder / name).write_text("old")
    dump = StackDump(me, tmp_path, {}, 100.0)  # this process is not below itself
    assert dump.collect_stacks(100.0) == []
    assert (folder / f"0.{me}.{start}").read_text() == "old"


def test_a_rank_that_has_not_joined_is_described_from_proc(tmp_path: Path) -> None:
    me = os.getpid()
    found = StackDump(1, tmp_path, {me: 5}, 100.0).collect_stacks(100.0)
    assert found is not None
    (stack,) = found
    assert (stack.rank, stack.pid) == (5, me)
    shown = f"while it runs, py-spy dump --pid {me} shows what it does"
    assert stack.text == f"process {me} has not joined a channel, state R (running); {shown}\n"
    assert stack.entry().startswith(f"replicas: stacks of rank 5, process {me}:\nprocess {me} has")
    assert stack.entry().endswith("\nreplicas: end of stacks\n")


class Lock:
    """It tells when a second thread has come to it."""

    def __init__(self) -> None:
        self.second = threading.Event()
        self._lock = threading.Lock()
        self._came = itertools.count(1)

    def __enter__(self) -> None:
        if next(self._came) == 2:
            self.second.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_that_join_at_once_register_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock()
    monkeypatch.setattr(stacks, "_open", {})
    monkeypatch.setattr(stacks, "_lock", lock)
    registered: list[object] = []
    together = threading.Barrier(2)

    def join() -> None:
        together.wait(10)
        stacks.register(tmp_path, 0, 1)

    def register(*_: object, file: object, **__: object) -> None:
        assert lock.second.wait(10)
        registered.append(file)

    monkeypatch.setattr(faulthandler, "register", register)
    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert registered == list(stacks._open.values())
    for file in stacks._open.values():
        file.close()


def test_what_is_gone_is_said_to_be_gone() -> None:
    assert _state(4_000_001) == "it is gone"
    assert not catches(4_000_001, 15)
    assert not is_below(4_000_001, 1)


def test_long_stacks_are_cut_for_the_message() -> None:
    found = short([Stack(0, 1, "x" * 200_000), Stack(1, 2, "y")])
    assert sum(len(stack.text) for stack in found) < 110_000
    assert found[0].text.endswith("x\n[cut]")
    assert found[1].text == "y"


@pytest.mark.parametrize("character", ["\N{GRINNING FACE}", "ä", "\0"])
def test_stacks_are_cut_by_what_they_weigh_in_a_message(character: str) -> None:
    found = short([Stack(rank, 1, character * 100_000) for rank in range(2)])
    assert 90_000 < len(orders.encode({"type": "stacks", "stacks": found})) < 110_000
