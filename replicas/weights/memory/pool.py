"""Spare (preallocated) and retired (still being read) buffers of an arena.

Theory of operation
===================

*Spare* buffers wait for a slot. A background thread allocates them as soon as a size is
known (:meth:`Pool.prepare`), because fresh pages cost ten times the copy. A caller that
needs a buffer while one is being allocated waits for that.

*Retired* buffers were taken from their slots because readers may still use their
content. They become spare again when their locks are free. Spare buffers beyond the
number of slots without memory are kept for a few versions: a reader that always keeps
a part of the previous version needs one for each version.

Buffers whose files were shown are *left*: closed here, and freed by the kernel after
their last reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from replicas.common.logs import Log
from replicas.errors import NoCapacity, WorldError
from replicas.weights.copies.accelerator import device_of
from replicas.weights.memory.buffers import AllocationStopped, Buffer, available_nbytes
from replicas.weights.memory.still_mapped import StillMapped

logger = Log("replicas.weights")

PREPARED_NBYTES = 1 << 20
"""Smaller buffers are not preallocated, as they cost little."""
SPARE_BEATS = 8
"""Versions for which a buffer that no slot needs is kept."""
WORKER_LOOKED_AT_S = 1.0
"""Interval at which a waiting caller checks that the allocating thread lives."""


class Pool:
    """Spare (ready) and retired (still read) buffers of one arena. Thread-safe.

    :ivar pinning: pin preallocated host memory.
    :ivar still_mapped: closed buffers whose files were shown.
    """

    def __init__(self, name: str, retired: int, device: str = "") -> None:
        """Begin without buffers.

        :param name: names its memory in ``/proc/PID/maps``.
        :param retired: how many buffers may be retired at a time.
        :param device: UUID of the GPU for the bytes; empty for host memory.
        """
        self.device = device
        self.pinning = False
        self._name = name
        self._cap = retired
        self._changed = threading.Condition()
        self._spare: list[tuple[Buffer, int]] = []
        self._retired: list[Buffer] = []
        self._wanted = 0
        self._nbytes = 0
        self._worker: threading.Thread | None = None
        self._beats = 0
        self._made = 0
        self._warned: set[int] = set()
        self._closed = False
        self.still_mapped = StillMapped(name, retired)

    def prepare(self, nbytes: int, count: int) -> None:
        """Have a thread allocate spare buffers, up to ``count`` of ``nbytes`` each.

        They are for later versions. Size and count replace those of an earlier call.
        Does not wait; stops where they do not fit. Small buffers are not allocated
        ahead of time.
        """
        if nbytes < PREPARED_NBYTES:
            return
        with self._changed:
            if self._closed:
                return
            self._nbytes, self._wanted = nbytes, count
            if self._worker is None and self._missing():
                self._worker = threading.Thread(target=self._work, name=f"{self._name} memory", daemon=True)
                try:
                    self._worker.start()
                except RuntimeError:  # no thread left; memory is allocated when it is needed
                    self._worker = None

    def _missing(self) -> bool:
        """Return True if the thread must allocate another buffer. Needs the lock."""
        return not self._closed and sum(buffer.nbytes == self._nbytes for buffer, _ in self._spare) < self._wanted

    def _work(self) -> None:
        """Allocate spare buffers until there are enough; the thread's function."""
        while True:
            with self._changed:
                if not self._missing():
                    self._worker = None
                    self._changed.notify_all()
                    return
                nbytes = self._nbytes
            try:
                buffer = self._allocate(nbytes, lambda: self._closed)
                if self.pinning:
                    buffer.pin()
            except (WorldError, AllocationStopped) as error:
                logger.info("%s: going on without memory allocated ahead of time: %s", self._name, error)
                with self._changed:
                    self._wanted = 0
                continue
            except BaseException:
                with self._changed:
                    self._worker, self._wanted = None, 0
                    self._changed.notify_all()
                raise
            with self._changed:
                if self._closed:
                    buffer.close()
                else:
                    self._spare.append((buffer, self._beats))
                self._changed.notify_all()

    def claim_buffer(self, nbytes: int, slots: int, *, alone: bool = False) -> Buffer:
        """Return a buffer of exactly ``nbytes``, locked for writing (claimed).

        It is a spare one, or is allocated here, which may block.

        :param slots: number of the arena's slots, for a warning if fewer fit.
        :param alone: only this process writes to it, so it may be sealed against
            others.
        :raises NoCapacity: too little memory is left, even after all spare buffers were
            closed.
        """
        with self._changed:
            self._warn(nbytes, slots)
            while True:
                found = self._take_spare(nbytes, alone=alone)
                coming = self._worker is not None and self._worker.is_alive() and self._nbytes == nbytes
                if found is not None or not coming or not self._missing():
                    break
                self._changed.wait(WORKER_LOOKED_AT_S)  # notified of each success or failure
            if nbytes == self._nbytes and self._wanted:
                self._wanted -= 1
        if found is None:
            try:
                found = self._allocate(nbytes)
            except NoCapacity:
                with self._changed:
                    spares, self._spare = self._spare, []  # buffers of other sizes make room
                for buffer, _ in spares:
                    buffer.close()
                found = self._allocate_last(nbytes)
            found.claim()  # cannot fail: it is new
        return found

    def retire(self, buffer: Buffer) -> bool:
        """Take over a buffer that processes still read, until they are done with it.

        Return False, and do nothing, if too many are kept already.
        """
        with self._changed:
            self._sweep()
            if len(self._retired) >= self._cap:
                return False
            self._retired.append(buffer)
            return True

    def close_shown(self, buffer: Buffer) -> None:
        """Close a buffer whose file a user has seen; readers keep its memory."""
        inode = buffer.place.inode
        buffer.close()
        self.still_mapped.add(inode, buffer.nbytes)

    def count_version(self, bare: int) -> None:
        """Count one more version; make buffers spare that are no longer read.

        Close spare buffers that were not needed for some versions.

        :param bare: the number of slots without memory, for which spares are kept.
        """
        with self._changed:
            self._beats += 1
            self._sweep()
            surplus = len(self._spare) - bare
            for spare in self._spare[: max(0, surplus)]:
                if self._beats - spare[1] > SPARE_BEATS:
                    self._spare.remove(spare)
                    spare[0].close()

    def close(self) -> None:
        """Close all buffers, spare and retired; an allocation in progress ends soon."""
        with self._changed:
            self._closed = True
            for buffer in [*(buffer for buffer, _ in self._spare), *self._retired]:
                buffer.close()
            self._spare.clear()
            self._retired.clear()
            self._changed.notify_all()

    @property
    def retired(self) -> tuple[Buffer, ...]:
        """The buffers that wait for their readers."""
        with self._changed:
            return tuple(self._retired)

    def _allocate(self, nbytes: int, stop: Callable[[], bool] = lambda: False) -> Buffer:
        """Allocate a buffer, which is not claimed yet.

        :param stop: asked meanwhile; returns True to give up.
        :raises NoCapacity: too little memory is left.
        """
        with self._changed:
            self._made += 1
            name = f"{self._name}-{self._made}"
        return Buffer.allocate(nbytes, name, stop=stop, device=self.device)

    def _allocate_last(self, nbytes: int) -> Buffer:
        """Allocate a buffer when there are no spares left to free.

        :raises NoCapacity: it does not fit; the text names processes that keep memory.
        """
        try:
            return self._allocate(nbytes)
        except NoCapacity as error:
            left = self.still_mapped.text()
            if not left:
                raise
            raise NoCapacity(f"{error.message}; {left}", hint=error.hint) from error

    def _take_spare(self, nbytes: int, *, alone: bool) -> Buffer | None:
        """Remove a spare buffer of this size and return it, claimed; None without one.

        Needs the lock.

        :param alone: one that is sealed against writers of other processes will do.
        """
        self._sweep()
        for spare in self._spare:
            buffer = spare[0]
            if buffer.nbytes != nbytes or (not alone and buffer.closed_to_writers):
                continue
            if buffer.claim() == "claimed":
                self._spare.remove(spare)
                return buffer
        return None

    def _sweep(self) -> None:
        """Make retired buffers (left to readers) spare if they are no longer read.

        Close those whose file was shown meanwhile. Needs the lock.
        """
        for buffer in list(self._retired):
            claim = buffer.claim()
            if claim == "shown":
                self._retired.remove(buffer)
                self.close_shown(buffer)
            elif claim == "claimed":  # for good: no process can open it from now on
                self._retired.remove(buffer)
                self._spare.append((buffer, self._beats))
                self._changed.notify_all()

    def _warn(self, nbytes: int, slots: int) -> None:
        """Log, once for each size, that fewer than ``slots`` buffers of it fit."""
        if nbytes in self._warned or nbytes < PREPARED_NBYTES:
            return
        self._warned.add(nbytes)
        if self.device:
            available, limit = device_of(self.device).free_nbytes(self.device)[0], f"the GPU {self.device}"
        else:
            available, limit = available_nbytes()
        fit = available // nbytes + sum(buffer.nbytes == nbytes for buffer, _ in self._spare)
        if fit < slots:
            logger.warning(
                "%s: going on with %d of %d slots of %d bytes: %s leaves %d. Free memory, raise the limit, or lower `slots`",
                *(self._name, fit, slots, nbytes, limit, available),
            )
