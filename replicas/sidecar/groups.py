"""Process groups (Gloo, NCCL) and their operations on host and device memory.

Each backend works in place on one kind of memory: Gloo on host memory, NCCL on device
memory. Tensors of the other kind go through staging memory, so that every lane can move
all tensors (Gloo between GPUs that NCCL refuses, NCCL for slots in host memory).
Operations start when called and end in :meth:`StartedWork.wait`; each has its own
deadline. Nothing here guards against a hung device or peer: the owner kills the process
when the deadline has passed.

Order on the device: an NCCL operation starts after the pending work of the caller's
stream; after the wait it is complete for every stream, for other processes and for the
host. Gloo reads and writes with the CPU: device tensors are copied, synchronously,
before the operation starts and after it has ended.

``Work.wait`` is not used to wait for NCCL operations. It polls every 10 ms, counts its
timeout from the start of the operation, and on an error aborts the communicator, which
may hang in turn. Here they are polled instead, and on an error the process ends.
``Work.wait`` is called only after an operation has succeeded, when it costs nothing:
until then torch keeps the tensors, and with them memory that the rank closed long ago.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from replicas.messages import GroupSpec
from replicas.weights.copies.accelerator import Accelerator, Registration

_c10d: Any = dist  # torch's own annotations leave out most of the names below
REDUCIBLE = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"))
"""Dtypes (by torch's name) that the backends can reduce. Any dtype can be moved."""

PINNED_NBYTES = 8 << 20
"""Size of a reusable pinned staging buffer; larger ones are allocated each time."""
PAUSE_S = 1e-3
"""Maximum pause between two polls of an NCCL operation, in seconds."""
_PAUSE_STEP_S = 2e-5
_REDUCE_OPS = {
    "sum": _c10d.ReduceOp.SUM,
    "mean": _c10d.ReduceOp.SUM,
    "min": _c10d.ReduceOp.MIN,
    "max": _c10d.ReduceOp.MAX,
}


def _wait(work: Any, deadline: float) -> None:
    """Block until a work of Gloo has ended.

    :param work: torch's ``Work``.
    :param deadline: by ``time.monotonic()``.
    :raises RuntimeError: it failed, or has not ended by the deadline.
    """
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def _wait_nccl(work: Any, deadline: float) -> None:
    """Poll a work of NCCL, on this thread, until it has ended.

    :param work: torch's ``Work``.
    :param deadline: by ``time.monotonic()``.
    :raises RuntimeError: it failed, or has not ended by the deadline.
    """
    pause = 0.0
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("an NCCL operation did not end in time")
        time.sleep(pause)
        pause = min(PAUSE_S, pause + _PAUSE_STEP_S)
    with contextlib.suppress(TypeError):  # this torch cannot return the exception: wait() raises it
        error = work.exception()  # a failed operation counts as completed
        if error is not None:
            raise RuntimeError(f"NCCL: {error}")
    work.wait()


@dataclass(frozen=True, eq=False)
class StartedWork:
    """Operations of a process group that have started, which :meth:`wait` completes.

    :ivar works: torch's ``Work`` objects.
    :ivar deadline: of the wait, by ``time.monotonic()``.
    :ivar finish: called after the wait, to copy results back and free memory.
    :ivar wait_for: waits for one work, with the deadline.
    """

    works: Sequence[Any]
    deadline: float
    finish: Callable[[], None] = lambda: None
    wait_for: Callable[[Any, float], None] = _wait

    def wait(self) -> None:
        """Block until the results are in the tensors, or the deadline.

        :raises RuntimeError: an operation failed, or did not end by the deadline.
        """
        for work in self.works:
            self.wait_for(work, self.deadline)
        self.finish()


class CollectiveGroup(ABC):
    """Operations of one process group on contiguous, non-empty tensors.

    Each starts when called, and is complete after the wait of the returned work. Each
    ``deadline`` is of the monotonic clock.
    """

    def __init__(self, backend: Any, spec: GroupSpec, device: Accelerator | None = None) -> None:
        """Use torch's process group ``backend``, formed as in ``spec``.

        :param device: accelerator of device tensors, or None without such ones.
        """
        self.rank = spec.rank
        self.size = spec.size
        self.backend = spec.backend
        self._backend = backend
        self._device = device

    def use(self, device: Accelerator) -> None:
        """Accept tensors on ``device`` from now on, if no device was set before."""
        self._device = self._device or device

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> StartedWork:
        """Start a broadcast of the root's ``tensor`` into the others'.

        :param root: rank in the group.
        :param deadline: by ``time.monotonic()``.
        """
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        start = self._starting(self._backend.broadcast, options, deadline)
        return self._run(tensor, start, deadline, read=self.rank == root, write=self.rank != root)

    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> StartedWork:
        """Start a reduction on all members, in place.

        :param op: ``sum``, ``mean``, ``min`` or ``max``; for ``mean`` the result is the
            sum, and the caller divides.
        :param deadline: by ``time.monotonic()``.
        """
        options = _c10d.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        start = self._starting(self._backend.allreduce, options, deadline)
        return self._run(tensor, start, deadline, read=True, write=True)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, deadline: float) -> StartedWork:
        """Start a reduction into the root's ``tensor``.

        The tensors of the other members are overwritten with values that mean nothing.

        :param root: rank in the group.
        :param op: as in :meth:`all_reduce`.
        :param deadline: by ``time.monotonic()``.
        """
        options = _c10d.ReduceOptions()
        options.rootRank, options.rootTensor, options.reduceOp = root, 0, _REDUCE_OPS[op]
        start = self._starting(self._backend.reduce, options, deadline)
        return self._run(tensor, start, deadline, read=True, write=self.rank == root)

    def send(self, tensor: torch.Tensor, peer: int, deadline: float) -> StartedWork:
        """Start to send ``tensor`` to the member of rank ``peer``.

        :param deadline: by ``time.monotonic()``.
        """
        start = partial(self._exchange, self._backend.send, peer)
        return self._run(tensor, start, deadline, read=True, write=False)

    def receive(self, tensor: torch.Tensor, peer: int, deadline: float) -> StartedWork:
        """Start to receive into ``tensor`` from the member of rank ``peer``.

        :param deadline: by ``time.monotonic()``.
        """
        start = partial(self._exchange, self._backend.recv, peer)
        return self._run(tensor, start, deadline, read=False, write=True)

    @abstractmethod
    def _in_place(self, tensor: torch.Tensor) -> bool:
        """Return True if the backend works on the tensor's memory directly."""

    @abstractmethod
    def _staging_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return staging memory of the shape and dtype of ``tensor``, and its release.

        It is of the kind on which the backend works. The caller copies into and out of
        it, and calls the second value to free it.
        """

    def _run(
        self,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor], list[Any]],
        deadline: float,
        *,
        read: bool,
        write: bool,
    ) -> StartedWork:
        """Start an operation on ``tensor``, in place or on a copy in staging memory;
        return the started work, for which the caller waits.

        :param start: starts the operation on the given tensor (``tensor`` or the copy);
            returns torch's works.
        :param deadline: by ``time.monotonic()``, for the wait.
        :param read: the operation reads ``tensor``: a copy is filled first.
        :param write: it changes ``tensor``: a copy is copied back after the wait.
        """
        if self._in_place(tensor):
            return StartedWork(start(tensor), deadline, wait_for=self._wait_for)
        device = self._device
        assert device is not None
        near, give_back = self._staging_for(tensor)
        if read:
            device.copy([near], [tensor])
            device.synchronize()

        def finish() -> None:
            """Copy the result to ``tensor`` if written, and free the staging memory."""
            if write:
                device.copy([tensor], [near])
                device.synchronize()
            give_back()

        return StartedWork(start(near), deadline, finish, self._wait_for)

    _wait_for = staticmethod(_wait)

    def _exchange(self, move: Callable[..., Any], peer: int, tensor: torch.Tensor) -> list[Any]:
        """Start to send the tensor to rank ``peer``, or to receive it from there.

        Returns the works to wait for.

        :param move: method ``send`` or ``recv`` of torch's process group.
        """
        return [move([tensor], peer, 0)]

    @staticmethod
    def _starting(operation: Callable[..., Any], options: Any, deadline: float) -> Callable[[torch.Tensor], list[Any]]:
        """Return a function that starts ``operation`` on a tensor.

        It returns torch's works.

        :param options: torch's options of the operation; their timeout is set at the
            start.
        :param deadline: by ``time.monotonic()``.
        """

        def start(near: torch.Tensor) -> list[Any]:
            """Start the operation on tensor ``near``, with the time that is left."""
            options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            return [operation([near], options)]

        return start


class GlooGroup(CollectiveGroup):
    """ProcessGroupGloo: works on host memory."""

    def __init__(self, backend: Any, spec: GroupSpec, device: Accelerator | None = None) -> None:
        """Use torch's Gloo group ``backend``, formed as in ``spec``.

        Allocate nothing yet.

        :param device: accelerator of device tensors, which are staged in host memory;
            None without such ones.
        """
        super().__init__(backend, spec, device)
        self._pinned: list[torch.Tensor] = []
        self._registrations: list[Registration | None] = []

    def _in_place(self, tensor: torch.Tensor) -> bool:
        """Return True for host memory, and on a device that has a Gloo of its own."""
        device = self._device
        return device is None or device.group_backend == "gloo" or not device.owns(tensor)

    def _staging_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return host memory like ``tensor`` (pinned if small), and its release.

        Pinned memory is used again for later tensors.
        """
        assert self._device is not None
        if tensor.nbytes > PINNED_NBYTES:
            near = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return near, lambda: None
        if not self._pinned:
            made = torch.zeros(PINNED_NBYTES, dtype=torch.uint8, device="cpu")
            self._registrations.append(self._device.register(made, read_only=False))
            self._pinned.append(made)
        memory = self._pinned.pop()
        near = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return near, lambda: self._pinned.append(memory)


