"""A rank of ``bench_startup.py``: loads torch, joins a channel of peers, and meets them in barriers."""

from __future__ import annotations

import time
from typing import Any

import torch

LOADED_AT = time.monotonic()

import replicas  # noqa: E402  # the time at which torch is loaded is wanted alone
from bench.rank import Driver, Handler  # noqa: E402
from replicas import errors  # noqa: E402

WAIT_S = 60.0
TRIES = 5


class StartupRank:
    def __init__(self) -> None:
        self._channel: replicas.Channel | None = None

    def loaded(self) -> dict[str, Any]:
        """When torch was loaded."""
        return {"at": LOADED_AT, "torch": str(torch.__version__)}

    def join(self, endpoint: str, token: str, replica: int) -> dict[str, Any]:
        began = time.monotonic()
        self._channel = replicas.join(
            "outer", endpoint=endpoint, token=token, group="peer", replica=replica, rank=0, world_size=1
        )
        return {"began": began, "joined": time.monotonic()}

    def barrier(self) -> dict[str, Any]:
        """Meet all peers; once more when the attempt failed for everyone, as after the death of a sidecar."""
        assert self._channel is not None
        failures: list[str] = []
        began = time.monotonic()
        while True:
            try:
                self._channel.barrier().wait(WAIT_S)
            except errors.SyncError as error:
                failures.append(str(error))
                if len(failures) >= TRIES:
                    raise
            else:
                return {"began": began, "ended": time.monotonic(), "failures": failures}

    def leave(self) -> dict[str, Any]:
        assert self._channel is not None
        self._channel.close()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    one = StartupRank()
    return {handler.__name__: handler for handler in (one.loaded, one.join, one.barrier, one.leave)}
