"""Whatever stands in a text from elsewhere: nothing of it controls a terminal, and no
line of it passes for ours.

Covers: common/foreign.py, messages/carried.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from replicas import errors
from replicas.cli import base as cli_base
from replicas.cli.base import Screen, complain
from replicas.cli.look import draw_findings
from replicas.cli.render import event_line, status_tables
from replicas.common.foreign import ascii_controls, characters, hanging, lines, one_line, readable, visible
from replicas.core.base.effects import MemberLost
from replicas.linux import processes
from replicas.messages.carried import WireError
from replicas.messages.identity import Member
from replicas.status import GroupStatus, ReplicaStatus, RunStatus, StoreStatus
from replicas.supervisor.agent import checks as doctor
from replicas.supervisor.cleanup import still_held as remains
from replicas.supervisor.console import Console
from replicas.supervisor.shim import launcher
from replicas.telemetry import events

OWNED = "\x1b]0;OWNED\x07\x1b[2J\nreplicas: 12:00:00 all is well\u202e\x9b31m\r\x00"
FORGED = re.compile(r"^replicas: 12:00:00|^\d\d:\d\d:\d\d replicas: all is well", re.MULTILINE)
SEQUENCES = ["\x1b[2J", "\x1b]0;t\x07", "\x1b]52;c;eA==\x1b\\", "\x1bP1$r\x1b\\", "\x1bc", "\x9b1A"]
CHARACTERS = ["\u202e", "\u2067", "\r", "\n", "\u2028", "\x85", "\t", "\0", "\x7f", "\ud800", "é", "漢", "\U0001f680"]
MARKUP = ["[red]", "[link=http://x]", "[/]", ":boom:"]
PARTS = st.sampled_from([*SEQUENCES, *CHARACTERS, *MARKUP])
FOREIGN = st.lists(PARTS | st.text(max_size=8), max_size=12).map("".join)
OURS = re.compile(r"\x1b\[[0-9;]*m")
"""What Rich writes for a style."""


def controls(text: str) -> str:
    """What of it is no printable character and no line break."""
    return "".join(one for one in text if not one.isprintable() and one != "\n")


def drawn(screen: Screen) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _a_terminal_with_colours() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TERM", "xterm-256color")
        yield


def screen() -> Screen:
    made = Screen(soft_wrap=True)
    made.file = io.StringIO()
    assert made.is_terminal
    assert made.color_system
    return made


# ------------------------------------------------------------ the functions


@given(FOREIGN, st.integers(3, 80))
def test_one_line_is_one_line_of_printable_characters(text: str, most: int) -> None:
    found = one_line(text, most)
    assert found.isprintable()
    assert len(found) <= most
    assert one_line(found, most) == found


@given(FOREIGN)
def test_lines_are_printable_and_only_the_first_begins_anew(text: str) -> None:
    assert not controls(lines(text))
    first, *others = hanging(text).split("\n")
    assert not controls(first)
    assert all(not other or other.startswith("  ") for other in others)


@given(FOREIGN)
def test_nothing_is_lost_of_what_a_user_wrote_and_lengths_stay_on_a_screen(text: str) -> None:
    assert visible(text).isprintable()
    assert len(characters(text)) == len(text)
    assert not controls(characters(text).replace("\t", ""))


@given(st.text())
def test_json_says_the_same(text: str) -> None:
    document = json.dumps({"text": text}, ensure_ascii=False)
    assert json.loads(ascii_controls(document)) == {"text": text}
    assert not controls(ascii_controls(document))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (OWNED, r"replicas: 12:00:00 all is well\u202e\x9b31m \x00"),
        ("plain", "plain"),
        ("a\tb\r\n  c \n", "a b c"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("caf\ud8e9", r"caf\ud8e9"),
    ],
)
def test_what_becomes_of_a_text(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_a_log_on_a_terminal_keeps_its_colours_but_no_direction() -> None:
    assert readable("\x1b[31mred\u202e\x1b[0m\x1b]0;t\x07\n".encode(), b"", 100) == [b"\x1b[31mred\x1b[0m\x1b[0m\n"]


# ------------------------------------------------------------ where it comes in


def test_the_error_file_of_torchelastic() -> None:
    message = {
        "message": f"ValueError: {OWNED}",
        "extraInfo": {"py_callstack": f"Traceback\n  x\n{OWNED}", "timestamp": 1},
    }
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="none")
    failure.error_file_data = {"message": message}
    found = launcher._rank_exit(0, failure)
    assert found.text.isprintable()
    assert not controls(found.error)
    assert found.error.startswith("Traceback\n  x\n")


def test_the_command_line_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: OWNED.encode("utf-8", "surrogatepass"))
    assert remains._named(7, processes.command_line(7)).isprintable()
    assert "OWNED" not in remains._named(7, processes.command_line(7))


def test_an_error_from_the_wire() -> None:
    of = WireError.of(errors.UsageError(OWNED, channel=OWNED, phase=OWNED, members=[OWNED], hint=OWNED))
    for made in (of, WireError("X", OWNED, channel=OWNED, phase=OWNED, members=(OWNED,), hint=OWNED)):
        assert not controls(made.message + made.hint)
        assert all(one is not None and one.isprintable() for one in (made.channel, made.phase, *made.members))


# ------------------------------------------------------------ where it goes out


def status_with(text: str) -> RunStatus:
    replica = ReplicaStatus(name=text, group=text, replica=0, state="failed", generation=1, reason=text)
    group = GroupStatus(name=text, launcher="exec", world_size=1, replicas=(replica,), restarts={text: 1})
    return RunStatus(
        run=text, version="0", endpoint=text, pid=1, uptime_s=0.0, ready=True,
        store=StoreStatus(up=True, host=text, port=0), groups=(group,), channels=(),
    )  # fmt: skip


def records_with(text: str) -> list[events.Record]:
    member = Member(text, 0, 0)
    found: list[events.Event] = [
        events.HeldUp(group=text, replica=0, generation=1, what=text, holder=text),
        events.ReloadRefused(problems=(text, text)),
        MemberLost(channel=text, member=member, reason=text),
    ]
    return [events.Record(seq=1, at=0.0, event=event) for event in found]


@given(FOREIGN)
def test_nothing_but_our_own_styles_reaches_a_terminal(text: str) -> None:
    out = screen()
    out.print(text)
    out.print(Text(text, style="bold"))
    out.rule(Text(text))
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    out.print(table)
    out.print(status_tables(status_with(text)))
    for record in records_with(text):
        out.print(event_line(record))
    draw_findings(out, [doctor.Finding(about="run", state="problem", text=text, remedy=text, node=text)])
    shown = OURS.sub("", drawn(out))
    assert not controls(shown), shown
    if "[red]" in text:
        assert "[red]" in shown  # no markup of theirs is ours


@pytest.mark.slow
@given(FOREIGN)
def test_nor_does_what_is_shown_live(text: str) -> None:
    out = screen()
    with Live(console=out, auto_refresh=False) as live:
        live.update(status_tables(status_with(text)), refresh=True)
    ours = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|1A|2K)|\r")  # colours, the cursor, a line up and cleared
    assert not controls(ours.sub("", drawn(out)))


@given(FOREIGN)
def test_an_event_is_one_line(text: str) -> None:
    for record in records_with(text):
        assert "\n" not in event_line(record).plain


@given(FOREIGN)
def test_the_supervisor_says_lines_that_only_it_begins(text: str) -> None:
    reader, writer = os.pipe()
    try:
        console = Console(writer)
        console.say(text)
        console.write(text)
        assert console.flush(30.0)
        data = b""
        while select.select([reader], [], [], 0.0)[0]:
            data += os.read(reader, 1 << 16)
    finally:
        os.close(writer)
        os.close(reader)
    said = data.decode()
    assert not controls(said)


def test_no_line_is_forged(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"first{OWNED}")
    told = capsys.readouterr().err
    assert told.startswith("replicas: first")
    assert not FORGED.search(told, 1)
    assert not controls(told)


def test_json_of_a_command_has_no_controls() -> None:
    assert not controls(cli_base.json_text({"reason": OWNED}))
