"""Tables that keep words whole, and the frame of ``replicas top`` at any size.

Covers: cli/top.py.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import ConsoleDimensions

from replicas.cli import render, top
from replicas.cli.base import Screen
from replicas.cli.render import fitted
from replicas.status import ChannelStatus, GroupStatus, NodeStatus, PublishStatus, ReplicaStatus, RunStatus, StoreStatus
from replicas.telemetry.events import Record
from tests.unit.telemetry.test_events import EVERYTHING

LONG = (
    "rank 0 was killed by SIGKILL (its log: /home/somebody/experiments/.replicas/grpo/logs/rollout/2/gen-3/rank-0.log)"
)


def a_status(count: int = 6) -> RunStatus:
    replicas = tuple(
        ReplicaStatus(
            name=f"rollout-server/{number}",
            group="rollout-server",
            replica=number,
            state="backoff" if number == 2 else "ready",
            generation=1,
            reason=LONG if number == 2 else "",
            state_age_s=125.0,
            heartbeat_age_s=0.4,
            versions={"policy": 12},
            lag_s={"policy": 31.0 if number == 4 else 0.0},
        )
        for number in range(count)
    )
    publish = PublishStatus(
        version=13, publisher="trainer/0", state="moving", seconds=2.0, waits_for=("rollout-server/4/0",), waiting=3
    )
    group = GroupStatus(
        name="rollout-server", launcher="exec", world_size=1, replicas=replicas, restarts={"heartbeat_timeout": 2}
    )
    channel = ChannelStatus(
        name="policy", epoch=1, committed_version=12, digest="", members=(), committed_at=100.0, under_way=(publish,)
    )
    return RunStatus(
        run="grpo",
        version="0",
        endpoint="10.20.30.40:9477",
        pid=1,
        uptime_s=4000.0,
        ready=False,
        store=StoreStatus(up=True, host="h", port=1),
        groups=(group,),
        channels=(channel,),
        nodes=(NodeStatus(name="node-17", state="up", local=True), NodeStatus(name="node-18", state="away")),
    )


def screen(columns: int, lines: int) -> Screen:
    found = Screen()
    found.size = ConsoleDimensions(columns, lines)
    return found


def frame(columns: int, lines: int, status: RunStatus, *keys: bytes, **seen: object) -> list[str]:
    """The lines that are drawn after these keys."""
    records = deque(Record(number, 100.0 + number, event) for number, event in enumerate(EVERYTHING, 1))
    known = SimpleNamespace(**{"status": status, "at": 131.0, "events": records, "error": "", "changes": 0} | seen)
    console = screen(columns, lines)
    drawn = top._Frame(known, console)  # type: ignore[arg-type]  # its fields alone
    for key in (b"", *keys):
        assert drawn.handle_key(key)
        found = console.render_lines(drawn, console.options.update(width=columns, height=lines))
    return ["".join(segment.text for segment in line).rstrip() for line in found]


def test_what_is_wrong_comes_first_and_all_fits() -> None:
    shown = frame(80, 24, a_status())
    assert len(shown) == 24
    assert all(len(line) <= 80 for line in shown)
    assert shown[0].startswith("grpo  10.20.30.40:9477  up 1h 6m  ")
    assert shown[1].startswith("rollout-server/2 has ended, and waits to be started again")
    rows = [line.split()[0] for line in shown if line.startswith("rollout-server/") and " 12 " in line]
    assert rows[:3] == ["rollout-server/2", "rollout-server/4", "rollout-server/0"]  # those with a trouble first
    assert any("13 moving" in line for line in frame(120, 40, a_status()))
    assert shown[-1].startswith("q quit")


@pytest.mark.parametrize(("columns", "lines"), [(1, 1), (20, 5), (40, 10), (300, 100)])
def test_any_terminal_gets_a_frame(columns: int, lines: int) -> None:
    shown = frame(columns, lines, a_status(3))
    assert len(shown) == lines
    assert all(len(line) <= columns for line in shown)


@pytest.mark.slow
def test_keys_scroll_and_stay_within_the_lines() -> None:
    status = a_status(24)

    def lines(*keys: bytes) -> str:
        return frame(80, 24, status, *keys)[-1].rpartition("lines ")[2]

    first, last = lines(), lines(b"G")
    whole = int(first.rpartition(" of ")[2])
    assert first.startswith("1 to ")
    assert last.endswith(f"to {whole} of {whole}")
    assert lines(b"G", b"j", b" ", b"\x1b[6~") == last
    assert lines(b"j", b"k", b"k", b"\x1b[A", b"\x1b[5~") == first
    assert lines(b"j").startswith("2 to ")
    assert lines(b"G", b"\x1b[H") == first
    assert lines(b"x", b"\x1b[99~") == first
    assert top._KEY.findall(b"\x1b[5~gj\x1bOBq") == [b"\x1b[5~", b"g", b"j", b"\x1bOB", b"q"]


def test_a_supervisor_that_does_not_answer_is_said_instead_of_an_old_verdict() -> None:
    shown = frame(80, 24, a_status(), error="cannot connect to the run", at=time.time() - 30)
    assert shown[1] == "No answer for 30 s: cannot connect to the run"
    assert "has ended" not in shown[2]


def test_hostile_texts_stay_text() -> None:
    status = a_status(1)
    shown = frame(80, 24, status, error="\x1b]0;x\x07[red]a\x9b31m\n\u202eb", at=time.time())
    assert all(line.isprintable() for line in shown)
    assert "[red]" in shown[1]


@given(
    st.lists(st.lists(st.text("ab -/", max_size=12), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 120),
)
def test_words_are_whole_where_they_fit(columns: list[list[str]], room: int) -> None:
    widths = fitted(columns, room)
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    assert len(widths) == len(columns)
    if sum(words) <= room:
        assert all(width >= word for width, word in zip(widths, words, strict=True))
        assert sum(widths) <= room
    if sum(max(map(len, column)) for column in columns) <= room:
        assert all(width >= max(map(len, column)) for width, column in zip(widths, columns, strict=True))


def test_a_long_path_does_not_break_the_other_columns() -> None:
    console = screen(80, 24)
    lines = console.render_lines(render.status_tables(a_status()), console.options.update(height=None), pad=False)
    text = "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)
    for number in range(6):
        assert f"rollout-server/{number} " in text
    assert "2 heartbeat" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Screen().print(render.status_tables(a_status()))
    assert LONG in capsys.readouterr().out


def many(**ill: str) -> RunStatus:
    """Fifty replicas: two trainers, which are well, and rollouts with these states."""
    status = a_status(48)
    base = msgspec.structs.replace(status.groups[0].replicas[0], group="rollout")
    rollouts = tuple(
        msgspec.structs.replace(base, name=f"rollout/{index}", replica=index, state=ill.get(f"r{index}", "ready"))
        for index in range(48)
    )
    trainers = tuple(
        msgspec.structs.replace(one, name=f"trainer/{one.replica}", group="trainer") for one in rollouts[:2]
    )
    made = [("trainer", trainers), ("rollout", rollouts)]
    groups = (msgspec.structs.replace(status.groups[0], name=name, replicas=replicas) for name, replicas in made)
    return msgspec.structs.replace(status, groups=tuple(groups))


def test_of_fifty_the_ill_and_the_channel_are_on_the_first_screen() -> None:
    shown = frame(80, 24, many(r17="silent", r40="failed", r41="starting"), at=110.0)
    assert shown[1].startswith("rollout/40 has failed for good")
    assert "rollout/17 is silent" in " ".join(shown[2:4])
    rows = [line.split()[0] for line in shown if line]
    assert rows.index("rollout") < rows.index("trainer"), "the ill group before the healthy one"
    assert "policy" in rows
    replicas = [one for one in rows[rows.index("replica") + 1 :] if one.startswith(("rollout/", "trainer/"))]
    assert replicas[:3] == ["rollout/40", "rollout/17", "rollout/41"]


def test_the_channel_is_on_the_first_screen_also_when_most_are_ill() -> None:
    shown = frame(80, 24, many(**{f"r{index}": "silent" if index == 30 else "pending" for index in range(1, 48)}))
    rows = [line.split()[0] for line in shown if line]
    assert "policy" in rows
    assert rows[rows.index("replica") + 1] == "rollout/30"


def test_of_several_replicas_the_oldest_trouble_is_the_most() -> None:
    console = screen(80, 24)
    status = many(r17="failed", r40="failed")
    lines = console.render_lines(render.status_tables(status), console.options.update(height=None), pad=False)
    text = " ".join("".join(segment.text for segment in line).rstrip() for line in lines)
    assert "rollout/17, rollout/40 have failed for good, for up to 2m 5s" in text
