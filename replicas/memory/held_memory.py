"""Hold memory of another process through own descriptors, beyond its owner's life.

Theory of operation
===================

A place (:class:`~replicas.messages.SlotPlace`) names a descriptor of a living process.
:func:`hold` opens that file with a file description of its own, through ``/proc`` or
else through the process's door (:mod:`replicas.memory.descriptor_server`), and takes
the locks that flag it as held (:mod:`replicas.linux.locks`). From then on the owner
does not refill the memory, and the kernel does not free it when the owner ends.

:class:`MemoryHolder` lets the newest committed version of a channel outlive its source:
members open it in the coordinator's process as they would have opened it in the source.
Nothing is mapped or copied. Memory of another host, user or pid namespace cannot be
held, nor GPU memory, which ends with its owner.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from replicas.common.logs import Log
from replicas.errors import Gone, NoCapacity, ReplicasError, WorldError
from replicas.linux import locks
from replicas.linux.files import open_plain
from replicas.linux.scarce import SCARCE, describe_limit
from replicas.memory import descriptor_server
from replicas.memory.beacon import own_door
from replicas.messages import SlotPlace

T = TypeVar("T")

log = Log("replicas.memory")


def is_in_proc(place: SlotPlace) -> bool:
    """Return True if this process can see the memory's file in ``/proc``; open nothing.

    :param place: where another process has a version: its pid, descriptor and inode.
    """
    if place.door and place.pid == os.getpid() and place.door != own_door():
        return False  # a process of another container with this pid
    with contextlib.suppress(OSError):  # the process has ended, or its /proc cannot be read
        return Path(f"/proc/{place.pid}/fd/{place.fd}").stat().st_ino == place.inode
    return False


def is_there(place: SlotPlace) -> bool:
    """Return True if another process's memory still exists, as far as is known.

    That is if its file is in ``/proc``, or if the connection to its process's door (the
    socket that gives away descriptors) is open. It does not block.

    :param place: the memory: pid and descriptor of that process, inode, and door.
    """
    return is_in_proc(place) or (place.door not in ("", own_door()) and descriptor_server.is_open(place.door))


def hold(place: SlotPlace, version: int, *, wait: bool = True, lock: bool = True) -> int:
    """Open and lock memory of another process on this host, so that it is not refilled.

    Pids differ between containers. So before the call, make sure (by a beacon) that the
    pid in ``place`` means, in this process, the process that sent the place.

    :param place: where the memory is: process, descriptor, inode and size.
    :param version: the version in it, for error texts only.
    :param wait: if ``/proc`` does not show the memory, ask at the process's door, and
        block for up to 2 s.
    :param lock: take the locks; without them the owner may refill the memory.
    :returns: a read-only descriptor, which the caller closes; that ends the locks.
    :raises Gone: the process has ended, or the memory is gone or reused.
    :raises NoCapacity: this process has no descriptor or memory left at the moment.
    :raises WorldError: this process can never open the memory, though it may exist.
    """
    what = f"version {version} in the memory of process {place.pid}"
    try:
        fd = _open(place, wait=wait)
    except (FileNotFoundError, ProcessLookupError):
        raise Gone(f"{what} is gone, with that process", version=version) from None
    except OSError as error:
        if error.errno in SCARCE:
            raise _too_little(f"{what} cannot be mapped", error, version) from error
        hint = 'run its processes as one user, or set transport = "group" on the channel'
        raise WorldError(f"{what} cannot be mapped: {error}", version=version, hint=hint) from error
    try:
        if lock and not locks.hold_shared(fd):
            raise Gone(f"{what} is being replaced by another version", version=version)
        if not locks.flagged(fd, place.serial):
            raise Gone(f"{what} was replaced by another version", version=version)
        if lock:
            locks.flag(fd, place.serial)
    except OSError as error:
        os.close(fd)
        if error.errno in SCARCE:
            raise _too_little(f"{what} cannot be locked", error, version) from error
        raise WorldError(f"{what} cannot be mapped: locks do not work on it: {error}", version=version) from error
    except Gone:
        os.close(fd)
        raise
    return fd


def _too_little(what: str, error: OSError, version: int) -> NoCapacity:
    """Return (do not raise) the error for a limit of this process that was met.

    :param what: the start of its text.
    :param error: what the kernel reported.
    """
    why, remedy = describe_limit(error)
    return NoCapacity(f"{what}: {why}", version=version, hint=f"{remedy}; the version is fetched again automatically")


def _open(place: SlotPlace, *, wait: bool) -> int:
    """Return a new read-only descriptor of the place's file, by ``/proc`` or by the
    door.

    :param wait: if ``/proc`` does not show it, ask at the process's door, for up to 2
        s.
    :raises FileNotFoundError: the memory or its process is gone, or does not answer.
    :raises OSError: the file cannot be opened here, for another reason.
    """
    try:
        return open_plain(place.pid, place.fd, inode=place.inode, nbytes=place.nbytes)
    except OSError as error:
        if not place.door or not wait or error.errno in SCARCE:
            raise
        try:
            return descriptor_server.fetch(place.door, place.fd, inode=place.inode, nbytes=place.nbytes)
        except (ConnectionError, FileNotFoundError, TimeoutError):
            # The process has ended or is frozen; /proc may show another one of its pid.
            raise FileNotFoundError from None
        except PermissionError as refused:
            raise (error if isinstance(error, PermissionError) else refused) from None


class Living(Generic[T]):
    """A set of the objects that were added and still live. Thread-safe.

    The callback of its weak references runs no Python, unlike ``weakref.WeakSet``'s. An
    object dies on the thread that drops the last reference, which may be the user's
    main thread, where signal handlers run: if one raises in a Python callback, Python
    discards the exception and Ctrl-C is lost. Here the callback is ``deque.append``,
    written in C: it records the dead reference, which the next :meth:`add` removes.

    :param in_child: called with each object in a forked child; only for sets that live
        as long as the process.
    """

    def __init__(self, in_child: Callable[[T], object] | None = None) -> None:
        """Start empty.

        :param in_child: called with each object after a fork, in the child. Only for
            sets that live as long as the process; None: nothing is called.
        """
        self._known: dict[int, weakref.ref[T]] = {}
        self._dead: deque[weakref.ref[T]] = deque()
        if in_child is not None:
            os.register_at_fork(after_in_child=lambda: [in_child(one) for one in self])

    def __iter__(self) -> Iterator[T]:
        """Iterate over the live objects, each once, in no order."""
        found = {id(one): one for known in list(self._known.values()) if (one := known()) is not None}
        return iter(found.values())

    def add(self, one: T) -> None:
        """Add an object by a weak reference: this does not keep it alive.

        Adding it twice is harmless. Dead objects are removed then.
        """
        while self._dead:
            self._known.pop(id(self._dead.popleft()), None)
        known = weakref.ref(one, self._dead.append)
        self._known[id(known)] = known


class MemoryHolder:
    """Keeps memory of other processes alive, by key, for further processes."""

    _living: Living[MemoryHolder] = Living(operator.methodcaller("close_after_fork"))

    def __init__(self) -> None:
        """Start without memory.

        After a fork the child closes its copies of the descriptors.
        """
        self._held: dict[object, tuple[int, int]] = {}
        self._living.add(self)

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: object, place: SlotPlace, version: int) -> SlotPlace | None:
        """Open and lock another process's memory, so that it outlives that process.

        First close what is held under ``key``. It does not block.

        :param key: name for :meth:`let_go`.
        :param version: for log texts only.
        :param place: the memory: pid and descriptor of its process, inode, and size.
        :returns: the place in this process at which others can open the memory; None,
            and a log line, if it cannot be held, as on a GPU.
        """
        self.let_go(key)
        if place.device:
            return None
        try:
            fd = hold(place, version, wait=False)  # on the loop of the coordinator
        except ReplicasError as error:
            log.info("going on without keeping version %d in the coordinator: %s", version, error)
            return None
        self._held[key] = (fd, place.serial)
        return SlotPlace(os.getpid(), fd, place.inode, place.nbytes, place.serial, place.part, door=own_door())

    def let_go(self, key: object) -> None:
        """Unlock and close the memory held under ``key``, if any: its owner may refill
        it."""
        fd, serial = self._held.pop(key, (-1, 0))
        if fd >= 0:
            locks.unlock(fd)  # a child being started may share the file description a moment longer
            locks.unflag(fd, serial)
            os.close(fd)

    def close(self) -> None:
        """Unlock and close all memory that is held."""
        for key in list(self._held):
            self.let_go(key)

    def close_after_fork(self) -> None:
        """Close the descriptors in a forked child, without touching the locks.

        The parent, which shares them, still holds the memory.
        """
        for fd, _ in self._held.values():
            os.close(fd)
        self._held.clear()
