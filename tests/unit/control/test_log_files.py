"""Reading logs as they grow: tails, rotation, new generations and replicas, times.

Covers: cli/look.py, control/log_files.py.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from replicas import errors
from replicas.cli.look import moment
from replicas.control import log_files
from replicas.control.log_files import LogFollower, LogLine, Selection, offset_since, tail_offset


def write(logs: Path, name: str, text: str) -> Path:
    path = logs / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def rotate(path: Path, keep: int = 3) -> None:
    for number in range(keep, 0, -1):
        newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if newer.exists():
            newer.rename(path.with_name(f"{path.name}.{number}"))


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(
    ("data", "lines", "expected"),
    [
        (b"", 2, (b"", 0)),
        (b"a\nb\nc\n", 2, (b"b\nc\n", 2)),
        (b"a\nb\nc", 2, (b"b\nc", 2)),
        (b"a\nb\n", 2, (b"a\nb\n", 2)),
        (b"a\n", 5, (b"a\n", 1)),
        (b"\n\n\n", 2, (b"\n\n", 2)),
        (b"abc", 1, (b"abc", 1)),
    ],
)
def test_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, block: int, data: bytes, lines: int, expected: tuple[bytes, int]
) -> None:
    monkeypatch.setattr(log_files, "_BLOCK_NBYTES", block)
    offset, found = tail_offset(io.BytesIO(data), lines)
    assert (data[offset:], found) == expected


def test_lines_come_as_they_are_complete(tmp_path: Path) -> None:
    write(tmp_path, "a/0/gen-1/rank-0", "one\ntw")
    follower = LogFollower(tmp_path, Selection())
    assert texts(follower.poll()) == ["one"]
    assert follower.poll() == []
    write(tmp_path, "a/0/gen-1/rank-0", "o\nthree")
    assert texts(follower.poll()) == ["two"]
    assert texts(follower.close()) == ["three"]
    assert follower.close() == []


def test_a_follower_loses_nothing_in_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them between two looks, and one while it is behind; the first part is gone
    in the end."""
    monkeypatch.setattr(log_files, "_READ_NBYTES", 8)
    path = write(tmp_path, "a/0/gen-1/rank-0", "".join(f"line {number}\n" for number in range(10)))
    follower = LogFollower(tmp_path, Selection())
    seen = texts(follower.poll())
    for number in range(10, 40):
        if number in (12, 13, 25):
            rotate(path)
        write(tmp_path, "a/0/gen-1/rank-0", f"line {number}\n")
        if number in (11, 30):
            seen += texts(follower.poll())
    while found := follower.poll():
        seen += texts(found)
    assert seen == [f"line {number}" for number in range(40)]
    follower.close()


def test_a_log_that_is_emptied_in_place_is_read_from_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, "a/0/gen-1/rank-0", "".join(f"old line {number}\n" for number in range(25)))
    follower = LogFollower(tmp_path, Selection())
    assert len(texts(follower.poll())) == 25
    for _ in range(2):
        os.truncate(path, 0)
        assert follower.poll() == []
        for number in range(10):  # shorter than before
            write(tmp_path, "a/0/gen-1/rank-0", f"line {number}\n")
            assert texts(follower.poll()) == [f"line {number}"]
    write(tmp_path, "a/0/gen-1/rank-0", "half a li")
    assert follower.poll() == []
    os.truncate(path, 0)
    write(tmp_path, "a/0/gen-1/rank-0", "new\n")
    assert [*texts(follower.poll()), *texts(follower.poll())] == ["half a li", "new"]
    follower.close()


def test_lines_since_a_time_of_a_log_that_was_emptied_after_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a/0/gen-1/rank-0", "new\n")
    times = path.with_name(f"{path.name}.times")
    times.write_text("5000 1000.0\n")
    assert log_files.offset_since(path, 2000.0) == 0


def test_the_last_lines_of_a_rotated_log(tmp_path: Path) -> None:
    path = write(tmp_path, "a/0/gen-1/rank-0", "1\n2\n")
    rotate(path)
    write(tmp_path, "a/0/gen-1/rank-0", "3\n4\n")
    rotate(path)
    write(tmp_path, "a/0/gen-1/rank-0", "5\n")

    def last(lines: int | None) -> list[str]:
        follower = LogFollower(tmp_path, Selection(lines=lines))
        found: list[str] = []
        while more := follower.poll():
            found += texts(more)
        follower.close()
        return found

    assert last(None) == ["1", "2", "3", "4", "5"]
    assert last(4) == ["2", "3", "4", "5"]
    assert last(2) == ["4", "5"]
    assert last(0) == []


def test_new_generations_and_replicas_are_read_from_their_start(tmp_path: Path) -> None:
    write(tmp_path, "a/0/gen-1/rank-0", "old\n")
    write(tmp_path, "a/0/gen-2/rank-0", "x\nnow\n")
    follower = LogFollower(tmp_path, Selection(target="a", lines=1))
    assert [(line.generation, line.text) for line in follower.poll()] == [(2, "now")]
    write(tmp_path, "a/0/gen-3/rank-0", "first\nsecond\n")
    write(tmp_path, "a/1/gen-1/rank-0", "third\n")
    write(tmp_path, "b/0/gen-1/rank-0", "not chosen\n")
    assert texts(follower.poll()) == ["first", "second", "third"]
    assert follower.many
    follower.close()


