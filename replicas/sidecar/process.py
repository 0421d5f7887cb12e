"""What runs in a sidecar: one process group, and requests one after another.

The main thread takes a request, does it, answers it. It may be stuck inside Gloo, NCCL or a store client at any time;
that is what the process is for. When its group has failed it says so and exits: that closes its connections, so that
peers which wait for it in another place fail at once too. A second thread (:mod:`replicas.sidecar.mailbox`) reads the
channel, answers pings, and ends the process with the rank or the channel.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable

import torch

from replicas.core.manifest import Manifest
from replicas.errors import Preflight, ReplicasError
from replicas.sidecar import lifeline, wire
from replicas.sidecar.collectives import run_collective, run_turn
from replicas.sidecar.groups import Group, build_group
from replicas.sidecar.mailbox import Mailbox
from replicas.sidecar.mesh import Mesh
from replicas.sidecar.transfer import run_transfer
from replicas.weights.arena import Buffer

__all__ = ["SidecarProcess", "run"]


class SidecarProcess:
    """Handles the requests that ``mailbox`` brings; keeps the group and the mapped buffers."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._group: Group | None = None
        self._address = ""
        self._mesh: Mesh | None = None
        self._buffers: dict[int, Buffer] = {}
        self._manifest: tuple[bytes, Manifest] | None = None

    def handle(self, request: wire.Request, fds: list[int]) -> wire.Reply | None:
        """Do what ``request`` asks; the reply, if it has one. Takes over ``fds``."""
        match request:
            case wire.MapBuffer(key=key):
                (fd,) = fds
                self._buffers[key] = Buffer.adopt(fd)
                return None
            case wire.ForgetBuffer(key=key):
                if key in self._buffers:
                    self._buffers.pop(key).close()
                return None
            case wire.BuildGroup(id=number):
                return self._answer(number, lambda: self._build(request))
            case wire.RunTransfer(id=number):
                return self._answer(number, lambda: self._transfer(request))
            case wire.RunCollective(id=number):
                return self._answer(number, lambda: self._collective(request))
            case wire.Ping() | wire.TransferProgress():  # the mailbox's own
                return None

    def _answer(self, number: int, do: Callable[[], wire.Reply]) -> wire.Reply:
        try:
            return do()
        except Exception as error:  # noqa: BLE001  # every failure is the answer, and a broken group our end
            refused = isinstance(error, (ValueError, ReplicasError)) and not isinstance(error, Preflight)
            if isinstance(error, ReplicasError):
                kind = type(error).__name__
                return wire.Failed(number, error.message, not refused, kind, error.members, error.hint)
            return wire.Failed(number, _summary(error), over=not refused)

    def _build(self, request: wire.BuildGroup) -> wire.Reply:
        if self._group is not None:
            raise ValueError("this sidecar has a group already")
        lifeline.name_process("replica-sidecar")
        started = time.monotonic()
        self._group = build_group(request.spec)
        self._address = request.spec.address
        return wire.Built(request.id, time.monotonic() - started)

    def _transfer(self, request: wire.RunTransfer) -> wire.Reply:
        buffer, spec, mailbox = self._buffers[request.buffer], request.spec, self._mailbox
        memory = buffer.readable() if spec.role == "send" else buffer.tensor()

        def wait_packed(nbytes: int, deadline: float) -> None:
            mailbox.wait_packed(spec.transfer, nbytes, deadline)

        try:
            result = run_transfer(self._built, spec, self._decoded(spec.manifest), memory, wait_packed)
        finally:
            mailbox.transfer_ended(spec.transfer)
        return wire.Transferred(request.id, result)

    def _collective(self, request: wire.RunCollective) -> wire.Reply:
        started = time.monotonic()
        group, spec = self._built, request.spec
        inputs, outputs = self._memory(request.inputs), self._memory(request.outputs)
        ledger = self._memory(request.ledger)
        if ledger is None:
            run_collective(group, spec, inputs, outputs)
            return wire.Collected(request.id, time.monotonic() - started)
        if self._mesh is None:
            self._mesh = Mesh.connect(group, self._address, started + spec.timeout_s)
        words = ledger[:8].view(torch.int64)

        def ready() -> None:
            words[0] = request.turn

        run_turn(group, self._mesh, spec, inputs, outputs, mark=request.mark, ready=ready)
        return wire.Collected(request.id, time.monotonic() - started)

    @property
    def _built(self) -> Group:
        if self._group is None:
            raise ValueError("this sidecar has no group yet")
        return self._group

    def _memory(self, key: int | None) -> torch.Tensor | None:
        return None if key is None else self._buffers[key].tensor()

    def _decoded(self, manifest: bytes) -> Manifest:
        """The manifest of every version is the same, as a rule: decode and check it once."""
        if self._manifest is None or self._manifest[0] != manifest:
            self._manifest = (manifest, Manifest.decode(manifest))
        return self._manifest[1]


def _summary(error: Exception) -> str:
    """The first line, without Gloo's source position and advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". This is typically")[0]


def run(channel: socket.socket, rank_pidfd: int) -> None:
    """Serve the rank at the other end of ``channel`` until it closes it or dies."""
    torch.set_num_threads(1)
    mailbox = Mailbox(channel, rank_pidfd)
    sidecar = SidecarProcess(mailbox)
    while True:
        request, fds = mailbox.get()
        reply = sidecar.handle(request, fds)
        if reply is not None:
            mailbox.reply(reply)
        if isinstance(reply, wire.Failed) and reply.over:
            os._exit(0)
