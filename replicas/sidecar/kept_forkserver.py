"""Keep a sidecar forkserver running, from when it is needed.

A forkserver holds about 150 MB and takes seconds to load torch, so the ranks of all
replicas of a node share those that their agent keeps
(:mod:`replicas.supervisor.agent.forkservers`). A rank without an agent, or whose agent
is dead or of another release, keeps one of its own
(:mod:`replicas.channel.session.loop`).

The keeper binds the listening socket, and holds it longer than any forkserver: no other
process can take the name, and clients can always connect, also between two
forkservers, and wait for their first answer. It starts the process at the first
connection, as systemd does for a service's socket, or earlier (:meth:`need`). One that
died, or could not be started for lack of processes, is started again in the same way,
after growing delays; after ``TRIES`` starts, each within a minute of the previous, it
is given up.

Only the keeper judges the process (:mod:`replicas.linux.stalls`): it kills, and thus
replaces, one that is frozen (SIGSTOP), and one that does nothing although a client
waits to be accepted, be it that torch's import or the forkserver itself hangs. A client
that waits too long for a fork connects again, and so waits there.

A death signal ends the process with the thread of its keeper. This module loads no
torch, as agents import it.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicas import environ
from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.logs import Log
from replicas.common.tasks import is_set_within
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.processes import ROOM_FOR_MARK, Child
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress
from replicas.linux.stalls import LOOK_INTERVAL_S, StallWatch

log = Log("replicas.sidecar")

TRIES = 8
AGAIN = Backoff(0.1, 6.4)


@naming_limits()
def start_forkserver(
    environment: Mapping[str, str], listener: int, command: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a forkserver process on a listening socket; its output goes to our stderr.

    :param environment: all variables of the process.
    :param listener: descriptor of the socket, which the process inherits.
    :param command: of a template (:mod:`replicas.supervisor.shim.template`); default:
        of a forkserver of sidecars.
    :raises OSError: the process cannot be started.
    """
    words = [*(command or python_module("replicas.sidecar.forkserver")), "--listener", str(listener)]
    options = popen_arguments(environment)
    return subprocess.Popen(
        [*words, "--parent", str(os.getpid())],
        stdout=2 if Path("/proc/self/fd/2").exists() else subprocess.DEVNULL,
        pass_fds=(listener,),
        **(options | ({"env": environment} if command else {})),  # a template has the path of its ranks
    )


