"""What this library asks of an accelerator: memory that other processes can open,
streams, events, pinned host memory.

Theory of operation
===================

Everything that only CUDA can do is behind :class:`Accelerator`;
:mod:`replicas.weights.devices.cuda` is the one for CUDA. Another kind plugs in by the
environment variable ``REPLICAS_ACCELERATOR="package.module:Class"``, which every
process of a run must have alike (ranks, and the sidecars that are forked for them); the
tests' fake is such a class.

A *device* is named by its UUID, in the words of ``CUDA_VISIBLE_DEVICES`` (``GPU-...``,
``MIG-...``), which mean the same in every process, as numbers do not.

*Order.* Work is enqueued on the current stream of a thread, and done later. These
enqueue: :meth:`Accelerator.copy`, :meth:`Event.record` and :meth:`Event.wait`. So does
every torch operation on a device tensor; but whoever reads with torch what
:meth:`~Accelerator.copy` has copied waits first (``event.synchronize()``,
``event.wait()`` in a later ``copy``, or :meth:`Accelerator.synchronize`): streams of
other threads, and the fake's streams, know nothing of each other. A thread of ours
works inside :meth:`Accelerator.on_side_stream`, never on the default stream, which
waits for the user's kernels and lets them wait.

*Memory.* :class:`DeviceMemory` is given back when it is closed *and* no tensor over it
is left, as a mapping is; the owner's memory must outlive all who have it open
(:mod:`replicas.weights.devices.device_buffers` takes care).
"""

from __future__ import annotations

import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from replicas import environ
from replicas.common.waits import locked
from replicas.errors import UsageError, WorldError

__all__ = ["DEFAULT", "Accelerator", "DeviceMemory", "Event", "Registration", "accelerator", "device_of"]

DEFAULT = "replicas.weights.devices.cuda:Cuda"
_NO_GPU_HINT = 'install a build of torch with CUDA, show it the GPU (CUDA_VISIBLE_DEVICES), or set staging = "host"'


class DeviceMemory(ABC):
    """One run of bytes on a device.

    :ivar uuid: the device.
    :ivar nbytes: its size.
    :ivar handle: how another process opens it (:meth:`Accelerator.open`); empty if it
        is somebody else's.
    """

    uuid: str
    nbytes: int
    handle: bytes

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """uint8 of shape ``[nbytes]``; keeps the memory while it, or a view of it, is
        alive.

        :raises ValueError: it is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it: it is freed, or if it is somebody else's unmapped, with the
        last tensor over it. Enqueued work on it must be over. Closing it again does
        nothing."""


class Event(ABC):
    """A point in the work of a stream.

    :ivar handle: how another process opens it (:meth:`Accelerator.open_event`); empty
        unless it is ours and interprocess.
    """

    handle: bytes

    @abstractmethod
    def record(self) -> None:
        """It happens when what this thread's current stream (of the event's device) has
        under way is done."""

    @abstractmethod
    def wait(self) -> None:
        """What is enqueued from now on waits for it, on the device: this thread's
        current stream. One that was never recorded has happened."""

    @abstractmethod
    def synchronize(self) -> None:
        """This thread waits for it, without a core and without Python's lock.

        :raises WorldError: the device has failed: some earlier work on it, of whomever
            in this process.
        """

    @abstractmethod
    def query(self) -> bool:
        """Whether it has happened.

        :raises WorldError: as :meth:`synchronize`.
        """

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """On the device's clock; both were made with ``timing`` and have happened."""


class Registration(ABC):
    """Host memory that is pinned. It keeps the memory alive."""

    @abstractmethod
    def close(self) -> None:
        """Unpin it; no copy may be under way. Closing it again does nothing."""


