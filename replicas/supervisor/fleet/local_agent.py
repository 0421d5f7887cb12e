"""Start, replace and end the agent of the supervisor's own machine.

It is started with the supervisor, before any other process, and dials the run's socket.
An agent that dies is replaced, and the new one ends its leftover processes; a frozen
agent is killed first. At the end of the run it is ordered to exit; while a process of
the run does not die, it stays and keeps killing it.

An agent that an earlier supervisor started is kept if it lives and connects, which it
does within seconds; a frozen one is replaced like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Sequence

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.logs import Log
from replicas.common.patience import Patience, PauseClock
from replicas.common.tasks import is_set_within, say_if_slow
from replicas.core.lives.lease_times import BEAT_S, FROZEN_S
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.processes import send_signal
from replicas.linux.scarce import naming_limits
from replicas.supervisor.fleet.cluster import Cluster
from replicas.supervisor.state.run_state import ProcessRecord

log = Log("replicas.supervisor")

AGENT = "replicas.supervisor.agent.local"
AGAIN = Backoff(0.05, 5.0)
JOIN_S = 60.0
_STEADY_S = 60.0
_END_S = 8.0
_KILLED_S = 5.0
_LOOK_S = 1.0


class LocalAgent:
    """The process of this machine's agent, which is replaced when it dies or freezes.

    For the event loop's thread only.

    :param arguments: of its command line.
    :param keep: descriptors that it inherits.
    """

    def __init__(self, node: str, cluster: Cluster, arguments: Sequence[str], *, keep: tuple[int, ...] = ()) -> None:
        """Keep the arguments; start no process before :meth:`start`.

        :param node: name of this machine's node.
        :param cluster: the nodes, which tell when the agent was heard.
        :param arguments: of the agent's command line.
        :param keep: descriptors that each agent process inherits; they stay the
            caller's, who must keep them open.
        """
        self._node, self._cluster, self._arguments, self._keep = node, cluster, tuple(arguments), keep
        self._loop = asyncio.get_running_loop()
        self._life = ChildLife(AGAIN, steady_s=_STEADY_S)
        self._clock = PauseClock(self._loop.time())
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.pid: int | None = None
        self._began = 0.0
        self._again: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    def start(self, known: ProcessRecord | None = None) -> None:
        """Start the agent, unless that of an earlier supervisor (``known``) lives.

        Does not wait for it to join.

        :raises OSError: the start fails.
        """
        self._again = None
        self._began = self._loop.time()
        self._life.start(self._began)
        try:
            if known is None or not self._watch_known(known):
                self._spawn()
        except OSError:
            self._life.ended(self._loop.time())
            raise

    def _watch_known(self, known: ProcessRecord) -> bool:
        """Watch the known agent like our own. Return False if it does not live."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(known.pid)
            if known.alive():
                self._watch(known.pid, pidfd)
                return True
            os.close(pidfd)
        return False

    @naming_limits()
    def _spawn(self) -> None:
        """Start the process of the agent, and watch it."""
        self._popen = subprocess.Popen(
            python_module(AGENT, "--parent", str(os.getpid()), *self._arguments),
            pass_fds=self._keep,
            **popen_arguments(os.environ),
        )
        self._watch(self._popen.pid, os.pidfd_open(self._popen.pid))

    def _watch(self, pid: int, pidfd: int) -> None:
        """Note the process, and have :meth:`_on_exit` called at its end.

        :param pidfd: of the process; closed later by this object.
        """
        self.pid, self._pidfd = pid, pidfd
        self._ended.clear()
        self._loop.add_reader(pidfd, self._on_exit)

    async def joined(self) -> None:
        """Wait until the agent has joined the run.

        An agent that was found alive, and has not joined after 10 s, is replaced.

        :raises replicas.errors.WorldError: it has not joined within 60 s; this call
            ends no process.
        """
        unheard = Patience(self._loop.time(), _LOOK_S)
        try:
            text = f"waiting up to {JOIN_S:g} s for the agent of this machine to join"
            with say_if_slow(log.warning, text):
                async with asyncio.timeout(JOIN_S):
                    while not await is_set_within(self._cluster.joined, _LOOK_S):
                        found_alive = self._popen is None and self._life.state == "starting"
                        if unheard.measure_duration(self._loop.time(), found_alive) > FROZEN_S:
                            self._replace()
        except TimeoutError:
            hint = "see its lines (replicas: agent:) above"
            raise errors.WorldError(
                f"the agent of this machine has not joined within {JOIN_S:g} s", hint=hint
            ) from None
        self._life.ready()

    def _on_exit(self) -> None:
        """Handle the end of the agent: reap it, and schedule a new one.

        Called by the loop.
        """
        ended = "ended" if self._popen is None else f"ended with code {self._popen.wait()}"
        self._clear_process()
        self._ended.set()
        now = self._loop.time()
        self._life.ended(now)
        self._schedule(now, ended)

    def _schedule(self, now: float, problem: str) -> None:
        """Schedule a new agent, unless :meth:`_stop` was called.

        :param now: time of the loop's clock.
        :param problem: how the last one ended, for the log.
        """
        if self._life.due < math.inf:  # it may be started again
            log.warning("starting a new agent of this machine in %.2g s, as the last %s", self._life.due - now, problem)
            self._again = self._loop.call_at(self._life.due, self._start_again)

    def _start_again(self) -> None:
        """Start a new agent; schedule the next try if that fails. A timer calls it."""
        try:
            self.start()
        except OSError as error:
            self._schedule(self._loop.time(), f"cannot be started: {error}")

    def tick(self) -> None:
        """Kill an agent that is silent for 10 s; its end starts a new one.

        To be called every second.
        """
        now = self._loop.time()
        pause_s = self._clock.measure_pause(now)
        self._clock.due = now + BEAT_S
        self._began += pause_s
        if pause_s or self._life.state not in ("starting", "up") or not self._cluster.joined.is_set():
            return
        lived_s, silent_s = now - self._began, self._cluster.silent_s(self._node)
        if silent_s < lived_s:
            self._life.ready()
        if min(silent_s, lived_s) > FROZEN_S:
            self._replace()

    def _replace(self) -> None:
        """Kill an agent that does not respond; its end starts a new one."""
        log.warning("replacing the agent of this machine, which does not respond")
        self._life.give_up()
        send_signal(self._pidfd, signal.SIGKILL)

    async def aclose(self) -> None:
        """Wait up to 8 s for the end of the agent, as it was ordered; start no other.

        Kill one that never joined or does not end. Leave it if it has processes left,
        or survives SIGKILL for 5 s.
        """
        self._stop()
        if self.pid is None:
            return
        if not self._cluster.joined.is_set():
            send_signal(self._pidfd, signal.SIGKILL)
        with say_if_slow(log.warning, f"waiting up to {_END_S:g} s for the agent of this machine to end"):
            if await is_set_within(self._ended, _END_S if self._cluster.is_empty(self._node) else 0.0):
                return
        if self._cluster.is_empty(self._node):
            send_signal(self._pidfd, signal.SIGKILL)
            if await is_set_within(self._ended, _KILLED_S):
                return
            log.error("leaving behind the agent of this machine, process %d: SIGKILL has not ended it", self.pid)
        self._let_go()

    def leave(self) -> None:
        """Let the agent live on for the next supervisor; stop watching it."""
        self._stop()
        if self.pid is not None:
            self._let_go()

    def _stop(self) -> None:
        """Start no agent from now on; cancel the timer of a new one."""
        self._life.stop()
        if self._again is not None:
            self._again.cancel()

    def _let_go(self) -> None:
        """Stop watching the process, which lives on and is never waited for."""
        if self._popen is not None:
            self._popen.returncode = 0  # this process does not wait for it
        self._clear_process()

    def _clear_process(self) -> None:
        """Close the pidfd, and forget the process."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.pid, self._popen, self._pidfd = None, None, -1
