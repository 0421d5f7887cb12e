"""Supervise one run in this process: handle signals, report to systemd.

TERM and INT drain the run; a second one kills the remaining processes. USR1 announces a
preemption: drain, and exit with 75. HUP reloads the config file; but if the terminal is
gone it drains, unless the process was started by nohup. A drain or preemption during
the start cancels the start.

:class:`Notifier` speaks sd_notify(3), a datagram of ``NAME=value`` lines per message.
:class:`Watcher` sends ``READY=1`` when the control port answers: a start must not fail
if a model loads for longer than systemd waits. A drain sends ``EXTEND_TIMEOUT_USEC``,
and ``WATCHDOG=1`` is sent only if the fleet's monitor has run since the last one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import shlex
import signal
import socket
import time
import traceback
from collections.abc import Coroutine, Iterator, MutableMapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio

from replicas import environ, errors
from replicas.common.foreign import one_line
from replicas.common.logs import Log
from replicas.common.tasks import keep_until_done
from replicas.config.structs import Config
from replicas.control.exit_codes import CUT, DONE, PREEMPTED, SUPERVISED, USAGE
from replicas.linux import inherited
from replicas.linux.scarce import naming_limits
from replicas.status import RunStatus
from replicas.supervisor.console import Console
from replicas.supervisor.scheduler_hooks import SchedulerHooks
from replicas.supervisor.state.state import AlreadySupervised
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import Reloaded

log = Log("replicas.supervisor")

_LAST_WORDS_S = 2.0
_FILES = 1 << 16
LOOK_INTERVAL_S = 1.0
_EXTENSION_S = 15.0
_WATCHDOG_SHARE = 3
_USEC = 1_000_000
_LINE_CHARACTERS = 900
"""Limit of each value: systemd ignores a datagram above 4096 bytes."""


def supervise(config: Config, surroundings: SchedulerHooks = SchedulerHooks()) -> int:
    """Run ``config`` to its end in this process, with human-readable lines on stderr.

    Blocks. Handles signals, and raises the limit of open files, of this process.

    :param surroundings: what the scheduler that starts this process changes.
    :return: one of :mod:`replicas.control.exit_codes`.
    :raises replicas.errors.UsageError: the run cannot be started with this config.
    """
    inherited.put_in_order()
    # Each replica needs several open files; 1024 is a common limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))
    faulthandler.enable()  # systemd's watchdog ends a hung supervisor with SIGABRT: the journal then has its stacks
    console = Console()
    try:
        with console.logging(), naming_limits():
            return anyio.run(_supervise, config, console, surroundings)
    except AlreadySupervised as error:
        console.say(str(error))
        return SUPERVISED
    except (errors.WorldError, BlockingIOError) as error:
        console.say(str(error))
        return USAGE
    finally:
        console.flush(_LAST_WORDS_S)


async def _supervise(config: Config, console: Console, surroundings: SchedulerHooks) -> int:
    """Run the config to its end on this loop, handle signals; return the exit code."""
    say = console.say
    notifier = Notifier.from_environ(os.environ)
    supervisor = Supervisor(surroundings.adapt(config), report=say)
    supervisor.reloading.adapt = surroundings.adapt
    supervisor.on_open = lambda: surroundings.opened(supervisor)
    supervisor.on_tokens = lambda: surroundings.renewed(supervisor)
    supervisor.resources.expected = surroundings.nodes
    watcher = Watcher(notifier, supervisor)
    operator = _Operator(supervisor, notifier, watcher, console, surroundings.preempting)
    try:
        with operator.listening():
            async with AsyncExitStack() as stack:
                if not await operator.entered(stack):
                    say(f"run {config.run.name}: not started, as the start was cancelled")
                    return PREEMPTED if operator.preempted else DONE
                scheme = "https" if supervisor.coordinator.tls else "http"
                where = f"{scheme}://{supervisor.endpoint}, state in {config.run.state_dir}"
                say(f"run {config.run.name}: control at {where}")
                for line in _invitations(supervisor):
                    say(line)
                operator.started.set()
                telling = operator.spawn(watcher.run())
                code = await supervisor.run_until_done()
                telling.cancel()
                watcher.stopping()
                await operator.finish()
    finally:
        notifier.close()
    words = f": {supervisor.fleet.words_of_cut}" if code == CUT else ""
    end = "goes on without this supervisor" if supervisor.detached else "over"
    say(f"run {config.run.name}: {end}, exit code {code}{words}; its output: replicas logs{_named(config)}")
    return code


def _invitations(supervisor: Supervisor) -> Iterator[str]:
    """Yield, for each external group, a line that says how its programs join."""
    for group in supervisor.config.groups.values():
        if group.external:
            variables = {
                environ.ENDPOINT: supervisor.endpoint,
                environ.TOKEN_FILE: supervisor.state.token_file,
                environ.GROUP: group.name,
                environ.REPLICA: "auto" if group.world_size == 1 else "N",
            }
            listed = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
            yield f"group {group.name}: start its programs yourself, each with these variables: {listed}"


def _named(config: Config) -> str:
    """Return a blank and the config's path, as a shell argument; "" without a path."""
    source = config.source
    if source is None:
        return ""
    here = Path(source.name)  # this folder may be gone
    return f" {shlex.quote(source.name if here.exists() and here.samefile(source) else str(source))}"


