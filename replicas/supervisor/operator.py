"""Supervise one run in this process, and act on its operator's signals.

TERM and INT drain the run; a second one kills what is left at once. USR1 is the notice
of a preemption: drain, and exit with 75. HUP reads the config file again; but if the
terminal is gone it drains, unless the process was started by nohup. A drain or
preemption during the start gives up the start.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager

import anyio

from replicas import errors
from replicas.config.structs import Config
from replicas.control.exit_codes import DONE, PREEMPTED, SUPERVISED, USAGE
from replicas.linux import inherited
from replicas.supervisor.console import Console
from replicas.supervisor.notify import Notifier, Watcher
from replicas.supervisor.state.state import AlreadySupervised
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import Reloaded

__all__ = ["supervise"]

_LAST_WORDS_S = 2.0
_FILES = 1 << 16


def supervise(config: Config) -> int:
    """Run ``config`` to its end in this process, with human-readable lines on stderr.

    :return: one of :mod:`replicas.control.exit_codes`: ``DONE``, ``FAILED``, ``USAGE``,
        ``SUPERVISED`` or ``PREEMPTED``.
    :raises replicas.errors.UsageError: the run cannot be started so; a BadConfig if its
        plan does not fit the machine.
    """
    inherited.put_in_order()
    _allow_files()
    faulthandler.enable()  # systemd's watchdog ends a hung supervisor with SIGABRT: the journal then has its stacks
    console = Console()
    try:
        with console.logging():
            return anyio.run(_supervise, config, console)
    except AlreadySupervised as error:
        console.say(str(error))
        return SUPERVISED
    except errors.WorldError as error:
        console.say(str(error))
        return USAGE
    finally:
        console.flush(_LAST_WORDS_S)


def _allow_files() -> None:
    """Raise the soft limit of open files: each replica needs some, and 1024 is common.

    Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))


async def _supervise(config: Config, console: Console) -> int:
    say = console.say
    notifier = Notifier.take(os.environ)
    supervisor = Supervisor(config, report=say)
    watcher = Watcher(notifier, supervisor)
    operator = _Operator(supervisor, notifier, watcher, console)
    try:
        with operator.listening():
            async with AsyncExitStack() as stack:
                if not await operator.entered(stack):
                    say(f"run {config.run.name}: not started")
                    return operator.code_of_no_start
                say(f"run {config.run.name}: control at http://{supervisor.endpoint}, state in {config.run.state_dir}")
                operator.started.set()
                telling = operator.spawn(watcher.run())
                code = await supervisor.run_until_done()
                telling.cancel()
                watcher.stopping()
                await operator.finish()
    finally:
        notifier.close()
    say(f"run {config.run.name}: over, exit code {code}")
    return code


class _Terminal:
    """The terminal of this process, if the run is to end with it."""

    def __init__(self) -> None:
        stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        self._controls = not stays and _has_controlling_terminal()
        self._shown = not stays and os.isatty(2)

    @property
    def gone(self) -> bool:
        """Whether the terminal existed and is gone.

        Standard error alone says little: it may be a pipe, as into ``tee``.
        """
        return (self._controls and not _has_controlling_terminal()) or (self._shown and not os.isatty(2))