class NcclGroup(CollectiveGroup):
    """ProcessGroupNCCL: works on device memory."""

    _wait_for = staticmethod(_wait_nccl)

    def __init__(self, backend: Any, spec: GroupSpec, device: Accelerator, where: torch.device) -> None:
        """Use torch's NCCL group ``backend``, formed as in ``spec``.

        Allocate nothing yet.

        :param device: accelerator of the group. :param where: torch's name of the GPU,
            on which host tensors are staged.
        """
        super().__init__(backend, spec, device)
        self._where = where

    def _in_place(self, tensor: torch.Tensor) -> bool:
        """Return True for memory of the GPU."""
        return self._device is not None and self._device.owns(tensor)

    def _staging_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return GPU memory like ``tensor``, and a function that does nothing."""
        return torch.empty_like(tensor, device=self._where), lambda: None

    def _exchange(self, move: Callable[..., Any], peer: int, tensor: torch.Tensor) -> list[Any]:
        """Start to send the tensor to rank ``peer``, or to receive it from there, as a
        batch of one; return the works to wait for.

        Outside a batch, NCCL would make a communicator for each pair of members.

        :param move: method ``send`` or ``recv`` of torch's process group.
        """
        self._backend._start_coalescing()
        super()._exchange(move, peer, tensor)
        return [self._backend._end_coalescing()]