def test_a_run_that_starts_again_is_followed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write(logs, "a/0/gen-1/rank-0", "before\n")
    follower = LogFollower(logs, Selection())
    assert texts(follower.poll()) == ["before"]
    logs.rename(tmp_path / "logs.previous")
    assert follower.poll() == []
    write(logs, "a/0/gen-1/rank-0", "after\n")
    assert texts(follower.poll()) == ["after"]
    follower.close()


def test_bytes_that_are_no_text_and_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_LINE_NBYTES", 4)
    path = write(tmp_path, "a/0/gen-1/rank-0", "")
    path.write_bytes(b"\xff\xfe\nabcdefgh")
    follower = LogFollower(tmp_path, Selection())
    assert texts(follower.poll()) == ["\ufffd\ufffd", "abcdefgh"]
    follower.close()


def test_a_selection_that_is_empty_names_what_there_is(tmp_path: Path) -> None:
    def refused(folder: str, **chosen: Any) -> str:
        with pytest.raises(errors.UsageError, match="there is no log of") as caught:
            LogFollower(tmp_path / folder, Selection(**chosen)).poll()
        return str(caught.value)

    assert "of this run in " in refused("logs")
    chosen: dict[str, Any]
    for chosen in ({}, {"target": "b/7"}):
        assert "(no program has written one here yet; external programs log elsewhere)" in refused("logs", **chosen)
        assert "--previous" not in refused("logs.previous", **chosen)
    write(tmp_path, "logs.previous/a/0/gen-1/rank-0", "x\n")
    said = refused("logs", target="b/7")
    assert said.endswith("(this start has written none yet; --previous shows the last one's, of: a/0)")
    write(tmp_path, "logs/a/1/gen-1/rank-0", "x\n")
    write(tmp_path, "logs/a/1/gen-3/rank-0", "x\n")
    said = refused("logs", target="a/1", rank=3, generation=2)
    assert "a/1, rank 3, generation 2 in " in said
    assert said.endswith("(there are logs of: a/1, generations 1 to 3)")


def test_since_goes_by_the_times_beside_a_log(tmp_path: Path) -> None:
    path = write(tmp_path, "a/0/gen-1/rank-0", "1\n2\n3\n")
    os.utime(path, (50, 50))
    assert offset_since(path, 60) is None
    assert offset_since(path, 40) == 0  # no times were noted: all or nothing
    path.with_name("rank-0.log.times").write_text("0 10.000\n2 20.000\n4 30.000\n4")
    assert [offset_since(path, since) for since in (5, 15, 25, 31)] == [0, 0, 2, 4]
    follower = LogFollower(tmp_path, Selection(since=25))
    assert texts(follower.poll()) == ["2", "3"]
    follower.close()
    later = LogFollower(tmp_path, Selection(since=60))
    assert later.poll() == []
    write(tmp_path, "a/0/gen-1/rank-0", "4\n")
    assert texts(later.poll()) == ["4"]
    later.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_generation_that_is_removed_is_read_to_its_end_and_let_go_of(tmp_path: Path) -> None:
    first = write(tmp_path, "a/0/gen-1/rank-0", "1\n2\n3")
    follower = LogFollower(tmp_path, Selection())
    before = open_files()
    assert texts(follower.poll()) == ["1", "2"]
    write(tmp_path, "a/0/gen-2/rank-0", "4\n")
    first.unlink()
    first.parent.rmdir()
    assert texts(follower.poll()) == ["4"]
    assert texts(follower.poll()) == ["3"]
    assert open_files() == before + 1
    write(tmp_path, "a/0/gen-2/rank-0", "5\n")
    assert texts(follower.poll()) == ["5"]
    follower.close()


NOW = 1_800_000_000.0


@pytest.mark.parametrize(("text", "ago_s"), [("10m", 600), ("1.5h", 5400), ("250 ms", 0.25), ("2d", 172800)])
def test_an_age(text: str, ago_s: float) -> None:
    assert moment(text, now=NOW) == NOW - ago_s


def test_a_time_of_day_is_the_last_one_such() -> None:
    import time

    before = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW - 3600))
    after = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW + 3600))
    assert NOW - 3660 <= moment(before, now=NOW) <= NOW - 3600
    assert moment(after, now=NOW) > NOW
    assert moment(after.split()[1], now=NOW) < NOW


@pytest.mark.parametrize("text", ["", "yesterday", "10 minutes ago", "25:99"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(errors.UsageError, match="is not a time"):
        moment(text, now=NOW)


def test_one_look_takes_a_little_of_many_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "BATCH_NBYTES", 10)
    for index in range(3):
        write(tmp_path, f"a/{index}/gen-1/rank-0", f"{index}_one\n{index}_two\n{index}_three\n")
    follower = LogFollower(tmp_path, Selection())
    batches = [texts(follower.poll()) for _ in range(4)]
    assert [len(batch) for batch in batches] == [3, 3, 3, 0]
    assert {text for batch in batches for text in batch} == {
        f"{index}_{word}" for index in range(3) for word in ("one", "two", "three")
    }
    follower.close()


def test_a_line_longer_than_a_look_is_no_end(tmp_path: Path) -> None:
    write(tmp_path, "a/0/gen-1/rank-0", f"{'x' * 3 * log_files.BATCH_NBYTES}\nlast\n")
    follower = LogFollower(tmp_path, Selection())
    assert [len(text) for text in texts(follower.poll())] == [3 * log_files.BATCH_NBYTES, 4]
    assert follower.poll() == follower.close() == []
