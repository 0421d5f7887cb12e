"""Lines for people never hold anybody up.

Covers: supervisor/console.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import threading
import time

import pytest

from replicas.supervisor.console import Console

PATIENCE_S = 30.0


class Held(Console):
    """It tells when it begins to write."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.begun = threading.Event()

    def _put(self, data: bytes) -> None:
        self.begun.set()
        super()._put(data)


def lines_of(descriptor: int, last: str) -> list[str]:
    """All lines up to one that ends so."""
    data, until = b"", time.monotonic() + PATIENCE_S
    while not data.endswith(f"{last}\n".encode()):
        assert select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0], data
        data += os.read(descriptor, 1 << 16)
    return data.decode().splitlines()


def test_who_does_not_read_holds_nobody_up_and_hears_what_is_missing() -> None:
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"\n" * size)
    console = Held(writer)
    console.say("first")
    assert console.begun.wait(PATIENCE_S)  # its thread has it, and is held up
    until = time.monotonic() + PATIENCE_S
    for number in range(1500):
        console.say(f"{number:050}")
    assert not console.flush(0.0)
    while time.monotonic() < until and (not console.flush(0.01) or select.select([reader], [], [], 0.0)[0]):
        while select.select([reader], [], [], 0.0)[0]:
            os.read(reader, 1 << 16)
    console.say("last")
    note, last = lines_of(reader, "last")
    assert note == "(500 lines before this one were dropped: the output was blocked)"
    assert last.endswith(" replicas: last")
    assert console.flush(10.0)


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(writer)
    console.say("x")
    console.say("y")
    assert console.flush(10.0)
    os.close(writer)


def test_it_shows_warnings_of_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    reader, writer = os.pipe()
    console = Console(writer)
    with console.logging():
        logging.getLogger("replicas.test").info("not this")
        logging.getLogger("replicas.test").warning("%d is %s", 7, "odd")
    (line,) = lines_of(reader, "odd")
    assert re.fullmatch(r"\d\d:\d\d:\d\d replicas: 7 is odd", line)
    assert not logging.getLogger().handlers
    for descriptor in (reader, writer):
        os.close(descriptor)
