"""Waits for other members' progress: a newer commit, and a version loaded everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from replicas import errors
from replicas.channel.hub import Hub
from replicas.channel.pending import Pending
from replicas.messages import WatchEnd, WatchLoaded

__all__ = ["Watches"]


class _Watch:
    def __init__(self, version: int, pending: Pending[int]) -> None:
        self.version = version
        self.pending = pending
        self.timer: asyncio.TimerHandle | None = None


class Watches:
    """The watches of one channel in this process. ``version``: newer than it, for commits; it or newer, for loads."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._numbered = 0
        self._commits: dict[int, _Watch] = {}
        self._loads: dict[int, _Watch] = {}
        hub.on_commit(self._committed)

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
        for number, watch in self._loads.items():
            self._hub.send(WatchLoaded(number, watch.version))
        self._committed()

    def fail_all(self, error: errors.ReplicasError) -> None:
        for watches in (self._commits, self._loads):
            for number in list(watches):
                self._end(watches, number).pending._fail(error)

    def session_down(self, error: errors.ReplicasError) -> None:
        self.fail_all(error)

    def _begin(self, watches: dict[int, _Watch], watch: _Watch, deadline_s: float | None) -> None:
        if self._hub.over is not None:
            watch.pending._fail(self._hub.over)
            return
        self._numbered += 1
        number = self._numbered
        watches[number] = watch
        if deadline_s is not None:
            watch.timer = self._hub.after(deadline_s, self._overdue, watches, number, deadline_s)
        if watches is self._loads:
            self._hub.send(WatchLoaded(number, watch.version))
        else:
            self._committed()

    def _committed(self) -> None:
        latest = self._hub.latest
        for number, watch in list(self._commits.items()):
            if latest > watch.version:
                self._end(self._commits, number).pending._resolve(latest)

    def _loaded(self, message: WatchEnd) -> None:
        if message.watch in self._loads:
            self._end(self._loads, message.watch).pending._resolve(message.version)

    def _overdue(self, watches: dict[int, _Watch], number: int, deadline_s: float) -> None:
        if number in watches:
            watch = self._end(watches, number)
            watch.pending._fail(self._hub.no_answer("the wait", deadline_s))

    @staticmethod
    def _end(watches: dict[int, _Watch], number: int) -> _Watch:
        watch = watches.pop(number)
        if watch.timer is not None:
            watch.timer.cancel()
        return watch
