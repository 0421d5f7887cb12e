"""Keep the sidecar forkserver of a node running, from when it is needed.

A forkserver holds about 150 MB and takes seconds to load torch, so the ranks of all
replicas of a node share one. If ranks will need it, it is started together with them.
If they probably never will, because all members share memory, the agent listens on its
socket and starts it at the first connection; the rank waits for the answer. (systemd
does so with a service's socket.) Ranks that differ in environment variables that a
process reads only at its start have a separate forkserver
(:func:`replicas.linux.rank_environment.lasting`). A forkserver that no replica of the
node uses ends when the next replica starts.

A forkserver that died, or could not be started for lack of processes, is started again
in the same way, after growing delays. A forkserver that froze (SIGSTOP), or stalls
while it loads torch, is killed and thus replaced; it counts as starting until its first
byte on the *ready* pipe (:mod:`replicas.linux.stalls`). A later hang shows when a rank
asks it to fork: the rank then kills it. After ``TRIES`` starts, each within a minute of
the previous, its replicas cannot sync, and are ended.

A death signal ends a forkserver with its agent.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping

from replicas import environ
from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.logs import Log
from replicas.linux.helpers import apart, python_module
from replicas.linux.processes import Child, room_for_mark
from replicas.linux.rank_environment import lasting
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress
from replicas.linux.stalls import LOOK_INTERVAL_S, StallWatch
from replicas.supervisor.agent.shim_process import base_environment

log = Log("replicas.agent")

TRIES = 8
AGAIN = Backoff(0.1, 6.4)
Starter = Callable[[Mapping[str, str], int, int], subprocess.Popen[bytes]]


@naming_limits()
def start_forkserver(environment: Mapping[str, str], listener: int, ready: int) -> subprocess.Popen[bytes]:
    """Start a forkserver on a listening socket; it shares this process's stderr.

    :param ready: descriptor to which the forkserver writes when it is ready.
    """
    options = ("--listener", str(listener), "--ready", str(ready))
    return subprocess.Popen(
        python_module("replicas.sidecar.forkserver", *options),
        stdout=2,
        stderr=2,
        pass_fds=(listener, ready),
        **apart(environment),
    )


class Forkservers:
    """The forkservers of a node, by their addresses. For the event loop's thread only.

    :param broken: called with an address and a reason when ranks with that address
        cannot sync.
    """

    def __init__(self, broken: Callable[[str, str], None], start: Starter = start_forkserver) -> None:
        self._broken, self._start = broken, start
        self._kept: dict[tuple[tuple[str, str], ...], KeptForkserver] = {}

    def address(self, environment: Mapping[str, str], *, ahead: bool, identity: str = "") -> str:
        """Return the address of the forkserver for ranks with this environment.

        :param ahead: start the forkserver now, unless it runs.
        :param identity: identity of the state folder, if any.
        :raises OSError: the socket cannot be bound.
        """
        own = lasting(environment)
        key = (("", identity), *sorted(own.items()))
        if key not in self._kept:
            own |= {environ.STATE_ID: identity} if identity else {}
            self._kept[key] = KeptForkserver(own, lambda reason: self._given_up(key, reason), self._start)
        if ahead:
            self._kept[key].need()
        return self._kept[key].address

    def retain(self, addresses: Collection[str]) -> None:
        """Kill the forkservers with other addresses."""
        for key, one in list(self._kept.items()):
            if one.address not in addresses:
                self._kept.pop(key).kill()

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Kill all forkservers, and wait up to ``timeout_s`` for their ends."""
        kept = list(self._kept.values())
        self.retain(())
        try:
            async with asyncio.timeout(timeout_s):
                for one in kept:
                    await one.gone.wait()
        except TimeoutError:
            log.error("leaving a forkserver that survives SIGKILL")

    def _given_up(self, key: tuple[tuple[str, str], ...], reason: str) -> None:
        one = self._kept.pop(key)
        one.kill()
        self._broken(one.address, reason)


