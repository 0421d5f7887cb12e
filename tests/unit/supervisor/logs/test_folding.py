"""What becomes of a rank's output: lines kept byte for byte, progress bars folded, text
for terminals and reports.

Covers: supervisor/logs/folding.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.common.foreign import last_lines, readable
from replicas.supervisor.logs.folding import BAR_INTERVAL_S, Folder


def fold(*parts: bytes | float) -> list[bytes]:
    """What is logged after each part of the input, or at each time; and in the end."""
    folder, pending, now, logged = Folder(), b"", 0.0, []
    for part in parts:
        if isinstance(part, float):
            now = part
            logged.append(folder.take_due_lines(now))
            continue
        pending += part
        folded = folder.fold(pending, now)
        pending = pending[folded.used :]
        logged.append(folded.lines)
    return [*logged, folder.finish(pending)]


@given(st.lists(st.binary(max_size=40).filter(lambda b: b"\r" not in b and b"\x1b" not in b), max_size=12))
@settings(max_examples=20, deadline=None)
def test_lines_are_kept_byte_for_byte_however_they_are_cut(parts: list[bytes]) -> None:
    text = b"".join(parts)
    assert b"".join(fold(*parts)) == text + (b"\n" if text and not text.endswith(b"\n") else b"")
    assert all(lines.endswith(b"\n") for lines in fold(*parts) if lines)


def test_a_line_that_was_drawn_again_and_again_is_logged_once() -> None:
    assert fold(b"\r 1%", b"\r 2%\r 3", b"%", b"\r100%\n", b"next\n") == [b"", b"", b"", b"100%\n", b"next\n", b""]


def test_carriage_returns_before_the_end_of_a_line_go() -> None:
    assert fold(b"a\r\nb\r\r\n", b"c\r", b"\nd\r") == [b"a\nb\n", b"", b"c\n", b"d\n"]


def test_a_bar_that_grows_shows_from_time_to_time_and_its_end_once() -> None:
    late = BAR_INTERVAL_S + 1.0
    assert fold(b"\r1%", b"\r2%\r", 1.0, late, late + 1, b"\n")[2:] == [b"", b"2%\n", b"", b"", b""]
    assert fold(b"\r1%\r2%\r", late, b"\r3%\n") == [b"", b"2%\n", b"3%\n", b""]


def test_a_long_bar_takes_no_room() -> None:
    folder, pending = Folder(), b""
    for percent in range(1000):
        pending += b"\r%3d%% of it" % percent
        pending = pending[folder.fold(pending, 0.0).used :]
        assert len(pending) < 40


def test_nested_bars_are_pictures_of_one_thing() -> None:
    step = [b"\router %d", b"\n\rinner %d\x1b[A"]
    parts = [part % number for number in range(100) for part in step]
    logged = b"".join(fold(*parts, b"\n\n", b"done\n"))
    assert logged == b"outer 0\nouter 1\ninner 99\n\ndone\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\xff\xfe caf\xc3\xa9", "\ufffd\ufffd café"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"a\x1b[2J\x1b]0;title\x07b\x07\tc", "ab\tc"),
    ],
)
def test_a_terminal_gets_text_and_colours_and_nothing_else(line: bytes, shown: str) -> None:
    assert readable(line + b"\n", b"a/0/1| ", 100) == [f"a/0/1| {shown}\n".encode()]


@given(st.binary(max_size=300).filter(lambda b: b"\n" not in b), st.integers(60, 120))
@settings(max_examples=20, deadline=None)
def test_no_line_on_a_terminal_is_too_long_or_not_utf8(line: bytes, limit: int) -> None:
    (shown,) = readable(line + b"\n", b"a/0/1| ", limit)
    assert len(shown) <= limit
    assert shown.endswith(b"\n")
    shown.decode()


def test_the_last_lines_of_a_log() -> None:
    assert last_lines(b"half\n1\n\x1b[1m2\xff\x1b[0m  \n\n3333\n\n", 3, 3) == ("2\ufffd", "", "333")
    assert last_lines(b"\n\n", 3, 3) == ()
