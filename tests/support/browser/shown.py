"""A run for the page that is made of events alone: its status follows from them.

It speaks through the real server, routes and token check; orders are noted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from replicas.control.access import ByToken
from replicas.control.app import control_routes
from replicas.control.log_files import FolderReader, LogReader, Selection
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.port_connections import PortRules
from replicas.coordinator.server import Server, bind_listener
from replicas.messages.version_orders import Steered, VersionOrder
from replicas.page.past import Past
from replicas.status import RunStatus
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import Event, Record
from replicas.trust.tokens import Tokens

__all__ = ["TOKEN", "ShownRun", "served"]

TOKEN = "operator-s-secret"


class ShownRun:
    """What the control port shows of a run.

    :param change: makes of the status that events tell what a supervisor would add.
    :param events: the file of its events; None: only the newest are kept.
    """

    def __init__(
        self,
        logs: Path = Path("none"),
        *,
        change: Callable[[RunStatus], RunStatus] = lambda status: status,
        events: Path | None = None,
    ) -> None:
        self.log = EventLog(events)
        self.past = Past()
        self.orders: list[tuple[str, Mapping[str, Any]]] = []
        self.refused: list[str] = []
        self._logs, self._change = logs, change

    def tell(self, event: Event) -> Record:
        record = self.log.emit(event)
        self.past.feed(record)
        return record

    def has_been(self, records: Iterable[Record]) -> None:
        """Begin with these events, at their own times."""
        now, self.log._now = self.log._now, lambda: at
        for record in records:
            at = record.at
            self.past.feed(self.log.emit(record.event))
        self.log._now = now

    # ------------------------------------------------------------ what the port asks

    def status(self) -> RunStatus:
        return self._change(self.past.status(time.time()))

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        return self.log.follow(after)

    @property
    def last_event(self) -> int:
        return self.log.seq

    def scrape(self, accept: str, client: str = "") -> tuple[bytes, str]:
        return b"", "text/plain"

    def live(self) -> bool:
        return True

    def read_logs(self, selection: Selection) -> LogReader:
        return FolderReader(self._logs, selection)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in (
            "scale",
            "restart",
            "drain",
            "drain_node",
            "reset_failed",
            "reload",
            "stacks",
            "detach",
            "doctor",
            "steer",
        ):
            raise AttributeError(name)

        async def steer(order: VersionOrder) -> Steered:
            self.orders.append((type(order).__name__.lower(), msgspec.structs.asdict(order)))
            return Steered(channel=order.channel, version=8, name="lease-1")

        if name == "steer":
            return steer

        async def order(**given: Any) -> object:
            self.orders.append((name, given))
            return {f"{given['target']}/0": 'File "train.py", line 7 in <module>'} if name == "stacks" else None

        return order


@asynccontextmanager
async def served(run: ShownRun, port: int = 0) -> AsyncIterator[str]:
    """The URL of its page, on a port of loopback."""
    listener = bind_listener("127.0.0.1", port)
    tokens = Tokens("member", TOKEN)
    access = ByToken(lambda: tokens, run.refused.append)
    rules = PortRules(run.refused.append, lambda _: True, AllowedHosts("127.0.0.1", "127.0.0.1"))
    server = Server(listener, control_routes(run, access=access), rules)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        await server.aclose()
        await asyncio.sleep(0)
