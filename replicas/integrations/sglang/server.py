"""SGLang's own server behind a gate: ``python -m replicas.integrations.sglang.server``,
started by ``serve``; its arguments are those of ``sglang.launch_server``.

Nothing of SGLang is changed: the gate is a middleware of its application. Its control
routes are those that SGLang itself marks for administrators, found in the installed
release. All but ``/abort_request``, by which clients end their own requests, are
reserved for the follower, also for reading: ``GET /release_memory_occupation`` frees
the model's memory.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

from replicas.integrations.gate import Gate

__all__ = ["SglangGate"]

ALWAYS = (
    "/health",
    "/health_generate",
    "/metrics",
    "/metrics/",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/v1/models",
)
CLIENTS = ("/abort_request",)


class SglangGate(Gate):
    """The gate in front of all routes of a SGLang server.

    :raises RuntimeError: the release marks no control routes, so they cannot be
        protected.
    """

    def __init__(self, app: Any, routes: Any) -> None:
        """Wrap the server's application ``app``: refuse requests before a version is
        loaded, and control requests of others than the process that loads versions.

        :param routes: the application's routes, of which control routes are found.
        """
        control = frozenset(_control_paths(routes))
        if "/update_weights_from_disk" not in control:
            raise RuntimeError("replicas: this release of SGLang marks its control routes in another way")
        super().__init__(app, control, always=ALWAYS, reads=False)


def _control_paths(routes: Any) -> Iterator[str]:
    """Yield the paths of routes that SGLang marks for administrators, without those by
    which clients end their own requests."""
    for route in routes:
        level = getattr(getattr(route, "endpoint", None), "_auth_level", None)
        if level is not None and getattr(level, "value", "") != "normal" and route.path not in CLIENTS:
            yield route.path


def main() -> None:
    """Add the gate (a middleware that refuses requests before a version is loaded) to
    SGLang's application, and run SGLang's own server in this process, with the command
    line's arguments."""
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(SglangGate, routes=app.routes)
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":  # schedulers are spawned, and import this module under another name
    main()
