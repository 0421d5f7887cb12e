"""The agent's side of a shim: start it, send orders, read states, sweep at its end."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import anyio.to_thread

from replicas import __version__, environ
from replicas.common import own_code
from replicas.common.logs import Log
from replicas.common.patience import PAUSE_S, Silence
from replicas.linux import cgroups, private
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.processes import MARK, SHIM, command_line, send_signal, signal_name, start_time
from replicas.linux.scarce import naming_limits
from replicas.supervisor.agent.shim_fork import ShimFork
from replicas.supervisor.cleanup.sweeping import UNSEEN, Sweep, by_mark
from replicas.supervisor.logs.pump import is_pump
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import REMAINS_INTERVAL_S, MessageSocket, PartSpec, plain
from replicas.supervisor.wire.part_state import ExitReport, LogLoss, PartState, Remains, first_state

log = Log("replicas.agent")

_PING_INTERVAL_S = 1.0
_SILENT_S = 1.5
"""A shorter silence is not reported: an answer may be on its way."""
_SWEEP_S = 2.0
"""Duration of the first sweep. Processes that are left are reported and swept again."""
_MAX_SWEEP_INTERVAL_S = 1.0
_CODE_S = 0.5
"""How long after the end of a forked shim its template may take to tell the code."""


def base_environment() -> dict[str, str]:
    """Return this process's environment, to be extended for a shim's processes.

    Variables of torchrun and of an outer run of replicas are left out.
    """
    return {
        name: value
        for name, value in environ.without_torchrun(own_code.rooted(os.environ)).items()
        if not name.startswith(("REPLICAS_", "REPLICA_")) or name == environ.ACCELERATOR
    }


class ShimProcess:
    """The agent's side of one shim: the child process that owns a part of a replica.

    It lasts until no process of the part is left. For the event loop's thread.

    :param changed: called after each change of :attr:`state` or :attr:`stacks`.
    :param lock: descriptor of a lock, which the shim keeps open while it lives.
    :ivar state: the shim's last message, or the findings after its death.
    :ivar stacks: received stacks by ``group/replica/rank``; the reader sets it to None.
    """

    _fork: ShimFork | None = None

    def __init__(
        self, spec: PartSpec, changed: Callable[[], None], lock: int | None = None, template: str = ""
    ) -> None:
        """Start the process of the shim, send it the spec, and watch it on the loop.

        :param changed: called on the loop after each change of :attr:`state` or
            :attr:`stacks`.
        :param lock: descriptor of a lock, which the shim keeps open while it lives.
        :param template: address of the template that forks it, perhaps later; if that
            fails, it is started without. Empty: there is none.
        :raises OSError: the process cannot be started, or the spec is too long.
        """
        self.spec, self.template, self._lock = spec, template, lock
        self.stacks: dict[str, str] | None = None
        self._changed = changed
        self._unlogged: tuple[LogLoss, ...] = ()
        self._finishing = False
        self._said_gone = False  # the exit code is not enough: where SIGCHLD is ignored, it reads 0
        self._sweeper: asyncio.Task[None] | None = None
        self._told_until = spec.lease_until or None
        self._answered_at = time.monotonic()
        self._silence = Silence(self._answered_at + _PING_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self._start = {"type": "start", "spec": plain(spec)}
        if (nbytes := len(orders.encode(self._start))) > orders.FILE_MAX_NBYTES:
            text = f"its environment and command take {nbytes >> 10} KiB, more than may be sent: make the environment smaller"
            raise OSError(errno.EMSGSIZE, text)
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.state = first_state(spec, 0)
        self._launch()

    def _launch(self) -> None:
        """Start the process of the shim, or ask the template for it.

        :raises OSError: it cannot be started.
        """
        ours, theirs = orders.pair()
        ours.setblocking(False)
        name = f"the shim of {self.spec.group}/{self.spec.replica}"
        self._control = MessageSocket(ours, name, self._handle_message, self._loop.remove_reader, log.error)
        with theirs, ExitStack() as stack:
            given = {"control": theirs.fileno()}
            if self._lock is not None:
                given["lock"] = self._lock
            if self.spec.tee:
                given["tee"] = os.dup(2)
                stack.callback(os.close, given["tee"])
            output = stack.enter_context(self._log())
            options = popen_arguments({**os.environ, MARK: self.spec.nonce})
            if self.template:
                self._fork = ShimFork(self.template, self, output.fileno(), options["env"], given)
            else:
                self._popen = _spawn(given, output, options)
                self.forked(self._popen.pid, os.pidfd_open(self._popen.pid))
        self._loop.add_reader(ours, self._control.read)

    def forked(self, pid: int, pidfd: int) -> None:
        """Watch the started shim by ``pidfd``, closed at its end; send it the spec."""
        self._pidfd = pidfd
        self._answered_at = time.monotonic()
        self.state = self.state._replace(pid=pid, start_time=start_time(pid) or 0, losses=self._unlogged)
        self._loop.add_reader(pidfd, self._on_exit)
        if not self._control.send(self._start):  # the shim has started no process, and ends
            self._control.close()
        if self._popen is None:
            self._changed()

    def not_forked(self, reason: str) -> None:
        """Start the process of the shim without its template; log why."""
        log.warning("starting %s/%s without its template: %s", self.spec.group, self.spec.replica, reason)
        self._control.close()  # a process that was forked nevertheless ends with it
        self.template, self._fork = "", None
        try:
            self._launch()
        except OSError as error:
            self._end_unstarted(f"its shim, which starts the ranks, cannot be started: {error}")
        else:
            self._changed()

    def _end_unstarted(self, why: str) -> None:
        """Report the part as ended and gone, as its shim has not been started.

        :param why: what has failed, in words; empty if it was told to end before its
            start.
        """
        if self._fork is not None:
            self._fork.close()
        self._control.close()
        self._finishing = True
        self._change(report=ExitReport("lost", text=why) if why else ExitReport("stopped"))
        self._all_gone()

    @property
    def _is_awaited(self) -> bool:
        """True while the template has not forked the shim yet."""
        return self._fork is not None and self._pidfd < 0 and not self._finishing

    def _log(self) -> IO[bytes]:
        """Open and return the shim's own log, or the null device if that fails.

        The failure is noted, for the part's state.
        """
        path = Path(self.spec.log_dir) / f"shim-{self.spec.node}.log"
        try:
            log = private.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, make_folder=True)
            return os.fdopen(log, "ab")
        except OSError as error:
            self._unlogged = (LogLoss(0, "file", error.strerror or str(error)),)
            return Path(os.devnull).open("ab")

    def meet(self, host: str, port: int) -> None:
        """Send the shim the rendezvous: host and port of the parts' common store."""
        self._control.send({"type": "rendezvous", "host": host, "port": port})

    def stop(self, timeout_s: float, *, stacks: bool = False, broken: str = "") -> None:
        """Order the shim to send its processes SIGTERM now, and SIGKILL later.

        Does not wait for the shim. A further call can make the SIGKILL earlier. A shim
        that its template has not forked yet is given up, and its part reported as
        ended.

        :param timeout_s: seconds until those that are left get SIGKILL.
        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        :param broken: why the part cannot run on; empty if the stop was ordered.
        """
        if self._is_awaited:
            self._end_unstarted(broken)
        self._control.send({"type": "stop", "timeout_s": timeout_s, "stacks": stacks, "broken": broken})

    def show_stacks(self) -> None:
        """Ask the shim for the stacks of its ranks, which arrive in :attr:`stacks`."""
        self._control.send({"type": "stacks"})

    def kill(self) -> None:
        """SIGKILL the shim, unless it has ended; does not wait.

        When the shim has ended, by this call or not, this object kills the processes
        that the shim has left (:meth:`_sweep`).
        """
        if self._is_awaited:
            self._end_unstarted("")
        elif not self._finishing:
            send_signal(self._pidfd, signal.SIGKILL)

    def check_shim(self, now: float, lease_until: float | None, patience_s: float) -> None:
        """Note in :attr:`state` for how long the shim has not answered; ping it if due.

        To be called every second. Does not wait for the answer.

        :param now: the present time of the machine's monotonic clock.
        :param lease_until: when the shim must end unless a later ping extends it, by
            the same clock; None for no such time.
        :param patience_s: how long the shim runs without a ping; 0 for no limit.
        """
        if self._is_awaited:
            self._silence.answered()
            return
        silent_s = self._silence.measure_silence(now)  # minus our own pauses
        self._silence.due = now + _PING_INTERVAL_S
        unheard_s = time.monotonic() - self._answered_at
        due = not self._silence.asked and now - self._answered_at >= _PING_INTERVAL_S
        if self.state.report is None and (due or lease_until is not None or self._told_until is not None):
            self._silence.ask(now)
            if self._control.send({"type": "ping", "until": lease_until or 0.0, "patience_s": patience_s}):
                self._told_until = lease_until
        self.state = self.state._replace(silent_s=silent_s if silent_s > _SILENT_S else 0.0)
        if not self._finishing and unheard_s >= REMAINS_INTERVAL_S + PAUSE_S:
            self.state = self.state._replace(remains=None)  # do not wait for processes that a silent shim named

    def _handle_message(self, message: orders.Message) -> None:
        """Note that the shim answers, and use the state or stacks in its message."""
        self._silence.answered()
        self._answered_at = time.monotonic()
        match message["type"]:
            case "state":
                self._take_state(orders.read(PartState, message.get("state")))
            case "stacks":
                self.stacks = orders.read(dict[str, str], message.get("found"))
                self._changed()

    def _take_state(self, state: PartState) -> None:
        """Replace :attr:`state` by one that the shim sent, and call ``changed``.

        Keep the part's identity (mark, group etc.) and ``silent_s``, as known here. The
        part counts as gone only after the end of the shim. Warn if the shim is of
        another release of this package.
        """
        if self.state.main_pid is None and state.main_pid is not None and state.release != __version__:
            log.warning(
                "%s/%s runs release %s of replicas, installed while this supervisor of %s ran: restart the supervisor",
                self.spec.group,
                self.spec.replica,
                state.release,
                __version__,
            )
        self._said_gone = state.gone
        known, self.state = self.state, state.with_identity_of(self.state)
        losses = (*self._unlogged, *state.losses)
        self._change(gone=False, losses=losses, silent_s=known.silent_s)  # a part is gone only after its shim

    def _change(self, **changes: Any) -> None:
        """Change fields of :attr:`state`, and call ``changed``."""
        self.state = self.state._replace(**changes)
        self._changed()

    def _on_exit(self) -> None:
        """Reap the dead shim, and report its end as that of its part.

        Start a task that kills the processes that are left. Called by the loop when the
        shim's pidfd becomes readable.
        """
        self._loop.remove_reader(self._pidfd)
        self._control.read_rest()
        if self._popen is not None:
            self.ended(self._popen.wait())
        elif self._fork is not None:  # its template knows the code
            self._loop.call_later(_CODE_S, self.ended, None)

    def ended(self, code: int | None) -> None:
        """Report the end of the shim as that of its part, once.

        :param code: its exit code; None: unknown, as its template has ended.
        """
        if self._finishing or not select.select([self._pidfd], [], [], 0)[0]:
            return  # without the template, its end shows later
        self._loop.remove_reader(self._pidfd)
        self._control.read_rest()
        self._finishing = True
        os.close(self._pidfd)
        if self._fork is not None:
            self._fork.close()
        if not code and self._said_gone:
            self._all_gone()
            return
        ended = f"failed with code {code}" if code else "ended before the ranks"
        if code is not None and code < 0:
            ended = f"was killed by {signal_name(-code)}"
        report = self.state.report
        if report is None or (report.outcome == "ok" and code != 0):
            report = ExitReport("lost", text=f"the shim on node {self.spec.node}, which watches the ranks, {ended}")
        self._change(report=report)
        self._sweeper = self._loop.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Kill the processes that the dead shim has left, until there are none.

        They have its mark in their environment, or are in the part's control group or
        the shim's last report. Looks in a thread. Those that remain are shown in
        :attr:`state`. At the end, remove the control group, and report the part gone.
        """
        groups = [Path(self.spec.cgroup)] if self.spec.cgroup else []
        sweep = Sweep(by_mark([self.spec.nonce]), groups=groups, known=dict(self.state.belongings.processes))
        began, timeout_s, interval_s = time.time(), _SWEEP_S, 0.05
        while True:
            try:
                left = await anyio.to_thread.run_sync(sweep.run, timeout_s)
            except OSError as error:  # e.g. this process has no descriptor left
                log.error("trying again to kill processes of %s/%s: %s", self.spec.group, self.spec.replica, error)
                left = [UNSEEN]
            if not left:
                break
            named = tuple((pid, command_line(pid)) for pid in left if not is_pump(pid))  # pumps end on their own
            self._change(remains=Remains(since=began, processes=named) if named else None)
            await asyncio.sleep(interval_s)
            timeout_s, interval_s = 0.0, min(2 * interval_s, _MAX_SWEEP_INTERVAL_S)
        for group in groups:
            cgroups.leave(group)
        self._all_gone()

    def _all_gone(self) -> None:
        """Set :attr:`state`: no process of the part is left. Call ``changed``."""
        self._change(report=self.state.report or ExitReport("stopped"), remains=None, gone=True)


@naming_limits()
def _spawn(given: Mapping[str, int], output: IO[bytes], options: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start the process of a shim, and return it.

    :param given: descriptors for it to inherit, by the names of its options.
    :param output: its log. :param options: further arguments of Popen.
    """
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = python_module(SHIM, *words, "--parent", str(os.getpid()))
    return subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[*given.values()], **options)