class Accelerator(ABC):
    """One kind of device. Every method is thread-safe; a forked child asks
    :func:`accelerator` again.

    :ivar kind: torch's device type of its tensors.
    :ivar group_backend: the backend of process groups that works on its memory in
        place.
    """

    kind: str
    group_backend: str

    @classmethod
    @abstractmethod
    def present(cls) -> bool:
        """Whether this machine and this torch may have such devices. Initialises
        nothing."""

    @abstractmethod
    def device(self) -> str:
        """The current device of this thread; empty if there is none that can be used.
        Initialises no more than needed."""

    @abstractmethod
    def visible(self) -> tuple[str, ...]:
        """All devices that this process may use."""

    @abstractmethod
    def select(self, uuid: str) -> None:
        """Use this device and no other, in a process that has used none yet.

        :raises Preflight: it cannot be used here.
        """

    @abstractmethod
    def torch_device(self, uuid: str) -> torch.device:
        """What torch calls it in this process.

        :raises WorldError: it is not visible here.
        """

    @abstractmethod
    def uuid_of(self, tensor: torch.Tensor) -> str:
        """The device on which ``tensor`` lies; empty for host memory."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on a device of this kind."""
        return bool(self.uuid_of(tensor))

    @abstractmethod
    def allocate(self, nbytes: int, uuid: str) -> DeviceMemory:
        """New memory, which other processes can open.

        :raises NoCapacity: the device has not so much left.
        """

    @abstractmethod
    def open(
        self, handle: bytes, nbytes: int, uuid: str, *, on_free: Callable[[], None] = lambda: None
    ) -> DeviceMemory:
        """Memory that another process (or this one) has allocated.

        :param on_free: called once, on whatever thread, when it was closed and no
            tensor over it is left.
        :raises WorldError: it cannot be opened here.
        """

    @abstractmethod
    def free_nbytes(self, uuid: str) -> tuple[int, int]:
        """How much memory of the device is free, and how much it has."""

    @abstractmethod
    def register(self, host: torch.Tensor, *, read_only: bool) -> Registration | None:
        """Pin contiguous host memory, so that copies from and to it need nobody's wait.
        It takes about as long as a copy.

        :param read_only: this process has mapped it for reading only.
        :return: None where it cannot be (said once in the log): copies work all the
            same, and hold the caller up.
        """

    @abstractmethod
    def event(self, uuid: str = "", *, interprocess: bool = False, timing: bool = False) -> Event:
        """A new event of a device, of the current one by default; an interprocess one
        cannot tell times."""

    @abstractmethod
    def open_event(self, handle: bytes, uuid: str) -> Event:
        """An interprocess event of another process, or of this one.

        :raises WorldError: it cannot be opened here.
        """

    @abstractmethod
    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies on this thread's current stream, device to device or between
        device and host; values are cast where dtypes differ. It returns at once where
        the host memory is pinned. Host memory must stay there until the copies are
        done; memory on the device that the caller has from torch's allocator may be
        freed at once if it was allocated on the same stream, and else after
        :meth:`keep`."""

    @abstractmethod
    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nobody else is given the memory of these tensors before what this thread's
        current stream has under way is done, even if they are freed now."""

    @abstractmethod
    def on_side_stream(self, uuid: str = "") -> AbstractContextManager[None]:
        """Work of this thread inside goes to a stream of ours, ordered after nothing
        but what was put there before. The device (the current one by default) is the
        current one inside."""

    @abstractmethod
    def on_stream(self, stream: object) -> AbstractContextManager[None]:
        """Work of this thread inside goes to ``stream``, a stream of torch's for this
        kind of device; None: the current one."""

    @abstractmethod
    def synchronize(self, uuid: str = "") -> None:
        """Wait for what this thread's current stream has under way, without a core.

        :raises WorldError: the device has failed.
        """


_lock = threading.Lock()
_chosen: tuple[int, str, Accelerator | None] = (0, "", None)


def accelerator() -> Accelerator | None:
    """The accelerator of this process, chosen once; None where there is none.
    Initialises nothing.

    :raises UsageError: ``REPLICAS_ACCELERATOR`` names no such class.
    """
    name = os.environ.get(environ.ACCELERATOR) or DEFAULT
    chosen = _chosen
    return chosen[2] if chosen[:2] == (os.getpid(), name) else locked(_lock, _choose, name)


def _choose(name: str) -> Accelerator | None:
    global _chosen  # one for each process, as the devices are; a forked child has another one
    if _chosen[:2] != (os.getpid(), name):
        kind = _load(name)
        _chosen = (os.getpid(), name, kind() if kind.present() else None)
    return _chosen[2]


def device_of(uuid: str) -> Accelerator:
    """The accelerator, for something that is known to be on device ``uuid``.

    :raises WorldError: this process has no accelerator.
    """
    found = accelerator()
    if found is None:
        raise WorldError(f"this process cannot use GPUs, and the memory is on {uuid}", hint=_NO_GPU_HINT)
    return found


def _load(name: str) -> type[Accelerator]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{environ.ACCELERATOR}={name!r} cannot be loaded: {error}", hint="it must be package.module:Class"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Accelerator)):
        raise UsageError(f"{environ.ACCELERATOR}={name!r} is not an Accelerator", hint="derive it from Accelerator")
    return kind
