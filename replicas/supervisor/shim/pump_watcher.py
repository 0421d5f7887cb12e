"""Keep a log pump running that reads a part's pipes.

A pump (:mod:`replicas.supervisor.logs.pump`) that ends is replaced immediately, or
after growing delays if that happens repeatedly; meanwhile the pipes buffer the output
(:mod:`replicas.supervisor.shim.log_pipes`). A pump that does not read waiting bytes for
``STUCK_S`` (it was stopped, or hangs in a write) is killed. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.patience import Patience
from replicas.linux.processes import send_signal
from replicas.linux.scarce import naming_limits
from replicas.supervisor.logs.log_file import remove_old_generations
from replicas.supervisor.logs.pump import COMM, OutputLog, Pump, waiting_nbytes
from replicas.supervisor.shim.log_pipes import LogPipes
from replicas.supervisor.wire.orders import Message, MessageSocket, PartSpec, note, read
from replicas.supervisor.wire.part_state import LogLoss

DRAIN_S = 2.0
"""How long the exit report waits for the last lines, in seconds."""
STUCK_S = 3.0
_LOOK_INTERVAL_S = 2.0
"""Longest interval of :meth:`PumpWatcher.kill_if_stuck`, at the agent's pings."""
_CLOSE_S = 1.0
_STEADY_S = 10.0
AGAIN = Backoff(0.02, 2.0)
KILLED = Backoff(0.02, 0.05)  # a killed pump had worked, so its successor will, too
_AT_ONCE = Backoff(0.0, 0.0)


