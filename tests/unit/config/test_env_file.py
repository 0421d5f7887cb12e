"""Environment files: what is read, and what is refused without telling a secret.

Covers: config/text.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.config.text import BadLine, parse_env


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("export A=1", "1"),
        ("  A = x y  ", "x y"),
        ("A=", ""),
        ("A= # nothing", ""),
        ("A=#fff", "#fff"),
        ("A= #fff", ""),
        ("A=  'x' ", "x"),
        ("A=x#y # a comment", "x#y"),
        ("A='# \" $B'", '# " $B'),
        (r'A="a\nb\t\"\\\$" # c', 'a\nb\t"\\$'),
        ("A=$B ${C}", "$B ${C}"),
        ("A=caf\u00e9 = 2", "caf\u00e9 = 2"),
    ],
)
def test_a_line(line: str, value: str) -> None:
    assert parse_env(f"# first\n\n{line}\r\nB=2\n") == {"A": value, "B": "2"}


def test_the_last_line_of_a_name_wins() -> None:
    assert parse_env("\ufeffA=1\nA=2") == {"A": "2"}


@pytest.mark.parametrize("line", ["secret", "=secret", "1A=secret", "A-B=secret", 'A="secret', "A='secret' x", "A=\0"])
def test_a_bad_line_is_numbered_and_not_quoted(line: str) -> None:
    with pytest.raises(BadLine, match=r"^line 2: ") as caught:
        parse_env(f"A=1\n{line}\n")
    assert "secret" not in str(caught.value)


@settings(max_examples=15, deadline=None)
@given(st.text(st.characters(exclude_characters="\0'\n\r", codec="utf-8")))
def test_single_quotes_keep_everything(value: str) -> None:
    assert parse_env(f"A='{value}'") == {"A": value}
