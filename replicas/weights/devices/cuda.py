"""CUDA accelerator: shared memory through the driver, streams and events through torch.

Theory of operation
===================

Shared memory comes from ``cuMemAlloc``, in the device's primary context, which is also
torch's. So CUDA IPC can share it independently of torch's allocator (memory of its
``expandable_segments`` needs ``pidfd_getfd``, which containers refuse). Sizes are
rounded up to 2 MiB, as a smaller allocation would also share its neighbours.

A :class:`Block` frees or unmaps the memory after its last tensor; the driver then waits
for all work on it. A process cannot open its own IPC handles, so these are looked up. A
forked child does not touch inherited memory, and cannot use CUDA after its parent has
called the driver. Programs that fork ask torch whether CUDA is initialised (vLLM does),
so :meth:`Cuda.device` also initialises torch, which creates no context.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from replicas.common.logs import Log
from replicas.common.sizes import size_text
from replicas.errors import NoCapacity, Preflight, UsageError, WorldError
from replicas.weights.copies.accelerator import Accelerator, DeviceMemory, Event, Registration
from replicas.weights.devices import cuda_driver as driver
from replicas.weights.devices.cuda_copies import enqueue
from replicas.weights.devices.cuda_driver import DriverError, first_line, typed, uncaptured

logger = Log("replicas.weights")

_cuda: Any = torch.cuda  # torch leaves much of it untyped
_backends: Any = torch.backends
_GRANULE_NBYTES = 2 << 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"

_LAZY_PEER_ACCESS = 1
_PORTABLE, _READ_ONLY = 0x01, 0x08

_VISIBLE_HINT = f"show all processes of a replica, its shim's included, the same GPUs: {_VISIBLE}"
_IPC_HINT = (
    "run all containers of a machine with --ipc=host, in one PID namespace and as one user, or set "
    'staging = "host" on the channel'
)


class Block:
    """Device memory under tensors; ``give_back`` runs when it is garbage-collected."""

    def __init__(self, address: int, nbytes: int, give_back: Callable[[], None]) -> None:
        """Take over device memory; ``give_back()`` is called when this is collected."""
        self.address = address
        self.nbytes = nbytes
        end = weakref.finalize(self, _in_this_process, os.getpid(), give_back)
        end.atexit = False  # the end of the process frees it

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


def tensor_over(block: Block, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor over the block's memory, which keeps the block alive."""
    with torch.inference_mode(False), uncaptured():
        if not block.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(block, device=device)


def _in_this_process(pid: int, give_back: Callable[[], None], *kept: object) -> None:
    """Call ``give_back``, except in a fork of ``pid``; ``kept`` was kept until now."""
    if pid == os.getpid():
        give_back()


class CudaEvent(Event):
    """An event of torch's; :class:`Event` describes the methods."""

    def __init__(self, event: Any, uuid: str, index: int, handle: bytes = b"") -> None:
        """Keep ``event`` of GPU ``uuid`` (torch's ``index``), and its IPC handle."""
        self.handle = handle
        self._event = event
        self._uuid = uuid
        self._index = index

    def record(self) -> None:
        """Record the event behind the work of its GPU's current stream."""
        with typed(self._uuid):
            self._event.record(_cuda.current_stream(self._index))

    def wait(self) -> None:
        """Make later work of its GPU's current stream wait for the event."""
        with typed(self._uuid):
            self._event.wait(_cuda.current_stream(self._index))

    def synchronize(self) -> None:
        """Block until the event is reached; raise WorldError if the GPU failed."""
        # On the event's device, as the thread's current one would get a context.
        with typed(self._uuid), _cuda.device(self._index), uncaptured():
            self._event.synchronize()

    def query(self) -> bool:
        """Return True if the event was reached; raise WorldError if the GPU failed."""
        with typed(self._uuid), _cuda.device(self._index), uncaptured():
            return bool(self._event.query())

    def seconds_since(self, earlier: Event) -> float:
        """Return the GPU's seconds from the event ``earlier`` to this one."""
        assert isinstance(earlier, CudaEvent)
        with typed(self._uuid), uncaptured():
            return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaRegistration(Registration):
    """Host memory pinned by the driver; unpinned when closed or garbage-collected."""

    def __init__(self, host: torch.Tensor, give_back: Callable[[], None]) -> None:
        """Keep pinned memory; ``give_back`` is called once, at the end, to unpin it."""
        self._end = weakref.finalize(self, _in_this_process, os.getpid(), give_back, host)  # mapped until then
        self._end.atexit = False

    def close(self) -> None:
        """Unpin the memory; a second call does nothing."""
        self._end()


