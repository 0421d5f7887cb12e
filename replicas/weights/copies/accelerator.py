"""Interface to GPUs: memory other processes can open, streams, events, pinning.

Theory of operation
===================

Code outside this interface is independent of CUDA:
:mod:`replicas.weights.devices.cuda` implements it. The environment variable
``REPLICAS_ACCELERATOR="package.module:Class"`` selects another implementation, such as
the tests' fake; it must be equal in every process of a run.

A *device* is named by its UUID, in the form of ``CUDA_VISIBLE_DEVICES`` (``GPU-...``,
``MIG-...``): UUIDs mean the same in every process, device numbers do not.

*Order.* Work is enqueued on a thread's current stream, and done later. Streams are not
ordered with each other: before torch reads bytes copied by :meth:`Accelerator.copy`,
wait (``event.synchronize()``, ``event.wait()`` before a later ``copy``, or
:meth:`Accelerator.synchronize`). The library's own threads work inside
:meth:`Accelerator.on_side_stream`, never on the default stream, which waits for the
user's kernels and delays them.

*Memory.* :class:`DeviceMemory` is freed or unmapped when it is closed *and* no tensor
over it is left. The owner's memory must outlive all processes that have it open;
:mod:`replicas.weights.devices.device_buffers` ensures that.
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

DEFAULT = "replicas.weights.devices.cuda:Cuda"
_NO_GPU_HINT = 'install a build of torch with CUDA, show it the GPU (CUDA_VISIBLE_DEVICES), or set staging = "host"'


class DeviceMemory:
    """One run of bytes on a device."""

    def __init__(self, tensor: torch.Tensor, handle: bytes, owner: object = None) -> None:
        """Keep the tensor, which owns the memory.

        :param tensor: uint8 of shape ``[nbytes]``; it and its views keep the memory
            alive.
        :param handle: lets another process open it (:meth:`Accelerator.open`); empty
            for memory opened from another process.
        :param owner: an object kept until the memory is closed, even if it has no
            bytes.
        """
        self.nbytes = tensor.nbytes
        self.handle = handle
        self._tensor: torch.Tensor | None = tensor
        self._owner = owner

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a uint8 tensor; raises ValueError after :meth:`close`."""
        if self._tensor is None:
            raise ValueError("the device memory is closed")
        return self._tensor

    def close(self) -> None:
        """Drop this reference; the last tensor over the memory frees or unmaps it.

        The device's work on it must have ended.
        """
        self._tensor = self._owner = None


