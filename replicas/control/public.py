"""What is shown to those who have not shown the run's token: all but what programs
print, what a config says, and where the store is, which knows no token.

A program may print a secret, and its last line is part of the reason why its replica
failed, which goes a long way: into states, events, and what is said of members. So no
field is trusted: every text is cut behind the exit code or the signal
(:func:`without_output`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from replicas.status import RunStatus
from replicas.telemetry.events import Event, Record, ReloadRefused, ReplicaExited

__all__ = ["Cached", "hiding_store", "public", "public_record", "without_output"]

_SHARE = 20
_KEPT_S = 0.5

_KILLED = r"was killed by (?:SIG\w+|signal \d+)"
_ENDED = rf" (?:exited with code \d+|{_KILLED})(?: after its process \d+ \([^)]*\) {_KILLED})?"
_OUTPUT = re.compile(rf"(rank \d+{_ENDED}|torchrun of node \d+(?:{_ENDED})?): .*", re.DOTALL)
"""How a cause begins that goes on with the last words of a program (here, or in an exit
report)."""


def without_output(text: str) -> str:
    """A text as far as it is our own: a cause in it ends with the exit code or the
    signal."""
    return _OUTPUT.sub(r"\1", text)


def public(value: object) -> Any:
    """``value`` as what JSON has a form for, its texts without output."""
    return _cut(msgspec.to_builtins(value, enc_hook=str))


def hiding_store(status: RunStatus) -> RunStatus:
    """The status without the store's address."""
    return msgspec.structs.replace(status, store=msgspec.structs.replace(status.store, host="", port=0))


class Cached:
    """A page of JSON that many may ask for: made anew when it is :data:`_SHARE` times
    as old as making it took, and half a second at most. So it is fresh where it is
    cheap, and costs a twentieth of the loop's time where it is not."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._body = b""
        self._until = 0.0

    def body(self) -> bytes:
        began = time.monotonic()
        if began >= self._until:
            self._body = msgspec.json.encode(self._make(), enc_hook=str)
            now = time.monotonic()
            self._until = now + min(_KEPT_S, _SHARE * (now - began))
        return self._body


def public_record(record: Record) -> bytes:
    """The record as one line of JSON, as :func:`replicas.telemetry.events.encode`
    writes it."""
    return msgspec.json.encode(public(Record(record.seq, record.at, _reduced(record.event))))


def _reduced(event: Event) -> Event:
    """The event without the fields that hold nothing but output, or that quote the
    config."""
    match event:
        case ReplicaExited():
            ranks = tuple(msgspec.structs.replace(rank, text="", lines=(), error="") for rank in event.ranks)
            return msgspec.structs.replace(event, ranks=ranks)
        case ReloadRefused():
            return ReloadRefused(problems=tuple(problem.partition(": ")[0] for problem in event.problems))
    return event


def _cut(value: Any) -> Any:
    match value:
        case str():
            return without_output(value) if ": " in value else value
        case dict():
            return {key: _cut(item) for key, item in value.items()}
        case list() | tuple():
            return [_cut(item) for item in value]
    return value
