"""CUDA device memory, events and pinned host memory, for the CUDA accelerator."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from replicas.errors import NoCapacity, WorldError
from replicas.weights.devices.accelerator import DeviceMemory, Event, Registration
from replicas.weights.devices.cuda_driver import BROKEN_HINT, uncaptured

__all__ = ["Block", "CudaEvent", "CudaMemory", "CudaRegistration", "first_line", "tensor_over", "typed"]


class Block:
    """Device memory from which tensors are made; given back when it is collected."""

    def __init__(self, address: int, nbytes: int, give_back: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        weakref.finalize(
            self, _in_this_process, os.getpid(), give_back
        ).atexit = False  # the end of the process frees it

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def tensor_over(block: Block, device: torch.device) -> torch.Tensor:
    """uint8 of shape ``[nbytes]``; its storage keeps ``block``.

    Any thread may write to it, whatever inference mode this thread is in.
    """
    with torch.inference_mode(False), uncaptured():
        if not block.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(block, device=device)


def _in_this_process(pid: int, give_back: Callable[[], None]) -> None:
    if pid == os.getpid():
        give_back()


class CudaMemory(DeviceMemory):
    def __init__(self, block: Block, uuid: str, device: torch.device, handle: bytes) -> None:
        self.uuid = uuid
        self.nbytes = block.nbytes
        self.handle = handle
        self._tensor: torch.Tensor | None = tensor_over(block, device)
        self._block: Block | None = block

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise ValueError("the device memory is closed")
        return self._tensor

    def close(self) -> None:
        self._tensor = self._block = None


class CudaEvent(Event):
    def __init__(self, event: Any, uuid: str, index: int, handle: bytes = b"") -> None:
        self.handle = handle
        self._event = event
        self._uuid = uuid
        self._index = index

    def record(self) -> None:
        with typed(self._uuid):
            self._event.record(torch.cuda.current_stream(self._index))

    def wait(self) -> None:
        with typed(self._uuid):
            self._event.wait(torch.cuda.current_stream(self._index))

    def synchronize(self) -> None:
        # Not on the thread's current device, where it would create a context.
        with typed(self._uuid), torch.cuda.device(self._index), uncaptured():
            self._event.synchronize()

    def query(self) -> bool:
        with typed(self._uuid), torch.cuda.device(self._index), uncaptured():
            return bool(self._event.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        with typed(self._uuid), uncaptured():
            return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaRegistration(Registration):
    def __init__(self, host: torch.Tensor, give_back: Callable[[], None]) -> None:
        self._host: torch.Tensor | None = host
        self._end = weakref.finalize(self, _unpinned, host, os.getpid(), give_back)
        self._end.atexit = False

    def close(self) -> None:
        self._end()
        self._host = None


def _unpinned(host: torch.Tensor, pid: int, give_back: Callable[[], None]) -> None:
    """Unpin ``host``; the reference keeps it mapped until then."""
    _in_this_process(pid, give_back)
    del host


@contextlib.contextmanager
def typed(uuid: str) -> Iterator[None]:
    """Turn torch's device errors into the library's error classes."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise NoCapacity(f"GPU {uuid} has not enough memory left: {first_line(error)}") from error
    except RuntimeError as error:
        if not isinstance(error, torch.AcceleratorError) and "CUDA" not in str(error):
            raise
        raise WorldError(f"GPU {uuid} failed: {first_line(error)}", hint=BROKEN_HINT) from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
