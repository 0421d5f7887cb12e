"""Process groups built straight from a store, and their operations on host memory.

:func:`build_group` is the only place that makes one. Both kinds work on CPU tensors: Gloo in place, NCCL through a
device buffer. Operations start at once and end in :meth:`Handle.wait`; each carries its own timeout. None of this is
safe against a frozen store or a hung device: the process is killed by its owner when the deadline has passed.

The connection to the store is tried again until the deadline (nothing has moved yet, and the store may be on its way back);
the rest is tried once, after the members have met (:mod:`replicas.sidecar.meeting`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import tenacity
import torch
import torch.distributed as dist

from replicas.sidecar.meeting import meet
from replicas.sidecar.wire import GroupSpec

__all__ = ["REDUCIBLE", "GlooGroup", "Group", "Handle", "NcclGroup", "build_group", "connect_store"]

_c10d: Any = dist  # torch's own annotations leave out most of the names below
_INTEGERS = ("int64", "int32", "int8", "uint8")
REDUCIBLE = {
    "gloo": frozenset(("float64", "float32", "float16", "bfloat16", *_INTEGERS)),
    "nccl": frozenset(("float64", "float32", "float16", "bfloat16", *_INTEGERS)),
}
"""Dtypes (by torch's name) that each backend can reduce. Any dtype can be moved."""

STORE_CONNECT_S = 0.5
"""For one attempt to connect to the store; torch's client takes up to twice that."""
PROBE_NBYTES = 64 << 10
_SIOCGIFADDR = 0x8915
_REDUCE_OPS = {
    "sum": _c10d.ReduceOp.SUM,
    "mean": _c10d.ReduceOp.SUM,
    "min": _c10d.ReduceOp.MIN,
    "max": _c10d.ReduceOp.MAX,
}


class Handle:
    """An operation that has started."""

    def __init__(self, work: Any, deadline: float, finish: Callable[[], None] | None = None) -> None:
        self._work = work
        self._deadline = deadline
        self._finish = finish

    def wait(self) -> None:
        """Return when the tensors hold the result; :class:`RuntimeError` when it failed or its timeout passed."""
        self._work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        if self._finish is not None:
            self._finish()


class Group(ABC):
    """Operations of one process group on contiguous, non-empty CPU tensors. ``deadline`` is of the monotonic clock."""

    def __init__(self, backend: Any, spec: GroupSpec) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self.backend = spec.backend
        self._backend = backend

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Handle: ...

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> Handle: ...

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: str, deadline: float) -> Handle:
        """The result is in ``tensor`` of the root; the others' tensors are scratch afterwards."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle: ...

    def _start(self, kind: str, tensor: torch.Tensor, root: int, op: str, deadline: float) -> Any:
        timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        if kind == "broadcast":
            broadcast = _c10d.BroadcastOptions()
            broadcast.rootRank, broadcast.rootTensor, broadcast.timeout = root, 0, timeout
            return self._backend.broadcast([tensor], broadcast)
        if kind == "all_reduce":
            all_reduce = _c10d.AllreduceOptions()
            all_reduce.reduceOp, all_reduce.timeout = _REDUCE_OPS[op], timeout
            return self._backend.allreduce([tensor], all_reduce)
        reduce = _c10d.ReduceOptions()
        reduce.rootRank, reduce.rootTensor, reduce.reduceOp, reduce.timeout = root, 0, _REDUCE_OPS[op], timeout
        return self._backend.reduce([tensor], reduce)


class GlooGroup(Group):
    """ProcessGroupGloo, on host memory in place."""

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Handle:
        return Handle(self._start("broadcast", tensor, root, "sum", deadline), deadline)

    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> Handle:
        return Handle(self._start("all_reduce", tensor, 0, op, deadline), deadline)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, deadline: float) -> Handle:
        return Handle(self._start("reduce", tensor, root, op, deadline), deadline)

    def send(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle:
        return Handle(self._backend.send([tensor], peer, 0), deadline)

    def receive(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle:
        return Handle(self._backend.recv([tensor], peer, 0), deadline)


class NcclGroup(Group):
    """ProcessGroupNCCL: each operation goes through its own device copy of the host tensor."""

    def __init__(self, backend: Any, spec: GroupSpec, device: torch.device) -> None:
        super().__init__(backend, spec)
        self._device = device

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Handle:
        staged = self._stage(tensor, read=self.rank == root)
        work = self._start("broadcast", staged, root, "sum", deadline)
        return self._handle(work, tensor, staged, deadline, write=self.rank != root)

    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> Handle:
        staged = self._stage(tensor, read=True)
        work = self._start("all_reduce", staged, 0, op, deadline)
        return self._handle(work, tensor, staged, deadline, write=True)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, deadline: float) -> Handle:
        staged = self._stage(tensor, read=True)
        work = self._start("reduce", staged, root, op, deadline)
        return self._handle(work, tensor, staged, deadline, write=self.rank == root)

    def send(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle:
        staged = self._stage(tensor, read=True)
        return self._handle(self._backend.send([staged], peer, 0), tensor, staged, deadline, write=False)

    def receive(self, tensor: torch.Tensor, peer: int, deadline: float) -> Handle:
        staged = self._stage(tensor, read=False)
        return self._handle(self._backend.recv([staged], peer, 0), tensor, staged, deadline, write=True)

    def _stage(self, tensor: torch.Tensor, *, read: bool) -> torch.Tensor:
        return tensor.to(self._device) if read else torch.empty_like(tensor, device=self._device)

    def _handle(self, work: Any, tensor: torch.Tensor, staged: torch.Tensor, deadline: float, *, write: bool) -> Handle:
        def finish() -> None:
            if write:
                tensor.copy_(staged)
            torch.cuda.synchronize(self._device)

        return Handle(work, deadline, finish)


def build_group(spec: GroupSpec) -> Group:
    """Form the process group of ``spec``; every rank of it does so with the same prefix.

    :raises replicas.errors.Preflight: the members do not agree, or cannot reach each other; names them.
    :raises RuntimeError: a peer did not come in time, the store cannot be reached, or the probe found wrong values.
    """
    deadline = time.monotonic() + spec.timeout_s
    if spec.backend == "nccl":
        _set_nccl_environment(spec)
    store = _c10d.PrefixStore(spec.prefix, connect_store(spec.store_host, spec.store_port, deadline))
    meet(store, spec, deadline)
    remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    store.set_timeout(remaining)
    group = (_build_gloo if spec.backend == "gloo" else _build_nccl)(store, spec, remaining)
    if spec.probe:
        _probe(group, deadline)
    return group


def connect_store(host: str, port: int, deadline: float) -> Any:
    """A client of the store; a refused or broken connection is tried again until ``deadline`` (monotonic clock).

    :raises RuntimeError: no store answered there by then.
    """
    retry = tenacity.Retrying(
        wait=tenacity.wait_exponential(multiplier=0.02, max=0.5) + tenacity.wait_random(0, 0.05),
        stop=tenacity.stop_before_delay(max(deadline - time.monotonic(), 0.0)),
        retry=tenacity.retry_if_exception_type((OSError, RuntimeError)),
        reraise=True,
    )
    try:
        for attempt in retry:
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    # torch's own client waits for twice its timeout where nobody listens, and logs pages about it.
                    socket.create_connection((host, port), timeout=_store_timeout_s(deadline)).close()
                return _c10d.TCPStore(
                    host, port, None, False, timedelta(seconds=_store_timeout_s(deadline)), wait_for_workers=False
                )
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"the store at {host}:{port} cannot be reached: {reason}") from error
    raise AssertionError  # tenacity ends with a result or an error


def _store_timeout_s(deadline: float) -> float:
    return max(0.05, min(STORE_CONNECT_S, deadline - time.monotonic()))


def _build_gloo(store: Any, spec: GroupSpec, timeout: timedelta) -> Group:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=spec.address)]
    options._timeout = timeout
    return GlooGroup(_c10d.ProcessGroupGloo(store, spec.rank, spec.size, options), spec)


def _build_nccl(store: Any, spec: GroupSpec, timeout: timedelta) -> Group:
    if not torch.cuda.is_available():
        raise RuntimeError("the nccl backend needs a GPU, and this process sees none")
    device = _device(spec.device)
    torch.cuda.set_device(device)
    _allow_shared_device(store, spec, str(torch.cuda.get_device_properties(device).uuid))
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = _c10d.ProcessGroupNCCL(store, spec.rank, spec.size, options)
    if hasattr(backend, "eager_connect_single_device"):
        backend.eager_connect_single_device(device)
    return NcclGroup(backend, spec, device)


def _probe(group: Group, deadline: float) -> None:
    """Move 64 KiB from everyone to everyone, and look at what came."""
    steps = torch.arange(PROBE_NBYTES // 8, dtype=torch.int64)
    tensor = steps * (group.rank + 1)
    group.all_reduce(tensor, "sum", deadline).wait()
    wrong = int((tensor != steps * (group.size * (group.size + 1) // 2)).sum())
    if wrong:
        raise RuntimeError(f"the probe of the group found {wrong} of {steps.numel()} values wrong")


def _set_nccl_environment(spec: GroupSpec) -> None:
    """The watchdog must not write outside our prefix or outlive a deadline; bootstrap goes over the lane's address."""
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    if spec.nccl_env is not None:
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            del os.environ[name]
        os.environ.update(spec.nccl_env)
    interface = _interface_of(spec.address)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _device(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if uuid in ("", str(torch.cuda.get_device_properties(index).uuid)):
            return torch.device("cuda", index)
    raise RuntimeError(f"the GPU {uuid} of the rank is not visible to its sidecar; check CUDA_VISIBLE_DEVICES")


def _allow_shared_device(store: Any, spec: GroupSpec, uuid: str) -> None:
    """NCCL refuses two ranks on one GPU, unless it takes them for two hosts: slow, and right for tests."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set(f"device/{spec.rank}", f"{boot_id}/{uuid}")
    devices = [store.get(f"device/{rank}") for rank in range(spec.size)]
    if len(set(devices)) < len(devices):
        os.environ["NCCL_HOSTID"] = f"replicas-{spec.prefix}-{spec.rank}"
        os.environ["NCCL_IB_DISABLE"] = "1"