class Cuda(Accelerator):
    """CUDA devices; :class:`Accelerator` describes the methods."""

    kind = "cuda"
    group_backend = "nccl"

    def __init__(self) -> None:
        """Begin without a device; initialise nothing."""
        self._lock = threading.RLock()  # garbage collection in the same thread may give memory back
        self._visible: tuple[str, ...] | None = None
        self._home = ""
        self._context_lock = threading.RLock()  # for the same reason
        self._contexts: dict[int, ctypes.c_void_p] = {}  # primary contexts in use, never released
        self._own: weakref.WeakValueDictionary[bytes, Block] = weakref.WeakValueDictionary()
        self._own_events: weakref.WeakValueDictionary[bytes, CudaEvent] = weakref.WeakValueDictionary()
        self._refused = False
        self._local = threading.local()
        self._idle: dict[int, list[Any]] = {}

    @classmethod
    def present(cls) -> bool:
        """Return True if torch has CUDA and the driver is there; initialise none."""
        return bool(_backends.cuda.is_built()) and torch.version.cuda is not None and driver.load_library() is not None

    def device(self) -> str:
        """Return the UUID of this thread's GPU, or "" without a usable one."""
        visible = self.visible()
        index = _cuda.current_device() if _cuda.is_initialized() else 0  # the first one until torch is used
        found = visible[index] if index < len(visible) else ""
        if found:
            try:
                self._index(found)
            except WorldError as error:
                logger.info("using no GPU: %s", error)
                return ""
        with self._lock:
            self._home = self._home or found
        return found

    def visible(self) -> tuple[str, ...]:
        """Return the UUIDs of all usable GPUs; the first call asks the driver."""
        with self._lock:
            if self._visible is None:
                try:
                    self._visible = driver.list_devices()
                except (DriverError, WorldError) as error:
                    logger.info("using no GPU: %s", error)
                    self._visible = ()
            return self._visible

    def select(self, uuid: str) -> None:
        """Use only this GPU from now on; raise Preflight if it is not visible."""
        if self._visible is None and not _cuda.is_initialized():
            os.environ[_VISIBLE] = uuid
        visible = self.visible()
        if uuid not in visible:
            text = f"GPU {uuid} cannot be used by process {os.getpid()}, which sees {', '.join(visible) or 'none'}"
            raise Preflight(text, hint=_VISIBLE_HINT)
        if len(visible) > 1:
            _cuda.set_device(visible.index(uuid))
        with self._lock:
            self._home = uuid

    def torch_device(self, uuid: str) -> torch.device:
        """Return torch's device of this GPU; initialise CUDA in torch."""
        return torch.device("cuda", self._index(uuid))

    def uuid_of(self, tensor: torch.Tensor) -> str:
        """Return the UUID of the tensor's GPU, or "" for host memory."""
        if not tensor.is_cuda:
            return ""
        return (self._visible or self.visible())[tensor.device.index]

    def allocate(self, nbytes: int, uuid: str) -> DeviceMemory:
        """Allocate memory for CUDA IPC by ``cuMemAlloc``; raise NoCapacity if full."""
        index = self._index(uuid)
        wanted = max(1, -(-nbytes // _GRANULE_NBYTES)) * _GRANULE_NBYTES
        address, handle = driver.Pointer(), driver.IpcHandle()
        with self._in_context(index):
            try:
                try:
                    driver.call("cuMemAlloc_v2", ctypes.byref(address), wanted)
                except DriverError as error:
                    if error.number != driver.OUT_OF_MEMORY:
                        raise
                    _cuda.empty_cache()  # frees unused memory of torch's allocator
                    driver.call("cuMemAlloc_v2", ctypes.byref(address), wanted)
                block = Block(address.value, nbytes, lambda: self._give_back("cuMemFree_v2", index, address.value))
                driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except DriverError as error:
                if error.number == driver.OUT_OF_MEMORY:
                    free, total = driver.memory_info()
                    has = f"{size_text(free)} of its {size_text(total)} are free"
                    text = f"{size_text(nbytes)} do not fit on GPU {uuid}: {has}"
                    hint = 'lower `slots`, leave more of the GPU free, or set staging = "host" on the channel'
                    raise NoCapacity(text, hint=hint) from error
                raise WorldError(f"memory of GPU {uuid} cannot be shared: {error}", hint=_IPC_HINT) from error
        self._own[bytes(handle.reserved)] = block
        return DeviceMemory(tensor_over(block, torch.device("cuda", index)), bytes(handle.reserved), block)

    def open(
        self, handle: bytes, nbytes: int, uuid: str, *, on_free: Callable[[], None] = lambda: None
    ) -> DeviceMemory:
        """Map memory by its IPC handle; ``on_free`` is called after its last tensor."""
        index = self._index(uuid)
        device = torch.device("cuda", index)
        own = self._own.get(handle)  # CUDA cannot open a handle in its own process
        if own is not None:
            kept = [own]

            def forget() -> None:
                """Let go of this process's own memory, which was opened here."""
                kept.clear()
                on_free()

            block = Block(own.address, nbytes, forget)
            return DeviceMemory(tensor_over(block, device), b"", block)
        address = driver.Pointer()
        with self._in_context(index):
            if len(handle) != ctypes.sizeof(driver.IpcHandle):
                text = f"a CUDA handle has {ctypes.sizeof(driver.IpcHandle)} bytes, not {len(handle)}"
                raise WorldError(text)
            theirs = driver.IpcHandle.from_buffer_copy(handle)
            try:
                driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, _LAZY_PEER_ACCESS)
            except DriverError as error:
                text = f"memory of another process on GPU {uuid} cannot be opened by CUDA IPC: {error}"
                raise WorldError(text, hint=_IPC_HINT) from error

        def give_back() -> None:
            """Unmap the other process's memory."""
            self._give_back("cuIpcCloseMemHandle", index, address.value)
            on_free()

        block = Block(address.value, nbytes, give_back)
        return DeviceMemory(tensor_over(block, device), b"", block)

    def free_nbytes(self, uuid: str) -> tuple[int, int]:
        """Return free and total bytes of the GPU's memory."""
        with self._in_context(self._index(uuid)), typed(uuid):
            return driver.memory_info()

    def register(self, host: torch.Tensor, *, read_only: bool) -> Registration | None:
        """Pin host memory by the driver; return None (logged once) if refused."""
        index = self._index(self._default())
        address = host.data_ptr()
        with self._in_context(index):
            try:
                try:
                    flags = _PORTABLE | _READ_ONLY if read_only else _PORTABLE
                    driver.call("cuMemHostRegister_v2", address, host.nbytes, flags)
                except DriverError:
                    # If the GPU uses the host's page tables, the flag is not needed and
                    # may be unknown.
                    if not read_only:
                        raise
                    driver.call("cuMemHostRegister_v2", address, host.nbytes, _PORTABLE)
            except DriverError as error:
                if not self._refused and error.number != driver.ALREADY_REGISTERED:
                    self._refused = True
                    logger.warning(
                        "copying to and from the GPU more slowly, and blocking the caller: %d bytes of host memory "
                        "cannot be pinned (%s)",
                        *(host.nbytes, error),
                    )
                return None
        return CudaRegistration(host, lambda: self._give_back("cuMemHostUnregister", index, address))

    def _give_back(self, function: str, index: int, address: int) -> None:
        """Free memory by a driver ``function``, on GPU ``index``; only log an error."""
        try:
            with self._in_context(index):
                driver.call(function, address)
        except (DriverError, WorldError) as error:
            logger.info("keeping memory of a closed version until this process ends: %s", error)

    def event(self, uuid: str = "", *, interprocess: bool = False, timing: bool = False) -> Event:
        """Return a new event, not recorded yet. If ``interprocess``, other processes
        can open it by its handle; with ``timing`` it can measure seconds."""
        uuid = uuid or self._default()
        index = self._index(uuid)
        with typed(uuid), _cuda.device(index), uncaptured():
            # blocking: waits do not use a core
            made = _cuda.Event(enable_timing=timing, blocking=True, interprocess=interprocess)
            handle = bytes(made.ipc_handle()) if interprocess else b""
        event = CudaEvent(made, uuid, index, handle)
        if handle:
            self._own_events[handle] = event
        return event

    def open_event(self, handle: bytes, uuid: str) -> Event:
        """Open another process's event by its handle; WorldError if impossible."""
        own = self._own_events.get(handle)
        if own is not None:
            return own
        index = self._index(uuid)
        try:
            opened = _cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
        except RuntimeError as error:
            text = f"an event of another process on GPU {uuid} cannot be opened by CUDA IPC: {first_line(error)}"
            raise WorldError(text, hint=_IPC_HINT) from error
        return CudaEvent(opened, uuid, index)

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue the copy of each source to its destination, on the current stream."""
        with typed(self._default()):
            enqueue(destinations, sources)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Delay reuse of these tensors' memory until the current stream is done."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(_cuda.current_stream(tensor.device))

    @contextlib.contextmanager
    def on_side_stream(self, uuid: str = "") -> Iterator[None]:
        """Context manager: have this thread's work use a stream that is kept for it."""
        index = self._index(uuid or self._default())
        own: _Streams | None = getattr(self._local, "own", None)
        if own is None:
            own = self._local.own = _Streams(self._idle)
        if index not in own.streams:
            own.streams[index] = self._stream(index)
        with uncaptured(), _cuda.stream(own.streams[index]):
            yield

    def _stream(self, index: int) -> Any:
        """Return a stream for this thread: an idle one of the device, or a new one."""
        with contextlib.suppress(KeyError, IndexError):
            return self._idle[index].pop()
        with self._in_context(index), typed(self.visible()[index]):
            return _cuda.ExternalStream(driver.new_stream(), device=index)

    @contextlib.contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        """Context manager: make this torch stream current, if it is not None."""
        if (
            isinstance(stream, torch.Stream)
            and not isinstance(stream, torch.cuda.Stream)
            and stream.device.type == "cuda"
        ):
            known = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
            stream = _cuda.Stream(**known)  # torch.accelerator's form
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            raise UsageError(f"a stream must be a torch.cuda.Stream, not a {type(stream).__name__}")
        with _cuda.stream(stream):
            yield

    def synchronize(self, uuid: str = "") -> None:
        """Block until this thread's current stream is done."""
        event = self.event(uuid)  # waiting for the stream itself would busy-wait
        event.record()
        event.synchronize()

    def _default(self) -> str:
        """Return the UUID of the default device; raise WorldError without one."""
        found = self._home or self.device()
        if not found:
            raise WorldError(f"process {os.getpid()} cannot use a GPU", hint=_VISIBLE_HINT)
        return found

    def _index(self, uuid: str) -> int:
        """Initialise CUDA; return torch's number of this GPU, or raise WorldError."""
        visible = self.visible()
        if uuid not in visible:
            text = f"GPU {uuid} is not visible to process {os.getpid()}, which sees {', '.join(visible) or 'none'}"
            raise WorldError(text, hint=_VISIBLE_HINT)
        try:
            _cuda.init()
        except RuntimeError as error:  # for example in a forked child of a process that uses CUDA
            raise WorldError(f"process {os.getpid()} cannot use CUDA: {first_line(error)}") from error
        return visible.index(uuid)

    @contextlib.contextmanager
    def _in_context(self, index: int) -> Iterator[None]:
        """Context manager: make the device's CUDA context current on this thread.
        Raises NoCapacity (no memory for it) or WorldError (the device is unusable)."""
        name = self.visible()[index]
        try:
            driver.call("cuCtxPushCurrent_v2", self._context(index))
        except DriverError as error:
            if error.number == driver.OUT_OF_MEMORY:
                raise NoCapacity(f"GPU {name} has no memory left for the context of a further process") from error
            raise WorldError(f"GPU {name} cannot be used: {error}", hint=driver.BROKEN_HINT) from error
        try:
            with uncaptured():
                yield
        finally:
            found = driver.load_library()
            if found is not None:
                found.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _context(self, index: int) -> ctypes.c_void_p:
        """Return the CUDA context of device ``index``; the first call may create it."""
        with self._context_lock:
            found = self._contexts.get(index)
            if found is None:
                device, found = ctypes.c_int(), ctypes.c_void_p()
                driver.call("cuDeviceGet", ctypes.byref(device), index)
                driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(found), device)
                self._contexts[index] = found
            return found


class _Streams:
    """The side streams of one thread, by device; ``idle`` gets them when it ends."""

    def __init__(self, idle: dict[int, list[Any]]) -> None:
        """Begin without streams; ``idle`` gets them when the thread has ended."""
        self.streams: dict[int, Any] = {}
        self._idle = idle

    def __del__(self) -> None:
        """Give the streams to ``idle``, as the thread has ended."""
        for index, stream in self.streams.items():
            self._idle.setdefault(index, []).append(stream)
