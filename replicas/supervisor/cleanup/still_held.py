"""Obstacles to a start: dying processes, and the GPU memory of a dead generation.

The driver frees that memory late. :meth:`StartObstacles.wait_until_clear` waits for it,
up to a limit; then it reports the holder, and the next generation starts nevertheless.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import anyio.to_thread

from replicas.common.foreign import one_line
from replicas.linux.processes import command_line
from replicas.linux.smi import gpu_processes
from replicas.supervisor.wire.part_state import Inventory, Remains
from replicas.telemetry.events import Event, HeldUp

CLEAR_S = 10.0
"""How long the next generation waits for the resources of the old one."""
_LOOK_INTERVAL_S = 0.1
_SMI_TIMEOUT_S = 5.0

Held = tuple[str, str]
"""``512 MiB on GPU 0``, and its holder ``process 1234 (python serve.py)``."""


class StartObstacles:
    """Obstacles to one generation: dying processes, and GPU memory still in use.

    Each is reported once, and shown while it lasts.
    """

    def __init__(self, emit: Callable[[Event], None], group: str, replica: int, generation: int) -> None:
        """Begin without obstacles; look at nothing yet.

        :param emit: called with a HeldUp event for each new obstacle of this
            generation.
        """
        self._emit = emit
        self._event = partial(HeldUp, group=group, replica=replica, generation=generation)
        self._known: set[tuple[int, str]] = set()
        self._remains: Remains | None = None
        self.waits = ""
        """Rest of the sentence "waits ..." of a waiting start; may be empty."""

    @property
    def text(self) -> str:
        """The present obstacle to the start or end, as text for people, or ""."""
        if self._remains is None:
            return f"waits {self.waits}" if self.waits else ""
        names = ", ".join(_named(*one) for one in self._remains.processes)
        return f"held up by {names}: not dead {max(0.0, time.time() - self._remains.since):.0f} s after SIGKILL"

    def report_remains(self, remains: Remains | None, *, gave_up: bool = False) -> bool:
        """Emit an event for each new process that SIGKILL has not ended.

        Keep them for :attr:`text`, in place of those of the previous call.

        :param remains: the processes, with the time of the first SIGKILL; None for
            none.
        :param gave_up: the run leaves them behind: report all again.
        :returns: True if any was reported.
        """
        self._remains = remains
        if remains is None:
            return False
        new = [one for one in remains.processes if gave_up or one not in self._known]
        self._known.update(new)
        for pid, command in new:
            what, holder = "the end of a process", _named(pid, command)
            self._emit(self._event(what=what, holder=holder, gave_up=gave_up, pid=pid, since=remains.since))
        return bool(new)

    async def wait_until_clear(self, old: Sequence[Inventory], pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait until the previous generation's processes hold no GPU memory.

        Give up after 10 s (:data:`CLEAR_S`). Emit an event for each holder, and a
        second one for each that still has memory when the wait is given up.

        :param old: the last known processes of that generation (the replica's last
            start).
        :param pause: waits for the given seconds; returns False to end the wait early.
        """
        pids = frozenset(pid for one in old if one.gpu for pid, _ in one.processes)
        deadline = time.monotonic() + CLEAR_S
        told: set[Held] = set()
        while pids:
            try:
                found = await anyio.to_thread.run_sync(gpu_memory, pids)
            except OSError as error:  # e.g. this process has no descriptor left
                found = {("GPU memory", f"an unknown process, as they cannot be listed ({error.strerror or error})")}
            for what, holder in sorted(found - told):
                self.waits = f"for {what}, held by {holder}"
                self._emit(self._event(what=what, holder=holder, gave_up=False))
            told |= found
            left_s = deadline - time.monotonic()
            if not found or left_s <= 0 or not await pause(min(_LOOK_INTERVAL_S, left_s)):
                for what, holder in sorted(found):
                    self._emit(self._event(what=what, holder=holder, gave_up=True))
                break
        self.waits = ""


def _named(pid: int, command: str) -> str:
    """Return "process PID (COMMAND)" for a message; pid 0 is a hidden process."""
    return f"process {pid} ({command or 'dying'})" if pid else "a process that is not visible from here"


def gpu_memory(pids: Collection[int]) -> set[Held]:
    """Return amounts and holders of GPU memory still booked to these processes.

    Asks nvidia-smi; blocks up to 5 s. An empty set if that is missing or fails; if it
    does not answer in time, the driver is named as the holder.
    """
    try:
        users = gpu_processes(_SMI_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError):
        return set()  # no nvidia-smi, or it fails
    except subprocess.TimeoutExpired:
        return {("GPU memory", f"the driver, as nvidia-smi does not answer within {_SMI_TIMEOUT_S:g} s")}
    return {
        (one_line(f"{used} MiB on GPU {gpu}"), _named(pid, command_line(pid) or "gone"))
        for pid, gpu, used, _ in users
        if pid in pids
    }
