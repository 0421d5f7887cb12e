"""The agent's side of one shim: start, orders, messages, sweep after its death."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import anyio.to_thread

from replicas import __version__, environ
from replicas.common import own_code
from replicas.common.logs import Log
from replicas.common.patience import PAUSE_S, Silence
from replicas.linux import cgroups, private
from replicas.linux.helpers import apart, python_module
from replicas.linux.processes import MARK, SHIM, command_line, send_signal, signal_name
from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.cleanup.sweeping import UNSEEN, Sweep, by_mark
from replicas.supervisor.logs.pump import is_pump
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import REMAINS_INTERVAL_S, ExitReport, LogLoss, NodeSpec, Remains

log = Log("replicas.agent")

_PING_INTERVAL_S = 1.0
_SWEEP_S = 2.0
"""Duration of the first sweep; what is left then is reported, and looked at again."""
_MAX_SWEEP_INTERVAL_S = 1.0


def base_environment() -> dict[str, str]:
    """This process's environment, without that of any torchrun or outer run."""
    return {
        name: value
        for name, value in environ.without_torchrun(own_code.rooted(os.environ)).items()
        if not name.startswith(("REPLICAS_", "REPLICA_")) or name == environ.ACCELERATOR
    }


def start_helper(
    module: str,
    control: int,
    lock: int | None,
    *arguments: str,
    keep: tuple[int, ...] = (),
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a shim or an agent, maybe with the run's lock, in a session of its own."""
    if lock is not None:
        arguments = ("--lock", str(lock), *arguments)
        keep += (lock,)
    return subprocess.Popen(
        python_module(module, "--control", str(control), "--parent", str(os.getpid()), *arguments),
        stdout=output,
        stderr=output,
        pass_fds=(control, *keep),
        **apart({**os.environ, **(env or {})}),
    )


class Node:
    """One shim, until nothing of its node is left. For the event loop's thread only.

    :param changed: called after each step: started, rendezvous known, main process
        ended, everything gone.
    :param lock: descriptor of a lock, which the shim keeps open while it lives.
    """

    def __init__(
        self,
        spec: NodeSpec,
        changed: Callable[[], None],
        lock: int | None = None,
    ) -> None:
        self.spec = spec
        self.main_pid: int | None = None
        self.rendezvous: tuple[str, int] | None = None
        self.report: ExitReport | None = None
        self.gone = asyncio.Event()
        """Set when nothing of its node is left."""
        self.belongings = Belongings()
        """Inventory of its processes, as last reported by the shim."""
        self.last_stacks: dict[str, str] = {}
        """Stacks by ``group/replica/rank``, as last saved."""
        self.losses: list[LogLoss] = []
        """Lost log lines that are not reported yet; the reader takes them out."""
        self._asking: asyncio.Future[dict[str, str]] | None = None
        self._changed = changed
        self._finishing = False
        self._said_gone = False  # the exit code does not tell: where SIGCHLD is ignored it is lost, and reads 0
        self._sweeper: asyncio.Task[None] | None = None
        self._remains: Remains | None = None
        self.lease_until: float | None = None
        """When the shim ends by itself, unless it is told a later time before; seconds
        of the machine's monotonic clock."""
        self.patience_s = 0.0
        """How long the shim goes on without a ping; 0: without limit."""
        self._told_until = spec.lease_until or None
        self._answered_at = time.monotonic()
        self._silence = Silence(self._answered_at + _PING_INTERVAL_S)
        ours, theirs = orders.pair()
        ours.setblocking(False)
        with theirs:
            self._popen = self._spawn(theirs.fileno(), lock)
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._control: socket.socket | None = ours
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._on_message)
        self._loop.add_reader(self._pidfd, self._on_exit)
        try:
            orders.send(ours, spec.message())
        except OSError as error:
            # It could not be given its spec, so it has started nothing.
            self._finishing = True
            self._close_control()
            self._loop.remove_reader(self._pidfd)
            send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._popen.wait()
            if error.errno == errno.EMSGSIZE:
                nbytes = len(orders.encode(spec.message()))
                text = f"its orders of {nbytes >> 10} KiB are too long for a message; the environment must be smaller"
                raise OSError(errno.EMSGSIZE, text) from None
            raise

    def _spawn(self, control: int, lock: int | None) -> subprocess.Popen[bytes]:
        with ExitStack() as stack:
            arguments: tuple[str, ...] = ()
            keep: tuple[int, ...] = ()
            if self.spec.tee:
                keep = (os.dup(2),)
                stack.callback(os.close, keep[0])
                arguments = ("--tee", str(keep[0]))
            log, mark = stack.enter_context(self._log()), {MARK: self.spec.nonce}
            return start_helper(SHIM, control, lock, *arguments, keep=keep, env=mark, output=log)

    def _log(self) -> IO[bytes]:
        """Open the shim's log; ``/dev/null`` if the disk takes no new file."""
        path = Path(self.spec.log_dir) / f"shim-{self.spec.node}.log"
        try:
            log = private.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, make_folder=True)
            return os.fdopen(log, "ab")
        except OSError as error:
            self.losses.append(LogLoss(0, "file", error.strerror or str(error)))
            return Path(os.devnull).open("ab")

    def meet(self, host: str, port: int) -> None:
        self._order({"type": "rendezvous", "host": host, "port": port})

    def stop(self, timeout_s: float, *, stacks: bool = False, broken: str = "") -> None:
        """SIGTERM now, SIGKILL after ``timeout_s``; a later call can only shorten that.

        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        :param broken: why it cannot go on, if it is not to end as if it was asked to.
        """
        self._order({"type": "stop", "timeout_s": timeout_s, "stacks": stacks, "broken": broken})

    async def stacks(self, timeout_s: float = 5.0) -> dict[str, str]:
        """Stacks by ``group/replica/rank``; none if the shim ends. TimeoutError."""
        if self._control is None:
            return {}
        if self._asking is None:
            self._asking = self._loop.create_future()
            self._order({"type": "stacks"})
        asked = self._asking
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            if self._asking is asked:
                self._asking = None  # the order or the answer is lost: the next call asks again
            raise

    def kill(self) -> None:
        """Kill the shim; the processes under it are then swept by its mark."""
        if not self._finishing:
            send_signal(self._pidfd, signal.SIGKILL)

    @property
    def remains(self) -> Remains | None:
        """Processes that SIGKILL has not ended; None: none, or the shim is silent."""
        heard = self._finishing or time.monotonic() - self._answered_at < REMAINS_INTERVAL_S + PAUSE_S
        return self._remains if heard else None

    def silent_s(self, now: float) -> float:
        """Seconds since a ping, less our own pauses. Call it every second: it pings."""
        silent_s = self._silence.lasts(now)
        self._silence.due = now + _PING_INTERVAL_S
        due = not self._silence.asked and now - self._answered_at >= _PING_INTERVAL_S
        if self.report is None and (due or self.lease_until is not None or self._told_until is not None):
            self._silence.ask(now)
            self._ping()
        return silent_s

    def _ping(self) -> None:
        message: orders.Message = {"type": "ping"}
        message |= {} if self.lease_until is None else {"until": self.lease_until}
        message |= {"patience_s": self.patience_s} if self.patience_s else {}
        if self._order(message):
            self._told_until = self.lease_until

    def abandon(self) -> None:
        """Leave the shim, which then ends its node within some seconds."""
        self._close_control()
        if self._sweeper is not None:
            self._sweeper.cancel()  # a later agent takes over
        if not self._finishing:
            self._finishing = True
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._popen.returncode = 0  # not waited for any more; reparented when this process ends

    def _order(self, message: orders.Message) -> bool:
        return self._control is not None and orders.send(self._control, message)

    def _on_message(self) -> bool:
        assert self._control is not None
        try:
            message = orders.receive(self._control)
            if message is None:
                self._close_control()
                return False
            self._take(message)
        except BlockingIOError:
            return False
        except orders.Malformed as error:
            log.error("what the shim of %s/%s said is no message: %s", self.spec.group, self.spec.replica, error)
        return True

    def _take(self, message: orders.Message) -> None:
        self._silence.answered()
        self._answered_at = time.monotonic()
        name = f"{self.spec.group}/{self.spec.replica}"
        match kind := message["type"]:
            case "pong":
                return
            case "gone":
                self._said_gone = True
            case "started":
                with orders.reading(kind):
                    self.main_pid = int(message["pid"])
                release = str(message.get("release", "unknown"))
                if release != __version__:
                    log.warning(
                        "%s is run by release %s of replicas, which was installed under this supervisor of %s: "
                        "restart that",
                        name,
                        release,
                        __version__,
                    )
            case "rendezvous":
                with orders.reading(kind):
                    self.rendezvous = (str(message["host"]), int(message["port"]))
            case "ended":
                with orders.reading(kind):
                    report = message["report"]
                self.report = ExitReport.of(report)
            case "dropped":
                self.losses.append(LogLoss.of(message))
            case "remains":
                self._remains = Remains.of(message)
            case "belongings":
                with orders.reading(kind):
                    self.belongings = Belongings.of(message)
                return
            case "stacks":
                with orders.reading(kind):
                    found = {f"{name}/{rank}": f"process {pid}\n{text}" for rank, pid, text in message["stacks"]}
                self.last_stacks = found
                self._answer(found)
                return
        self._changed()

    def _answer(self, stacks: dict[str, str]) -> None:
        asked, self._asking = self._asking, None
        if asked is not None and not asked.done():
            asked.set_result(stacks)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        while self._control is not None and self._on_message():
            pass  # messages from before its death
        self._close_control()  # a child may still have the shim's end open, so end-of-stream may never come
        self._answer({})
        code = self._popen.wait()
        self._finishing = True
        os.close(self._pidfd)
        if code == 0 and self._said_gone:
            self._all_gone()
            return
        ended = f"failed with code {code}" if code else "ended before its processes"
        if code < 0:
            ended = f"was killed by {signal_name(-code)}"
        if self.report is None or (self.report.outcome == "ok" and code != 0):
            self.report = ExitReport("lost", text=f"the shim of node {self.spec.node} {ended}")
        self._changed()
        self._sweeper = self._loop.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Kill what the shim has left, however long it takes, and report the rest."""
        groups = [Path(self.spec.cgroup)] if self.spec.cgroup else []
        sweep = Sweep(by_mark([self.spec.nonce]), groups=groups, known=dict(self.belongings.processes))
        began, timeout_s, interval_s = time.time(), _SWEEP_S, 0.05
        while True:
            try:
                left = await anyio.to_thread.run_sync(sweep.run, timeout_s)
            except OSError as error:  # e.g. this process has no descriptor left
                log.error("what is left of %s/%s cannot be swept yet: %s", self.spec.group, self.spec.replica, error)
                left = [UNSEEN]
            if not left:
                break
            named = tuple((pid, command_line(pid)) for pid in left if not is_pump(pid))  # pumps end by themselves
            self._remains = Remains(since=began, processes=named) if named else None
            self._changed()
            await asyncio.sleep(interval_s)
            timeout_s, interval_s = 0.0, min(2 * interval_s, _MAX_SWEEP_INTERVAL_S)
        for group in groups:
            cgroups.leave(group)
        self._all_gone()

    def _all_gone(self) -> None:
        if self.report is None:
            self.report = self._saved_report() or ExitReport("stopped")
        self._remains = None
        self.gone.set()
        self._changed()

    def _saved_report(self) -> ExitReport | None:
        """The shim's exit report on disk, in case its message was lost."""
        try:
            message = orders.decode(private.read(Path(self.spec.log_dir) / f"exit-{self.spec.node}.json"))
            return ExitReport.of(message["report"])
        except FileNotFoundError:
            return None  # its main process was never started
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.error("the exit report of %s/%s cannot be read: %s", self.spec.group, self.spec.replica, error)
            return None

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None
