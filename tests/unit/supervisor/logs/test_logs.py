"""The log pump's parts: files that are rotated, a pump that is killed, a disk that is
full, a slow terminal.

Covers: supervisor/fleet/generation.py, supervisor/logs/log_file.py,
supervisor/logs/pump.py, supervisor/logs/tee.py.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
from contextlib import suppress
from pathlib import Path

import pytest

from replicas.config.structs import LogsConfig
from replicas.linux import private
from replicas.supervisor.fleet.generation import wants_tee
from replicas.supervisor.logs.log_file import RotatedFile, remove_old_generations
from replicas.supervisor.logs.pump import LONGEST_NBYTES, LogSource, OutputLog
from replicas.supervisor.logs.tee import Tee
from replicas.supervisor.shim.pump_watcher import PumpWatcher
from replicas.supervisor.wire.guard import RANK_MARK
from replicas.supervisor.wire.orders import PartSpec
from tests.support.machine.full_disk import file_size_limit

LIMIT = 64 << 10


class Pipe:
    """One stream of a log, and who writes into it."""

    def __init__(self, name: str = "rank-0") -> None:
        reader, self.writer = os.pipe()
        self.source = LogSource(name, (reader,), shown=True)

    def write(self, data: bytes) -> None:
        os.write(self.writer, data)

    def close(self) -> None:
        os.close(self.source.pipes[0])
        os.close(self.writer)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def log_of(pipe: Pipe, folder: Path, max_nbytes: int = LIMIT, keep: int = 3, *, replaces: bool = False) -> OutputLog:
    return OutputLog(pipe.source, folder, max_nbytes, keep, replaces=replaces)


def test_a_log_is_rotated_by_size_and_only_so_many_parts_are_kept(tmp_path: Path, pipe: Pipe) -> None:
    log = log_of(pipe, tmp_path, 1000, 2)
    for number in range(50):
        pipe.write(b"%098d\n" % number)
        log.read(0, 0.0)
    parts = [tmp_path / name for name in ("rank-0.log.2", "rank-0.log.1", "rank-0.log")]
    assert [part.stat().st_size for part in parts] == [990, 990, 990]
    text = b"".join(part.read_bytes() for part in parts)
    assert [int(line) for line in text.split()] == list(range(20, 50))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {name for part in parts for name in (part.name, f"{part.name}.times")}
    log.close()
    pipe.close()


def test_logs_of_old_generations_go(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 11):
        (tmp_path / f"gen-{number}" / "stacks").mkdir(parents=True)
        (tmp_path / f"gen-{number}" / "rank-0.log").write_text("x")
    (tmp_path / "gen-mine").mkdir()
    remove_old_generations(tmp_path / "gen-11", 3)
    assert {path.name for path in tmp_path.iterdir()} == {"gen-9", "gen-10", "gen-11", "gen-mine"}


def test_another_pump_goes_on_behind_a_note_where_one_was_killed(tmp_path: Path, pipe: Pipe) -> None:
    """It was killed while it wrote, and what it had read of the next line is lost."""
    path = tmp_path / "rank-0.log"
    log = log_of(pipe, tmp_path)
    pipe.write(b"one\ntwo\nhal")
    log.read(0, 0.0)
    with path.open("ab") as file:
        file.write(b"half a line, writ")
    log.close()
    pipe.write(b"f\nthree\n")
    log = log_of(pipe, tmp_path, replaces=True)
    gap = b"replicas: the log pump was killed: a line may be torn here, or missing\n"
    assert path.read_bytes() == b"one\ntwo\nhalf a line, writ\n" + gap
    assert log.read(0, 0.0) == b"f\nthree\n"
    pipe.write(b"four")
    assert log.read(0, 0.0) == b""
    assert log.finish(0.0) == b"four\n"
    assert path.read_bytes() == b"one\ntwo\nhalf a line, writ\n" + gap + b"f\nthree\nfour\n"
    assert pipe.source.tail() == b"one\ntwo\nf\nthree\nfour\n"
    assert pipe.source.reads == 3
    log.close()
    pipe.close()


def test_another_pump_knows_the_rank_of_a_worker(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    other, other_writer = os.pipe()
    source = LogSource("", (reader, other), shown=True)
    log = OutputLog(source, tmp_path, LIMIT, 3)
    os.write(writer, RANK_MARK + b"7\nout\n")
    log.read(0, 0.0)
    log.close()
    os.write(other_writer, RANK_MARK + b"7\nerr\n")
    log = OutputLog(source, tmp_path, LIMIT, 3, replaces=True)
    assert log.read(1, 0.0) == b"err\n"
    lines = (tmp_path / "rank-7.log").read_bytes().splitlines()
    assert (lines[0], lines[-1], len(lines)) == (b"out", b"err", 3)
    assert [path.name for path in tmp_path.glob("*.log")] == ["rank-7.log"]
    log.close()
    for descriptor in (reader, writer, other, other_writer):
        os.close(descriptor)


def test_a_line_that_is_too_long_is_cut(tmp_path: Path, pipe: Pipe) -> None:
    log = log_of(pipe, tmp_path, 4 << 20)
    lines = b""
    for _ in range(LONGEST_NBYTES // LIMIT):
        pipe.write(b"x" * LIMIT)
        lines += log.read(0, 0.0) or b""
    assert lines == b"x" * LONGEST_NBYTES + b"\n"
    pipe.write(b"y\n")
    assert log.read(0, 0.0) == b"y\n"
    log.close()
    pipe.close()


def test_a_full_disk_drops_lines_counts_them_and_says_so_when_it_has_room(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(pipe, tmp_path)
    pipe.write(b"before\n")
    log.read(0, 0.0)
    write = os.write
    room = [3]

    def full(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= 1
        return write(descriptor, data[:3])

    monkeypatch.setattr(os, "write", full)
    for number in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            pipe.write(b"lost line %d\n" % number)
        assert log.read(0, 0.1 * number) == b"lost line %d\n" % number  # it goes to the terminal all the same
    assert log.trouble == "No space left on device"
    assert (tmp_path / "rank-0.log").read_bytes() == b"before\n"  # no part of a line is left
    monkeypatch.undo()
    assert log.due < math.inf
    log.log_due_lines(log.due)
    pipe.write(b"after\n")
    log.read(0, min(log.due, 9.0))
    missing = b"replicas: 4 lines (48 bytes) are missing here: No space left on device\n"
    assert (tmp_path / "rank-0.log").read_bytes() == b"before\n" + missing + b"after\n"
    assert log.trouble == ""
    assert pipe.source.tail() == b"before\n" + b"".join(b"lost line %d\n" % n for n in range(4)) + b"after\n"
    log.close()
    pipe.close()


def test_a_worker_of_torchrun_is_named_by_its_guard(tmp_path: Path) -> None:
    pipe = Pipe(name="")
    log = log_of(pipe, tmp_path)
    pipe.write(RANK_MARK + b"1")
    log.read(0, 0.0)
    assert not list(tmp_path.iterdir())
    pipe.write(b"2\nhello\n")
    assert log.read(0, 0.0) == b"hello\n"
    assert (tmp_path / "rank-12.log").read_bytes() == b"hello\n"
    assert log.source.title == "rank-12"
    pipe.write(RANK_MARK + b"x\n" + RANK_MARK + b"3\n")  # its own words, by whatever chance
    log.read(0, 0.0)
    assert (tmp_path / "rank-12.log").read_bytes() == b"hello\n" + RANK_MARK + b"x\n" + RANK_MARK + b"3\n"
    log.close()
    pipe.close()


def test_the_end_of_a_stream_and_a_line_without_end(tmp_path: Path, pipe: Pipe) -> None:
    log = log_of(pipe, tmp_path)
    assert log.read(0, 0.0) == b""  # nothing yet
    pipe.write(b"last words")
    os.close(pipe.writer)
    assert log.read(0, 0.0) == b""
    assert log.read(0, 0.0) is None
    assert log.finish(0.0) == b"last words\n"
    log.close()
    os.close(pipe.source.pipes[0])


def test_lines_go_to_stderr_when_they_are_wanted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(os, "isatty", lambda _, terminal=terminal: terminal)
        assert wants_tee(LogsConfig()) == terminal
        assert wants_tee(LogsConfig(tee="always"))
        assert not wants_tee(LogsConfig(tee="never"))


def test_a_file_is_opened_again_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"12\n345")
    file = RotatedFile(path, 100, 0)
    file.append(b"ab\n")
    assert path.read_bytes() == b"12\n345\nab\n"
    file.rotate()
    file.append(b"")
    assert path.read_bytes() == b""
    file.close()


def test_a_rotation_that_failed_half_way_loses_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.log"
    for number, name in enumerate(("x.log", "x.log.1", "x.log.2", "x.log.3")):
        (tmp_path / name).write_text(str(number))
        (tmp_path / f"{name}.times").write_text(str(number))
    file = RotatedFile(path, 100, 3)
    rename = private.rename
    left = [0]

    def fails(old: Path, new: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "error")
        rename(old, new)

    monkeypatch.setattr(private, "rename", fails)
    for allowed in range(6):  # 2 of them go through, then 2 more, ...
        left[0] = allowed
        with suppress(OSError):
            file.rotate()
            break
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        f"x.log.{number}{end}": str(number - 1) for number in (1, 2, 3) for end in ("", ".times")
    }


def test_a_close_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RotatedFile(tmp_path / "x.log", 100, 1)
    file.append(b"")
    close = os.close

    def fails(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "close", fails)
    file.close()
    file.close()
    monkeypatch.undo()
    file.append(b"x\n")
    assert (tmp_path / "x.log").read_bytes() == b"x\n"
    file.close()


def test_a_file_as_stderr_that_is_full_costs_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("ab") as file:
        tee = Tee(file.fileno(), "a/0")
        with file_size_limit(30):
            for number in range(5):
                tee.show(b"some line %d\n" % number, "0")
        assert not tee.waiting
        assert (tee.dropped, tee.why_dropped) == (4, "File too large")
        tee.show(b"more\n", "0")
    lines = path.read_text().split("\n")
    assert lines[0] == "a/0/0| some line 0"
    assert "a/0| (4 lines are shown only in the log: File too large)" in lines[1]
    assert lines[2] == "a/0/0| more"


def test_a_pump_that_dies_at_the_end_is_replaced_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    selector = selectors.DefaultSelector()
    spec = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", (), {}, str(tmp_path), str(tmp_path), 1.0, "nonce")
    keeper = PumpWatcher(spec, selector, None, lambda _: None)
    started: list[int] = []

    def start(keeper: PumpWatcher) -> None:
        started.append(1)
        keeper._life.start(0.0)
        keeper.pid = 4000001

    monkeypatch.setattr(PumpWatcher, "start", start)
    os.write(keeper.pipes.streams("rank 0")[0], b"last words\n")
    keeper.close()
    assert not keeper.over
    keeper.ended(-9)
    assert (len(started), keeper.over) == (2, False)
    kill_at = keeper.due
    keeper.on_time(kill_at)
    keeper.ended(-9)
    assert (len(started), keeper.over) == (2, True)
    assert "dropping the last 11 bytes" in capfd.readouterr().err
    for pipe in keeper.pipes.readers:
        os.close(pipe)
    selector.close()


def test_a_terminal_that_nobody_reads_costs_lines_and_no_time() -> None:
    reader, writer = os.pipe()
    tee = Tee(writer, "a/0")
    line = b"x" * 99 + b"\n"
    for _ in range(100):
        tee.show(line * 100, "0")
    shown = b""
    while tee.waiting:
        shown += os.read(reader, 1 << 16)
        tee.write()
    os.close(writer)
    os.close(tee.fileno())
    while part := os.read(reader, 1 << 16):
        shown += part
    lines = shown.decode().splitlines()
    dropped = [int(one.split("(")[1].split()[0]) for one in lines if "are shown only in the log" in one]
    whole = [one for one in lines if one == "a/0/0| " + "x" * 99]
    assert len(whole) + len(dropped) == len(lines)
    assert len(whole) + sum(dropped) == 10_000
    assert tee.dropped == sum(dropped) > 5000
    os.close(reader)
