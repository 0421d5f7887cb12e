"""Memory of another process, held through descriptors of one's own: what is in it stays
as it is until it is let go.

Theory of operation
===================

A place (:class:`~replicas.messages.SlotPlace`) names a descriptor of a living process.
:func:`hold` opens that very file, by a description of its own, and takes the locks that
say so (:mod:`replicas.linux.locks`): from then on the memory is neither refilled by its
owner nor freed with it.

:class:`MemoryHolder` holds the newest committed version of a channel in the
coordinator's process, which has no use for it but to outlive its source. Others open it
there as they would have opened it in the source. Nothing is mapped or copied for it,
and memory that cannot be held (another host, another user; a GPU's, which ends with its
owner) is simply not kept.
"""

from __future__ import annotations

import errno
import logging
import os

from replicas.errors import Gone, NoCapacity, ReplicasError, WorldError
from replicas.linux import locks
from replicas.linux.files import open_plain
from replicas.memory.living import Living
from replicas.messages import SlotPlace

__all__ = ["MemoryHolder", "hold"]

_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What passes: it says nothing about whether the two processes share memory."""
_SCARCE_HINT = "raise the limit of open files (ulimit -n) or free memory; the version is fetched again by itself"

log = logging.getLogger("replicas.memory")


def hold(place: SlotPlace, version: int) -> int:
    """Open and hold the memory of another process on this host: a descriptor,
    read-only; the locks end with it.

    That the process is the one that is meant must be known beforehand.

    :param place: as its owner, or another one that holds it, has named it.
    :param version: what is in it, for texts.
    :raises Gone: the process has ended, or the memory is not there any more, or is used
        for something else.
    :raises NoCapacity: this process has no descriptor or memory left for it, for the
        time being.
    :raises WorldError: it can never be opened here, though it may be there.
    """
    what = f"version {version} in the memory of process {place.pid}"
    try:
        fd = open_plain(place.pid, place.fd, inode=place.inode, nbytes=place.nbytes)
    except (FileNotFoundError, ProcessLookupError):
        raise Gone(f"{what} is gone", version=version) from None
    except OSError as error:
        if error.errno in _SCARCE:
            raise NoCapacity(f"{what} cannot be mapped: {error}", version=version, hint=_SCARCE_HINT) from error
        hint = 'run its processes as one user, or set transport = "group" on the channel'
        raise WorldError(f"{what} cannot be mapped: {error}", version=version, hint=hint) from error
    try:
        if not locks.hold_shared(fd):
            raise Gone(f"{what} is being replaced by another version", version=version)
        if not locks.marked(fd, place.serial):
            raise Gone(f"{what} was replaced by another version", version=version)
        locks.mark(fd, place.serial)
    except OSError as error:
        os.close(fd)
        if error.errno in _SCARCE:
            raise NoCapacity(f"{what} cannot be locked: {error}", version=version, hint=_SCARCE_HINT) from error
        raise WorldError(f"{what} cannot be mapped: locks do not work on it: {error}", version=version) from error
    except Gone:
        os.close(fd)
        raise
    return fd


class MemoryHolder:
    """What this process keeps alive for others, by key; :meth:`close` lets go of
    everything."""

    _living: Living[MemoryHolder] = Living()

    def __init__(self) -> None:
        self._held: dict[object, tuple[int, int]] = {}
        self._living.add(self)

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: object, place: SlotPlace, version: int) -> SlotPlace | None:
        """Hold what is at ``place``, beside what is kept under other keys; where it can
        be opened from now on.

        None: it cannot be held by this process.
        """
        self.let_go(key)
        if place.device:
            return None
        try:
            fd = hold(place, version)
        except ReplicasError as error:
            log.info("version %d is not kept: %s", version, error)
            return None
        self._held[key] = (fd, place.serial)
        return SlotPlace(os.getpid(), fd, place.inode, place.nbytes, place.serial, place.part)

    def let_go(self, key: object) -> None:
        """Hold it no longer; nothing happens when it is not held."""
        fd, serial = self._held.pop(key, (-1, 0))
        if fd >= 0:
            locks.let_go(fd)  # a child that is being started may have the description for a moment longer
            locks.unmark(fd, serial)
            os.close(fd)

    def close(self) -> None:
        for key in list(self._held):
            self.let_go(key)

    def forget(self) -> None:
        """This is a forked child: it must keep neither the memory nor the locks."""
        for fd, _ in self._held.values():
            os.close(fd)
        self._held.clear()


def _forget_all() -> None:
    for keeper in list(MemoryHolder._living):
        keeper.forget()


os.register_at_fork(after_in_child=_forget_all)
