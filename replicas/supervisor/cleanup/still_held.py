"""What holds up a replica: dying processes, and what a dead generation still holds.

GPU memory is held by the driver, which frees it late. :func:`wait_clear` waits for
that, up to a limit: then the holder is reported, and the next generation starts
nevertheless.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio.to_thread

from replicas.common.foreign import one_line
from replicas.linux.processes import command_line
from replicas.linux.smi import gpu_processes
from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.wire.orders import Remains
from replicas.telemetry.events import Event, HeldUp

CLEAR_S = 10.0
"""How long the next generation waits for the resources of the old one."""
_LOOK_INTERVAL_S = 0.1
_SMI_TIMEOUT_S = 5.0


class HoldUps:
    """Obstacles of one generation: each is reported once, and shown while it lasts."""

    def __init__(self, emit: Callable[[Event], None], group: str, replica: int, generation: int) -> None:
        self._emit = emit
        self._event = partial(HeldUp, group=group, replica=replica, generation=generation)
        self._known: set[tuple[int, str]] = set()
        self._remains: Remains | None = None
        self._waits = ""

    @property
    def text(self) -> str:
        """What holds the replica up now; empty: nothing."""
        if self._remains is None:
            return self._waits
        names = ", ".join(_named(*one) for one in self._remains.processes)
        return f"held up by {names}: not dead {max(0.0, time.time() - self._remains.since):.0f} s after SIGKILL"

    def remain(self, remains: Remains | None, *, gave_up: bool = False) -> bool:
        """Note processes that SIGKILL has not ended; True: there is a new one."""
        self._remains = remains
        if remains is None:
            return False
        new = [one for one in remains.processes if gave_up or one not in self._known]
        self._known.update(new)
        for pid, command in new:
            what, holder = "the end of a process", _named(pid, command)
            self._emit(self._event(what=what, holder=holder, gave_up=gave_up, pid=pid, since=remains.since))
        return bool(new)

    def wait(self, what: str) -> None:
        """Show what its start waits for; empty: nothing."""
        self._waits = what

    async def until_clear(self, old: Sequence[Belongings], pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait for the last generation's resources, as :func:`wait_clear` does."""

        def told(held: StillHeld) -> None:
            self._waits = f"waits for {held.what}, held by {held.holder}"
            self._emit(self._event(what=held.what, holder=held.holder, gave_up=False))

        for held in await wait_clear(old, told, pause):
            self._emit(self._event(what=held.what, holder=held.holder, gave_up=True))
        self._waits = ""


def _named(pid: int, command: str) -> str:
    return f"process {pid} ({command or 'dying'})" if pid else "a process that is not seen from here"


class StillHeld(NamedTuple):
    """``512 MiB on GPU 0``, and its holder ``process 1234 (python serve.py)``."""

    what: str
    holder: str


async def wait_clear(
    old: Sequence[Belongings],
    told: Callable[[StillHeld], None],
    pause: Callable[[float], Awaitable[bool]],
    *,
    timeout_s: float = CLEAR_S,
) -> list[StillHeld]:
    """Wait until nothing that an old generation had is held any more.

    :param told: called once for each resource that is still held.
    :param pause: waits for some seconds; False: give up.
    :return: what is still held after ``timeout_s``.
    """
    if not any(one.gpu for one in old):
        return []
    deadline = time.monotonic() + timeout_s
    known: set[StillHeld] = set()
    while True:
        try:
            found = await anyio.to_thread.run_sync(held, old)  # for 5 s at most
        except OSError as error:  # e.g. this process has no descriptor left
            why = f"unknown: it cannot be looked for ({error.strerror or error})"
            found = [StillHeld("what the old generation had", why)]
        for one in found:
            if one not in known:
                known.add(one)
                told(one)
        left_s = deadline - time.monotonic()
        if not found or left_s <= 0 or not await pause(min(_LOOK_INTERVAL_S, left_s)):
            return found


def held(old: Sequence[Belongings]) -> list[StillHeld]:
    """What old generations still hold. Blocks up to 5 s for nvidia-smi."""
    return [found for one in old for found in _gpu(one)]


def _gpu(old: Belongings) -> list[StillHeld]:
    if not old.gpu:
        return []
    try:
        users = gpu_processes(_SMI_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError):
        return []  # no nvidia-smi, or it fails
    except subprocess.TimeoutExpired:
        return [StillHeld("GPU memory", f"the driver: nvidia-smi does not answer within {_SMI_TIMEOUT_S:g} s")]
    pids = {pid for pid, _ in old.processes}
    return [StillHeld(one_line(f"{used} MiB on GPU {gpu}"), _name(pid)) for pid, gpu, used, _ in users if pid in pids]


def _name(pid: int) -> str:
    return f"process {pid} ({command_line(pid) or 'gone'})"
