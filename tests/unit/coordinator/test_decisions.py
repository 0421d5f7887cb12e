"""The decision log: what was decided is on disk, whole, or the log is as it was.

Covers: coordinator/decisions.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from replicas import errors
from replicas.coordinator import decisions
from replicas.coordinator.decisions import DecisionLog
from replicas.core.base.ledger import Decision


def decision(version: int) -> Decision:
    return Decision("commit", "policy", version, "digest", 1, 1)


def test_the_floor_is_read_back(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    for version in (1, 2, 3):
        log.append(decision(version))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.past("policy").floor == 3
    assert again.past("other").floor == 0
    again.close(remove=True)
    assert not (tmp_path / "log").exists()


def test_a_disk_that_takes_half_a_line_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DecisionLog(tmp_path / "log")
    log.append(decision(1))
    before = (tmp_path / "log").read_bytes()
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:10], offset))
    with pytest.raises(OSError, match="only a part"):
        log.append(decision(2))
    assert (tmp_path / "log").read_bytes() == before
    assert log.past("policy").floor == 1
    monkeypatch.undo()
    log.append(decision(2))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.past("policy").floor == 2
    again.close()


def test_aborted_numbers_are_not_used_again(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    log.append(decision(1))
    log.append(Decision("abort", "policy", 2, "", 1, 1))
    log.append(Decision("abort", "policy", 3, "", 1, 1))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.past("policy").decided == (1, "digest")
    assert again.past("policy").floor == 3
    assert again.past("policy").aborted == {2, 3}
    again.append(decision(4))
    assert (again.past("policy").floor, again.past("policy").aborted) == (4, frozenset())
    again.close()


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    first = DecisionLog(tmp_path / "log")
    with pytest.raises(errors.WorldError, match="another coordinator uses the decision log"):
        DecisionLog(tmp_path / "log")
    first.close()
    DecisionLog(tmp_path / "log").close()


def test_a_long_log_is_written_anew_and_stays_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "COMPACT_NBYTES", 4000)
    log = DecisionLog(tmp_path / "log")
    for version in range(1, 201):
        log.append(decision(version))
        assert (tmp_path / "log").stat().st_size < 4200
    log.append(Decision("abort", "policy", 201, "", 1, 1))
    with pytest.raises(errors.WorldError):
        DecisionLog(tmp_path / "log")
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert (again.past("policy").decided, again.past("policy").floor) == ((200, "digest"), 201)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    again.close()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"kind": "commit"}\n')
    with pytest.raises(errors.WorldError, match=r"line 1 of the decision log .* is damaged"):
        DecisionLog(tmp_path / "log")


def test_the_folder_is_synced_before_a_decision_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut may bring an older file back, or none, without decisions that
    were synced."""
    calls: list[str] = []
    real_write, real_sync = os.pwrite, os.fsync

    def write(fd: int, data: bytes, offset: int) -> int:
        calls.append("write")
        return real_write(fd, data, offset)

    def sync(fd: int) -> None:
        assert Path(f"/proc/self/fd/{fd}").readlink() == tmp_path
        calls.append("sync folder")
        real_sync(fd)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fsync", sync)
    log = DecisionLog(tmp_path / "log")
    log.append(decision(1))
    log.append(decision(2))
    assert calls == ["sync folder", "write", "write"]
    monkeypatch.setattr(decisions, "COMPACT_NBYTES", 10)
    log.append(decision(3))
    monkeypatch.setattr(decisions, "COMPACT_NBYTES", 10**6)
    calls.clear()
    log.append(decision(4))
    log.append(decision(5))
    assert calls == ["sync folder", "write", "write"]
    log.close()


def test_a_folder_that_cannot_be_synced_refuses_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DecisionLog(tmp_path / "log")

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="the disk is broken"):
            log.append(decision(1))
    assert log.past("policy").floor == 0
    log.append(decision(1))
    log.close()


def test_a_new_file_that_cannot_be_locked_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DecisionLog(tmp_path / "log")
    log.append(decision(1))

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as patch:
        patch.setattr(decisions, "COMPACT_NBYTES", 10)
        patch.setattr(fcntl, "flock", refuse)
        log.append(decision(2))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    log.append(decision(3))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.past("policy").decided == (3, "digest")
    again.close()
