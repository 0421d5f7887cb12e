"""``replicas report``: files of what a run did, from its state folder alone.

Covers: cli/report_command.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicas.cli.main import main
from replicas.telemetry.event_log import EventLog
from tests.support.showing.trace_rules import check_trace
from tests.unit.telemetry.test_events import EVERYTHING


def run_folder(base: Path) -> Path:
    folder = base / ".replicas" / "r"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    log = EventLog(folder / "events.jsonl")
    for event in EVERYTHING:
        log.emit(event)
    log.close()
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_a_timeline_of_a_run_that_is_over(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path)
    assert main(["report", *([str(folder)] if named else []), "--trace", "run.json"]) == 0
    assert capsys.readouterr().out == "wrote run.json: open it in https://ui.perfetto.dev\n"
    tracks = {one["args"]["name"] for one in check_trace(tmp_path / "run.json") if one["name"] == "process_name"}
    assert tracks >= {"run", "replica a/0", "channel p", "node n1"}
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["empty"], "there are no events of a run"),
        ([".replicas/r", "--trace", "no/x.json"], "no/x.json cannot be written: No such file or directory"),
        ([".replicas/r", "-o", "pipe"], "pipe cannot be written: it is not a regular file"),
    ],
)
def test_what_cannot_be_written_says_why(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo("pipe")
    assert main(["report", *arguments]) == 69
    assert said in capsys.readouterr().err
    assert Path("pipe").is_fifo()


def test_a_link_to_the_page_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path)
    (tmp_path / "pages").mkdir()
    Path("newest.html").symlink_to("pages/run.html")
    assert main(["report", ".replicas/r", "-o", "newest.html"]) == 0
    assert Path("newest.html").readlink() == Path("pages/run.html")
    assert [one.name for one in Path("pages").iterdir()] == ["run.html"]
    assert Path("pages/run.html").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "x.json").exists()


def test_the_recorded_run_needs_no_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--demo", "-o", "demo.html", "--trace", "demo.json"]) == 0
    assert "trainer finished" in Path("demo.html").read_text()
    tracks = {one["args"]["name"] for one in check_trace(tmp_path / "demo.json") if one["name"] == "process_name"}
    assert tracks >= {"replica trainer/0", "replica rollout/4", "channel policy", "node n3"}
    assert main(["report", "--demo", "somewhere"]) == 2
    assert "give STATE_DIR or --demo, not both" in capsys.readouterr().err
