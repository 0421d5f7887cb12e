"""LMDeploy's own server behind a gate: ``python -m
replicas.integrations.lmdeploy.server``, started by ``serve``; its arguments are those
of ``lmdeploy``.

LMDeploy makes its application in the function that also runs it, and takes no
middleware. So ``uvicorn.run``, by which it runs the application, is replaced in this
process by a function that puts the gate in front first. API processes that LMDeploy
spawns (``--dp``) would have no gate: ``serve`` refuses that option.

Control routes are those of the two modules in which LMDeploy has them. All but
``/abort_request``, by which clients end their own requests, are reserved for the
follower, also for reading: ``GET /terminate`` ends the server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from replicas.integrations.gate import ALWAYS, Gate

__all__ = ["LmdeployGate"]

CONTROL = ("lmdeploy.serve.openai.endpoints.management", "lmdeploy.serve.openai.endpoints.distserve")
"""Modules of the routes that change the server or its engine."""
OPEN = (*ALWAYS, "/metrics/", "/is_sleeping", "/v1/models")
CLIENTS = ("/abort_request",)


class LmdeployGate(Gate):
    """The gate in front of all routes of a LMDeploy server.

    :raises RuntimeError: the release has its control routes elsewhere, so they cannot
        be protected.
    """

    def __init__(self, app: Any, routes: Any) -> None:
        """Wrap the server's application ``app``.

        It refuses requests before a version is loaded, and control requests of others
        than the follower.

        :param routes: the application's routes, of which control routes are found.
        """
        control = frozenset(_control_paths(routes))
        if "/update_weights" not in control:
            raise RuntimeError("replicas: this release of LMDeploy has its control routes elsewhere")
        super().__init__(app, control, always=OPEN, reads=False)


def _control_paths(routes: Any) -> Iterator[str]:
    """Yield the paths among ``routes`` that change the server or its engine: those of
    LMDeploy's management modules, except the ones that are open to every client."""
    for route in routes:
        module = getattr(getattr(route, "endpoint", None), "__module__", "")
        if module in CONTROL and route.path not in (*OPEN, *CLIENTS):
            yield route.path


def main() -> None:
    """Run LMDeploy's own command in this process, with the gate in front of its
    application."""
    import uvicorn
    from lmdeploy.cli import run

    serve = uvicorn.run

    def serve_behind_gate(app: Any, **options: Any) -> None:
        """Put the gate in front of ``app``, and serve it; LMDeploy calls this in place
        of ``uvicorn.run``.

        :param options: those of ``uvicorn.run``.
        """
        app.add_middleware(LmdeployGate, routes=app.routes)
        serve(app, **options)

    uvicorn.run = serve_behind_gate
    sys.argv[0] = "lmdeploy"
    run()


if __name__ == "__main__":  # its engine's processes are spawned, and import this module under another name
    main()
