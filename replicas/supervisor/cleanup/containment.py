"""Contain the processes of a run: control groups, and a janitor.

:class:`Containment` starts shims for the supervisor, each in a control group for its
node and generation. Before a shim starts anything, its group exists and the janitor
knows of it, so that none of its processes is lost, whichever process is killed next.
Neither is required: where control groups cannot be made, and while a killed janitor is
replaced, processes are found by descent and by their mark.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import anyio

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.config.structs import ResourcesConfig
from replicas.linux.cgroups import RunCgroups, find_own
from replicas.linux.processes import send_signal, start_time
from replicas.supervisor.fleet.node import Node, start_helper
from replicas.supervisor.shim import orders
from replicas.supervisor.shim.orders import NodeSpec

__all__ = ["Containment"]

log = logging.getLogger("replicas.supervisor")

_STEADY_S = 60.0
AGAIN = Backoff(0.05, 5.0)
_END_S = 5.0


class _JanitorHandle:
    """The supervisor's side of the janitor. For the event loop's thread only.

    A janitor that dies is replaced, and the new one is told everything again.
    """

    def __init__(self, lock: int | None, cgroup: Path | None, door: Path | None) -> None:
        self._lock, self._cgroup, self._door = lock, cgroup, door
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, orders.Message] = {}
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._control: socket.socket | None = None
        self._began = 0.0
        self._deaths = 0
        self._again: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._closing = False

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start a janitor, and tell it of the control group and all shims."""
        self._again = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door = () if self._door is None else ("--socket", str(self._door))
        try:
            with theirs:
                self._popen = start_helper("replicas.supervisor.cleanup.janitor", theirs.fileno(), self._lock, *door)
        except OSError:
            ours.close()
            raise
        self._began = time.monotonic()
        self._control = ours
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        if self._cgroup is not None:
            self._tell({"type": "run", "cgroup": str(self._cgroup)})
        for message in self._watched.values():
            self._tell(message)

    def watch(self, spec: NodeSpec, pid: int) -> None:
        """Tell the janitor of a shim that has not started anything yet."""
        shim = {"type": "watch", "nonce": spec.nonce, "pid": pid, "start": start_time(pid), "cgroup": spec.cgroup}
        self._watched[spec.nonce] = shim
        self._tell(shim)

    def forget(self, nonce: str) -> None:
        """Tell the janitor that nothing started under this shim is left."""
        if self._watched.pop(nonce, None) is not None:
            self._tell({"type": "forget", "nonce": nonce})

    async def aclose(self) -> None:
        """End the janitor; while shims are left, it stays and cleans up after them."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        if self._popen is None:
            return
        if self._watched:
            self._forget_process()
            return
        self._tell({"type": "done"})
        self._hang_up()
        try:
            async with asyncio.timeout(_END_S):
                await self._ended.wait()
        except TimeoutError:
            send_signal(self._pidfd, signal.SIGKILL)
            await self._ended.wait()

    def _tell(self, message: orders.Message) -> None:
        if self._control is not None and not orders.send(self._control, message):
            send_signal(self._pidfd, signal.SIGKILL)  # it does not read: the next janitor is told everything

    def _on_exit(self) -> None:
        assert self._popen is not None
        code = self._popen.wait()
        self._forget_process()
        self._ended.set()
        if self._closing:
            return
        steady = time.monotonic() - self._began > _STEADY_S
        self._deaths = 1 if steady else self._deaths + 1
        delay_s = AGAIN.after(self._deaths - 1)
        log.warning("the janitor ended with code %d; a new one starts in %.2g s", code, delay_s)
        self._again = self._loop.call_later(delay_s, self._start_again)

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            log.warning("the janitor cannot be started: %s", error)
            self._again = self._loop.call_later(AGAIN.max_s, self._start_again)

    def _forget_process(self) -> None:
        """Do not look after this janitor any more."""
        assert self._popen is not None
        self._hang_up()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.returncode = self._popen.returncode or 0  # it is not waited for any more
        self._popen = None

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


class Containment:
    """Starts shims in control groups, and has the janitor watch them.

    Use it with ``async with``, in the event loop's thread only.

    :param resources: limits of a group, by its name.
    :param lock: descriptor of the run's lock, which janitor and shims keep open.
    :param limits: controllers (:data:`replicas.linux.cgroups.LIMITS`) that are needed.
    :param door: path of the run's Unix socket, for the janitor to remove.
    """

    def __init__(
        self,
        run: str,
        resources: Callable[[str], ResourcesConfig],
        *,
        lock: int | None,
        limits: frozenset[str],
        door: Path | None = None,
    ) -> None:
        self._run, self._lock, self._door = run, lock, door
        self._limits = limits
        self._resources = resources
        self._cgroups: RunCgroups | None = None
        self._no_cgroups = ""
        """Why there are no control groups."""
        self._janitor: _JanitorHandle | None = None

    @property
    def janitor_pid(self) -> int | None:
        return None if self._janitor is None else self._janitor.pid

    async def __aenter__(self) -> Self:
        """Make the run's control group, and start the janitor.

        :raises replicas.errors.WorldError: the janitor cannot be started, or limits of
            the config cannot be set.
        """
        try:
            self._cgroups = RunCgroups.make(self._run, find_own(), limited=bool(self._limits))
        except OSError as error:
            self._no_cgroups = error.strerror or str(error)
            log.info("no control groups: %s", self._no_cgroups)
        there = self._cgroups.limits if self._cgroups is not None else frozenset()
        if missing := ", ".join(sorted(self._limits - there)):
            why = self._no_cgroups or f"{missing} cannot be handed on by the control group of this process"
            self._remove_cgroups()
            raise errors.WorldError(
                f"limits of memory and processes cannot be set: {why}",
                hint="run it as a systemd unit of its own with Delegate=yes, or remove the limits from the config",
            )
        cgroup = None if self._cgroups is None else self._cgroups.path
        self._janitor = _JanitorHandle(self._lock, cgroup, self._door)
        try:
            self._janitor.start()
        except OSError as error:
            self._remove_cgroups()
            raise errors.WorldError(f"the janitor cannot be started: {error}") from error
        return self

    def _place(self, spec: NodeSpec) -> NodeSpec:
        limits = self._resources(spec.group)
        limited = limits.memory_nbytes is not None or limits.max_processes is not None
        if self._cgroups is None:
            if limited:
                raise OSError(f"limits of memory and processes need control groups: {self._no_cgroups}")
            return spec
        name = f"{spec.group}.{spec.replica}.{spec.generation}"
        try:
            path = self._cgroups.add(
                name, spec.node, memory_nbytes=limits.memory_nbytes, max_processes=limits.max_processes
            )
        except OSError as error:
            if limited:
                raise
            log.warning("no control group for %s: %s", name, error)
            return spec
        return spec._replace(cgroup=str(path))

    def start(self, spec: NodeSpec, changed: Callable[[], None], lock: int | None = None) -> Node:
        """Start a shim (a :data:`replicas.supervisor.shim.generation.ShimStarter`).

        :raises OSError: the shim, or its control group, cannot be made.
        """
        placed, janitor = self._place(spec), self._janitor
        if janitor is None:
            raise errors.InternalError("no replica can be started before containment has been entered")

        def moved() -> None:
            if node is not None and node.gone.is_set():
                janitor.forget(placed.nonce)
            changed()

        node: Node | None = None
        try:
            node = Node(placed, moved, lock, born=lambda pid: janitor.watch(placed, pid))
        except OSError:
            janitor.forget(placed.nonce)
            raise
        return node

    async def __aexit__(self, *_: object) -> None:
        """End the janitor, unless it has to look after processes that still run."""
        if self._janitor is not None:
            with anyio.CancelScope(shield=True):
                await self._janitor.aclose()
            self._janitor = None
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        if self._cgroups is not None:
            self._cgroups.close()
            self._cgroups = None
