"""The rank's handle of one sidecar: requests, pings, errors, and its end.

:mod:`replicas.sidecar.rank_side.forkserver_client` has the theory of operation,
:mod:`replicas.linux.helper_process` the pings.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from replicas import errors
from replicas.linux.helper_process import HelperDied, HelperProcess
from replicas.messages import GroupSpec
from replicas.sidecar import wire
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.memory.buffers import Buffer

_R = TypeVar("_R")


class SidecarFailed(RuntimeError):
    """The sidecar answered with an error. Fields as of :class:`wire.Failed`."""

    def __init__(self, reply: wire.Failed) -> None:
        """Make the exception from the sidecar's reply, whose fields it takes."""
        super().__init__(reply.error)
        self.over, self.kind, self.links = reply.over, reply.kind, reply.links
        self.members, self.hint = reply.members, reply.hint

    def as_error(self, **fields: Any) -> errors.ReplicasError:
        """Return (do not raise) the failure as an error of the library.

        :param fields: its channel, phase and version.
        """
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(HelperDied):
    """The sidecar or the forkserver is dead, or was killed at a deadline."""

    kind = "sidecar"


def _lend(buffer: Buffer) -> wire.MapBuffer:
    """Return the message that names ``buffer``; it is sent with its descriptor.

    :raises ValueError: the buffer is closed.
    """
    if buffer.fd < 0:
        raise ValueError("the buffer is closed")
    return wire.MapBuffer(buffer.key, buffer.device)


class Sidecar(HelperProcess):
    """One sidecar process, with at most one process group: a method for each request.

    :ivar on_moved: called on the loop, about twice a second during a request that moves
        bytes.
    """

    died, decode = SidecarDied, staticmethod(wire.decode_reply)
    lend = staticmethod(_lend)
    ping, forget = wire.Ping, wire.ForgetBuffer

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        """Take over the process and its socket; the object closes both descriptors.

        :param pidfd: of the process; readable at its end.
        """
        super().__init__(pid, pidfd, sock)
        self.on_moved: Callable[[wire.Moved], None] | None = None

    async def build(self, spec: GroupSpec) -> None:
        """Have the sidecar form the process group of ``spec``; wait for it.

        :raises SidecarFailed: a peer did not join, or an address is wrong.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after the timeout.
        """
        if spec.backend == "nccl":
            spec = _of_this_process(spec)
        request = wire.BuildGroup(next(self._numbers), spec)
        await self._ask(request, spec.timeout_s, wire.Done)

    async def probe(self, buffer: Buffer, timeout_s: float) -> bytes:
        """Have the sidecar open a small buffer; return all bytes that it reads there.

        :param timeout_s: limit in seconds.
        :raises SidecarFailed: it cannot open the buffer.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after the timeout.
        """
        request = wire.ProbeBuffer(next(self._numbers), buffer.key)
        return (await self._ask(request, timeout_s, wire.Probed, buffer)).seen

    async def collective(self, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> None:
        """Have the sidecar run one operation of its process group; wait for its end.

        After an error the sidecar may write to ``outputs`` until its process has ended.

        :param spec: the operation, with its timeout.
        :param inputs: memory that it reads; None without any.
        :param outputs: memory that it writes; None without any. Both are sent to the
            sidecar once, and then known to it by a key.
        :raises SidecarFailed: a peer failed, or the arguments do not fit.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after the timeout.
        """
        buffers = tuple(buffer for buffer in (inputs, outputs) if buffer is not None)
        first, second = (None if buffer is None else buffer.key for buffer in (inputs, outputs))
        request = wire.RunCollective(next(self._numbers), first, second, spec)
        await self._ask(request, spec.timeout_s, wire.Done, *buffers)

    def _failure(self, reply: Any, text: str) -> Exception:
        """Return (do not raise) the error for ``reply``: a Failed, or not expected.

        :param text: of the error if the reply is not a Failed.
        """
        return SidecarFailed(reply if isinstance(reply, wire.Failed) else wire.Failed(reply.id, text))

    def _answers_ping(self, reply: wire.Reply) -> bool:
        """Return True if ``reply`` is a pong, and pass its traffic to ``on_moved``.

        Return False for any other reply. If it is an error after which the sidecar
        exits, store its text as the reason of that end.
        """
        if isinstance(reply, wire.Pong):
            if reply.moved is not None and self.on_moved is not None:
                self.on_moved(reply.moved)
            return True
        if isinstance(reply, wire.Failed) and reply.over:
            self._reason = self._reason or reply.error
        return False


def _of_this_process(spec: GroupSpec) -> GroupSpec:
    """Return a copy of the spec with this process's GPU and ``NCCL_`` variables, where
    the spec does not set them.

    Without them the sidecar would use the variables that it inherited from its
    forkserver, which may be outdated.
    """
    changes: dict[str, Any] = {}
    if not spec.device and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        found = accelerator()
        changes["device"] = found.device() if found is not None else ""
    if spec.nccl_env is None:
        changes["nccl_env"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return msgspec.structs.replace(spec, **changes)
