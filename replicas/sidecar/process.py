"""Main loop of a sidecar: handles requests one by one, with one process group.

The main thread takes a request, handles it and answers it. It may be stuck inside Gloo,
NCCL or a store client at any time; therefore it has a process of its own. When its
group has failed the sidecar answers Failed and exits, which closes its connections:
peers that wait for it fail immediately, too. A second thread
(:mod:`replicas.sidecar.mailbox`) answers pings meanwhile, and ends the process with the
rank or the channel.

Buffers may be in the memory of the rank's GPU, the only one that this process uses; the
first request that names the GPU selects it. The sidecar works on its own stream. It
waits for the rank's pending work on a buffer before it reads the buffer, and answers
only when no work of the request is pending on any stream. So the rank needs no event of
the sidecar: after the answer, or the sidecar's death, the memory belongs to the rank
again. (An event recorded by a killed process might never complete, and a stream that
waits for it would hang.)
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from replicas.common.logs import end_process
from replicas.errors import InternalError, Preflight, ReplicasError, StoreTampered, WorldError, kind_of
from replicas.linux.processes import name_process
from replicas.sidecar import wire
from replicas.sidecar.building import build_group
from replicas.sidecar.collective import run_collective
from replicas.sidecar.groups import CollectiveGroup
from replicas.sidecar.mailbox import Mailbox
from replicas.sidecar.meeting import Unreachable
from replicas.weights.copies.accelerator import Accelerator, device_of
from replicas.weights.devices import cuda  # noqa: F401  # loaded once, before sidecars are forked
from replicas.weights.memory.buffers import Buffer


class SidecarProcess:
    """A sidecar's process group and mapped buffers; it handles the rank's requests."""

    def __init__(self, mailbox: Mailbox) -> None:
        """Begin without a process group, GPU or mapped buffer; start no thread.

        :param mailbox: the channel to the rank; a request records its traffic there,
            from which the mailbox answers pings.
        """
        self._mailbox = mailbox
        self._group: CollectiveGroup | None = None
        self._buffers: dict[int, Buffer] = {}
        self._unusable: dict[int, ReplicasError] = {}
        self._gpu: Accelerator | None = None
        self._uuid = ""
        self._began = False

    def handle(self, request: wire.Request, fds: list[int]) -> wire.Reply | None:
        """Handle ``request`` on this thread; return the reply for the caller to send.

        Blocks until it is done. None means that the request has no reply. The
        descriptors in ``fds``, which came with it, are owned and closed here.
        """
        match request:
            case wire.MapBuffer(key=key, device=device):
                (fd,) = fds
                self._map(key, fd, device)
                return None
            case wire.ForgetBuffer(key=key):
                self._unusable.pop(key, None)
                if key in self._buffers:
                    self._buffers.pop(key).close()
                return None
            case wire.ProbeBuffer(id=number):
                return self._answer(number, lambda: self._probe(request))
            case wire.BuildGroup(id=number):
                return self._answer(number, lambda: self._build(request))
            case wire.RunCollective(id=number):
                return self._answer(number, lambda: self._collective(request))
            case wire.Ping():  # handled by the mailbox
                return None

    def _answer(self, number: int, do: Callable[[], wire.Reply]) -> wire.Reply:
        """Return the reply of ``do()``, or Failed if that raises.

        Failed says whether the group is over, and with it this process, or the request
        was refused before any byte moved.

        :param number: of the request.
        """
        self._began = False
        try:
            return do()
        except Exception as error:  # noqa: BLE001  # answer every failure; after a broken group this process ends
            refused = isinstance(error, (ValueError, ReplicasError)) and not isinstance(
                error, Preflight | StoreTampered
            )
            if isinstance(error, WorldError) and self._began:  # the GPU failed during the operation
                refused = False
            if isinstance(error, ReplicasError):
                links = error.links if isinstance(error, Unreachable) else ()
                return wire.Failed(number, error.message, not refused, kind_of(error), error.members, error.hint, links)
            return wire.Failed(number, _summary(error), over=not refused)

    def _build(self, request: wire.BuildGroup) -> wire.Reply:
        """Form the process group, and use its GPU; block until then, and return Done.

        :raises ValueError: there is a group already. Other errors are those of
            :func:`build_group`.
        """
        if self._group is not None:
            raise ValueError("this sidecar has a group already")
        name_process("replica-sidecar")
        if request.spec.device:
            self._select_gpu(request.spec.device)
        with self._stream():
            self._group = build_group(request.spec)
        return wire.Done(request.id)

    def _collective(self, request: wire.RunCollective) -> wire.Reply:
        """Run an operation on mapped buffers; block until its results are there.

        Return Done.

        :raises ValueError: there is no group, or the buffers do not fit.
        :raises RuntimeError: a peer failed, or the timeout passed.
        """
        group, spec = self._built_group, request.spec
        found = [None if key is None else self._buffer(key) for key in (request.inputs, request.outputs)]
        buffers = [buffer for buffer in found if buffer is not None]
        with self._stream():
            source, target = found  # only read, and written
            inputs = None if source is None else source.readable()
            outputs = None if target is None else target.tensor()
            self._await_rank(*buffers)
            self._began = True
            with self._mailbox.traffic.of_request() if group.backend == "gloo" else nullcontext():
                run_collective(group, spec, inputs, outputs)
                self._synchronize_gpu(*buffers)
        return wire.Done(request.id)

    def _probe(self, request: wire.ProbeBuffer) -> wire.Reply:
        """Return a reply with all bytes of a small buffer: proof that it can be read.

        Block until the rank's GPU work on the buffer has ended.
        """
        buffer = self._buffer(request.buffer)
        with self._stream():
            self._await_rank(buffer)
            seen = bytes(buffer.readable().cpu().numpy().tobytes())
        return wire.Probed(request.id, seen)

    def _map(self, key: int, fd: int, device: str) -> None:
        """Map a buffer for later requests, and own ``fd``; raise nothing.

        An error is kept, and raised by each request that uses the buffer.

        :param key: name of the buffer in later requests.
        :param device: UUID of its GPU, which is selected; empty for host memory.
        """
        try:
            if device:
                self._select_gpu(device)
        except ReplicasError as error:
            os.close(fd)
            self._unusable[key] = error
            return
        try:
            self._buffers[key] = Buffer.adopt(fd, device)  # owns the descriptor even if it fails
        except ReplicasError as error:
            self._unusable[key] = error

    def _buffer(self, key: int) -> Buffer:
        """Return the buffer mapped as ``key``.

        :raises replicas.errors.ReplicasError: it could not be mapped.
        :raises KeyError: no such buffer was sent.
        """
        if key in self._unusable:
            raise self._unusable[key]
        return self._buffers[key]

    def _select_gpu(self, uuid: str) -> None:
        """Use this GPU from now on, also in the group; nothing if it is in use already.

        :raises replicas.errors.InternalError: another GPU is in use.
        """
        if self._uuid not in ("", uuid):
            raise InternalError(f"this sidecar works on GPU {self._uuid}, not on {uuid}")
        if not self._uuid:
            gpu = device_of(uuid)
            gpu.select(uuid)
            self._gpu, self._uuid = gpu, uuid
            if self._group is not None:
                self._group.use(gpu)

    def _stream(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the sidecar's own CUDA stream the current
        one in its block; it does nothing without a GPU."""
        return nullcontext() if self._gpu is None else self._gpu.on_side_stream(self._uuid)

    def _await_rank(self, *buffers: Buffer) -> None:
        """Block until the rank's pending GPU work on the buffers has ended."""
        for buffer in buffers:
            buffer.wait_for_write()
        self._synchronize_gpu(*buffers)

    def _synchronize_gpu(self, *buffers: Buffer) -> None:
        """Block until this process's own GPU work on the buffers has ended."""
        if self._gpu is not None and any(buffer.device for buffer in buffers):
            self._gpu.synchronize(self._uuid)

    @property
    def _built_group(self) -> CollectiveGroup:
        """The process group; raises ValueError before it is built."""
        if self._group is None:
            raise ValueError("this sidecar has no group yet")
        return self._group


def _summary(error: Exception) -> str:
    """Return the first line of the error, without Gloo's source position and advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". This is typically")[0]


def run(channel: socket.socket, rank_pidfd: int) -> None:
    """Serve the rank at the other end of ``channel``; never return.

    The process ends when the rank closes the channel or dies, or the group has failed.

    :param rank_pidfd: of the rank's process, watched for its end.
    """
    torch.set_num_threads(1)
    mailbox = Mailbox(channel, rank_pidfd)
    sidecar = SidecarProcess(mailbox)
    while True:
        request, fds = mailbox.get()
        reply = sidecar.handle(request, fds)
        if reply is not None:
            mailbox.reply(reply)
        if isinstance(reply, wire.Failed) and reply.over:
            end_process(0)
