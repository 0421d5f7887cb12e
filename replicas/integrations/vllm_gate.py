"""The gate of a vLLM server, for its option ``--middleware``: control routes, names of
adapters, and the served version as a metric.

Each version of an adapter is loaded under its own name, ``NAME@VERSION``. A request for
the model ``NAME`` gets the newest version, and the answer's ``model`` names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replicas.engine.demands import Send
from replicas.integrations.gate import ALWAYS, Gate, GatePage, Receive, Scope

__all__ = ["ServedVersion", "VllmGate"]

_ALWAYS = (*ALWAYS, "/ping", "/version", "/load", "/v1/models")
_CONTROL_PACKAGES = ("vllm.entrypoints.rl", "vllm.entrypoints.serve.dev")
_OPERATORS_PACKAGES = tuple(f"vllm.entrypoints.serve.{name}" for name in ("elastic_ep", "fault_tolerance", "profile"))
"""Packages in which a release may have further routes that change the engine."""


class VllmGate(Gate):
    """ASGI middleware, the gate in front of all routes of vLLM's development mode and
    of its adapters."""

    def __init__(self, app: object) -> None:
        """Wrap the server's application ``app``, and register the version's metrics
        with Prometheus. The gate refuses requests before a version is loaded, and
        control requests of others than the process that loads versions.

        :raises RuntimeError: this release of vLLM has its control routes elsewhere.
        """
        super().__init__(app, frozenset(_control_paths()), always=_ALWAYS)  # type: ignore[arg-type]  # an ASGI app
        REGISTRY.register(ServedVersion(self._page))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one ASGI request, as :class:`Gate`. In the body of a POST
        that selects an adapter by its plain name, put the name of its newest
        version."""
        if scope["type"] == "http" and scope["method"] == "POST" and (newest := _newest_adapters(scope)):
            receive = _renamed(receive, newest)
        await super().__call__(scope, receive, send)


def _newest_adapters(scope: Scope) -> dict[str, str]:
    """Return {adapter's name: ``NAME@VERSION``} of each adapter's newest version, among
    those that the server of this request has loaded."""
    newest: dict[str, int] = {}
    models = getattr(scope["app"].state, "openai_serving_models", None)
    for full in list(getattr(models, "lora_requests", {})):
        name, found, version = full.rpartition("@")
        if found and version.isdigit():
            newest[name] = max(newest.get(name, 0), int(version))
    return {name: f"{name}@{version}" for name, version in newest.items()}


def _renamed(receive: Receive, newest: dict[str, str]) -> Receive:
    """Return an ASGI ``receive`` that yields the body of a request as one message, in
    which the model, if it is a key of ``newest``, is replaced by its value.

    :param receive: the server's own ``receive`` of the request.
    """
    was_read = False

    async def read() -> MutableMapping[str, Any]:
        """At the first call await the whole body, and return it with its model
        replaced; later pass on the server's next message."""
        nonlocal was_read
        if was_read:
            return await receive()
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        was_read = True
        return {"type": "http.request", "body": _with_full_name(body, newest), "more_body": False}

    return read


def _with_full_name(body: bytes, newest: dict[str, str]) -> bytes:
    """Return a request's JSON body, in which the model, if it is a key of ``newest``,
    is replaced by its value; return any other body unchanged."""
    try:
        asked = json.loads(body)
    except ValueError:  # vLLM reports it itself
        return body
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str) or asked["model"] not in newest:
        return body
    return json.dumps({**asked, "model": newest[asked["model"]]}).encode()


class ServedVersion(Collector):
    """The metrics of a server that follows a channel, beside those of vLLM."""

    def __init__(self, page: GatePage) -> None:
        """Read from ``page``, the memory that the gate shares with the follower, at
        each scrape."""
        self._page = page

    def collect(self) -> Iterable[Metric]:
        """Yield version, paused seconds and readiness, read from the gate's page
        now."""
        yield GaugeMetricFamily(
            "replicas_engine_version",
            "Version of the weights that this server answers with; 0: none yet.",
            self._page.version,
        )
        text = "Seconds for which loads have paused the server so far."
        yield CounterMetricFamily("replicas_engine_paused_seconds", text, self._page.paused_s)
        yield GaugeMetricFamily(
            "replicas_engine_ready",
            "1 when the gate is open, and the server answers requests.",
            int(self._page.is_open),
        )


def _control_paths() -> Iterator[str]:
    """Import the installed vLLM's control routers; yield the paths of their routes,
    which only the process that loads versions may request.

    :raises RuntimeError: no paths were found, so vLLM must have moved them.
    """
    found = False
    for package in _CONTROL_PACKAGES:
        for path in _routes_of(package):
            found = True
            yield path
    if not found:
        raise RuntimeError("replicas: this release of vLLM has its control routes elsewhere; they cannot be protected")
    for package in _OPERATORS_PACKAGES:
        if importlib.util.find_spec(package) is not None:
            yield from _routes_of(package)
    yield from ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/")


def _routes_of(package: str) -> Iterator[str]:
    """Import the modules ``*api_router`` of a package; yield the paths of their
    routes."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if module.name.endswith("api_router"):
            for route in importlib.import_module(module.name).router.routes:
                yield route.path
