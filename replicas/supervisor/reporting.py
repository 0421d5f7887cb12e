"""What a run tells others: its events, lines for people, and metrics.

Every event of the run goes through :meth:`Reporting.emit`: to the file of events, its
followers and the counters. The last one says how the run ended, and each Prometheus
that comes regularly sees that before the control port closes.
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
from replicas.common.tasks import telling
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
"""How long at most an end waits for a Prometheus that has come regularly until then."""


class Reporting:
    """The events, lines and metrics of one run.

    :param report: called with each line for people.
    :param status: the status of the run, for the metrics.
    :ivar events: those of the run, in its file once that is open.
    :ivar ended: the run's last event, once it is over.
    """

    def __init__(self, report: Callable[[str], None], status: Callable[[], RunStatus]) -> None:
        self.events = EventLog(None)
        self.ended: RunEnded | None = None
        self.metrics = Metrics(status, lambda: self.events.tally)
        self._report = report
        self._failures = FailureReports()
        self._refusals = CounterDeltas(_REFUSALS_INTERVAL_S)
        self._scrapes = Scrapes()
        self._traces: Traces | None = None
        self._seen_off = asyncio.Event()
        """Set when the metrics have told all how the run ended, or a hurry began."""

    def open(self, stack: AsyncExitStack, events: EventLog, run: str) -> EventLog:
        """Take the events in their file, until the stack ends; export syncs as spans.

        That is, where the environment says so, which costs nothing else.
        """
        self.events = events
        stack.callback(events.close)
        if exporters(os.environ):
            self._traces = traces = Traces(run, os.environ)
            stack.push_async_callback(lambda: anyio.to_thread.run_sync(traces.close))
        return events

    def say(self, text: str) -> None:
        """Pass a line to people."""
        try:
            self._report(text)
        except BaseException:  # code of the program that embeds this: the run goes on
            log.exception("report() failed on %s", text)

    def emit(self, event: Event) -> None:
        """Pass an event to the event file, its followers and the counters."""
        record = self.events.emit(event)
        if self._traces is not None:
            self._traces.put(record)
        if text := self._failures.text(event):
            self.say(text)

    def tell_of_leases(self, unseen: Collection[Lease]) -> None:
        """Say why no replica starts yet, if any lease keeps all from starting."""
        if unseen:
            nodes = tuple(dict.fromkeys(one.node for one in unseen))
            seconds = lost_after_s(max(one.lease_s for one in unseen))
            self.emit(LeasesAwaited(nodes=nodes, seconds=seconds))

    def count_refused(self, refused: Mapping[str, int], now: float | None = None) -> None:
        """Emit the refused connections since the last look, one event per reason.

        At most every 10 s where ``now`` is given: neither a flood of connections nor
        one of page requests can push older events out of the file.
        """
        for reason, count in self._refusals.since(refused, now):
            self.emit(ConnectionsRefused(reason=reason, count=count))

    def conclude(self, ended: RunEnded) -> None:
        """Write the run's last event, and end all who follow the events."""
        self.ended = ended
        self.emit(ended)
        self.events.finish()

    def hurry(self) -> None:
        """Let the end of the run wait for no scrape."""
        self._seen_off.set()

    async def last_scrape(self) -> None:
        """Let each Prometheus that comes regularly see how the run has ended."""
        if due_s := self._scrapes.due_s(time.monotonic()):
            wait_s = min(due_s, _LAST_SCRAPE_S)
            text = f"waiting for a last scrape by Prometheus, {wait_s:.0f} s at most"
            with anyio.move_on_after(wait_s), telling(self.say, text):
                await self._seen_off.wait()

    def scrape(self, accept: str, client: str) -> tuple[bytes, str]:
        """See :meth:`replicas.Supervisor.scrape`."""
        now, over = time.monotonic(), self.ended is not None
        self._scrapes.came(client, now, over=over)
        if over and not self._scrapes.due_s(now):
            self._seen_off.set()
        return self.metrics.render(accept)
