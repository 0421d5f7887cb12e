"""The gate of a vLLM server, for its option ``--middleware``, and the served version as
a metric."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replicas.integrations.gate import Gate, GatePage

__all__ = ["VllmGate"]

_CONTROL_PACKAGES = ("vllm.entrypoints.rl", "vllm.entrypoints.serve.dev")


class VllmGate(Gate):
    """The gate in front of all routes of vLLM's development mode and of its
    adapters."""

    def __init__(self, app: object) -> None:
        super().__init__(app, frozenset(_control_paths()))  # type: ignore[arg-type]  # FastAPI's app is an ASGI app
        REGISTRY.register(_ServedVersion(self._page))


class _ServedVersion(Collector):
    def __init__(self, page: GatePage) -> None:
        self._page = page

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("replicas_engine_version", "Version that this server answers with.", self._page.version)
        yield GaugeMetricFamily("replicas_engine_ready", "1 when it answers requests.", int(self._page.is_open))


def _control_paths() -> Iterator[str]:
    """The paths of vLLM's routers for its operator, found in the installed release.

    :raises RuntimeError: there are none, so they must have moved.
    """
    found = False
    for package in _CONTROL_PACKAGES:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if module.name.endswith("api_router"):
                for route in importlib.import_module(module.name).router.routes:
                    found = True
                    yield route.path
    if not found:
        raise RuntimeError("replicas: this release of vLLM has its control routes elsewhere; they cannot be protected")
    yield from ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
