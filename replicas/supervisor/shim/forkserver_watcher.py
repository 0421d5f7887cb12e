"""Keep a node's sidecar forkserver running, within the shim's loop.

Theory of operation
===================

A forkserver that died, or could not be started for lack of processes, is started again,
later each time. One that froze (SIGSTOP), or stalls while it should load torch, is
killed and thus replaced; it counts as starting until its first byte on the *ready* pipe
(:mod:`replicas.linux.stalls`). A hang after that shows when a rank asks it to fork: the
rank then kills it. After ``TRIES`` starts, each within a minute of the one before, the
replica cannot sync, and the shim ends it. Standard library only.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable

from replicas.common.backoff import Backoff
from replicas.linux.processes import Child
from replicas.linux.stalls import LOOK_INTERVAL_S, StallWatch
from replicas.supervisor.shim.orders import note

__all__ = ["TRIES", "ForkserverWatcher"]

TRIES = 8
AGAIN = Backoff(0.1, 6.4)
_STEADY_S = 60.0


class ForkserverWatcher:
    """Keeps one forkserver running. ``spawn``: starts it, given a descriptor: ready."""

    def __init__(self, spawn: Callable[[int], Child], selector: selectors.BaseSelector) -> None:
        self._spawn = spawn
        self._selector = selector
        self._child: Child | None = None
        self._starts = 0
        self._began = 0.0
        self._start_at: float | None = None
        self._look_at: float | None = None
        self._ready: int | None = None
        self._watch: StallWatch | None = None
        self._over = False

    @property
    def pid(self) -> int:
        """Process id of the forkserver; 0 if there is none."""
        return 0 if self._child is None or self._child.code is not None else self._child.pid

    @property
    def wakes(self) -> list[float]:
        """When :meth:`on_time` must be called."""
        return [at for at in (self._start_at, self._look_at) if at is not None]

    def start(self) -> None:
        self._start_at = None
        self._starts += 1
        self._began = time.monotonic()
        self._forget_readiness()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._child = self._spawn(writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._ready = reader
        self._selector.register(reader, selectors.EVENT_READ, self._forget_readiness)
        self._watch = StallWatch(self._child.pid, self._began)
        self._look_at = self._began + LOOK_INTERVAL_S

    def ended(self, code: int) -> str:
        """Note its end, after it was reaped; return why it is not restarted, if so."""
        assert self._child is not None
        self._child.ended(code)
        self._look_at = None
        return self._again(time.monotonic(), "died")

    def on_time(self, now: float) -> str:
        """Do what is due; return why it is not restarted, if so."""
        if self._start_at is not None and now >= self._start_at:
            try:
                self.start()
            except OSError as error:
                note(f"the forkserver cannot be started: {error}")
                return self._again(now, f"cannot be started ({error}), or died,")
        if self._look_at is not None and now >= self._look_at:
            assert self._child is not None
            assert self._watch is not None
            self._look_at = now + LOOK_INTERVAL_S
            reason = self._watch.look(now, starting=self._ready is not None)
            if reason:
                self._look_at = None
                note(f"the forkserver, process {self._child.pid}, {reason}: it is killed")
                self._child.signal(signal.SIGKILL)
        return ""

    def _again(self, now: float, what: str) -> str:
        """Schedule a restart, later each time; or return why not."""
        if self._over:
            return ""
        if now - self._began > _STEADY_S:
            self._starts = 1
        if self._starts >= TRIES:
            return f"{what} {self._starts} times"
        self._start_at = now + AGAIN.after(self._starts - 1)
        return ""

    def stop(self) -> None:
        """Stop restarting it."""
        self._over = True
        self._start_at = self._look_at = None

    def kill(self) -> None:
        self.stop()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _forget_readiness(self) -> None:
        """End the start-up watch: it has loaded torch, or is gone."""
        if self._ready is not None:
            self._selector.unregister(self._ready)
            os.close(self._ready)
            self._ready = None
