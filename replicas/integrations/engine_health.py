"""The health watch of one inference server: gone, frozen, or at work?

A busy server may stay silent for minutes: an engine compiles its kernels within a step,
and answers between two steps only. So silence alone proves nothing. The processor time
of the engine's processes counts as life: a frozen engine uses none. An engine that uses
some, or whose processes cannot be seen from here, is given up after a longer time only.
A server is gone immediately if it refuses connections, reports that its engine is dead,
or has lost one of the engine's processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from replicas.common.patience import PauseClock
from replicas.common.reason import Reason
from replicas.integrations.engine_server import API, Answer, EngineServer
from replicas.linux.processes import command_line, descendants, start_time, stat_fields
from replicas.linux.sockets import listeners

__all__ = ["EngineHealth", "LivenessWatch", "ProcessorTime", "processor_time", "serving_process", "watch_processes"]

EVERY_S = 1.0
AT_WORK = 0.05
"""A process that uses this share of one processor is at work."""
SCAN_MAX_S = 5.0
"""Longest scan of ``/proc`` on a large machine; a longer one was a pause."""
DEAD_LOOKS = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessorTime(NamedTuple):
    """Seconds of processor time of the API process, and of the processes below it."""

    api_s: float
    engine_s: float


def processor_time(api: int) -> ProcessorTime | None:
    """Return the processor time that the processes of a server have used since their
    start, as ``/proc`` shows it, or None if the server is gone or hidden.

    The engine's time is given as 0 while a process below ``api`` is stopped (SIGSTOP),
    so that an engine that is frozen in part is not taken for one at work.

    :param api: pid of the server's API process.
    """
    try:
        own = stat_fields(api)
        below = [stat_fields(pid) for pid in descendants(api)]
    except OSError:  # also when this process has no file descriptor left
        return None
    used = [sum(map(int, fields[11:15])) / _TICKS_PER_S for fields in below]  # with children that have ended
    return ProcessorTime(
        sum(map(int, own[11:13])) / _TICKS_PER_S, 0.0 if any(one[0] in "Tt" for one in below) else sum(used)
    )


def watch_processes(api: int, title: str) -> Callable[[], Reason | None]:
    """Note the processes of a server that run now, and return a function that says
    which of them has ended, or returns None while all run.

    :param api: pid of the server's API process.
    :param title: only processes below it count whose titles begin so at this call.
    """
    found = {pid: (start_time(pid), command_line(pid)) for pid in descendants(api)}
    needed = {pid: (began, name) for pid, (began, name) in found.items() if name.startswith(title)}

    def ended() -> Reason | None:
        """Return which of the noted processes has ended, as a clause, or None."""
        with contextlib.suppress(OSError):  # without file descriptors nothing can be seen
            for pid, (began, name) in needed.items():
                if start_time(pid) != began:
                    return f"its process {pid} ({name}) has ended"
        return None

    return ended


def serving_process(port: int) -> int | None:
    """Return the pid of the oldest process of this machine that listens on a TCP port,
    or None if none is visible."""
    targets = {f"socket:[{found.inode}]" for found, _ in listeners() if found.port == port}
    holders = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  # names are enough
        with contextlib.suppress(OSError), os.scandir(f"/proc/{name}/fd") as entries:
            if any(os.readlink(entry.path) in targets for entry in entries):  # noqa: PTH115  # hundreds of them
                holders.append(int(name))
    return min(holders, default=None)


class _Call(NamedTuple):
    path: str
    began: float
    patience_s: float


class LivenessWatch:
    """Decides by a server's answers and processor time whether to give it up. Times are
    of a monotonic clock, in seconds.

    :param watched: how long each path may go unanswered while the processes behind it
        are idle.
    :param limit_s: the same while the processes are at work, or cannot be seen.
    :param while_loading: the paths that are answered during a load, too.
    :param api: a path that the API process answers without the engine.
    """

    def __init__(
        self,
        watched: Mapping[str, float],
        limit_s: float,
        now: float,
        *,
        while_loading: Collection[str],
        api: str = API,
    ) -> None:
        """Count every silence from ``now`` on (seconds of a monotonic clock); ask
        nothing.

        :param watched: how many seconds each path may go unanswered while the processes
            behind it are idle.
        :param limit_s: the same while the processes are at work, or cannot be seen.
        :param while_loading: the paths that are answered during a load, too.
        :param api: a path that the API process answers without the engine.
        """
        self._api = api
        self._watched, self._limit_s, self._while_loading = watched, limit_s, while_loading
        self._answered = dict.fromkeys(watched, now)
        self._refused = dict.fromkeys(watched, 0)
        self._lived = {True: now, False: now}
        self._spent: ProcessorTime | None = None
        self._clock = PauseClock(now + EVERY_S)
        self._looked = now
        self.call: _Call | None = None
        self.is_loading = False

    def record_answer(self, path: str, answer: Answer, now: float) -> None:
        """Record how a request to ``path`` was answered at the time ``now`` (seconds of
        a monotonic clock).

        :param answer: "good" ends the path's silence, "none" does not. Two times "dead"
            without a "good" between them are a reason to give the server up.
        """
        if answer == "good":
            self._answered[path], self._refused[path] = now, 0
        elif answer == "dead":
            self._refused[path] += 1

    def reason_to_give_up(self, spent: ProcessorTime | None, now: float, scan_s: float = 0.0) -> Reason | None:
        """Return why to give the server up, or None to keep it; the watching thread
        calls this about once a second. If a call comes late, as this process was
        suspended, all silences are counted from now.

        :param spent: processor time used so far; None: the processes cannot be seen.
        :param now: the present time, in seconds of a monotonic clock.
        :param scan_s: how many seconds the measurement of ``spent`` took, until now; up
            to 5 s of it do not count as a suspension.
        """
        if self._clock.measure_pause(
            now - min(scan_s, SCAN_MAX_S)
        ):  # this process was suspended, perhaps with the server
            self._restart_timers(now)
        self._clock.due = now + EVERY_S
        self._record_work(spent, now)
        for path, patience_s in self._watched.items():
            if self.is_loading and path not in self._while_loading:
                self._answered[path] = now
            if self._refused[path] >= DEAD_LOOKS:
                return f"the server no longer answers {path}"
            if silent_s := self._silent_s(path == self._api, self._answered[path], patience_s, now):
                return f"the server has not answered {path} for {silent_s:.0f} s"
        call = self.call
        if call is not None and (silent_s := self._silent_s(False, call.began, call.patience_s, now)):
            return f"no answer to {call.path} within {silent_s:.0f} s"
        return None

    def _restart_timers(self, now: float) -> None:
        """Count every silence from ``now`` on, as after a pause."""
        self._answered = dict.fromkeys(self._answered, now)
        if self.call is not None:
            self.call = self.call._replace(began=now)

    def _record_work(self, spent: ProcessorTime | None, now: float) -> None:
        """Record for :meth:`_silent_s` that the API process, or the engine, was at work
        at the time ``now`` if it has used 5 % of a processor or more since the last
        call.

        :param spent: processor time used so far; None: the processes cannot be seen.
        """
        before, elapsed_s = self._spent, now - self._looked
        self._spent, self._looked = spent, now
        if spent is None or before is None:
            return
        for is_api, used_s in ((True, spent.api_s - before.api_s), (False, spent.engine_s - before.engine_s)):
            if used_s >= AT_WORK * elapsed_s > 0:
                self._lived[is_api] = now

    def _silent_s(self, is_api: bool, since: float, patience_s: float, now: float) -> float:
        """Return the seconds since ``since`` if that silence is too long, else 0.

        It is too long after ``patience_s`` of idle processes, and in any case after the
        larger of that and the ``limit_s`` of the constructor.

        :param is_api: True if the API process must answer, False if the engine must.
        :param since: time of the last answer, or of the call's begin.
        :param patience_s: seconds of silence allowed while those processes are idle.
        :param now: the present time, in seconds of a monotonic clock.
        """
        idle_since = max(since, self._lived[is_api]) if self._spent is not None else now
        return now - since if now - idle_since > patience_s or now - since > max(patience_s, self._limit_s) else 0.0


class EngineHealth:
    """Context manager: threads watch a server, and give it up when it is gone or
    frozen: its calls then raise, also the pending one.

    :param is_gone: returns why the server is gone, or None.
    :param spent: returns the processor time of its processes, or None if hidden.
    :ivar reason: why the server was given up; empty: it was not.

    The other parameters are those of :class:`LivenessWatch`.
    """

    def __init__(
        self,
        server: EngineServer,
        is_gone: Callable[[], Reason | None],
        watched: Mapping[str, float],
        *,
        while_loading: Collection[str],
        limit_s: float,
        spent: Callable[[], ProcessorTime | None] = lambda: None,
    ) -> None:
        """Make the threads, one for each path of ``watched`` and one that judges; start
        none before entering.

        :param server: answers the requests; given up when it is gone or silent.
        :param is_gone: returns why the server is gone, or None.
        :param watched: how many seconds each path may go unanswered while the processes
            behind it are idle.
        :param while_loading: the paths that are answered during a load, too.
        :param limit_s: how many seconds each path may go unanswered while the processes
            are at work, or cannot be seen.
        :param spent: returns the processor time of its processes, or None if hidden.
        """
        self._server, self._is_gone, self._spent = server, is_gone, spent
        self._vigil = LivenessWatch(watched, limit_s, time.monotonic(), while_loading=while_loading, api=server.api)
        self._over = threading.Event()
        self.reason = ""
        asks = [threading.Thread(target=self._ask, args=(path,), name="replicas-engine-ask") for path in watched]
        self._threads = [*asks, threading.Thread(target=self._watch, name="replicas-engine-health")]

    def __enter__(self) -> EngineHealth:
        """Start the threads: one for each path, and the watch."""
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Break the pending requests, and end the threads; wait up to 2 s for each."""
        self._over.set()
        self._server.break_health_requests()
        for thread in self._threads:
            thread.join(2 * EVERY_S)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager: a load is under way, so only the paths ``while_loading`` of
        the constructor must be answered."""
        self._vigil.is_loading = True
        try:
            yield
        finally:
            self._vigil.is_loading = False

    @contextlib.contextmanager
    def calling(self, path: str, patience_s: float) -> Iterator[None]:
        """Context manager: a call, other than those of the watch, is under way. The
        server is given up if the call lasts too long.

        :param path: the requested path, for the text of the reason.
        :param patience_s: how many seconds the engine's processes may be idle during
            the call. While they are at work the call may take the larger of this and
            the ``limit_s`` of the constructor.
        """
        self._vigil.call = _Call(path, time.monotonic(), patience_s)
        try:
            yield
        finally:
            self._vigil.call = None

    def _ask(self, path: str) -> None:
        """Thread: request a path every second until the watch ends, and record the
        answers."""
        while not self._over.wait(EVERY_S):
            answer = self._server.check_path(path)
            self._vigil.record_answer(path, answer, time.monotonic())

    def _watch(self) -> None:
        """Thread: judge the server every second until the watch ends. When it is gone
        or silent for too long, set ``reason`` and give the server up (its calls raise,
        now and later); then return."""
        while not self._over.wait(EVERY_S):
            began = time.monotonic()
            spent = self._spent()
            now = time.monotonic()
            if reason := self._is_gone() or self._vigil.reason_to_give_up(spent, now, now - began):
                self.reason = reason
                self._server.give_up(reason)
                return
