"""A rank of ``bench_startup.py``: loads torch, joins a channel of peers, forks a
sidecar, and meets the peers in barriers."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

LOADED_AT = time.monotonic()

import replicas  # noqa: E402  # the time at which torch is loaded is wanted alone
from bench.operations_rank import Torchft  # noqa: E402
from bench.rank import Driver, Handler  # noqa: E402
from bench.sync_rank import SyncRank  # noqa: E402
from replicas import errors  # noqa: E402
from replicas.channel.session.loop import session_loop  # noqa: E402
from replicas.sidecar.rank_side.forkserver_client import Forkserver  # noqa: E402
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed  # noqa: E402
from replicas.sidecar.wire import CollectiveSpec  # noqa: E402

WAIT_S = 60.0
TRIES = 5


class StartupRank:
    def __init__(self) -> None:
        self._channel: replicas.Channel | None = None
        self._torchft: Torchft | None = None

    def loaded(self) -> dict[str, Any]:
        """When torch was loaded."""
        return {"at": LOADED_AT, "torch": str(torch.__version__)}

    def join(self, endpoint: str, token: str, replica: int) -> dict[str, Any]:
        began = time.monotonic()
        self._channel = replicas.join(
            "outer", endpoint=endpoint, token=token, group="peer", replica=replica, rank=0, world_size=1
        )
        return {"began": began, "joined": time.monotonic()}

    def sidecar(self) -> dict[str, Any]:
        """Connect to the forkserver if need be, fork one, and have it answer a request;
        it is killed then."""
        loop = session_loop()

        async def make() -> float:
            began = time.monotonic()
            forkserver: Forkserver = await loop.forkserver(os.environ["REPLICAS_FORKSERVER"])
            sidecar = await forkserver.fork()
            try:
                await sidecar.collective(CollectiveSpec(1, "barrier", "sum", (0,), ((),), 0, -1, WAIT_S), None, None)
            except SidecarFailed:  # it has no group; it has taken the request, and that is what is measured
                return time.monotonic() - began
            finally:
                sidecar.kill()
                await sidecar.wait_dead()
            raise RuntimeError("a sidecar without a group has run an operation")

        return {"seconds": loop.run(make, WAIT_S), "ended": time.monotonic()}

    def barrier(self) -> dict[str, Any]:
        """Meet all peers; once more when the attempt failed for everyone, as after the
        death of a sidecar."""
        assert self._channel is not None
        failures: list[str] = []
        began = time.monotonic()
        while True:
            try:
                receipt = self._channel.barrier().wait(WAIT_S)
            except errors.SyncError as error:
                failures.append(str(error))
                if len(failures) >= TRIES:
                    raise
            else:
                ended = time.monotonic()
                return {"began": began, "ended": ended, "form": receipt.phases.get("form", 0.0), "failures": failures}

    def torchft(self, port: int, prefix: str, rank: int, size: int) -> dict[str, Any]:
        """Form a group of torchft's, or form it anew."""
        began = time.monotonic()
        if self._torchft is None:
            self._torchft = Torchft(port, prefix, rank, size)
        else:
            self._torchft.renew(port, prefix, rank, size)
        self._torchft.barrier()
        return {"seconds": time.monotonic() - began}

    def leave(self) -> dict[str, Any]:
        assert self._channel is not None
        self._channel.close()
        if self._torchft is not None:
            self._torchft.close()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    one = StartupRank()
    mine = (one.loaded, one.join, one.sidecar, one.barrier, one.torchft, one.leave)
    return {handler.__name__: handler for handler in (*mine, SyncRank(driver).host)}