class KeptForkserver:
    """One forkserver (it forks helpers), kept running from its first use.

    That is the first connection, or :meth:`need`. The helpers are sidecars. For the
    thread of the running loop only.

    :param environment: variables of the process.
    :param given_up: called once, with the reason, if it is not started again.
    :ivar address: of its socket, with its secret.
    :ivar gone: set while no process of it runs.
    :raises OSError: the socket cannot be bound.
    """

    def __init__(
        self, environment: Mapping[str, str], given_up: Callable[[str], None], command: Sequence[str] = ()
    ) -> None:
        """Bind the socket, and wait for connections on the loop; start no process.

        :param environment: variables of the process.
        :param command: its command line, as for :func:`start_forkserver`.
        :param given_up: called once, on the loop, with the reason as text, when the
            process failed so often in a row that it is not started again; not after
            :meth:`kill`.
        :raises OSError: the socket cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._given_up, self._command = given_up, command
        address = SocketAddress(f"replicas-{secrets.token_hex(16)}", secrets.token_hex(16))
        self.address = str(address)
        self._environment = {**environment, environ.FORKSERVER: self.address, **ROOM_FOR_MARK}
        self._ahead = False
        self._child: Child | None = None
        self._watch: StallWatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._life = ChildLife(AGAIN, tries=TRIES, look_interval_s=LOOK_INTERVAL_S)
        self.gone = asyncio.Event()
        self.gone.set()
        self._listener = address.listen()
        self._waiting = select.poll()
        """Polls whether a client waits to be accepted."""
        self._waiting.register(self._listener, select.POLLIN)
        self._listen()

    @property
    def pid(self) -> int:
        """The pid of the process, or 0 if none runs."""
        return 0 if self._child is None else self._child.pid

    @property
    def fds(self) -> set[int]:
        """Descriptors of the process and the socket, as far as open. A forked child of
        this process must not keep them open."""
        child = set() if self._child is None else {self._child.pidfd}
        return child | ({self._listener.fileno()} - {-1})

    @property
    def over(self) -> bool:
        """True once it was given up or killed; nothing listens at its address then."""
        return self._listener.fileno() < 0

    def need(self) -> None:
        """Have the process run from now on, and again after each end, with or without
        connections. Do not wait for it."""
        if not self._ahead:
            self._ahead = True
            if self._life.state == "waiting" and self._life.due == math.inf:
                self._start()

    def kill(self) -> None:
        """Kill the process and close its socket, for good; do not wait. Idempotent."""
        self._life.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
        if not self.over:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Kill the process and close its socket, for good; wait for the process's end.

        After ``timeout_s`` only log that it has not ended.
        """
        self.kill()
        if not await is_set_within(self.gone, timeout_s):
            log.error("leaving behind forkserver process %d: SIGKILL has not ended it", self.pid)

    def _listen(self) -> None:
        """Have the loop start the process at the next connection, or if one waits."""
        self._loop.add_reader(self._listener, self._start)

    def _start(self) -> None:
        """Start the process now, and watch it on the loop.

        Raise nothing: a failure counts as an end of the process, after which the next
        start is scheduled.
        """
        self._loop.remove_reader(self._listener)
        now = self._loop.time()
        self._life.start(now)
        try:
            self._child = Child(start_forkserver(self._environment, self._listener.fileno(), self._command))
        except OSError as error:
            self._ended(f"cannot be started ({error}), or died,")
            return
        self.gone.clear()
        self._watch = StallWatch(self._child.pid, now)
        self._loop.add_reader(self._child.pidfd, self._reap)
        self._schedule()

    def _reap(self) -> None:
        """Collect the status of the process, which has ended; time the next start."""
        assert self._child is not None
        child, self._child = self._child, None
        self._loop.remove_reader(child.pidfd)
        child.ended(child.popen.wait())
        self.gone.set()
        self._ended("died")

    def _ended(self, how: str) -> None:
        """Schedule the next start, after a delay; none after :meth:`kill`.

        After too many failures in a row close all and call ``given_up``.

        :param how: the end in words, for logs.
        """
        if self.over:
            self._life.ended(self._loop.time())
        elif self._life.ended(self._loop.time()):
            self.kill()
            self._given_up(f"{how} {TRIES} times")
        else:
            log.warning("starting no more helper processes: their forkserver %s", how.removesuffix(", or died,"))
            self._schedule()

    def _schedule(self) -> None:
        """Set the timer to the next step of the child's lifecycle: start or look."""
        if self._timer is not None:
            self._timer.cancel()
        due = self._life.due
        self._timer = self._loop.call_at(due, self._on_time) if due < math.inf else None

    def _on_time(self) -> None:
        """Take the due step: start the process (or wait for a connection), or look.

        A look kills a process that stalls. Then set the timer to the next step.
        """
        match self._life.on_time(self._loop.time()):
            case "start":
                (self._start if self._ahead else self._listen)()
            case "look":
                self._kill_if_stalled()
        self._schedule()

    def _kill_if_stalled(self) -> None:
        """Kill the process if it is frozen or stalls; its end starts another."""
        assert self._child is not None
        assert self._watch is not None
        reason = self._watch.reason_to_give_up(self._loop.time(), awaited=bool(self._waiting.poll(0)))
        if reason:
            log.warning("killing forkserver %d, which starts helper processes: it %s", self._child.pid, reason)
            self._life.give_up()
            self._child.signal(signal.SIGKILL)
