"""The shim: one for each replica and node. It owns the node's process tree and leaves nothing of it behind.

Theory of operation
===================

``python -m replicas.supervisor.shim --control FD --parent PID`` is exec'ed by the supervisor; orders come over the
socketpair ``FD`` (:mod:`replicas.supervisor.orders`). It is a subreaper, so whatever a rank forks, double-forks or puts
into a session of its own stays below it. One thread, one loop over a selector, in four phases::

    waiting ──start──► running ──stop, supervisor gone──► stopping ──main process gone──► sweeping ──no child──► exit
                          └─────────main process gone────────────────────────────────────────►┘

* *running*: the forkserver (started again when it dies or freezes, :mod:`replicas.supervisor.keeper`) and the main
  process: torchrun's launcher, or the program itself. A torchrun that is stopped (SIGSTOP) when a rank dies would never
  tell, and is killed.
* *stopping*: SIGTERM to the main process; at the deadline SIGKILL to the whole tree.
* *sweeping*: the exit report is out; SIGTERM to what is left, SIGKILL ``SWEEP_GRACE_S`` later, again and again until
  this process has no child. Then ``gone`` is sent and the shim ends.

The supervisor's death is seen by a pidfd and by the end of the control stream, whichever comes first; either way there
are ``ORPHAN_GRACE_S`` from SIGTERM to SIGKILL. A parent-death signal would tell less: it is bound to the *thread* that
spawned the shim, which an embedding program may end at any time. Should the shim itself be killed, the launcher has its
parent-death signal, ranks have theirs, and the supervisor sweeps the rest by the mark in their environment.

Standard library only; torch is never imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from replicas.supervisor import orders
from replicas.supervisor.commands import guard_command, guard_orders, scratch_folder, tail
from replicas.supervisor.guard import GUARD
from replicas.supervisor.keeper import ForkserverKeeper
from replicas.supervisor.orders import ExitReport, NodeSpec, RankExit
from replicas.supervisor.processes import (
    Child,
    become_subreaper,
    python_module,
    signal_descendants,
    signal_name,
)
from replicas.supervisor.stopped import StoppedWatch

__all__ = ["ORPHAN_GRACE_S", "SWEEP_GRACE_S", "Shim", "main"]

ORPHAN_GRACE_S = 2.0
"""From SIGTERM to SIGKILL when the supervisor is gone."""
SWEEP_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for what a replica left behind."""
_SWEEP_INTERVAL_S = 0.05


def exit_code(status: int) -> int:
    """Exit code of a wait status; negative for a signal."""
    return os.waitstatus_to_exitcode(status)


