"""Waits for a newer commit, or for a version to be loaded by all targets.

However many callers wait here, and whether or not their deadlines have passed, the
coordinator has one watch for this member, of the oldest version that a caller awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicas import errors
from replicas.channel.hub import Hub, Part
from replicas.channel.pending import Pending
from replicas.messages import WatchEnd, WatchLoaded

__all__ = ["Watches"]


@dataclass(eq=False, repr=False)
class _Watch:
    version: int
    pending: Pending[int]
    timer: asyncio.TimerHandle | None = None


class Watches(Part):
    """Commit watches wait for a newer version, load watches for that one too."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._commits: set[_Watch] = set()
        self._loads: set[_Watch] = set()
        self._told: WatchLoaded | None = None
        self._numbered = 0

    def committed(self, after: int | None, deadline_s: float | None) -> Pending[int]:
        pending: Pending[int] = Pending(f"commit on {self._hub.name}")
        version = self._hub.latest if after is None else after
        self._hub.call(self._begin, self._commits, _Watch(version, pending), deadline_s)
        return pending

    def loaded(self, version: int, deadline_s: float | None) -> Pending[int]:
        pending: Pending[int] = Pending(f"load of version {version} on {self._hub.name}")
        self._hub.call(self._begin, self._loads, _Watch(version, pending), deadline_s)
        return pending

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {WatchEnd: self._loaded}

    def new_term(self) -> None:
        self._told = None
        self._watch()
        self.latest_grown()

    def fail_all(self, error: errors.ReplicasError) -> None:
        for watches in (self._commits, self._loads):
            for watch in list(watches):
                self._end(watches, watch)._fail(error)

    def session_down(self, error: errors.ReplicasError) -> None:
        self.fail_all(error)

    def _begin(self, watches: set[_Watch], watch: _Watch, deadline_s: float | None) -> None:
        if self._hub.over is not None:
            watch.pending._fail(self._hub.over)
            return
        watches.add(watch)
        if deadline_s is not None:
            watch.timer = self._hub.after(deadline_s, self._overdue, watches, watch, deadline_s)
        self._watch()
        self.latest_grown()

    def _watch(self) -> None:
        """Have the coordinator watch the oldest awaited version, if it does not."""
        oldest = min((watch.version for watch in self._loads), default=None)
        if oldest is None or (self._told is not None and self._told.version == oldest):
            return
        self._numbered += 1
        self._told = WatchLoaded(self._numbered, oldest)
        self._hub.send(self._told)

    def latest_grown(self) -> None:
        latest = self._hub.latest
        for watch in [watch for watch in self._commits if latest > watch.version]:
            self._end(self._commits, watch)._resolve(latest)

    def _loaded(self, message: WatchEnd) -> None:
        if self._told is None or message.watch != self._told.watch:
            return  # answers an older watch; the newer one is answered, too
        self._told = None
        for watch in [watch for watch in self._loads if watch.version <= message.version]:
            self._end(self._loads, watch)._resolve(message.version)
        self._watch()

    def _overdue(self, watches: set[_Watch], watch: _Watch, deadline_s: float) -> None:
        if watch in watches:
            self._end(watches, watch)._fail(self._hub.no_answer("the wait", deadline_s))

    @staticmethod
    def _end(watches: set[_Watch], watch: _Watch) -> Pending[int]:
        watches.discard(watch)
        if watch.timer is not None:
            watch.timer.cancel()
        return watch.pending
