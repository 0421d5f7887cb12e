"""sd_notify: telling systemd (or whoever listens at ``NOTIFY_SOCKET``) how the
supervisor fares.

Theory of operation
===================

The protocol is one datagram of ``NAME=value`` lines for each message, to the Unix
socket that ``NOTIFY_SOCKET`` names (``@`` first: an abstract one); see sd_notify(3).
:class:`Notifier` speaks it and never waits: a datagram that the receiver's full buffer
does not take is sent again with the next one. Without ``NOTIFY_SOCKET`` nothing is
sent.

:class:`Watcher` is the supervisor's task that has something to say: ``READY=1`` when
the control port answers and the replicas are being started (whether they are ready is
what ``STATUS`` and ``/readyz`` tell: a start must not fail because a model loads for
longer than systemd waits), ``STATUS`` at each change, ``STOPPING=1`` once it drains,
with ``EXTEND_TIMEOUT_USEC`` as long as the drain goes on, as its own deadlines bound
it. ``WATCHDOG=1`` is sent at a third of the watchdog's time, but only when the control
loop has come round since: one that hangs is killed by systemd, and the shims then end
what it ran. Around a reload on SIGHUP come ``RELOADING=1`` with ``MONOTONIC_USEC`` and
``READY=1``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol

from replicas.common.foreign import one_line
from replicas.status import RunStatus

__all__ = ["Notifier", "Watched", "Watcher", "status_line"]

log = logging.getLogger("replicas.supervisor")

LOOK_INTERVAL_S = 1.0
_EXTENSION_S = 15.0
_WATCHDOG_SHARE = 3
_USEC = 1_000_000
_LINE_CHARACTERS = 900
"""Of each value: systemd ignores a datagram above 4096 bytes."""


class Notifier:
    """The sending end.

    :param address: of the receiver's datagram socket; empty: nobody listens.
    :param watchdog_s: within which a ``WATCHDOG=1`` is wanted; None: no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._unsent: dict[str, str] = {}
        self._failed = False
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """The one that the environment names, whose variables are removed: replicas are
        not to speak for us."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        watchdog_s = int(usec) / _USEC if usec.isascii() and usec.isdigit() and int(usec) > 0 and ours else None
        return cls(address if address.startswith(("/", "@")) else "", watchdog_s)

    @property
    def wanted(self) -> bool:
        """Whether somebody listens."""
        return self._socket is not None

    def send(self, **fields: str) -> bool:
        """Send these fields, and those that could not be sent before; never waits.

        :return: whether they have left.
        """
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
        """Say that the config is being read again, and at the end of the block that it
        was: also when it was refused."""
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


class Watched(Protocol):
    """What is told of: the supervisor."""

    def status(self) -> RunStatus: ...

    @property
    def looked_at(self) -> float:
        """When the control loop came round last, by any clock."""
        ...


class Watcher:
    """Tells systemd of a supervisor, from :meth:`run`'s begin until it is cancelled."""

    def __init__(self, notifier: Notifier, watched: Watched) -> None:
        self._notifier = notifier
        self._watched = watched
        self._status = ""
        self._stopping = False
        self._alive_at = 0.0
        self._loop_at: float | None = None

    async def run(self) -> None:
        """Say that we are ready, then look every second, or as often as the watchdog
        needs."""
        if not self._notifier.wanted:
            return
        watchdog_s = self._notifier.watchdog_s
        interval_s = LOOK_INTERVAL_S if watchdog_s is None else min(LOOK_INTERVAL_S, watchdog_s / _WATCHDOG_SHARE)
        self.look(time.monotonic(), READY="1")
        while True:
            await asyncio.sleep(interval_s)
            self.look(time.monotonic())

    def stopping(self) -> None:
        """Say that the supervisor is ending, unless that was said."""
        if not self._stopping:
            self._stopping = True
            self._notifier.send(STOPPING="1")

    def look(self, now: float, **fields: str) -> None:
        """Send what there is to say at ``now``, and ``fields``."""
        status = self._watched.status()
        line = status_line(status)
        if line != self._status:
            fields["STATUS"] = self._status = line
        if status.draining:
            if not self._stopping:
                self._stopping = True
                fields["STOPPING"] = "1"
            fields["EXTEND_TIMEOUT_USEC"] = str(int(_EXTENSION_S * _USEC))
        if self._is_alive(now):
            fields["WATCHDOG"] = "1"
        if fields:
            self._notifier.send(**fields)

    def _is_alive(self, now: float) -> bool:
        """Whether a WATCHDOG=1 is due, and true: the control loop has come round since
        the last one."""
        watchdog_s = self._notifier.watchdog_s
        came_round = self._watched.looked_at
        due = watchdog_s is not None and now - self._alive_at >= watchdog_s / _WATCHDOG_SHARE * 0.9
        if not due or came_round == self._loop_at:
            return False
        self._alive_at, self._loop_at = now, came_round
        return True


def status_line(status: RunStatus) -> str:
    """One line for ``systemctl status``: ``rollout 3/4, trainer 1/1 ready; policy at
    version 17``."""
    groups = ", ".join(
        f"{group.name} {sum(one.state in ('ready', 'finished') for one in group.replicas)}/{len(group.replicas)}"
        for group in status.groups
    )
    channels = ", ".join(f"{channel.name} at version {channel.committed_version}" for channel in status.channels)
    return ("draining; " if status.draining else "") + f"{groups} ready" + (f"; {channels}" if channels else "")
