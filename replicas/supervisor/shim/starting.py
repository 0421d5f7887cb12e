"""Start a node's processes, and keep its sidecar forkserver running.

:class:`Starter` starts torchrun's launcher, or the program, and the forkserver; the
launcher has the commands of its workers from here, too.

A forkserver holds some 150 MB and takes seconds to load torch. Where ranks will need
one, it is started with them, ahead of that. Where they probably never will, because all
members share memory, the shim listens on its socket, and starts it when the first rank
has connected; the rank waits for its answer. (systemd does so with a service's socket.)

A forkserver that died, or could not be started for lack of processes, is started again
in the same way, but later each time. One that froze (SIGSTOP), or stalls while it
should load torch, is killed and thus replaced; it counts as starting until its first
byte on the *ready* pipe (:mod:`replicas.linux.stalls`). A hang after that shows when a
rank asks it to fork: the rank then kills it. After ``TRIES`` starts, each within a
minute of the one before, the replica cannot sync, and the shim ends it. Standard
library only.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from replicas.common import own_code
from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.linux import cgroups, private
from replicas.linux.processes import Child, python_module
from replicas.linux.sockets import SocketAddress
from replicas.linux.stalls import LOOK_INTERVAL_S, StallWatch
from replicas.supervisor.logs.pump_watcher import PumpWatcher
from replicas.supervisor.shim import orders
from replicas.supervisor.shim.guard import GUARD, pack
from replicas.supervisor.shim.orders import NodeSpec, note

__all__ = ["TRIES", "ForkserverWatcher", "Starter", "guard_command", "guard_orders", "resolve_command"]


class Starter:
    """Starts a node's processes: own sessions, the node's control group, its logs.

    Each start raises OSError if the system refuses.

    :ivar scratch: folder made for torchrun; empty if there is none.
    """

    def __init__(self, spec: NodeSpec, logs: PumpWatcher) -> None:
        self.scratch = ""
        self._spec = spec
        self._logs = logs
        self._listener: socket.socket | None = None

    def program(self) -> Child:
        env = {**self._spec.env, GUARD: guard_orders(self._spec, direct=True)}
        return self._spawn(guard_command(), env, "rank 0")

    def launcher(self) -> tuple[Child, socket.socket]:
        """Start torchrun's launcher; return it and this end of its control socket."""
        ours, theirs = orders.pair()
        fd = theirs.fileno()
        command = python_module("replicas.supervisor.shim.launcher", "--control", str(fd), "--parent", str(os.getpid()))
        with theirs:
            child = self._spawn(command, own_code.findable(self._spec.env), "torchrun", (fd,))
        self._enclose(child)
        self.scratch = str(_scratch_folder(self._spec))
        spec = self._spec._replace(shim=os.getpid(), pipes=self._logs.pipes(), scratch=self.scratch)
        orders.send(ours, spec.message())
        return child, ours

    def listener(self) -> socket.socket:
        """The socket of the node's forkserver.

        Call it before any other process of the node starts: no other process can take
        its name then, not even between two forkservers.
        """
        if self._listener is None:
            self._listener = SocketAddress.parse(self._spec.forkserver).listen()
        return self._listener

    def forkserver(self, ready: int) -> Child:
        """Start a forkserver on its socket.

        :param ready: descriptor to which it writes when it is ready.
        """
        fds = (self.listener().fileno(), ready)
        command = python_module("replicas.sidecar.forkserver", "--listener", str(fds[0]), "--ready", str(ready))
        child = self._spawn(command, own_code.findable(self._spec.env), "forkserver", fds)
        self._enclose(child)
        return child

    def _enclose(self, child: Child) -> None:
        """Move the child, which still waits or loads, into the control group."""
        if self._spec.cgroup:
            cgroups.enter(Path(self._spec.cgroup), child.pid)

    def _spawn(self, command: list[str], env: dict[str, str], log: str, fds: tuple[int, ...] = ()) -> Child:
        out, err = self._logs.streams(log)
        popen = subprocess.Popen(
            command,
            env=env,
            cwd=self._spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=fds,
            start_new_session=True,
        )
        return Child(popen)


def resolve_command(command: Sequence[str]) -> list[str]:
    """Command to exec: ``x.py`` and ``-m module`` run in this Python, unbuffered."""
    if command[0] == "-m" or command[0].endswith(".py"):
        return [sys.executable, "-u", *command]
    return list(command)