class KeptForkserver:
    """One forkserver, kept running from the first connection or from :meth:`need` on.

    :param environment: variables in addition to those of this process.
    :param given_up: called once, with the reason, if it is not started again.
    :ivar gone: set while no process of it runs.
    :raises OSError: the socket cannot be bound.
    """

    def __init__(
        self, environment: Mapping[str, str], given_up: Callable[[str], None], start: Starter = start_forkserver
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._popen_with, self._given_up = start, given_up
        address = SocketAddress(f"replicas-{secrets.token_hex(16)}", secrets.token_hex(16))
        self.address = str(address)
        self._environment = {**base_environment(), **environment, environ.FORKSERVER: self.address}
        self._environment |= room_for_mark()
        self._ahead = False
        self._child: Child | None = None
        self._ready: int | None = None
        self._watch: StallWatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._life = ChildLife(AGAIN, tries=TRIES, look_interval_s=LOOK_INTERVAL_S)
        self.gone = asyncio.Event()
        self.gone.set()
        self._listener = address.listen()  # its name is never free, not even between two forkservers
        self._listen()

    @property
    def pid(self) -> int:
        return 0 if self._child is None or self._child.code is not None else self._child.pid

    def need(self) -> None:
        """Start the process now and after each end, without waiting for connections."""
        if not self._ahead:
            self._ahead = True
            if self._life.state == "waiting" and not self._life.wakes:
                self._start()

    def kill(self) -> None:
        """Kill the process and close its socket, for good."""
        self._life.stop()
        self._stop_listening()
        self._forget_readiness()
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
        self._listener.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._start)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._listener)

    def _start(self) -> None:
        self._stop_listening()
        self._forget_readiness()  # of the previous process
        now = self._loop.time()
        self._life.start(now)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._child = Child(self._popen_with(self._environment, self._listener.fileno(), writer))
        except OSError as error:
            os.close(reader)
            self._ended(f"cannot be started ({error}), or died,")
            return
        finally:
            os.close(writer)
        self.gone.clear()
        self._ready = reader
        self._watch = StallWatch(self._child.pid, now)
        self._loop.add_reader(reader, self._forget_readiness)
        self._loop.add_reader(self._child.pidfd, self._reap)
        self._schedule()

    def _reap(self) -> None:
        assert self._child is not None
        self._loop.remove_reader(self._child.pidfd)
        self._child.ended(self._child.popen.wait())
        self.gone.set()
        self._ended("died")

    def _ended(self, how: str) -> None:
        if self._life.state == "leaving":
            self._life.ended(self._loop.time())
        elif self._life.ended(self._loop.time()):
            self._given_up(f"{how} {TRIES} times")
        else:
            log.warning("the sidecar forkserver %s", how.removesuffix(", or died,"))
            self._schedule()

    def _schedule(self) -> None:
        """Set the timer to the next step of the child's lifecycle."""
        if self._timer is not None:
            self._timer.cancel()
        wakes = self._life.wakes
        self._timer = self._loop.call_at(min(wakes), self._on_time) if wakes else None

    def _on_time(self) -> None:
        match self._life.on_time(self._loop.time()):
            case "start":
                (self._start if self._ahead else self._listen)()
            case "look":
                self._kill_if_stalled()
        if self._life.state != "over":
            self._schedule()

    def _kill_if_stalled(self) -> None:
        assert self._child is not None
        assert self._watch is not None
        reason = self._watch.reason_to_give_up(self._loop.time(), starting=self._life.state == "starting")
        if reason:
            log.warning("killing the forkserver, process %d: it %s", self._child.pid, reason)
            self._life.give_up()
            self._child.signal(signal.SIGKILL)

    def _forget_readiness(self) -> None:
        """Stop waiting for the ready pipe: the child has loaded torch, or is gone."""
        self._life.ready()
        if self._ready is not None:
            self._loop.remove_reader(self._ready)
            os.close(self._ready)
            self._ready = None
