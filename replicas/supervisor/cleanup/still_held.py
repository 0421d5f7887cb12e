"""Ports and GPU memory that a dead generation still holds.

A port is held by a process that inherited or received the listening socket, GPU memory
by the driver, which frees it late. :func:`wait_clear` waits for both, up to a limit:
then the holder is reported, and the next generation starts nevertheless.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio.to_thread

from replicas.common.foreign import one_line
from replicas.linux.processes import command_line
from replicas.linux.smi import gpu_processes
from replicas.supervisor.cleanup.inventory import Belongings, listeners

__all__ = ["CLEAR_S", "StillHeld", "held", "wait_clear"]

CLEAR_S = 10.0
"""How long the next generation waits for the resources of the old one."""
_LOOK_INTERVAL_S = 0.1
_SMI_TIMEOUT_S = 5.0


class StillHeld(NamedTuple):
    """A resource that is still held.

    :ivar what: such as ``port 127.0.0.1:8000``.
    :ivar holder: such as ``process 1234 (python serve.py)``.
    """

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
    if not any(one.ports or one.gpu for one in old):
        return []
    deadline = time.monotonic() + timeout_s
    known: set[StillHeld] = set()
    while True:
        found = await anyio.to_thread.run_sync(_looked, old)  # for 5 s at most
        for one in found:
            if one not in known:
                known.add(one)
                told(one)
        left_s = deadline - time.monotonic()
        if not found or left_s <= 0 or not await pause(min(_LOOK_INTERVAL_S, left_s)):
            return found


def _looked(old: Sequence[Belongings]) -> list[StillHeld]:
    try:
        return held(old)
    except OSError as error:  # e.g. this process has no descriptor left
        return [
            StillHeld("what the old generation had", f"unknown: it cannot be looked for ({error.strerror or error})")
        ]


def held(old: Sequence[Belongings]) -> list[StillHeld]:
    """Resources of old generations that are still held, and their holders.

    Blocks: some milliseconds, with a GPU up to 5 s for nvidia-smi.
    """
    return [found for one in old for found in (*_ports(one), *_gpu(one))]


def _ports(old: Belongings) -> list[StillHeld]:
    inodes = {one.inode for one in old.ports}
    found: list[StillHeld] = []
    for one in listeners() if inodes else ():
        if one.inode in inodes:
            where = f"[{one.address}]" if ":" in one.address else one.address
            found.append(StillHeld(f"port {where}:{one.port}", _holder(f"socket:[{one.inode}]")))
    return found


def _gpu(old: Belongings) -> list[StillHeld]:
    """Memory that the driver still counts for a process of the old generation."""
    if not old.gpu:
        return []
    try:
        lines = gpu_processes("pid,gpu_uuid,used_memory", _SMI_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError):
        return []  # no nvidia-smi, or it fails
    except subprocess.TimeoutExpired:
        return [StillHeld("GPU memory", f"the driver: nvidia-smi does not answer within {_SMI_TIMEOUT_S:g} s")]
    pids = {pid for pid, _ in old.processes}
    found: list[StillHeld] = []
    for line in lines:
        pid, gpu, used = (word.strip() for word in (*line.split(","), "", "")[:3])
        if pid.isdigit() and int(pid) in pids:
            found.append(StillHeld(one_line(f"{used} MiB on GPU {gpu}"), _name(int(pid))))
    return found


# ------------------------------------------------------------ holders


def _holder(target: str) -> str:
    """The first process found with a descriptor for ``target``."""
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  # names are enough
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                if any(_refers(entry, target) for entry in entries):
                    return _name(int(pid))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is another user's
    return "a process that cannot be looked into (another user's, or in another container)"


def _refers(entry: os.DirEntry[str], target: str) -> bool:
    try:
        return os.readlink(entry.path) == target  # noqa: PTH115  # thousands of them
    except OSError:
        return False  # closed meanwhile


def _name(pid: int) -> str:
    return f"process {pid} ({command_line(pid) or 'gone'})"
