"""The guard's orders, as they are in their file.

Covers: supervisor/wire/guard.py.
"""

from __future__ import annotations

import os

import pytest

from replicas.supervisor.wire.guard import pack, unpack


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("12", "34", "", "", "python", "-c", "print(1)"),
        ("", "", "a b", "1:2", ":", "3:abc", "line\nline\t", "{}\"'\\$"),
        ("é", "日本", os.fsdecode(b"\xff\xfe:"), "x" * 10_000),
    ],
)
def test_words_come_out_as_they_went_in(words: tuple[str, ...]) -> None:
    assert unpack(pack(words)) == [os.fsencode(word) for word in words]
