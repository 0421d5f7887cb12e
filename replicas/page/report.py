"""The page of a run that is over, in one file that needs no network."""

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
    """Return the HTML of a run's last moment and its history, by its events.

    It has what programs wrote last where one failed: show it to whom the run's logs may
    be shown.
    """
    past, history = Past(), History(whole=True)
    for record in records:
        past.feed(record)
        history.feed((record,))
    shown = {**document(past.status(past.at), past.at), **history.whole(), "now": past.at}
    return in_one_file(shown)


def recorded(ended_at: float) -> list[Record]:
    """Return the events of a recorded run of some minutes, for a look at the page.

    :param ended_at: when it ended, in seconds since 1970; all its times are moved.
    """
    records = [decode(line) for line in _RECORDING.read_bytes().splitlines()]
    return [replace(one, at=one.at + ended_at - records[-1].at) for one in records]
