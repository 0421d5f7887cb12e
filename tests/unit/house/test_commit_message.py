"""Commit messages: the place, and a verb in the imperative.

Covers: nothing of the package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.house.commit_message import main, problems


@pytest.mark.parametrize(
    "message",
    [
        "coordinator: close idle connections",
        "bench: faults: wait until a doubted link carries a group again",
        "weights, channel: let readers load only what has changed\n\nThe class: a load that compares each tensor.",
        "cli/doctor: process what an agent sends late\n# a comment of git's that is longer than seventy-two columns of text",
        'Revert "coordinator: close idle connections"',
    ],
)
def test_a_message_in_the_imperative_is_taken(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("core: a rank that leaves a version half loaded has not done its part", "imperative, but with `a`"),
        ("carry: who has missed versions takes a delta", "imperative, but with `who`"),
        ("page: shows the newest events", "imperative, but with `shows`"),
        ("page: fixed the legend", "imperative, but with `fixed`"),
        ("Close idle connections", "does not name its place"),
        ("", "does not name its place"),
        ("page: keep the legend\nbody", "the line below the subject is not empty"),
        ("page: keep " + "x" * 72, "more than 72 columns"),
        ("page: keep the legend\n\n" + "x" * 73, "more than 72 columns"),
    ],
)
def test_another_is_refused_with_the_reason(message: str, said: str) -> None:
    assert said in "\n".join(problems(message))


def test_the_hook_reads_the_file_of_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "message").write_text("page: the legend is kept\n")
    assert main([str(tmp_path / "message")]) == 1
    assert "imperative" in capsys.readouterr().err
    (tmp_path / "message").write_text("page: keep the legend\n")
    assert main([str(tmp_path / "message")]) == 0