class Shim:
    """The loop. ``run`` returns when no process of the node is left."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control: socket.socket | None = control
        self.spec: NodeSpec | None = None
        self._selector = selectors.DefaultSelector()
        self._parent_fd: int | None = None
        self._main: Child | None = None
        self._forkserver: ForkserverKeeper | None = None
        self._broken = ""
        self._launcher: socket.socket | None = None
        self._stopped: StoppedWatch | None = None
        self._report: ExitReport | None = None
        self._stopping = False
        self._sweeping = False
        self._childless = False
        self._kill_at: float | None = None
        self._wake = _wakeup_fd()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)
        self._watch_parent(parent)

    def run(self) -> int:
        while not self._finished():
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._reap()
            self._on_time(time.monotonic())
        if self.spec is not None:
            shutil.rmtree(scratch_folder(self.spec), ignore_errors=True)
        self._tell({"type": "gone"})
        return 0

    # ------------------------------------------------------------ inputs

    def _watch_parent(self, parent: int) -> None:
        try:
            self._parent_fd = os.pidfd_open(parent)
        except ProcessLookupError:
            self._supervisor_gone()
            return
        self._selector.register(self._parent_fd, selectors.EVENT_READ, self._supervisor_gone)
        if os.getppid() != parent:
            self._supervisor_gone()

    def _on_control(self) -> None:
        assert self.control is not None
        message = orders.receive(self.control)
        if message is None:
            self._supervisor_gone()
        elif message["type"] == "start":
            self._start(NodeSpec.of(message["spec"]))
        elif message["type"] == "stop":
            self._stop(float(message["timeout_s"]))
        elif message["type"] == "rendezvous":
            if self._launcher is not None:
                orders.send(self._launcher, message)
        elif message["type"] == "ping":
            self._tell({"type": "pong"})
        else:
            raise ValueError(f"unknown order {message['type']!r}")

    def _on_launcher(self) -> None:
        assert self._launcher is not None
        message = orders.receive(self._launcher)
        if message is None:
            self._selector.unregister(self._launcher)
            self._launcher.close()
            self._launcher = None
        elif message["type"] == "report":
            self._report = ExitReport.of(message["report"])
        else:
            self._tell(message)

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._wake, 512)
            if any(signum != signal.SIGCHLD for signum in received):
                self._stop(self.spec.stop_timeout_s if self.spec else 0.0)

    def _supervisor_gone(self) -> None:
        if self._parent_fd is not None:
            self._selector.unregister(self._parent_fd)
            os.close(self._parent_fd)
            self._parent_fd = None
        if self.control is not None:
            self._selector.unregister(self.control)
            self.control.close()
            self.control = None
        self._stop(ORPHAN_GRACE_S)

    def _tell(self, message: orders.Message) -> None:
        if self.control is not None:
            orders.send(self.control, message)

    # ------------------------------------------------------------ processes

    def _start(self, spec: NodeSpec) -> None:
        self.spec = spec
        if self._stopping:
            return
        try:
            if spec.forkserver:
                self._forkserver = ForkserverKeeper(self._spawn_forkserver, self._selector)
                self._forkserver.start()
            if spec.launcher == "torchrun":
                self._main = self._start_launcher(spec)
            else:
                env = {**spec.env, GUARD: guard_orders(spec, 0)}
                self._main = self._spawn(guard_command(), spec, env, self._log("rank-0"))
        except OSError as error:
            self._tell(ExitReport("failed", text=f"cannot be started: {error}").message())
            self._begin_sweep()
        else:
            self._tell({"type": "started", "pid": self._main.pid})

    def _start_launcher(self, spec: NodeSpec) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = theirs.fileno()
        command = python_module("replicas.supervisor.launcher", "--control", str(fd), "--parent", str(os.getpid()))
        child = self._spawn(command, spec, spec.env, self._log(f"torchrun-{spec.node}"), (fd,))
        theirs.close()
        orders.send(ours, spec.message())
        self._launcher = ours
        self._stopped = StoppedWatch(child.pid)
        self._selector.register(ours, selectors.EVENT_READ, self._on_launcher)
        return child

    def _spawn_forkserver(self, ready: int) -> Child:
        spec = self.spec
        assert spec is not None
        command = python_module("replicas.sidecar.forkserver", "--name", spec.forkserver, "--ready", str(ready))
        return self._spawn(command, spec, spec.env, self._log(f"forkserver-{spec.node}"), (ready,))

    def _spawn(
        self, command: list[str], spec: NodeSpec, env: dict[str, str], log: IO[bytes], fds: tuple[int, ...] = ()
    ) -> Child:
        with log:
            popen = subprocess.Popen(
                command,
                env=env,
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,
            )
        return Child(popen)

    def _log(self, name: str) -> IO[bytes]:
        assert self.spec is not None
        return (Path(self.spec.log_dir) / f"{name}.log").open("ab")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            self._childless = False
            if pid == 0:
                return
            if self._main is not None and pid == self._main.pid:
                self._main.ended(exit_code(status))
                self._main_ended(self._main)
            elif self._forkserver is not None and pid == self._forkserver.pid:
                self._without_forkserver(self._forkserver.ended(exit_code(status)))

    def _without_forkserver(self, reason: str) -> None:
        """A replica that cannot sync is of no use."""
        if reason:
            assert self.spec is not None
            self._broken = f"the sidecar forkserver of node {self.spec.node} {reason}"
            self._stop(self.spec.stop_timeout_s)

    # ------------------------------------------------------------ ending

    def _stop(self, timeout_s: float) -> None:
        first = not self._stopping
        self._stopping = True
        if self._forkserver is not None:
            self._forkserver.stop()
        deadline = time.monotonic() + timeout_s
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        if first and self._main is not None:
            self._main.signal(signal.SIGTERM)

    def _main_ended(self, main: Child) -> None:
        assert self.spec is not None
        assert main.code is not None
        while self._launcher is not None:  # the launcher is dead: read what it wrote, up to the end of the stream
            self._on_launcher()
        report = _finish(self.spec, main, self._report, stopping=self._stopping)
        if self._broken:
            report = ExitReport("lost", text=self._broken)
        path = Path(self.spec.log_dir) / f"exit-{self.spec.node}.json"
        path.write_bytes(orders.encode(report.message()))
        self._tell(report.message())
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        self._sweeping = True
        if self._forkserver is not None:
            self._forkserver.kill()
        signal_descendants(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + SWEEP_GRACE_S
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _on_time(self, now: float) -> None:
        if self._forkserver is not None:
            self._without_forkserver(self._forkserver.on_time(now))
        if self._stopped is not None and self._main is not None and not self._sweeping and self._stopped.blind(now):
            assert self.spec is not None
            self._stopped = None
            self._broken = f"torchrun of node {self.spec.node} was stopped when a rank died, and did not see it"
            self._main.signal(signal.SIGKILL)
        if self._kill_at is not None and now >= self._kill_at:
            signal_descendants(os.getpid(), signal.SIGKILL)
            self._kill_at = now + _SWEEP_INTERVAL_S

    def _finished(self) -> bool:
        if self._main is not None and not self._sweeping:
            return False
        return (self._sweeping or self._stopping) and self._childless

    def _timeout(self) -> float | None:
        times = [] if self._forkserver is None else self._forkserver.wakes
        times += [] if self._kill_at is None else [self._kill_at]
        times += [] if self._stopped is None or self._sweeping else self._stopped.wakes
        if self._stopping and not times:
            return _SWEEP_INTERVAL_S
        return max(0.0, min(times) - time.monotonic()) if times else None


def _finish(spec: NodeSpec, main: Child, report: ExitReport | None, *, stopping: bool) -> ExitReport:
    """The exit report of a node whose main process is gone; the launcher's own one, if it came to write it."""
    code = main.code
    assert code is not None
    if report is not None:
        if report.outcome == "stopped" and not stopping:
            return ExitReport("lost", text=f"torchrun of node {spec.node} was stopped from outside")
        return report
    if spec.launcher == "exec":
        if code == 0:
            return ExitReport("ok")
        text = tail(Path(spec.log_dir) / "rank-0.log")
        rank = RankExit(rank=0, code=code, pid=main.pid, text=text, at=time.time())
        return ExitReport("stopped" if stopping else "failed", ranks=(rank,))
    if stopping:
        return ExitReport("stopped")
    ended = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    words = tail(Path(spec.log_dir) / f"torchrun-{spec.node}.log") if code > 0 else ""
    return ExitReport("lost", text=f"torchrun of node {spec.node} {ended}{': ' if words else ''}{words}")


def _wakeup_fd() -> int:
    """A descriptor that gets one byte, the signal's number, for each signal that the shim handles."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    return reader


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="replicas.supervisor.shim", description="started by the supervisor")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    parser.add_argument("--lock", type=int, help="descriptor of the run's lock, held as long as the shim lives")
    options = parser.parse_args(arguments)
    become_subreaper()
    if options.lock is not None:
        os.set_inheritable(options.lock, False)
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    return Shim(control, options.parent).run()


if __name__ == "__main__":
    sys.exit(main())
