"""The page of a run that is over, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.page.assets import in_one_file
from replicas.page.document import document
from replicas.page.history import History
from replicas.page.past import Past
from replicas.telemetry.events import Record


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
