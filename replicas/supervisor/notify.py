"""sd_notify: report the supervisor's state to systemd, or to another listener.

:class:`Notifier` speaks the protocol of sd_notify(3): one datagram of ``NAME=value``
lines per message. It never waits: fields that the receiver's full buffer does not take
are sent with the next message.

:class:`Watcher` reports for the supervisor. ``READY=1`` is sent when the control port
answers and the replicas are being started; whether they are ready is in ``STATUS`` and
``/readyz``: a start must not fail because a model loads for longer than systemd waits.
A drain sends ``EXTEND_TIMEOUT_USEC`` as long as it goes on; its own deadlines bound it.
``WATCHDOG=1`` is sent only if the control loop has run since the last one: systemd
kills a hung supervisor, and the shims then end their processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from replicas.common.foreign import one_line
from replicas.status import RunStatus
from replicas.supervisor.supervisor import Supervisor

__all__ = ["Notifier", "Watcher", "status_line"]

log = logging.getLogger("replicas.supervisor")

LOOK_INTERVAL_S = 1.0
_EXTENSION_S = 15.0
_WATCHDOG_SHARE = 3
_USEC = 1_000_000
_LINE_CHARACTERS = 900
"""Limit of each value: systemd ignores a datagram above 4096 bytes."""


class Notifier:
    """Sender of sd_notify messages to a datagram socket; empty: there is none."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._unsent: dict[str, str] = {}
        self._failed = False

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Make it from variables of ``environ``, which replicas then do not inherit."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        watchdog_s = int(usec) / _USEC if usec.isascii() and usec.isdigit() and int(usec) > 0 and ours else None
        return cls(address if address.startswith(("/", "@")) else "", watchdog_s)

    @property
    def wanted(self) -> bool:
        """Whether there is a receiver."""
        return self._socket is not None

    def send(self, **fields: str) -> bool:
        """Send these fields and those not sent before, and return whether they were."""
        if self._socket is None:
            return False
        self._unsent.update(fields)
        text = "\n".join(f"{name}={one_line(value, _LINE_CHARACTERS)}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._failed:
                log.warning("cannot notify %s: %s", self._address.replace("\0", "@"), error.strerror)
            self._failed = True
            return False
        self._failed = False
        self._unsent.clear()
        return True

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload around the block, refused or not."""
        self.send(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))
        try:
            yield
        finally:
            self._unsent.pop("RELOADING", None)
            self._unsent.pop("MONOTONIC_USEC", None)
            self.send(READY="1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Watcher:
    """Reports a supervisor's state to systemd while :meth:`run` runs."""

    def __init__(self, notifier: Notifier, supervisor: Supervisor) -> None:
        self._notifier = notifier
        self._supervisor = supervisor
        self._status = ""
        self._stopping = False
        self._alive_at = 0.0
        self._loop_at: float | None = None

    async def run(self) -> None:
        """Send ``READY=1``, then look every second, or more often for the watchdog."""
        if not self._notifier.wanted:
            return
        watchdog_s = self._notifier.watchdog_s
        interval_s = LOOK_INTERVAL_S if watchdog_s is None else min(LOOK_INTERVAL_S, watchdog_s / _WATCHDOG_SHARE)
        self.look(time.monotonic(), READY="1")
        while True:
            await asyncio.sleep(interval_s)
            self.look(time.monotonic())

    def stopping(self) -> None:
        """Send ``STOPPING=1``, unless it was sent."""
        if not self._stopping:
            self._stopping = True
            self._notifier.send(STOPPING="1")

    def look(self, now: float, **fields: str) -> None:
        """Send what has changed by ``now``, and ``fields``."""
        status = self._supervisor.status()
        line = status_line(status)
        if line != self._status:
            fields["STATUS"] = self._status = line
        if status.draining:
            if not self._stopping:
                self._stopping = True
                fields["STOPPING"] = "1"
            fields["EXTEND_TIMEOUT_USEC"] = str(int(_EXTENSION_S * _USEC))
        watchdog_s, looked_at = self._notifier.watchdog_s, self._supervisor.looked_at
        due = watchdog_s is not None and now - self._alive_at >= watchdog_s / _WATCHDOG_SHARE * 0.9
        if due and looked_at != self._loop_at:
            self._alive_at, self._loop_at = now, looked_at
            fields["WATCHDOG"] = "1"
        if fields:
            self._notifier.send(**fields)


def status_line(status: RunStatus) -> str:
    """Text of ``STATUS``: ``rollout 3/4, trainer 1/1 ready; policy at version 17``."""
    groups = ", ".join(
        f"{group.name} {sum(one.state in ('ready', 'finished') for one in group.replicas)}/{len(group.replicas)}"
        for group in status.groups
    )
    channels = ", ".join(f"{channel.name} at version {channel.committed_version}" for channel in status.channels)
    return ("draining; " if status.draining else "") + f"{groups} ready" + (f"; {channels}" if channels else "")
