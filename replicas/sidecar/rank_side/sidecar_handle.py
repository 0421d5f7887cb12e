"""The rank's handle of one sidecar: requests, pings, errors, and its end.

:mod:`replicas.sidecar.rank_side.forkserver_client` has the theory of operation,
:mod:`replicas.linux.helper_process` the pings.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from replicas import errors
from replicas.linux.helper_process import HelperDied, HelperProcess
from replicas.sidecar import wire
from replicas.sidecar.wire import CollectiveSpec, GroupSpec, TransferResult, TransferSpec
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.memory.buffers import Buffer

_R = TypeVar("_R")


class SidecarFailed(RuntimeError):
    """The sidecar answered with an error. Fields as of :class:`wire.Failed`."""

    def __init__(self, reply: wire.Failed) -> None:
        super().__init__(reply.error)
        self.over, self.kind, self.links = reply.over, reply.kind, reply.links
        self.members, self.hint = reply.members, reply.hint

    def as_error(self, **fields: Any) -> errors.ReplicasError:
        """Convert to an error of the library. ``fields``: channel, phase, version."""
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(HelperDied):
    """The sidecar or the forkserver is dead, or was killed at a deadline."""

    kind = "sidecar"


class Sidecar(HelperProcess):
    """One sidecar process, with at most one process group: a method for each request.

    :ivar on_moved: called on the loop, about twice a second during a request that moves
        bytes.
    """

    died, decode, ping = SidecarDied, staticmethod(wire.decode_reply), wire.Ping

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        super().__init__(pid, pidfd, sock)
        self.on_moved: Callable[[wire.Moved], None] | None = None
        self._mapped: set[int] = set()

    async def build(self, spec: GroupSpec) -> float:
        """Form the process group; return the duration in seconds.

        :raises SidecarFailed: a peer did not join, or an address is wrong.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after the timeout.
        """
        if spec.backend == "nccl":
            spec = _of_this_process(spec)
        request = wire.BuildGroup(next(self._numbers), spec)
        return (await self._ask_with(request, (), spec.timeout_s, wire.Built)).seconds

    async def transfer(self, spec: TransferSpec, buffer: Buffer) -> TransferResult:
        """Move one version from or into ``buffer``.

        Errors as of :meth:`build`; a receiver's slot is then undefined.
        """
        request = wire.RunTransfer(next(self._numbers), buffer.key, spec)
        return (await self._ask_with(request, (buffer,), spec.timeout_s, wire.Transferred)).result

    async def probe(self, buffer: Buffer, timeout_s: float) -> bytes:
        """Read all of a small buffer in the sidecar. Errors as of :meth:`build`."""
        request = wire.ProbeBuffer(next(self._numbers), buffer.key)
        return (await self._ask_with(request, (buffer,), timeout_s, wire.Probed)).seen

    def progress(self, transfer: int, nbytes: int) -> None:
        """Report the first ``nbytes`` of a streaming ``transfer``'s data as packed.

        Never blocks. A report before :meth:`transfer` is kept; a report after the end
        of the transfer or sidecar is ignored.
        """
        if self.usable:
            self._send(wire.TransferProgress(transfer, nbytes))

    async def collective(self, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        """Run one operation; return its duration. Errors as of :meth:`build`."""
        buffers = tuple(buffer for buffer in (inputs, outputs) if buffer is not None)
        first, second = (None if buffer is None else buffer.key for buffer in (inputs, outputs))
        request = wire.RunCollective(next(self._numbers), first, second, spec)
        return (await self._ask_with(request, buffers, spec.timeout_s, wire.Collected)).seconds

    def buffer_closed(self, key: int) -> None:
        """Any thread: have the sidecar unmap a buffer that was closed here."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the sidecar has ended
            self._loop.call_soon_threadsafe(self._unmap_buffer, key)

    async def _ask_with(self, request: Any, buffers: tuple[Buffer, ...], timeout_s: float, kind: type[_R]) -> _R:
        def map_all() -> None:
            for buffer in buffers:
                self._map(buffer)

        return await self._ask(request, timeout_s, kind, map_all)

    def _checked(self, reply: Any, request: Any, kind: type[_R]) -> _R:
        if isinstance(reply, wire.Failed):
            raise SidecarFailed(reply)
        if not isinstance(reply, kind):
            text = f"sidecar {self.pid} answered {type(request).__name__} with {type(reply).__name__}"
            raise SidecarFailed(wire.Failed(request.id, text))
        return reply

    def _answers_ping(self, reply: wire.Reply) -> bool:
        if isinstance(reply, wire.Pong):
            if reply.moved is not None and self.on_moved is not None:
                self.on_moved(reply.moved)
            return True
        if isinstance(reply, wire.Failed) and reply.over:
            self._reason = self._reason or reply.error
        return False

    def _map(self, buffer: Buffer) -> None:
        if buffer.fd < 0:
            raise ValueError("the buffer is closed")
        if buffer.key not in self._mapped:
            self._send(wire.MapBuffer(buffer.key, buffer.device), buffer.fd)
            self._mapped.add(buffer.key)
            buffer.watchers.add(self)

    def _unmap_buffer(self, key: int) -> None:
        if key in self._mapped and self.usable:
            self._mapped.discard(key)
            self._send(wire.ForgetBuffer(key))


def _of_this_process(spec: GroupSpec) -> GroupSpec:
    """Add this process's GPU and NCCL variables; the forkserver's may be outdated."""
    changes: dict[str, Any] = {}
    if not spec.device and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        found = accelerator()
        changes["device"] = found.device() if found is not None else ""
    if spec.nccl_env is None:
        changes["nccl_env"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return msgspec.structs.replace(spec, **changes)
