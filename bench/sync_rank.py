"""A rank that is a member of a channel with weights, or in a plain Gloo group, or
both."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import replicas
from bench.rank import Driver, Handler
from bench.weights import Weights, first_values

__all__ = ["WAIT_S", "SyncRank", "handlers"]

WAIT_S = 60.0
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class SyncRank:
    """All commands; a process uses those of its part.

    Who sends changes the first value of each tensor before the clock runs, so that no
    digest fits by itself.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._weights: Weights | None = None
        self._channel: replicas.Channel | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._groups: dict[int, Any] = {}
        self._store: Any = None

    # ------------------------------------------------------------ with the library

    def fill(self, what: str, seed: int) -> dict[str, Any]:
        """Make the weights, of the set of that name; their memory is also the flat
        buffer."""
        self._weights = Weights(what, seed)
        self._flat = self._weights.flat
        return {
            "tensors": len(self._weights.tensors),
            "nbytes": self._weights.nbytes,
            "threads": torch.get_num_threads(),
        }

    def tensors(self, quick: bool, seed: int) -> dict[str, Any]:
        """Make those of a real model, or a ninth of them."""
        return self.fill("smollm2-small" if quick else "smollm2", seed)

    def join(self, endpoint: str, token: str, group: str, replica: int) -> dict[str, Any]:
        self._channel = replicas.join(
            "policy", endpoint=endpoint, token=token, group=group, replica=replica, rank=0, world_size=1
        )
        return {}

    def publish(self, tries: int = 1, share: float = 0.0) -> dict[str, Any]:
        """Publish the next version, every tensor of which has changed, in this share of
        its elements; once more when that failed, ``tries`` in all."""
        self.weights.change(share)
        began = time.monotonic()
        failures: list[str] = []
        while True:
            pending = self.channel.publish(self.weights.tensors)
            held = time.monotonic()
            try:
                receipt = pending.wait(WAIT_S)
            except replicas.errors.SyncError as error:
                failures.append(str(error))
                if len(failures) == tries:
                    raise
            else:
                break
        committed = time.monotonic()
        facts = {"version": receipt.version, "phases": receipt.phases, "lost": receipt.lost, "failures": failures}
        return {"began": began, "held": held, "committed": committed, **facts}

    def receive(self, announce: bool = True) -> dict[str, Any]:
        """Ask for the next version, say so, and load it when it comes.

        ``readable``: the update could be entered; ``loaded``: all is copied;
        ``reported``: and that has been said.
        """
        pending = self.channel.receive()
        if announce:
            self._driver.say(waiting=True)
        with pending.wait(WAIT_S) as update:
            readable = time.monotonic()
            update.load_into(self.weights.tensors)
            loaded = time.monotonic()
        return {"readable": readable, "loaded": loaded, "reported": time.monotonic(), "version": update.version}

    def read(self) -> dict[str, Any]:
        """Ask for the next version, say so, and read the first value of each tensor
        when it comes, but load nothing.

        The digest is made afterwards, of all its bytes.
        """
        pending = self.channel.receive()
        self._driver.say(waiting=True)
        with pending.wait(WAIT_S) as update:
            found = dict(update)
            first_values(found)
            readable = time.monotonic()
            digest = _digest(found.values())
        return {"readable": readable, "digest": digest}

    def digest(self) -> dict[str, Any]:
        """Of this rank's own weights."""
        return {"digest": self.weights.digest()}

    def leave(self) -> dict[str, Any]:
        self.channel.close()
        return {}

    @property
    def channel(self) -> replicas.Channel:
        assert self._channel is not None
        return self._channel

    @property
    def weights(self) -> Weights:
        assert self._weights is not None
        return self._weights

    # ------------------------------------------------------------ without it

    def buffers(self, nbytes: int) -> dict[str, Any]:
        """A flat buffer of so many random bytes, and no tensors."""
        self._flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        return {}

    def host(self, address: str = "127.0.0.1") -> dict[str, Any]:
        """Serve a store at ``address``."""
        listener = socket.socket()
        listener.bind((address, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        self._store = _c10d.TCPStore(
            address,
            port,
            None,
            True,
            timedelta(seconds=WAIT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return {"port": port}

    def form(
        self, port: int, rank: int, size: int, host: str = "127.0.0.1", address: str = "127.0.0.1"
    ) -> dict[str, Any]:
        """Form a Gloo group of ``size``; ``host``: where the store is, ``address``: of
        this rank."""
        timeout = timedelta(seconds=WAIT_S)
        client = _c10d.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        store = _c10d.PrefixStore(f"group-{size}", client)
        self._groups[size] = _c10d.ProcessGroupGloo(store, rank, size, options)
        return {}

    def broadcast(self, size: int, source: bool) -> dict[str, Any]:
        """Broadcast the flat buffer in one piece from rank 0."""
        return self._broadcast([self._flat], size, source)

    def broadcast_copy(self, size: int, source: bool) -> dict[str, Any]:
        """Copy the flat buffer to other memory, warm after the first time, and
        broadcast that from rank 0."""
        if source and self._copy.numel() != self._flat.numel():
            self._copy = self._flat.clone()
        return self._broadcast([self._copy if source else self._flat], size, source, copy=True)

    def broadcast_each(self, size: int, source: bool) -> dict[str, Any]:
        """Broadcast one tensor after another from rank 0."""
        return self._broadcast(list(self.weights.tensors.values()), size, source)

    def _broadcast(self, tensors: list[torch.Tensor], size: int, source: bool, copy: bool = False) -> dict[str, Any]:
        group = self._groups[size]
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if source and self._weights is not None:
            self._weights.change()
        if not source:
            self._driver.say(waiting=True)
        began = time.monotonic()
        if source and copy:
            self._copy.copy_(self._flat)
        for tensor in tensors:
            group.broadcast([tensor], options).wait()
        return {"began": began, "ended": time.monotonic()}

    def handlers(self) -> list[Handler]:
        library = (self.fill, self.tensors, self.join, self.publish, self.receive, self.read, self.digest, self.leave)
        return [*library, self.buffers, self.host, self.form, self.broadcast, self.broadcast_copy, self.broadcast_each]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.view(torch.uint8).flatten().numpy().data)
    return state.hexdigest()


def handlers(driver: Driver) -> dict[str, Handler]:
    return {handler.__name__: handler for handler in SyncRank(driver).handlers()}
