"""Prove that two processes are on one host: one reads a nonce in the other's memory.

Each process that joins has a *beacon*: a memfd that contains a random nonce. Its Hello
names its pid, descriptor and nonce. A process that opens ``/proc/PID/fd/FD`` and reads
that nonce is on the same host, in the same pid namespace, and allowed to map the
other's memory. Names, addresses and boot ids prove none of this: network namespaces
share a kernel, containers share names.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from replicas.linux.files import open_plain
from replicas.linux.processes import START_TIME, boot_id, namespace, stat_fields
from replicas.messages import Beacon
from replicas.messages.identity import ProcessIdentity

__all__ = ["find", "own_beacon", "own_process"]

_NONCE_NBYTES = 32
_beacon: Beacon | None = None


def own_process() -> ProcessIdentity:
    """Pid, start time, boot id and pid namespace of this process."""
    return ProcessIdentity(os.getpid(), int(stat_fields("self")[START_TIME]), boot_id(), namespace("pid"))


def own_beacon() -> Beacon:
    """The beacon of this process, alive as long as it; a forked child gets its own."""
    global _beacon  # one per process, whatever it joins
    if _beacon is None or _beacon.pid != os.getpid():
        nonce = secrets.token_hex(_NONCE_NBYTES // 2)
        fd = os.memfd_create("replicas-beacon", os.MFD_CLOEXEC)
        os.write(fd, nonce.encode())
        _beacon = Beacon(os.getpid(), fd, nonce, os.geteuid())
    return _beacon


def find(beacons: Sequence[Beacon]) -> int:
    """Index of the first beacon that can be opened and has its nonce, or -1."""
    return next((index for index, beacon in enumerate(beacons) if _read(beacon) == beacon.nonce.encode()), -1)


def _read(beacon: Beacon) -> bytes:
    """The nonce read; empty if unreadable, or no plain file (opening might block)."""
    try:
        fd = open_plain(beacon.pid, beacon.fd)
        try:
            return os.pread(fd, _NONCE_NBYTES, 0)
        finally:
            os.close(fd)
    except OSError:
        return b""