class _Terminal:
    """The terminal of this process, with which the run ends unless it has nohup."""

    def __init__(self) -> None:
        """Note whether this process has a terminal, and whether it runs under nohup."""
        stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        self._controls = not stays and self._is_controlled()
        self._shown = not stays and os.isatty(2)

    @property
    def gone(self) -> bool:
        """True if the terminal of the start is gone; always False under nohup."""
        return (self._controls and not self._is_controlled()) or (self._shown and not os.isatty(2))

    @staticmethod
    def _is_controlled() -> bool:
        """Return True if this process has a controlling terminal."""
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return False
        return True


class _Operator:
    """Carries out signals (drain, preempt, reload), each in a task."""

    def __init__(
        self,
        supervisor: Supervisor,
        notifier: Notifier,
        watcher: Watcher,
        console: Console,
        preempting: frozenset[signal.Signals] = frozenset(),
    ) -> None:
        """Start the task of reloads. ``preempting``: signals that mean a preemption."""
        self.started = asyncio.Event()
        self.preempted = False
        self._supervisor, self._notifier, self._watcher = supervisor, notifier, watcher
        self._console, self._say = console, console.say
        self._preempting = preempting
        self._terminal = _Terminal()
        self._ending = False
        self._starting: asyncio.Task[object] | None = None
        self._reload_asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloads = {self.spawn(self._reload_when_asked())}
        """The tasks of reloads, which the end of the run cancels."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM, SIGINT, SIGHUP, SIGUSR1 in the block; ignore them later."""
        loop = asyncio.get_running_loop()
        signals = {
            signal.SIGTERM: self._drain,
            signal.SIGINT: self._drain,
            signal.SIGHUP: self._hang_up,
            **dict.fromkeys((signal.SIGUSR1, *self._preempting), self._preempt),
        }

        def arrived(number: int, frame: object) -> None:
            """Python's signal handler: pass signal ``number`` on to the loop."""
            signum = signal.Signals(number)
            loop.call_soon_threadsafe(signals[signum], signum.name)

        for signum in signals:
            signal.signal(signum, arrived)
        try:
            yield
        finally:
            # The run is over, and a signal must not replace its exit code. (Removing
            # a handler of the loop leaves a moment in which the signal kills.)
            for signum in signals:
                signal.signal(signum, signal.SIG_IGN)

    async def finish(self) -> None:
        """Cancel all reloads, and wait until all tasks of signals have ended."""
        for task in self._reloads:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each has reported its own error

    async def entered(self, stack: AsyncExitStack) -> bool:
        """Enter the supervisor in ``stack``. Return False if a signal cancelled it."""
        entered = False
        self._starting = asyncio.current_task()
        try:
            await stack.enter_async_context(self._supervisor)
            entered = True
            await asyncio.sleep(0)  # a cancellation that came too late is raised here, not in the code below
        except asyncio.CancelledError:
            if not self._ending or self._starting is None:
                raise
            self._starting.uncancel()
            if not entered:
                for waiting in self._tasks:
                    waiting.cancel()
                await self.finish()
        finally:
            self._starting = None
        return entered

    def _give_up(self, name: str) -> bool:
        """Cancel the start for signal ``name``. Return True if it was in progress."""
        if self._starting is None:
            return False
        self._say(f"{name}: cancelling the start")
        self._starting.cancel()
        return True

    def _drain(self, name: str) -> None:
        """Drain for signal ``name``, or cancel the start; a second call kills all."""
        if self._ending:
            self._say(f"{name}: killing the remaining processes")
        elif not self._give_up(name):
            self._say(f"{name}: draining the run; repeat the signal to kill its processes at once")
        self.spawn(self._end(hurry=self._ending))
        self._ending = True
        self._watcher.stopping()

    def _preempt(self, name: str) -> None:
        """Drain for a preemption (signal ``name``), or cancel the start; only once."""
        if self._ending:
            self._say(f"{name}: ignored, as the run is being drained already")
            return
        self._ending = self.preempted = True
        if not self._give_up(name):
            self._say(f"{name}: draining the run, because this machine is about to be taken away")
        self.spawn(self._end(preempted=True))
        self._watcher.stopping()

    async def _end(self, *, hurry: bool = False, preempted: bool = False) -> None:
        """Wait for the run's start; then preempt or drain it (``hurry``: SIGKILL)."""
        await self.started.wait()
        await (self._supervisor.preempt() if preempted else self._supervisor.drain(hurry=hurry))

    def _hang_up(self, name: str) -> None:
        """Order a reload for signal ``name``, or drain if the terminal is gone."""
        if self._terminal.gone:
            if not self._ending:
                self._drain(f"{name} of a terminal that is gone")
        elif self._ending:
            self._say(f"{name}: the config is not reloaded, as the run is being drained")
        else:
            self._reload_asked.set()

    async def _reload_when_asked(self) -> None:
        """Carry out the reloads that :meth:`_hang_up` orders, until cancelled. The next
        one begins when the config of the last one is in use or refused."""
        await self.started.wait()
        while await self._reload_asked.wait():
            self._reload_asked.clear()
            self._say(f"SIGHUP: reloading {self._supervisor.config.source}")
            decided = asyncio.Event()
            keep_until_done(self.spawn(self._change(decided)), self._reloads)
            with self._notifier.reloading():
                await decided.wait()

    async def _change(self, decided: asyncio.Event) -> None:
        """Reload once, or print why not; set ``decided`` when it is used or refused."""

        def accepted(reloaded: Reloaded) -> None:
            """Print what changes, and set ``decided``."""
            parts = (("changed", reloaded.changed), ("added", reloaded.added), ("removed", reloaded.removed))
            words = "; ".join(f"{word} {', '.join(names)}" for word, names in parts if names)
            self._say(f"SIGHUP: the new config is in use; {words or 'nothing has changed'}")
            decided.set()

        try:
            await self._supervisor.reloading.reload(accepted=accepted)
        except errors.ReplicasError as error:
            self._say(f"SIGHUP: {'' if decided.is_set() else 'the old config stays in use; '}{error}")
        finally:
            decided.set()

    def spawn(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        """Run the work in a task, which prints errors; :meth:`finish` waits for it."""
        return keep_until_done(asyncio.create_task(self._reporting(work)), self._tasks)

    async def _reporting(self, work: Coroutine[object, object, object]) -> None:
        """Run the work, and print its error instead of raising it."""
        try:
            await work
        except errors.ReplicasError as error:
            self._say(str(error))
        except Exception:  # noqa: BLE001  # a bug in a signal's work must be seen, and must not end the run
            self._console.write(traceback.format_exc())
            self._say("this is a bug; please report it with the lines above")


class Notifier:
    """Sends messages to systemd (sd_notify), if it has the address of a socket."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        """Open a socket for an address. ``watchdog_s``: limit between signs of life."""
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._unsent: dict[str, str] = {}
        self._failed = False

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Return a notifier from systemd's variables; remove these from ``environ``."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        watchdog_s = int(usec) / _USEC if usec.isascii() and usec.isdigit() and int(usec) > 0 and ours else None
        return cls(address if address.startswith(("/", "@")) else "", watchdog_s)

    @property
    def wanted(self) -> bool:
        """True if there is an address to send to, until :meth:`close`."""
        return self._socket is not None

    def send(self, **fields: str) -> bool:
        """Send these and unsent fields, without waiting; return False if that fails."""
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
                log.warning("going on without telling %s: %s", self._address.replace("\0", "@"), error.strerror)
            self._failed = True
            return False
        self._failed = False
        self._unsent.clear()
        return True

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Send RELOADING before the block, and READY after it, also after an error."""
        self.send(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))
        try:
            yield
        finally:
            self._unsent.pop("RELOADING", None)
            self._unsent.pop("MONOTONIC_USEC", None)
            self.send(READY="1")

    def close(self) -> None:
        """Close the socket; later messages are not sent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Watcher:
    """Reports a supervisor's state to systemd while :meth:`run` runs."""

    def __init__(self, notifier: Notifier, supervisor: Supervisor) -> None:
        """Keep the arguments; send nothing before :meth:`run`."""
        self._notifier = notifier
        self._supervisor = supervisor
        self._status = ""
        self._stopping = False
        self._alive_at = 0.0
        self._loop_at: float | None = None

    async def run(self) -> None:
        """Send ``READY=1``, then each change within about 1 s, until cancelled."""
        if not self._notifier.wanted:
            return
        watchdog_s = self._notifier.watchdog_s
        interval_s = LOOK_INTERVAL_S if watchdog_s is None else min(LOOK_INTERVAL_S, watchdog_s / _WATCHDOG_SHARE)
        self.send_changes(time.monotonic(), READY="1")
        while True:
            await asyncio.sleep(interval_s)
            self.send_changes(time.monotonic())

    def stopping(self) -> None:
        """Send ``STOPPING=1``, unless it was sent before."""
        if not self._stopping:
            self._stopping = True
            self._notifier.send(STOPPING="1")

    def send_changes(self, now: float, **fields: str) -> None:
        """Send ``fields``, a changed status, and if due ``now``, a sign of life."""
        status = self._supervisor.status()
        line = status_line(status)
        if line != self._status:
            fields["STATUS"] = self._status = line
        if status.draining:
            self.stopping()
            fields["EXTEND_TIMEOUT_USEC"] = str(int(_EXTENSION_S * _USEC))
        watchdog_s, looked_at = self._notifier.watchdog_s, self._supervisor.looked_at
        due = watchdog_s is not None and now - self._alive_at >= watchdog_s / _WATCHDOG_SHARE * 0.9
        if due and looked_at != self._loop_at:
            self._alive_at, self._loop_at = now, looked_at
            fields["WATCHDOG"] = "1"
        if fields:
            self._notifier.send(**fields)


def status_line(status: RunStatus) -> str:
    """Return the status as ``rollout 3/4, trainer 1/1 ready; policy at version 17``."""
    groups = ", ".join(
        f"{group.name} {sum(one.state in ('ready', 'finished') for one in group.replicas)}/{len(group.replicas)}"
        for group in status.groups
    )
    channels = ", ".join(f"{channel.name} at version {channel.committed_version}" for channel in status.channels)
    return ("draining; " if status.draining else "") + f"{groups} ready" + (f"; {channels}" if channels else "")