def _has_controlling_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class _Operator:
    """Acts on the operator's signals."""

    def __init__(self, supervisor: Supervisor, notifier: Notifier, watcher: Watcher, console: Console) -> None:
        self.started = asyncio.Event()
        self._supervisor = supervisor
        self._notifier = notifier
        self._watcher = watcher
        self._console = console
        self._say = console.say
        self._terminal = _Terminal()
        self._ending = False
        self._starting: asyncio.Task[object] | None = None
        self._preempted = False
        self._reload_again = False
        self._reloading: asyncio.Task[None] | None = None
        self._changing: set[asyncio.Task[None]] = set()
        """Reloads whose config is in use, but whose changes are not carried out yet."""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = {
            signal.SIGTERM: self._drain,
            signal.SIGINT: self._drain,
            signal.SIGUSR1: self._preempt,
            signal.SIGHUP: self._hang_up,
        }

        def arrived(number: int, frame: object) -> None:
            signum = signal.Signals(number)
            loop.call_soon_threadsafe(signals[signum], signum.name)

        for signum in signals:
            signal.signal(signum, arrived)
        try:
            yield
        finally:
            # The run is over: nothing may replace its exit code. (A handler of the
            # loop could not be removed without a moment in which the signal kills.)
            for signum in signals:
                signal.signal(signum, signal.SIG_IGN)

    async def finish(self) -> None:
        """Wait for the spawned tasks; cancel reloads."""
        for task in (self._reloading, *self._changing):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each has reported its own error

    async def entered(self, stack: AsyncExitStack) -> bool:
        """Start the supervisor; False: the start was given up and undone."""
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

    @property
    def code_of_no_start(self) -> int:
        return PREEMPTED if self._preempted else DONE

    def _give_up(self, name: str) -> bool:
        """Cancel the start; False: no start is under way."""
        if self._starting is None:
            return False
        self._say(f"{name}: giving up the start")
        self._starting.cancel()
        return True

    def _drain(self, name: str) -> None:
        if self._ending:
            self._say(f"{name}: killing what is left")
        elif not self._give_up(name):
            self._say(f"{name}: draining; once more to kill at once")
        self.spawn(self._end(hurry=self._ending))
        self._ending = True
        self._watcher.stopping()

    def _preempt(self, name: str) -> None:
        if self._ending:
            self._say(f"{name}: draining already")
            return
        self._ending = self._preempted = True
        if not self._give_up(name):
            self._say(f"{name}: this machine is about to be taken away; draining")
        self.spawn(self._end(preempted=True))
        self._watcher.stopping()

    async def _end(self, *, hurry: bool = False, preempted: bool = False) -> None:
        await self.started.wait()
        await (self._supervisor.preempt() if preempted else self._supervisor.drain(hurry=hurry))

    def _hang_up(self, name: str) -> None:
        if self._terminal.gone:
            if not self._ending:
                self._drain(f"{name} of a terminal that is gone")
        elif self._ending:
            self._say(f"{name}: draining; the config is not read again")
        elif self._reloading is not None and not self._reloading.done():
            self._reload_again = True
        else:
            self._reloading = self.spawn(self._reload(name))

    async def _reload(self, name: str) -> None:
        await self.started.wait()
        self._reload_again = True
        while self._reload_again:
            self._reload_again = False
            self._say(f"{name}: reading {self._supervisor.config.source} again")
            accepted = asyncio.create_task(self._accepted(name, self._supervisor.last_event))
            work = asyncio.create_task(self._supervisor.reload())
            with self._notifier.reloading():
                try:
                    await asyncio.wait((accepted, work), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    accepted.cancel()
                    work.cancel()
                    raise
            rest = self.spawn(self._change(name, accepted, work))
            self._changing.add(rest)
            rest.add_done_callback(self._changing.discard)

    async def _change(self, name: str, accepted: asyncio.Task[bool], work: asyncio.Task[Reloaded]) -> None:
        """Wait for the changes of a reload.

        They may take long or never end; meanwhile another config may be read.
        """
        try:
            await work
            await accepted
        except errors.ReplicasError as error:
            self._say(f"{name}: {'' if accepted.done() else 'nothing is changed: '}{error}")
        finally:
            accepted.cancel()
            work.cancel()

    async def _accepted(self, name: str, after: int) -> bool:
        """Wait until the new config is in use; its changes may take long after that."""
        async for record in self._supervisor.events(after):
            event = record.event
            if isinstance(event, Reloaded):
                parts = (("changed", event.changed), ("added", event.added), ("removed", event.removed))
                words = "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names)
                self._say(f"{name}: in use{'; ' if words else ''}{words}")
                return True
        return False

    def spawn(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._reporting(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reporting(self, work: Coroutine[object, object, object]) -> None:
        """Report the work's error at once: nothing awaits it before the run's end."""
        try:
            await work
        except errors.ReplicasError as error:
            self._say(str(error))
        except Exception:  # noqa: BLE001  # a bug in a signal's work must be seen, and must not end the run
            self._console.write(traceback.format_exc())
            self._say("this is a bug; please report it with the lines above")
