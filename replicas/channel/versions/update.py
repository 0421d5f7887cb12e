"""`Update`: one committed version, open for reading."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.pending import Pending
from replicas.channel.versions.owner import Base, Owner
from replicas.common.waits import locked
from replicas.core.base.manifest import Manifest
from replicas.messages import Meta, arguments
from replicas.messages.bounds import shown
from replicas.messages.version_orders import Steered
from replicas.weights.changes import Change, Difference, all_of
from replicas.weights.copies.accelerator import Event, device_of
from replicas.weights.loading import Model, each_name, load_image, views
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.buffers import Buffer

_T = TypeVar("_T")


# One object for the user, so it has a method for each way to read a version.
class Update:
    """One committed version, open to be loaded; the same for all ranks of this replica.

    Use it in a ``with`` block: a clean exit reports :meth:`loaded`, an exception
    :meth:`failed`. Without a block call one of the two yourself. Take tensors and
    :attr:`path` before the end of the block (or before that call). Tensors and mappings
    taken until then stay unchanged for as long as they are kept, and keep memory of
    their version. Only one thread may use it at a time: a second ``with`` block is
    refused, and a :meth:`load_into` under way elsewhere keeps the memory until then.

    An update that you read from, and drop without a report, counts as a failed load.

    :ivar version: its number. ``content_of``: an older version with its content, or 0.
    :ivar meta: the publisher's ``meta``.
    :ivar base: the version that this rank loaded last, before this one; 0 if there is
        none, or a later load failed.
    :ivar digest: XXH3 digest of its bytes, as in the publisher's receipt.
    :ivar manifest: names, dtypes and shapes (``replicas.core.base.manifest.Manifest``).
    """

    def __init__(self, owner: Owner, slot: Slot, version: int, meta: Meta, digest: str = "") -> None:
        """Take over a pinned slot; ``owner`` gets the reports, and unpins the slot."""
        manifest = slot.image
        if manifest is None:
            raise errors.InternalError(f"version {version} is not a whole image here", version=version)
        self.version = version
        self.content_of: int = 0 if slot.version == version else slot.version
        self.meta: Meta = meta
        self.digest = digest
        self.manifest: Manifest = manifest
        self._base = base = owner.base
        self.base: int = 0 if base is None else base.version
        self._path = ""
        self._reads: deque[Event] = deque()
        self._owner = owner
        self._pid = os.getpid()
        self._slot: Slot | None = slot
        self._lock = threading.Lock()
        self._entered = False
        self._loads: tuple[weakref.ref[Holder], ...] = ()
        self.holder: Holder = Holder()
        self._over = False
        self._outcome: str | None = None
        self._adoption: Pending[None] | None = None
        self._adopted = self._by_hand = False
        self._began: float | None = None

    def __repr__(self) -> str:
        return f"<Update version={self.version} {self._outcome or 'open'}>"

    @property
    def path(self) -> str:
        """The slot as a safetensors file, for engines that load from disk; read-only.

        Open it before the end of the block. A mapping of it (``safe_open``,
        ``np.memmap``) never changes, whatever is published later. So the memory is not
        reused, but freed when no process maps it; :attr:`path_to_copy` avoids this.

        A tied tensor is in the file under its first name only. The file's metadata maps
        the other names to the first (``replicas.aliases``, a JSON object), which only
        this library reads. :meth:`tensors` and ``replicas get`` give all names.

        :raises replicas.errors.UsageError: the update has ended, or the slot is in GPU
            memory (``staging = "device"``).
        :raises replicas.errors.ManifestMismatch: safetensors lacks a tensor's dtype.
        :raises replicas.errors.WorldError: the kernel cannot make the file read-only.
        """
        return self._file_path(to_copy=False)

    @property
    def path_to_copy(self) -> str:
        """:attr:`path`, for a reader that copies all data before the block ends.

        The memory is then reused for a later version, which a kept mapping would show.
        On a host that receives versions from another host this equals :attr:`path`.
        """
        return self._file_path(to_copy=True)

    def _file_path(self, *, to_copy: bool) -> str:
        """Return the path of the slot's file, sealed so that its bytes never change;
        but with ``to_copy`` (its reader keeps no mapping) it may be refilled later."""
        if self.ended and self._path:
            return self._path
        self.manifest.check_file()
        self._path = self._of_this(partial(self._slot_or_raise().buffer.show, to_copy=to_copy))
        return self._path

    @property
    def touched(self) -> bool:
        """True once the caller has read, adopted or reported the update."""
        return self._began is not None or self._outcome is not None

    @property
    def ended(self) -> bool:
        """True once it was reported and its block (if any) was left."""
        return self._over or (self._outcome is not None and not self._entered)

    def withdraw(self) -> bool:
        """End an untouched update; return False if it was touched, and stays open."""
        if not locked(self._lock, self._withdraw):
            return False
        self._end()
        return True

    def _withdraw(self) -> bool:
        """Under the lock: end an untouched update; return False if touched or over."""
        if self.touched or self._over:
            return False
        self._outcome = "replaced by a newer version"
        return True

    def adopt(self, *, whole: bool = False) -> Pending[None]:
        """Report that this rank can load this version; return the pending decision.

        With ``adopt_together`` it ends when all may load the version; else immediately.
        Read from the update before to find out whether it fits, and :meth:`refuse` it
        if not: then no target loads it. A ``with`` block and :meth:`load_into` call
        this and wait; await it first where that would block an event loop. It ends
        within the channel's deadline; a replica without a version waits for the others.

        :param whole: this rank has checked for all ranks of its replica.
        :raises replicas.errors.UsageError: the update has ended. The Pending raises
            NotAdopted if no target loads the version, or Disconnected after 60 s
            without a session; the update is then refused, and a receive gets a newer.
        """
        return locked(self._lock, self._adopt, arguments.flag("adopt: whole", whole))

    def _adopt(self, whole: bool) -> Pending[None]:
        """Under the lock: report once that this rank can load; return the Pending."""
        self._touch()
        if self._adoption is None:
            self._adoption = self._owner.await_decision(self.version, whole, self._decided)
        return self._adoption

    def _decided(self, error: errors.ReplicasError | None) -> None:
        """Session thread: note that the load may begin, or refuse it with ``error``."""
        if error is None:
            self._adopted, self._began = True, time.monotonic()
        else:
            with contextlib.suppress(errors.UsageError):  # already reported
                self.refuse(error)

    def unadopted(self) -> Update:
        """Return this update, whose ``with`` will not call and await :meth:`adopt`."""
        self._by_hand = True
        return self

    def __enter__(self) -> Update:
        """Wait for the decision of ``adopt_together``, if set; open the block."""
        if self._owner.together and not self._by_hand:
            self.adopt().wait()
        locked(self._lock, self._enter)
        return self

    def _enter(self) -> None:
        """Under the lock: open the block; raise UsageError if one is open."""
        if self._entered:
            text = f"the update of version {self.version} is open in another `with` block already"
            hint = "receive and load in one thread: all waiters of one receive get the same update"
            raise errors.UsageError(text, version=self.version, hint=hint)
        self._touch()
        self._entered = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if self._outcome is None:
                if error is None:
                    self.loaded()
                elif self._pid == os.getpid():
                    self.failed(error)
        finally:
            self._entered = False
            self._end()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors by name, aliases included, in published shapes and dtypes.

        Private copy-on-write CPU views; with ``staging = "device"`` copies on the GPU.
        """
        return dict(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over (name, tensor) in the publisher's order.

        A tied tensor comes under each of its names, in a row, as the same tensor. The
        tensors are CPU views, private to this iteration: writing to one changes neither
        the slot nor the data of other processes. With ``staging = "device"`` they are
        copies on the GPU, made one by one on the current stream.

        :raises replicas.errors.NoCapacity: open files, address space or mappings are at
            their limit, which the error names; nothing was read.
        """
        buffer = self._slot_or_raise().buffer
        found = self._copies(buffer) if buffer.device else views(self._of_this(buffer.private), self.manifest).items()
        return each_name(found, self.manifest.aliases)

    def _of_this(self, look: Callable[[], _T]) -> _T:
        """Return ``look()``, which maps or seals the slot's memory. If it raises a
        WorldError, such as NoCapacity, set that error's ``version``, and raise it."""
        try:
            return look()
        except errors.WorldError as error:
            error.version = self.version
            raise

    def _copies(self, buffer: Buffer) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, copy) of each tensor, made on the GPU's current stream."""
        gpu = device_of(buffer.device)
        for name, shared in views(buffer.readable(), self.manifest).items():
            self._slot_or_raise()
            tensor, event = shared.clone(), gpu.event(buffer.device)
            event.record()
            while self._reads and self._reads[0].query():
                self._reads.popleft()
            self._reads.append(event)
            yield name, tensor

    def changes(self) -> Iterator[Change]:
        """Iterate over the changes since :attr:`base`, the version loaded last.

        Each name comes once, changed or not. It is compared when the iteration reaches
        it, bit by bit, so that no NaN hides a change. A tensor comes whole if over an
        eighth of its elements changed. All do if there is no base, or its memory was
        reused for a later version (with two ``slots`` at the next publish, with more
        later); if names, dtypes or shapes differ; or with ``staging = "device"``. Whole
        tensors are as when iterating; positions and values are copies.

        :raises replicas.errors.NoCapacity: open files or mappings are at their limit.
        :raises replicas.errors.UsageError: the update has ended.
        """
        slot = self._slot_or_raise()
        if slot.buffer.device:
            return (all_of(name, tensor) for name, tensor in self)
        found = each_name(self._changes(self._of_this(slot.buffer.private), slot.sharing), self.manifest.aliases)
        return (change if change.name == name else replace(change, name=name) for name, change in found)

    def _changes(self, image: torch.Tensor, sharing: int) -> Iterator[tuple[str, Change]]:
        """Yield (name, change from the base). ``image``: the slot's bytes. ``sharing``:
        number of processes of this host that compare now, and share its cores."""
        with Difference(image, self.manifest, self._owner.open_base(self._base, self.manifest), sharing) as difference:
            for spec in self.manifest.tensors:
                self._slot_or_raise()
                yield spec.name, difference.of(spec.name)

    def load_into(self, model: Model, *, changed_only: bool = False) -> None:
        """Copy every tensor into ``model``'s parameters and persistent buffers.

        They are written in place: names and shapes must fit exactly; floating dtypes
        are cast, if float16 can hold all finite values that it gets. DTensor parameters
        get their local part, without communication. All checks come before the first
        write. On return all is copied, also on a GPU, by this thread's current stream.
        Each name gets its tensor, whatever is tied here or at the publisher. Parameters
        that share memory must get the same values for it.

        :param model: a module, a mapping of names to tensors, or
            :func:`replicas.sources.hf` of a transformers model, where the names of the
            version are those of its checkpoint.
        :param changed_only: write only the changes since :attr:`base`. The model must
            hold the values that the load of that version wrote; other values that you
            wrote since stay. Tensors that come whole (:meth:`changes`), and changed
            ones that are DTensors or not contiguous, are written whole. Finding changes
            is slower than copying all within a host: use it for slow memory.
        :raises replicas.errors.ManifestMismatch: a tensor (named) does not fit.
        :raises replicas.errors.NoCapacity: open files or mappings are at their limit;
            ``model`` is unchanged.
        :raises replicas.errors.UsageError: the update has ended; or ``changed_only``
            without a base: pass ``changed_only=update.base > 0``.
        """
        if (changed_only := arguments.flag("load_into: changed_only", changed_only)) and not self.base:
            text = f"changes to version {self.version}: this rank has not loaded a whole version before it"
            hint = "load this version whole: load_into(model, changed_only=update.base > 0)"
            raise errors.UsageError(text, version=self.version, hint=hint)
        if self._owner.together:
            self.adopt().wait()
        load = Holder()
        try:
            slot = locked(self._lock, self._begin_load, load)
            buffer = slot.buffer
            sharing = slot.sharing  # the ranks mostly load at the same time
            image = self._of_this(buffer.readable)
            base = self._owner.open_base(self._base, self.manifest) if changed_only else None
            if base is None or buffer.device:
                load_image(model, image, self.manifest, sharing=sharing, on_device=buffer.pin)
            else:
                with Difference(image, self.manifest, base, sharing) as difference:
                    load_image(model, image, self.manifest, difference, sharing=sharing, on_device=buffer.pin)
        finally:
            del load
            self._let_go()  # another thread may have ended the update

    def _begin_load(self, load: Holder) -> Slot:
        """Under the lock: return the slot, kept in use until ``load`` is dropped."""
        slot = self._touch()
        self._loads = (*(one for one in self._loads if one() is not None), weakref.ref(load))
        return slot

    def loaded(self) -> None:
        """Report, once, that this rank serves this version from now on.

        :raises replicas.errors.UsageError: the update was reported failed before.
        :raises replicas.errors.ReplicasError: the session is over, e.g. Fenced.
        """
        self._check_process()  # before the lock, which may be taken in a forked child
        if self._owner.together and not self._adopted and self._outcome is None:
            text = f"version {self.version} was loaded before all targets of the channel could load it"
            hint = "adopt_together: wait for update.adopt() before the load, or load in a plain `with update:` block"
            error = errors.UsageError(text, version=self.version, hint=hint)
            self.failed(error)
            raise error
        slot, load_s = self._slot, 0.0 if self._began is None else time.monotonic() - self._began
        base = None if slot is None else Base(self.version, slot.version, self.manifest.hash, slot.buffer.origin)
        self._conclude("loaded", partial(self._owner.loaded, self.version, load_s, base))

    def failed(self, error: BaseException | str) -> None:
        """Report that this rank may hold only a part of this version.

        The replica is *partial* until it has loaded a whole version.

        :param error: the exception of the load, or a text.
        :raises replicas.errors.UsageError: the update was reported loaded before, or
            ``error`` is neither an exception nor a text.
        """
        self._end_without("failed", error)

    def refuse(self, error: BaseException | str) -> None:
        """Report that this rank loads nothing of this version, and keeps its own.

        The replica keeps its version, and the next receive waits for a newer one.
        ``receipt.not_loaded``, ``channel.loaded()`` and the status show the reason.

        :param error: the reason, an exception or a text.
        :raises replicas.errors.UsageError: reported otherwise, or ``error`` is invalid.
        """
        self._end_without("refused", error)

    def report(self, **scores: float) -> Pending[Steered]:
        """Report scores (``reward=0.82``) at any time; the Pending ends when stored."""
        return self._owner.score(self.version, scores)

    def _end_without(self, outcome: str, error: BaseException | str) -> None:
        """Report the ``outcome``, ``failed`` or ``refused``, because of ``error``."""
        if not isinstance(error, (BaseException, str)):
            raise errors.UsageError(
                f"{outcome}: error must be an exception or a text, not {shown(error)}",
                version=self.version,
                hint="pass the exception of the load",
            )
        self._check_process()
        if isinstance(error, str):
            error = errors.SyncError(error, version=self.version, phase="load", hint="")
        self._conclude(outcome, partial(self._owner.failed, self.version, error, kept=outcome == "refused"))

    def _conclude(self, outcome: str, report: Callable[[], None]) -> None:
        """Once: set the outcome and call ``report``; outside a block end the update."""
        if not locked(self._lock, self._report, outcome):
            return
        try:
            report()
        finally:
            if not self._entered:
                self._end()

    def _check_process(self) -> None:
        """Raise UsageError in a forked child of the process that received it."""
        if self._pid != os.getpid():
            text = f"the update of version {self.version} belongs to the parent, from which this process was forked"
            hint = "read and report it in the parent; tensors read before the fork can be used here"
            raise errors.UsageError(text, version=self.version, hint=hint)

    def _report(self, outcome: str) -> bool:
        """Under the lock: set the outcome to ``outcome``; return False if it is that
        already. Raise UsageError if another outcome was reported before."""
        if self._outcome == outcome:
            return False
        if self._outcome is not None:
            text = f"the update of version {self.version} was reported as {self._outcome} before"
            raise errors.UsageError(text, version=self.version, hint="report an update once")
        self._outcome = outcome
        return True

    def _touch(self) -> Slot:
        """Under the lock: mark as used, return the slot; UsageError if it has ended."""
        self._check_process()
        slot = self._slot
        if slot is None or self._over:
            text = f"the update of version {self.version} has ended: {self._outcome or 'its block was left'}"
            hint = "read it before its `with` block ends, or before loaded() or failed()"
            raise errors.UsageError(text, version=self.version, hint=hint)
        if self._began is None:
            self._owner.touched(self.version)  # first: after an interrupt in between, no reference may stay
            self._began = time.monotonic()
        return slot

    def _slot_or_raise(self) -> Slot:
        """Mark the update as used; return its slot, or raise UsageError if ended."""
        return locked(self._lock, self._touch)

    def _end(self) -> None:
        """End the update; release its slot once no thread copies from it."""
        self._over = True
        self._let_go()

    def _let_go(self) -> None:
        """Release the slot if the update has ended and no thread copies from it."""
        slot = self._slot
        if slot is None or not self._over or any(load() is not None for load in self._loads):
            return
        try:
            for read in list(self._reads):
                read.synchronize()
        finally:
            self._owner.let_go(self.holder, slot)
            self._slot = None
            self._reads.clear()
