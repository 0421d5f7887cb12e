"""Write the page of a finished run as one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from replicas.page.assets import in_one_file
from replicas.page.document import document
from replicas.page.history import History
from replicas.page.past import Past
from replicas.telemetry.events import Record, decode

_RECORDING = Path(__file__).with_name("demo.jsonl")


def report(records: Iterable[Record]) -> str:
    """Return the page of a run, from its events, as the text of one HTML file: last
    state and history. Write nothing.

    It contains the last output of failed programs: treat it like the run's logs.
    """
    past, history = Past(), History(whole=True)
    for record in records:
        past.feed(record)
        history.feed((record,))
    shown = {**document(past.status(past.at), past.at), **history.whole(), "now": past.at}
    return in_one_file(shown)


def recorded(ended_at: float) -> list[Record]:
    """Return the events of a recorded run of a few minutes, as a sample.

    :param ended_at: time of its end, in seconds since 1970; all its times are shifted.
    """
    records = [decode(line) for line in _RECORDING.read_bytes().splitlines()]
    return [replace(one, at=one.at + ended_at - records[-1].at) for one in records]
