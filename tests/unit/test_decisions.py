"""The decision log: what was decided is on disk, whole, or the log is as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicas.coordinator.decisions import DecisionLog
from replicas.core.effects import CommitDecision


def decision(version: int) -> CommitDecision:
    return CommitDecision("commit", "policy", version, "digest", 1, 1)


def test_the_floor_is_read_back(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    for version in (1, 2, 3):
        log.append(decision(version))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.floor("policy") == 3
    assert again.floor("other") == 0
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
    assert log.floor("policy") == 1
    monkeypatch.undo()
    log.append(decision(2))
    log.close()
    again = DecisionLog(tmp_path / "log")
    assert again.floor("policy") == 2
    again.close()
