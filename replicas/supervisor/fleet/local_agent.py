"""The agent of the supervisor's own machine: start it, replace it, and end it.

It is started with the supervisor, before any other process, and dials the run's socket.
One that dies is replaced, and the next one ends what it has left; one that freezes is
killed first. At the end it gets the order to end; while something of the run does not
die, it stays and looks after that.

An agent that an earlier supervisor has started is kept if it lives and has replicas:
it dials by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from replicas import errors
from replicas.common import own_code
from replicas.common.backoff import Backoff
from replicas.linux.processes import python_module, send_signal
from replicas.supervisor.fleet.cluster import Cluster
from replicas.supervisor.state.run_state import ProcessRecord

__all__ = ["AGENT", "LocalAgent"]

log = logging.getLogger("replicas.supervisor")

AGENT = "replicas.supervisor.agent.local"
AGAIN = Backoff(0.05, 5.0)
JOIN_S = 60.0
_STEADY_S = 60.0
_FROZEN_S = 10.0
_END_S = 8.0
_PAUSE_S = 1.0


class LocalAgent:
    """The process of the agent. For the event loop's thread only.

    :param arguments: of its command line.
    :param keep: descriptors that it inherits.
    :param known: of an earlier supervisor, alive; None: it is started here.
    """

    def __init__(
        self,
        node: str,
        cluster: Callable[[], Cluster | None],
        arguments: Sequence[str],
        *,
        keep: tuple[int, ...] = (),
        known: ProcessRecord | None = None,
    ) -> None:
        self._node, self._cluster, self._arguments, self._keep = node, cluster, tuple(arguments), keep
        self._loop = asyncio.get_running_loop()
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.pid: int | None = None
        self._known = known
        self._began = 0.0
        self._deaths = 0
        self._again: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._closing = False
        self._ticked_at = time.monotonic()

    def start(self) -> None:
        """Start it, or watch the one that is known. OSError: it cannot be started."""
        self._again = None
        if self._known is not None:
            known, self._known = self._known, None
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(known.pid)
                if known.alive():
                    self._watch(known.pid, pidfd)
                    return
                os.close(pidfd)
        self._popen = subprocess.Popen(
            python_module(AGENT, "--parent", str(os.getpid()), *self._arguments),
            env=own_code.findable(os.environ),
            stdin=subprocess.DEVNULL,
            pass_fds=self._keep,
            start_new_session=True,
        )
        self._watch(self._popen.pid, os.pidfd_open(self._popen.pid))

    def _watch(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd, self._began = pid, pidfd, time.monotonic()
        self._ended.clear()
        self._loop.add_reader(pidfd, self._on_exit)

    async def joined(self, cluster: Cluster) -> None:
        """Wait until it has joined. WorldError: it does not within 60 s."""
        try:
            async with asyncio.timeout(JOIN_S):
                await cluster.joined.wait()
        except TimeoutError:
            hint = "what it wrote to standard error says why"
            raise errors.WorldError(
                f"the agent of this machine has not joined within {JOIN_S:g} s", hint=hint
            ) from None

    def _on_exit(self) -> None:
        code = self._popen.wait() if self._popen is not None else 0
        self._forget()
        self._ended.set()
        cluster = self._cluster()
        if self._closing or cluster is None:
            return
        steady = time.monotonic() - self._began > _STEADY_S
        self._deaths = 1 if steady else self._deaths + 1
        delay_s = AGAIN.after(self._deaths - 1)
        log.warning("the agent of this machine ended with code %d; a new one starts in %.2g s", code, delay_s)
        self._again = self._loop.call_later(delay_s, self._start_again)

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            log.warning("the agent of this machine cannot be started: %s", error)
            self._again = self._loop.call_later(AGAIN.max_s, self._start_again)

    def tick(self, cluster: Cluster) -> None:
        """Kill it if nothing is heard of it for 10 s; call it each second."""
        now = time.monotonic()
        late_s, self._ticked_at = now - self._ticked_at, now
        frozen = late_s < _PAUSE_S and cluster.joined.is_set() and cluster.silent_s(self._node) > _FROZEN_S
        if frozen and self.pid is not None and now - self._began > _FROZEN_S:
            log.warning("the agent of this machine does not answer: it is replaced")
            send_signal(self._pidfd, signal.SIGKILL)

    async def aclose(self) -> None:
        """Wait until it has ended, as ordered; one with processes left stays."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        if self.pid is None:
            return
        cluster = self._cluster()
        if cluster is None or not cluster.joined.is_set():
            send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S if cluster is None or cluster.is_empty(self._node) else 0.0):
                await self._ended.wait()
                return
        if cluster is not None and cluster.is_empty(self._node):
            send_signal(self._pidfd, signal.SIGKILL)
            await self._ended.wait()
        elif self._popen is not None:
            self._let_go()

    def leave(self) -> None:
        """Leave it to the next supervisor."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        if self.pid is not None:
            self._let_go()

    def _let_go(self) -> None:
        if self._popen is not None:
            self._popen.returncode = 0  # it is not waited for any more
        self._forget()

    def _forget(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.pid, self._popen, self._pidfd = None, None, -1