def guard_orders(spec: NodeSpec, *, direct: bool) -> str:
    """The guard's orders, in a child of this process. ``direct``: not torchrun's."""
    pipes = () if direct else spec.pipes
    return pack(
        [
            str(os.getpid()),
            str(spec.shim),
            " ".join(f"{out} {err}" for out, err in pipes),
            spec.cgroup if direct else "",  # torchrun's children inherit its control group
            *resolve_command(spec.command),
        ]
    )


def _scratch_folder(spec: NodeSpec) -> Path:
    """Folder for torchrun's error files: beside the logs, if that disk is not full."""
    folder = Path(spec.log_dir) / f"torchrun-{spec.node}"
    try:
        private.make_folder(folder)
        private.create(folder / "probe", bytes(4096))
        private.remove(folder / "probe")
    except OSError:
        import tempfile  # loads slowly, and is rarely needed

        private.remove_tree(folder)
        folder = Path(tempfile.mkdtemp(prefix="replicas-"))
    return folder


def guard_command() -> list[str]:
    """Command line of the guard, run as a file and not as a module, for speed."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]


TRIES = 8
AGAIN = Backoff(0.1, 6.4)


class ForkserverWatcher:
    """Keeps one forkserver running, at once or from the first connection on.

    :param spawn: starts it, given a descriptor: ready.
    :param ahead: start it without waiting for a connection.
    """

    def __init__(self, spawn: Callable[[int], Child], selector: selectors.BaseSelector, *, ahead: bool = False) -> None:
        self._spawn = spawn
        self._selector = selector
        self._ahead = ahead
        self._listener: socket.socket | None = None
        self._listening = False
        self._child: Child | None = None
        self._life = ChildLife(AGAIN, tries=TRIES, look_interval_s=LOOK_INTERVAL_S)
        self._ready: int | None = None
        self._watch: StallWatch | None = None
        self._problem = ""
        """Why it is not started again, until :meth:`on_time` says so."""

    @property
    def pid(self) -> int:
        return 0 if self._child is None or self._child.code is not None else self._child.pid

    @property
    def wakes(self) -> list[float]:
        return self._life.wakes

    def begin(self, listener: socket.socket) -> None:
        """Start it, or wait until a connection waits on ``listener``; it accepts them.

        :raises OSError: it cannot be started.
        """
        self._listener = listener
        if self._ahead:
            self._start()
        else:
            self._listen()

    def _listen(self) -> None:
        assert self._listener is not None
        self._selector.register(self._listener, selectors.EVENT_READ, self._asked_for)
        self._listening = True

    def _asked_for(self) -> None:
        if self._listening:  # not stopped in this turn of the loop
            self._deafen()
            self._try()

    def _try(self) -> None:
        """Start it; if that fails, try it again, later."""
        try:
            self._start()
        except OSError as error:
            note(f"the forkserver cannot be started: {error}")
            if self._life.ended(time.monotonic()):
                self._problem = f"cannot be started ({error}), or died, {TRIES} times"

    def _deafen(self) -> None:
        if self._listening and self._listener is not None:
            self._selector.unregister(self._listener)
        self._listening = False

    def _start(self) -> None:
        self._forget_readiness()  # of the one before
        self._life.start(time.monotonic())
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
        self._watch = StallWatch(self._child.pid, time.monotonic())

    def ended(self, code: int) -> str:
        """Note its end, after it was reaped; return why it is not restarted, if so."""
        assert self._child is not None
        self._child.ended(code)
        return f"died {TRIES} times" if self._life.ended(time.monotonic()) else ""

    def on_time(self, now: float) -> str:
        """Do what is due; return why it is not restarted, if so."""
        match self._life.on_time(now):
            case "start":
                (self._try if self._ahead else self._listen)()
            case "look":
                self._look(now)
        problem, self._problem = self._problem, ""
        return problem

    def _look(self, now: float) -> None:
        assert self._child is not None
        assert self._watch is not None
        reason = self._watch.look(now, starting=self._life.state == "starting")
        if reason:
            note(f"the forkserver, process {self._child.pid}, {reason}: it is killed")
            self._life.give_up()
            self._child.signal(signal.SIGKILL)

    def stop(self) -> None:
        self._life.stop()
        self._deafen()

    def kill(self) -> None:
        self.stop()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _forget_readiness(self) -> None:
        """It has loaded torch, or is gone."""
        self._life.ready()
        if self._ready is not None:
            self._selector.unregister(self._ready)
            os.close(self._ready)
            self._ready = None
