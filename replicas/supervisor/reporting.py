"""Report a run: events, lines for people, metrics and traces.

Every event of the run goes through :meth:`Reporting.emit`: to the event file, its
followers and the counters. The last event gives the end of the run; the control port
stays open until each regular Prometheus has scraped it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread

from replicas.common.logs import Log
from replicas.common.tasks import say_if_slow
from replicas.core.lives.lease_times import lost_after_s
from replicas.status import RunStatus
from replicas.supervisor.fleet.causes import FailureReports
from replicas.supervisor.state.leases import Lease
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import ConnectionsRefused, Event, LeasesAwaited, RunEnded
from replicas.telemetry.metrics import Metrics
from replicas.telemetry.otel import Traces, exporters
from replicas.telemetry.scrapes import Scrapes
from replicas.telemetry.tally import CounterDeltas

log = Log("replicas.supervisor")

_REFUSALS_INTERVAL_S = 10.0
_LAST_SCRAPE_S = 10.0
"""Longest time for which the end of a run waits for a last regular scrape."""


class Reporting:
    """The events, lines and metrics of one run.

    :param report: called with each line for people.
    :param status: the status of the run, for the metrics.
    :ivar events: the event log, in memory until :meth:`open`.
    :ivar ended: the run's last event, or None while it runs.
    """

    def __init__(self, report: Callable[[str], None], status: Callable[[], RunStatus]) -> None:
        """Begin with an event log in memory, which :meth:`open` replaces.

        :param report: called by :meth:`say` and :meth:`emit` with each line for people.
        :param status: returns the status of the run, for the metrics.
        """
        self.events = EventLog(None)
        self.ended: RunEnded | None = None
        self.metrics = Metrics(status, lambda: self.events.tally)
        self._report = report
        self._failures = FailureReports()
        self._refusals = CounterDeltas(_REFUSALS_INTERVAL_S)
        self._scrapes = Scrapes()
        self._traces: Traces | None = None
        self._seen_off = asyncio.Event()
        """Set when each Prometheus has scraped the end, or at :meth:`hurry`."""

    def open(self, stack: AsyncExitStack, events: EventLog, run: str) -> EventLog:
        """Use this event log from now on, and return it.

        Export syncs as OpenTelemetry spans if the environment names an exporter.

        :param stack: its end closes the event log and the exporter.
        :param run: the run's name, for the spans.
        """
        self.events = events
        stack.callback(events.close)
        if exporters(os.environ):
            self._traces = traces = Traces(run, os.environ)
            stack.push_async_callback(lambda: anyio.to_thread.run_sync(traces.close))
        return events

    def say(self, text: str) -> None:
        """Call ``report`` with a line for people; log an exception that it raises."""
        try:
            self._report(text)
        except BaseException:  # code of the program that embeds this: the run continues
            log.exception("continuing after the program's report() failed on %s", text)

    def emit(self, event: Event) -> None:
        """Append an event to the event log, from which followers and counters take it.

        Also add it to the exported spans, and pass a text about a failure to
        ``report``. Does not wait.
        """
        record = self.events.emit(event)
        if self._traces is not None:
            self._traces.put(record)
        if text := self._failures.text(event):
            self.say(text)

    def tell_of_leases(self, unseen: Collection[Lease]) -> None:
        """Emit an event if replicas may still run that this supervisor cannot see.

        All replicas wait until the leases of those replicas' agents are over.

        :param unseen: those leases, each with the node and how long its agent may run
            without a supervisor; nothing is emitted if there are none.
        """
        if unseen:
            nodes = tuple(dict.fromkeys(one.node for one in unseen))
            seconds = lost_after_s(max(one.lease_s for one in unseen))
            self.emit(LeasesAwaited(nodes=nodes, seconds=seconds))

    def count_refused(self, refused: Mapping[str, int], now: float | None = None) -> None:
        """Emit the connections refused since the last call, one event per reason.

        :param refused: the total number so far, by reason.
        :param now: monotonic time. If given, emit at most every 10 s, so that floods of
            connections do not displace older events in the file.
        """
        for reason, count in self._refusals.since(refused, now):
            self.emit(ConnectionsRefused(reason=reason, count=count))

    def conclude(self, ended: RunEnded) -> None:
        """Emit ``ended`` as the run's last event; followers of the events then end."""
        self.ended = ended
        self.emit(ended)
        self.events.finish()

    def hurry(self) -> None:
        """End the wait in :meth:`last_scrape`, and do not wait in later calls."""
        self._seen_off.set()

    async def last_scrape(self) -> None:
        """Wait until each Prometheus that scrapes regularly has scraped the run's end.

        Wait up to 10 s, or until :meth:`hurry`; print a line if the wait is noticeable.
        """
        if due_s := self._scrapes.due_s(time.monotonic()):
            wait_s = min(due_s, _LAST_SCRAPE_S)
            text = f"waiting for a last scrape by Prometheus, {wait_s:.0f} s at most"
            with anyio.move_on_after(wait_s), say_if_slow(self.say, text):
                await self._seen_off.wait()

    def scrape(self, accept: str, client: str) -> tuple[bytes, str]:
        """Note a scrape, and return the metrics as text and their Content-Type.

        May end the wait of :meth:`last_scrape`.

        :param accept: the Accept header of the request, which chooses the format.
        :param client: address of the scraper, by which its regular scrapes are
            recognized.
        """
        now, over = time.monotonic(), self.ended is not None
        self._scrapes.note_scrape(client, now, over=over)
        if over and not self._scrapes.due_s(now):
            self._seen_off.set()
        return self.metrics.render(accept)
