"""Prove that two processes are on one host: one reads a nonce in the other's memory.

Each process that joins has a *beacon*: a memfd that contains a random nonce. Its Hello
names its pid, descriptor and nonce. A process that opens ``/proc/PID/fd/FD`` and reads
that nonce is on the same host and may map the other's memory. From another pid
namespace it opens the beacon through the other's door
(:mod:`replicas.memory.descriptor_server`), which proves the same. Names, addresses and
boot ids prove nothing: network namespaces share a kernel, containers share names.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence

from replicas.linux.files import open_plain
from replicas.linux.processes import START_TIME, boot_id, namespace, stat_fields
from replicas.memory.descriptor_server import ANSWER_S, DescriptorServer, fetch
from replicas.messages import Beacon
from replicas.messages.identity import ProcessIdentity

_NONCE_NBYTES = 32
_FIND_S = 4.0
"""Time limit of :func:`find`: doors of frozen processes do not answer."""
_beacon: Beacon | None = None


def own_process() -> ProcessIdentity:
    """Return the identity of this process (pid, start time, boot, namespace), read from
    /proc."""
    return ProcessIdentity(os.getpid(), int(stat_fields("self")[START_TIME]), boot_id(), namespace("pid"))


def own_beacon() -> Beacon:
    """Return this process's beacon; create it on first use, also in a forked child.

    A beacon is a memfd with a nonce, which proves that its reader is on this host. With
    it a socket is opened, and a thread started, from which other containers get
    descriptors. If that fails, the beacon does not name a socket. All stay open until
    the process ends.
    """
    global _beacon  # one for all channels of the process
    if _beacon is None or _beacon.pid != os.getpid():
        nonce = secrets.token_hex(_NONCE_NBYTES // 2)
        fd = os.memfd_create("replicas-beacon", os.MFD_CLOEXEC)
        os.write(fd, nonce.encode())
        try:
            door = str(DescriptorServer().address)
        except (OSError, RuntimeError):  # without a door other namespaces count as other hosts
            door = ""
        _beacon = Beacon(os.getpid(), fd, nonce, os.geteuid(), door)
    return _beacon


def own_door() -> str:
    """Return the address and secret of this process's descriptor socket, as one text.

    "" if :func:`own_beacon` has not opened it, or could not.
    """
    return _beacon.door if _beacon is not None and _beacon.pid == os.getpid() else ""


def find(beacons: Sequence[Beacon]) -> int:
    """Return the index of a beacon that is on this host; -1 if none was found.

    A beacon names a random nonce in the memory of a process. It is on this host if the
    nonce can be read there: all are tried through ``/proc``, in order, and then by the
    sockets of their processes, until one can be. This blocks for up to 4 s; call it on
    a thread.
    """
    until = time.monotonic() + _FIND_S - ANSWER_S
    for index, beacon in enumerate(beacons):
        if _read(beacon) == beacon.nonce.encode():
            return index
    for index, beacon in enumerate(beacons):
        if beacon.door and time.monotonic() < until and _read(beacon, by_door=True) == beacon.nonce.encode():
            return index
    return -1


def _read(beacon: Beacon, *, by_door: bool = False) -> bytes:
    """Return the nonce in another process's beacon; b"" if it cannot be read.

    :param by_door: ask the process's socket, for up to 2 s; False: open the file in
        /proc.
    """
    try:
        fd = fetch(beacon.door, beacon.fd) if by_door else open_plain(beacon.pid, beacon.fd)
        try:
            return os.pread(fd, _NONCE_NBYTES, 0)
        finally:
            os.close(fd)
    except OSError:
        return b""
