"""A rank of ``bench_sync.py``: a member of a channel, or a plain process with a Gloo group of its own."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import replicas
from bench.rank import Driver, Handler
from bench.shapes import FULL, SMALL, shapes

WAIT_S = 60.0
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class SyncRank:
    """All commands; a process uses those of its part."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._tensors: dict[str, torch.Tensor] = {}
        self._channel: replicas.Channel | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._groups: dict[int, Any] = {}
        self._store: Any = None

    # ------------------------------------------------------------ with the library

    def tensors(self, quick: bool, seed: int) -> dict[str, Any]:
        """Make the weights: random bytes that are finite numbers."""
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes(SMALL if quick else FULL):
            self._tensors[name] = torch.randn(shape, generator=generator).bfloat16()
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        return {"tensors": len(self._tensors), "nbytes": nbytes, "threads": torch.get_num_threads()}

    def join(self, endpoint: str, token: str, group: str, replica: int) -> dict[str, Any]:
        self._channel = replicas.join(
            "policy", endpoint=endpoint, token=token, group=group, replica=replica, rank=0, world_size=1
        )
        return {}

    def publish(self, tries: int = 1) -> dict[str, Any]:
        """Publish the next version, every tensor of which has changed; once more when that failed, ``tries`` in all."""
        for tensor in self._tensors.values():
            tensor.view(-1)[0] += 1
        began = time.monotonic()
        failures: list[str] = []
        while True:
            pending = self._joined.publish(self._tensors)
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
        """Ask for the next version, say so, and load it when it comes."""
        pending = self._joined.receive()
        if announce:
            self._driver.say(waiting=True)
        with pending.wait(WAIT_S) as update:
            readable = time.monotonic()
            update.load_into(self._tensors)
            loaded = time.monotonic()
        return {"readable": readable, "loaded": loaded, "version": update.version}

    def digest(self) -> dict[str, Any]:
        """Of this rank's own weights."""
        state = xxhash.xxh3_128()
        for tensor in self._tensors.values():
            state.update(tensor.view(torch.uint8).flatten().numpy().data)
        return {"digest": state.hexdigest()}

    def leave(self) -> dict[str, Any]:
        self._joined.close()
        return {}

    @property
    def _joined(self) -> replicas.Channel:
        assert self._channel is not None
        return self._channel

    # ------------------------------------------------------------ without it

    def buffers(self, nbytes: int) -> dict[str, Any]:
        """One flat buffer of so many random bytes, and memory to copy it to, both warm."""
        self._flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self._copy = self._flat.clone()
        return {}

    def host(self) -> dict[str, Any]:
        """Serve a store on loopback."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        self._store = _c10d.TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=WAIT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return {"port": port}

    def form(self, port: int, rank: int, size: int) -> dict[str, Any]:
        """Form a Gloo group of ``size`` over loopback."""
        timeout = timedelta(seconds=WAIT_S)
        client = _c10d.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        store = _c10d.PrefixStore(f"group-{size}", client)
        self._groups[size] = _c10d.ProcessGroupGloo(store, rank, size, options)
        return {}

    def broadcast(self, size: int, source: bool) -> dict[str, Any]:
        """Broadcast the flat buffer in one piece from rank 0."""
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if not source:
            self._driver.say(waiting=True)
        began = time.monotonic()
        self._groups[size].broadcast([self._flat], options).wait()
        return {"began": began, "ended": time.monotonic()}

    def memcpy(self) -> dict[str, Any]:
        """Copy the flat buffer to other warm memory of this process."""
        began = time.monotonic()
        self._copy.copy_(self._flat)
        return {"seconds": time.monotonic() - began}


def handlers(driver: Driver) -> dict[str, Handler]:
    one = SyncRank(driver)
    library = (one.tensors, one.join, one.publish, one.receive, one.digest, one.leave)
    plain = (one.buffers, one.host, one.form, one.broadcast, one.memcpy)
    return {handler.__name__: handler for handler in (*library, *plain)}
