"""A server is never taken back to an older version, and has one follower.

Covers: engine/following.py.
"""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from replicas import Update
from replicas.engine import Engine, PauseMode
from replicas.engine.following import Follower, Plan


class Told(Engine):
    """It says that it has version ``said``."""

    name = "the server"

    def __init__(self, said: int | None) -> None:
        self.said = said
        self.calls: list[str] = []

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.calls.append("pause")

    def load(self, update: Update, timeout_s: float) -> None:
        self.calls.append(f"load {update.version}")
        self.said = self.said and update.version

    def reset_caches(self, timeout_s: float) -> None:
        self.calls.append("reset")

    def resume(self, timeout_s: float) -> None:
        self.calls.append("resume")

    def version(self) -> int | None:
        return self.said


def update(version: int) -> Any:
    refused: list[str] = []
    manifest = types.SimpleNamespace(hash="a")
    return types.SimpleNamespace(version=version, manifest=manifest, refused=refused, refuse=refused.append)


def follower(engine: Engine) -> Follower:
    return Follower(engine, Plan(min_serving=0.0, verify_load="never"), None, threading.Event())


@pytest.mark.parametrize(
    ("said", "version", "latest", "loads"),
    [
        (5, 4, 6, False),  # of this run
        (5, 4, 5, False),
        (5, 4, 4, True),  # of the run before, which had more versions
        (5, 5, 5, True),  # a follower that starts again
        (5, 6, 6, True),
        (None, 4, 6, True),
    ],
)
def test_the_first_load_of_a_follower(said: int | None, version: int, latest: int, loads: bool) -> None:
    engine, given = Told(said), update(version)
    follower(engine)._load_or_refuse(given, latest)
    if loads:
        assert engine.calls == ["pause", f"load {version}", "reset", "resume"]
        assert not given.refused
        return
    assert engine.calls == []
    (why,) = given.refused
    assert why.message == "the server has version 5 already: another program loads versions into it"
    assert "one follower" in why.hint


def test_another_program_takes_the_server_further() -> None:
    engine = Told(1)
    one = follower(engine)
    one._load_or_refuse(update(1), 1)
    engine.said, engine.calls = 9, []  # of another run, perhaps: not from this follower
    second = update(2)
    one._load_or_refuse(second, 2)
    assert engine.calls == []
    assert "has version 9 already" in second.refused[0].message
    engine.said = 1
    one._load_or_refuse(update(3), 3)
    assert engine.calls == ["pause", "load 3", "reset", "resume"]