class PumpWatcher:
    """Keeps the log pump, the process that writes a part's logs, running."""

    def __init__(
        self, spec: PartSpec, selector: selectors.BaseSelector, tee: int | None, dropped: Callable[[LogLoss], None]
    ) -> None:
        """Make the pipes of the logs; start no pump before :meth:`start`.

        :param selector: the shim's loop, in which the pump's messages are registered.
        :param tee: descriptor of the supervisor's stderr; None to show no lines there.
        :param dropped: called by the shim's loop with lines that a log or the terminal
            lost.
        """
        self._spec = spec
        self._selector = selector
        self._tee = tee
        self._tell_dropped = dropped
        self.pipes = LogPipes(spec)
        self.pid = 0
        self._pidfd: int | None = None
        self._control: MessageSocket | None = None
        self._life = ChildLife(AGAIN, steady_s=_STEADY_S)
        self._replaces = False
        self._kill_at = math.inf
        self._closed = False
        self._reads: tuple[int, ...] = ()
        self._stuck = Patience(0.0, _LOOK_INTERVAL_S)
        self._drains = 0
        self._on_drained: Callable[[], None] | None = None
        self._drained_by = math.inf

    @property
    def over(self) -> bool:
        """True if, after :meth:`close`, the pump has ended: in order, or by SIGKILL."""
        return self._life.state == "over"

    @property
    def due(self) -> float:
        """When :meth:`on_time` must be called; inf for never."""
        return min(self._life.due, self._kill_at, self._drained_by, self.pipes.flush_at)

    def start(self) -> None:
        """Fork a log pump; schedule another try if the system refuses."""
        now = time.monotonic()
        self._life.start(now)
        self._stuck = Patience(now, _LOOK_INTERVAL_S)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with naming_limits():
                pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            note(f"waiting with the output of the ranks: the process that writes their logs cannot be started: {error}")
            self._life.ended(now)
            return
        if pid == 0:
            self._become_pump(theirs)
        theirs.close()
        self._life.ready()
        self.pid, self._pidfd = pid, os.pidfd_open(pid)
        self._control = MessageSocket(ours, "the log pump", self._take, self._selector.unregister)
        self._selector.register(ours, selectors.EVENT_READ, self._control.read)
        if self._on_drained is not None:  # the previous pump ended before it answered
            self._ask()

    def _become_pump(self, control: socket.socket) -> NoReturn:
        """Run the pump in this forked process until the output ends, and exit.

        :param control: the pump's end of its message socket to the shim.
        """
        code = 1
        try:
            _leave_the_shim(keep=[control.fileno(), *self.pipes.readers, *([] if self._tee is None else [self._tee])])
            spec = self._spec
            name = f"{spec.group}/{spec.replica}"
            folder = Path(spec.log_dir)
            _rename(f"replicas log pump of {name}")
            limits = (spec.log_max_nbytes, spec.log_keep)
            sources = self.pipes.sources.values()
            logs = [OutputLog(source, folder, *limits, replaces=self._replaces) for source in sources]
            remove_old_generations(folder, spec.log_keep_generations)
            Pump(logs, control, self._tee, name).run()
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must never return into its parent's code
            sys.excepthook(*sys.exc_info())  # the traceback module loads slowly
        finally:
            os._exit(code)

    def ended(self, code: int) -> None:
        """Handle the end of the pump: replace it, unless all output is logged.

        :param code: its exit code, or minus the signal that killed it.
        """
        self.pid = 0
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._control is not None:
            self._control.read_rest()
        if self._closed and code == 0:
            self._life.stop()
        now = time.monotonic()
        self._life.ended(now, _AT_ONCE if self._life.starts == 1 else KILLED if code < 0 else AGAIN)
        if self.over:
            self._kill_at = math.inf
            return
        note(f"replacing the process that writes the logs of the ranks, which ended with {code}")
        self._replaces = True
        if self._life.on_time(now):
            self.start()

    def _take(self, message: Message) -> None:
        """Handle a message of the pump: lost lines, or all output being logged."""
        if message["type"] == "dropped":
            self._tell_dropped(read(LogLoss, message.get("loss")))
        # other numbers answer earlier requests
        elif message["type"] == "drained" and message.get("number") == self._drains:
            self._drained()

    def kill_if_stuck(self, now: float) -> None:
        """Kill a pump that left waiting bytes unread for 3 s; it is then replaced.

        To be called every second or two.
        """
        before, self._reads = self._reads, tuple(source.reads for source in self.pipes.sources.values())
        idle = self._reads == before and any(waiting_nbytes(pipe) for pipe in self.pipes.readers)
        if self._stuck.measure_duration(now, idle) >= STUCK_S and self._life.state == "up" and self._pidfd is not None:
            note(f"killing the process that writes the logs of the ranks, which has read nothing for {STUCK_S:g} s")
            self._life.give_up()
            send_signal(self._pidfd, signal.SIGKILL)

    def on_time(self, now: float) -> None:
        """Take the due steps: start or kill the pump, end a drain, write lines."""
        if self._life.on_time(now):
            self.start()
        if now >= self._drained_by:
            note(f"no longer waiting for the last output of the ranks, not logged within {DRAIN_S:g} s")
            self._drained()
        if now >= self.pipes.flush_at:
            self.pipes.flush_lines(now)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._life.stop()
            unread = sum(waiting_nbytes(pipe) for pipe in self.pipes.readers)
            if unread:
                note(f"dropping the last {unread} bytes of output, not read within {_CLOSE_S:g} s")
            if self._pidfd is not None:
                send_signal(self._pidfd, signal.SIGKILL)

    def drain(self, then: Callable[[], None]) -> None:
        """Order the pump to log all output up to now. Does not wait.

        :param then: called once when that is done, or after 2 s (``DRAIN_S``) without
            an answer; replaces that of an earlier call.
        """
        self._on_drained = then
        self._drained_by = time.monotonic() + DRAIN_S
        self._ask()

    def _ask(self) -> None:
        """Send the pump the order to log all output up to now.

        The order has a new number, by which its answer is recognized.
        """
        self._drains += 1
        if self._control is not None:
            self._control.send({"type": "drain", "number": self._drains})

    def _drained(self) -> None:
        """Call the ``then`` of :meth:`drain`, once."""
        then, self._on_drained, self._drained_by = self._on_drained, None, math.inf
        if then is not None:
            then()

    def close(self) -> None:
        """Close the shim's ends of the pipes, so that the pump ends after all output.

        It is killed after a second; until then, a pump that dies is replaced. Does not
        wait; :attr:`over` shows the end.
        """
        if self._closed:
            return
        self._closed = True
        self._kill_at = time.monotonic() + _CLOSE_S
        if self.pid == 0:
            self.start()
        self.pipes.close()


def _leave_the_shim(keep: list[int]) -> None:
    """Make this forked process independent of the shim.

    Close all inherited descriptors but ``keep`` and the standard ones, reset the signal
    handlers, and start a session.
    """
    signal.set_wakeup_fd(-1)  # the pump's signals must not wake the shim
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its input
    os.setsid()
    last = 2
    for descriptor in sorted(keep):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _rename(title: str) -> None:
    """Set the name in ``ps`` to ``title``.

    Overwrites this process's arguments in memory, as setproctitle does.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start > 0:
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(COMM)
