"""The CUDA driver (``libcuda.so.1``), called through ctypes without the GIL.

It has only functions that torch lacks: memory that can be shared with any allocator of
torch's, IPC handles, and pinning. They work in the primary contexts of the devices,
which are also torch's. Nothing is initialised before it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import uuid as uuids
from collections.abc import Iterator
from typing import Any

import torch

from replicas.common.logs import Log
from replicas.errors import NoCapacity, WorldError

logger = Log("replicas.weights")

OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
BROKEN_HINT = (
    "an earlier operation of this process broke its CUDA context: restart the replica; CUDA_LAUNCH_BLOCKING=1 "
    "shows which operation"
)


class IpcHandle(ctypes.Structure):
    """CUDA's handle of memory for other processes."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Uuid(ctypes.Structure):
    """CUDA's binary UUID of a device."""

    _fields_ = [("octets", ctypes.c_ubyte * 16)]


Pointer = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemGetInfo_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cuMemAlloc_v2": (ctypes.POINTER(Pointer), ctypes.c_size_t),
    "cuMemFree_v2": (Pointer,),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), Pointer),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(Pointer), IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (Pointer,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamCreate": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
}
_NON_BLOCKING = 1
_THREAD_LOCAL = 1


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load libcuda and declare its functions; return None if it is missing.

    Calls no function of it. The result is cached.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        logger.info("going on without the CUDA driver: %s", error)
        return None
    return found


class DriverError(Exception):
    """A driver call failed; callers turn this into a typed error."""

    def __init__(self, function: str, number: int) -> None:
        """Make the error of the driver's ``function`` that returned ``number``."""
        self.number = number
        name = ctypes.c_char_p()
        found = load_library()
        if found is None or found.cuGetErrorName(number, ctypes.byref(name)) or name.value is None:
            super().__init__(f"{function} failed with {number}")
        else:
            super().__init__(f"{function} says {name.value.decode()}")


@contextlib.contextmanager
def typed(uuid: str) -> Iterator[None]:
    """Context manager: raise errors of a GPU as errors of this library.

    Errors of torch or of driver calls become NoCapacity (no memory left) or WorldError
    (the GPU failed).

    :param uuid: of the GPU, for the texts.
    """
    try:
        yield
    except DriverError as error:
        raise WorldError(f"GPU {uuid} failed: {error}", hint=BROKEN_HINT) from error
    except torch.cuda.OutOfMemoryError as error:
        raise NoCapacity(f"GPU {uuid} has not enough memory left: {first_line(error)}") from error
    except RuntimeError as error:
        if not isinstance(error, torch.AcceleratorError) and "CUDA" not in str(error):
            raise
        raise WorldError(f"GPU {uuid} failed: {first_line(error)}", hint=BROKEN_HINT) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def call(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver, and check its result.

    :param function: its name. :param arguments: of the C function.
    :raises DriverError: it did not return 0.
    :raises WorldError: there is no driver.
    """
    found = load_library()
    if found is None:
        raise WorldError("there is no CUDA driver on this machine: libcuda.so.1 cannot be loaded")
    number = getattr(found, function)(*arguments)
    if number:
        raise DriverError(function, number)


def list_devices() -> tuple[str, ...]:
    """Initialise the driver; return the names of all visible GPUs, by torch's numbers.

    :raises DriverError: it failed. :raises WorldError: there is no driver.
    """
    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return tuple(_name(index) for index in range(count.value))


def _name(index: int) -> str:
    """Return the name of GPU ``index`` in ``CUDA_VISIBLE_DEVICES``: ``GPU-UUID``.

    It is ``MIG-UUID`` for a part of a GPU: of the two UUID calls one returns that of a
    MIG instance, the other its GPU's.
    """
    device, whole, exact = ctypes.c_int(), _Uuid(), _Uuid()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid", ctypes.byref(whole), device)
    call("cuDeviceGetUuid_v2", ctypes.byref(exact), device)
    kind = "GPU" if bytes(whole.octets) == bytes(exact.octets) else "MIG"
    return f"{kind}-{uuids.UUID(bytes=bytes(exact.octets))}"


def memory_info() -> tuple[int, int]:
    """Return (free, total) bytes of the device whose context is current on this
    thread."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def new_stream() -> int:
    """Create a CUDA stream in the current context; return its address.

    It does not wait for the default stream, and is never destroyed.
    """
    stream = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return stream.value or 0


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """Context manager: keep this thread's driver calls out of CUDA graph captures.

    While another thread captures a graph, as engines do when they start, a call that
    allocates, pins or queries an event fails and invalidates the capture, unless it is
    made in this block.
    """
    found, mode = load_library(), ctypes.c_int(_THREAD_LOCAL)
    # This fails before the driver is initialised, when no capture can run.
    changed = found is not None and not found.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if changed and found is not None:
            found.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # as it was