class Event(ABC):
    """A point in the work of a stream.

    :ivar handle: lets another process open it (:meth:`Accelerator.open_event`); empty
        unless it is this process's own and interprocess.
    """

    handle: bytes

    @abstractmethod
    def record(self) -> None:
        """Record the event behind all work that the current stream has enqueued now.

        It is this thread's current stream on the event's device.
        """

    @abstractmethod
    def wait(self) -> None:
        """Make later work of this thread's current stream wait for the event.

        The call does not block. No effect if the event was never recorded.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without busy-waiting, until the event is reached.

        :raises WorldError: the device failed.
        """

    @abstractmethod
    def query(self) -> bool:
        """Return True if the event has been reached; do not wait.

        :raises WorldError: the device failed.
        """

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds on the device from event ``earlier`` to this one.

        Both were made with ``timing``, and have been reached.
        """


class Registration(ABC):
    """Pinned host memory, which it keeps alive."""

    @abstractmethod
    def close(self) -> None:
        """Unpin the memory; no copy may be in flight. A second call does nothing."""


class Accelerator(ABC):
    """One kind of device. Every method is thread-safe.

    Methods that take the UUID of a device that this process cannot use raise
    :class:`WorldError`; without one they mean the current device.

    :ivar kind: torch's device type of its tensors.
    :ivar group_backend: the process group backend that transfers its memory in place.
    """

    kind: str
    group_backend: str

    @classmethod
    @abstractmethod
    def present(cls) -> bool:
        """Return True if this machine and torch may have such devices.

        Initialises nothing.
        """

    @abstractmethod
    def device(self) -> str:
        """Return the UUID of this thread's current device, or "" if none is usable.

        The first call chooses the default device of the process.
        """

    @abstractmethod
    def visible(self) -> tuple[str, ...]:
        """Return the UUIDs of all devices that this process may use."""

    @abstractmethod
    def select(self, uuid: str) -> None:
        """Make this device the only one that this process uses.

        To be called before the process has used a device.

        :raises Preflight: the process cannot use it.
        """

    @abstractmethod
    def torch_device(self, uuid: str) -> torch.device:
        """Return torch's device for this UUID in this process."""

    @abstractmethod
    def uuid_of(self, tensor: torch.Tensor) -> str:
        """Return the UUID of the tensor's device, or "" for host memory."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is in device memory."""
        return bool(self.uuid_of(tensor))

    @abstractmethod
    def allocate(self, nbytes: int, uuid: str) -> DeviceMemory:
        """Allocate memory that other processes can open.

        :raises NoCapacity: too little is left.
        """

    @abstractmethod
    def open(
        self, handle: bytes, nbytes: int, uuid: str, *, on_free: Callable[[], None] = lambda: None
    ) -> DeviceMemory:
        """Map memory of another process (or this one) by its ``handle``.

        :param on_free: called once, on any thread, when the memory is closed and no
            tensor over it is left.
        :raises WorldError: the memory cannot be opened here.
        """

    @abstractmethod
    def free_nbytes(self, uuid: str) -> tuple[int, int]:
        """Return free and total bytes of the device's memory."""

    @abstractmethod
    def register(self, host: torch.Tensor, *, read_only: bool) -> Registration | None:
        """Pin contiguous host memory for fast copies; takes about as long as a copy.

        Return an object that unpins it when closed, or None if it cannot be pinned
        (logged once); copies then work, but block the caller.

        :param read_only: this process has mapped it for reading only.
        """

    @abstractmethod
    def event(self, uuid: str = "", *, interprocess: bool = False, timing: bool = False) -> Event:
        """Return a new event on the device, not recorded yet.

        :param interprocess: other processes can open it; then it cannot have
            ``timing``.
        :param timing: :meth:`Event.seconds_since` is allowed.
        """

    @abstractmethod
    def open_event(self, handle: bytes, uuid: str) -> Event:
        """Open an event of another process on device ``uuid`` by its handle.

        :raises WorldError: it cannot be opened here.
        """

    @abstractmethod
    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue the copy of each source to the destination of the same index.

        Both have one shape; values are cast where dtypes differ. Copies go from device
        to device or between device and host, on this thread's current stream; the call
        does not block if the host memory is pinned. Host memory must stay until the
        copies are done. Memory of torch's device allocator may be freed immediately if
        it was allocated on the same stream, else only after :meth:`keep`.
        """

    @abstractmethod
    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Delay reuse of the tensors' memory until the current stream's work is done.

        The caller may drop the tensors before that; the call does not block.
        """

    @abstractmethod
    def on_side_stream(self, uuid: str = "") -> AbstractContextManager[None]:
        """Context manager: run this thread's work on the library's own stream.

        The stream waits only for its own earlier work. The block makes the device
        current.
        """

    @abstractmethod
    def on_stream(self, stream: object) -> AbstractContextManager[None]:
        """Context manager: make this torch stream current, if not None."""

    @abstractmethod
    def synchronize(self, uuid: str = "") -> None:
        """Block until this thread's current stream is done, without busy-waiting."""


_lock = threading.Lock()
_chosen: tuple[int, str, Accelerator | None] = (0, "", None)


def accelerator() -> Accelerator | None:
    """Return the accelerator (GPU interface) of this process, or None without a GPU.

    It is chosen by the first call, and again in a forked child.

    :raises UsageError: the class that ``REPLICAS_ACCELERATOR`` names cannot be loaded.
    """
    name = os.environ.get(environ.ACCELERATOR) or DEFAULT
    chosen = _chosen
    return chosen[2] if chosen[:2] == (os.getpid(), name) else locked(_lock, _choose, name)


def _choose(name: str) -> Accelerator | None:
    """Return the accelerator of the class called ``name``; None without such devices.

    The first call in a process loads the class and makes the object; later calls return
    the same object. Needs the lock.

    :param name: ``package.module:Class``.
    :raises UsageError: it cannot be loaded, or is not an Accelerator.
    """
    global _chosen  # one for each process, as the devices are; a forked child chooses again
    if _chosen[:2] == (os.getpid(), name):
        return _chosen[2]
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        text = f"{environ.ACCELERATOR}={name!r} cannot be loaded: {error}"
        raise UsageError(text, hint="it must be package.module:Class") from error
    if not (isinstance(kind, type) and issubclass(kind, Accelerator)):
        raise UsageError(f"{environ.ACCELERATOR}={name!r} is not an Accelerator", hint="derive it from Accelerator")
    _chosen = (os.getpid(), name, kind() if kind.present() else None)
    return _chosen[2]


def device_of(uuid: str) -> Accelerator:
    """Return the accelerator for memory on ``uuid``; raise WorldError without one."""
    found = accelerator()
    if found is None:
        raise WorldError(f"this process cannot use GPUs, and the memory is on {uuid}", hint=_NO_GPU_HINT)
    return found
