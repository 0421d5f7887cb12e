"""Ray for ``bench_sync.py``: a Ray of its own on this host, with an actor that puts the
weights and others that get them.

The weights go in as numpy arrays, which Ray reads from its shared memory without a copy
(torch tensors it would copy). The source's actor puts them, the targets' actors get
them as soon as the reference is there. This process starts Ray and the actors' calls,
and is in no time but that of Ray's own messages.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from bench.rank import Driver, Handler
from bench.sync_rank import WAIT_S
from bench.weights import Weights

__all__ = ["Holder", "RayRank", "handlers"]

STORE_COPIES = 2.5
"""Size of the object store: the last object is let go when the next one is put
already."""
LEAST_NBYTES = 256 << 20

Arrays = Mapping[str, "numpy.typing.NDArray[numpy.uint8]"]


class Holder:
    """An actor with weights of its own."""

    def __init__(self, what: str, seed: int) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._weights = Weights(what, seed)
        self._arrays: Arrays = {
            name: tensor.view(torch.uint8).flatten().numpy() for name, tensor in self._weights.tensors.items()
        }

    def put(self) -> tuple[list[Any], float]:
        """The reference (in a list, lest Ray should resolve it), and when it began."""
        self._weights.change()
        began = time.monotonic()
        return [self._ray.put(dict(self._arrays))], began

    def get(self, put: tuple[list[Any], float]) -> tuple[float, float]:
        """When the first byte of each had been read, and when all was copied into the
        own weights."""
        (reference,), _ = put
        found: Arrays = self._ray.get(reference, timeout=WAIT_S)
        for array in found.values():
            array[0].item()
        readable = time.monotonic()
        for name, array in self._arrays.items():
            numpy.copyto(array, found[name])
        return readable, time.monotonic()

    def digest(self) -> str:
        return self._weights.digest()


class RayRank:
    def __init__(self, driver: Driver) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        self._ray: Any = importlib.import_module("ray")
        self._source: Any = None
        self._targets: list[Any] = []

    def start(self, what: str, targets: int, nbytes: int, folder: str) -> dict[str, Any]:
        """Start Ray, and an actor for the source and each target.

        :param folder: for its sockets and logs, of a short name: paths of sockets have
            at most 107 characters.
        """
        self._ray.init(
            num_cpus=targets + 1,
            object_store_memory=max(LEAST_NBYTES, int(nbytes * STORE_COPIES)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        actor = self._ray.remote(num_cpus=0)(Holder)
        self._source, *self._targets = (actor.remote(what, seed) for seed in range(targets + 1))
        self._ray.get([one.digest.remote() for one in (self._source, *self._targets)], timeout=WAIT_S)
        return {"release": self._ray.__version__}

    def sync(self, targets: int) -> dict[str, Any]:
        """Put once and get by ``targets`` of them; their bytes are compared
        afterwards."""
        chosen = self._targets[:targets]
        put = self._source.put.remote()
        got = self._ray.get([one.get.remote(put) for one in chosen], timeout=WAIT_S)
        _, began = self._ray.get(put, timeout=WAIT_S)
        del put
        digests = self._ray.get([one.digest.remote() for one in (self._source, *chosen)], timeout=WAIT_S)
        readable, loaded = (max(stamps) for stamps in zip(*got, strict=True))
        return {"began": began, "readable": readable, "loaded": loaded, "digests": digests}

    def close(self) -> dict[str, Any]:
        """End Ray and all its processes."""
        self._ray.shutdown()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    one = RayRank(driver)
    return {handler.__name__: handler for handler in (one.start, one.sync, one.close)}
