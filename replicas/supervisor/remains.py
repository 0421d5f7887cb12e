"""What an old generation leaves in the way of the next one, and who holds it.

Every process of the old generation is gone when this is asked. What it had may still be held: a port by a process that got
its socket handed over, or by a stranger that was quicker; a segment by one that has it mapped; GPU memory by the driver,
which takes its time. :func:`wait_clear` waits for all that, but not for ever: in the end the holder is named, and the next
generation tries its luck. A segment that nobody holds is in nobody's way, and may be what the program wants to find again.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from replicas.foreign import one_line
from replicas.linux.processes import command_line, start_time
from replicas.linux.smi import gpu_processes
from replicas.supervisor.belongings import Belongings, Listener, listeners, shared_files, unix_sockets

__all__ = ["CLEAR_S", "Held", "held", "wait_clear"]

CLEAR_S = 10.0
"""How long the next generation waits for what the old one had."""
_LOOK_INTERVAL_S = 0.1
_SMI_TIMEOUT_S = 5.0
_LEAST_LOOK_S = 1.0
_ANY = ("0.0.0.0", "::")


class Held(NamedTuple):
    """``what``: such as ``port 127.0.0.1:8000``. ``holder``: such as ``process 1234 (python serve.py)``."""

    what: str
    holder: str


async def wait_clear(
    old: Sequence[Belongings],
    told: Callable[[Held], None],
    pause: Callable[[float], Awaitable[bool]],
    *,
    timeout_s: float = CLEAR_S,
) -> list[Held]:
    """Wait until nothing of what an old generation had is held any more.

    :param told: called once for each thing that is waited for.
    :param pause: waits for some seconds; False: give up.
    :return: what is still held after ``timeout_s``.
    """
    if not any(one.ports or one.sockets or one.segments or one.gpu or one.processes for one in old):
        return []
    deadline = time.monotonic() + timeout_s
    known: set[Held] = set()
    found = [Held("what the old generation had", f"unknown: to look for it takes more than {timeout_s:g} s")]
    while True:
        with anyio.move_on_after(
            max(_LEAST_LOOK_S, deadline - time.monotonic())
        ):  # a driver may hold up whoever asks it
            found = await anyio.to_thread.run_sync(_looked, old, abandon_on_cancel=True)
        for one in found:
            if one not in known:
                known.add(one)
                told(one)
        left_s = deadline - time.monotonic()
        if not found or left_s <= 0 or not await pause(min(_LOOK_INTERVAL_S, left_s)):
            return found


def _looked(old: Sequence[Belongings]) -> list[Held]:
    try:
        return held(old)
    except OSError as error:  # such as: no descriptor is left to this process
        return [Held("what the old generation had", f"unknown: it cannot be looked for ({error.strerror or error})")]


def held(old: Sequence[Belongings]) -> list[Held]:
    """What is held of that, and by whom. Blocks for some milliseconds (with a GPU for what nvidia-smi takes, up to 5 s)."""
    return [found for one in old for found in (*_alive(one), *_ports(one), *_sockets(one), *_segments(one), *_gpu(one))]


def _alive(old: Belongings) -> list[Held]:
    """Processes that left the tree in time."""
    alive = [pid for pid, start in old.processes if start_time(pid) == start]
    return [Held("the life of a process", _name(pid)) for pid in alive]


def _ports(old: Belongings) -> list[Held]:
    if not old.ports:
        return []
    now = list(listeners())
    low, high = _ephemeral()
    found: list[Held] = []
    for one in old.ports:
        # Ports of the kernel's choice are not asked for again: another socket there is no matter.
        chosen = not low <= one.port <= high
        for other in now:
            same = other.inode == one.inode
            if same or (chosen and _conflict(one, other)):
                where = f"[{one.address}]" if ":" in one.address else one.address
                found.append(Held(f"port {where}:{one.port}", _holder(f"socket:[{other.inode}]")))
                break
    return found


def _conflict(one: Listener, other: Listener) -> bool:
    any_address = one.address in _ANY or other.address in _ANY
    return one.port == other.port and (one.address == other.address or any_address)


def _ephemeral() -> tuple[int, int]:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def _sockets(old: Belongings) -> list[Held]:
    if not old.sockets:
        return []
    now = dict(unix_sockets())
    return [Held(f"socket {one_line(path)}", _holder(f"socket:[{now[path]}]")) for path in old.sockets if path in now]


def _segments(old: Belongings) -> list[Held]:
    there = {path for path in old.segments if os.path.exists(path)}  # noqa: PTH110  # names that are no good Paths too
    if not there:
        return []
    found: dict[str, Held] = {}
    for pid in _pids():
        for path in there & shared_files(pid):
            found.setdefault(path, Held(f"segment {one_line(path)}", _name(pid)))
    return list(found.values())


def _gpu(old: Belongings) -> list[Held]:
    """Memory that the driver still counts for a process of the old generation."""
    if not old.gpu:
        return []
    try:
        lines = gpu_processes("pid,gpu_uuid,used_memory", _SMI_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError):
        return []  # the driver does not tell
    except subprocess.TimeoutExpired:
        return [Held("GPU memory", f"the driver: nvidia-smi does not answer within {_SMI_TIMEOUT_S:g} s")]
    pids = {pid for pid, _ in old.processes}
    found: list[Held] = []
    for line in lines:
        pid, gpu, used = (word.strip() for word in (*line.split(","), "", "")[:3])
        if pid.isdigit() and int(pid) in pids:
            found.append(Held(one_line(f"{used} MiB on GPU {gpu}"), _name(int(pid))))
    return found


# ------------------------------------------------------------ who it is


def _pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  # names are enough


def _holder(target: str) -> str:
    """The process that has a descriptor for this; several: the first."""
    for pid in _pids():
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                if any(_refers(entry, target) for entry in entries):
                    return _name(pid)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is somebody else's
    return "a process that cannot be looked into (another user's, or in another container)"


def _refers(entry: os.DirEntry[str], target: str) -> bool:
    try:
        return os.readlink(entry.path) == target  # noqa: PTH115  # thousands of them
    except OSError:
        return False  # closed meanwhile


def _name(pid: int) -> str:
    return f"process {pid} ({command_line(pid) or 'gone'})"
