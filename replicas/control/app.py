"""The pages of the control port: ``/livez``, ``/readyz``, ``/metrics``, ``/status`` and a short index.

They only read. The coordinator serves them beside its sessions; without one they are routes for any Starlette app.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicas.status import ReplicaStatus, RunStatus

__all__ = ["StatusSource", "control_routes", "readiness_checks"]

_PAGES = {
    "/livez": "200 while the supervisor itself works",
    "/readyz": "200 when all that should be ready is; ?verbose lists the checks",
    "/metrics": "for Prometheus",
    "/status": "the whole state of the run, as JSON",
}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NO_STORE = {"Cache-Control": "no-store"}


class StatusSource(Protocol):
    """What the pages show. All three are called on the event loop and must not block."""

    def status(self) -> RunStatus: ...

    def metrics_text(self) -> bytes: ...

    def live(self) -> bool: ...


def control_routes(source: StatusSource) -> list[Route]:
    """The routes of the control pages, with a last one that answers every unknown path with JSON and status 404.

    They take GET and HEAD; any other method is answered with 405.
    """

    async def livez(_: Request) -> Response:
        live = source.live()
        return _text("ok\n" if live else "the supervisor's event loop or store is stuck\n", 200 if live else 503)

    async def readyz(request: Request) -> Response:
        status = source.status()
        code = 200 if status.ready else 503
        if request.query_params.get("verbose", "0").lower() in ("0", "false"):
            return _text("ok\n" if status.ready else "not ready; see /readyz?verbose\n", code)
        lines = [f"[{'+' if good else '-'}] {text}" for good, text in readiness_checks(status)]
        lines.append(f"run {status.run} is {'ready' if status.ready else 'not ready'}")
        return _text("\n".join(lines) + "\n", code)

    async def metrics(_: Request) -> Response:
        return Response(source.metrics_text(), headers={"Content-Type": _METRICS_TYPE, **_NO_STORE})

    async def status(_: Request) -> Response:
        return _json(source.status(), 200)

    async def index(_: Request) -> Response:
        run = source.status()
        lines = [f"replicas {run.version}, run {run.run}", "", *(f"{path:10}{text}" for path, text in _PAGES.items())]
        return _text("\n".join(lines) + "\n", 200)

    async def unknown(request: Request) -> Response:
        return _json({"error": f"no such page: {request.url.path}", "endpoints": ["/", *_PAGES]}, 404)

    return [
        Route("/", index, methods=["GET"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/status", status, methods=["GET"]),
        Route("/{path:path}", unknown, methods=["GET"]),
    ]


def readiness_checks(status: RunStatus) -> Iterator[tuple[bool, str]]:
    """``(good, line)`` for the store, each group with its replicas, and each channel."""
    yield status.store.up, f"store: {'up' if status.store.up else 'down'} at {status.store.host}:{status.store.port}"
    for group in status.groups:
        good = sum(1 for replica in group.replicas if _is_good(replica))
        yield good == len(group.replicas), f"group {group.name}: {good} of {len(group.replicas)} replicas"
        for replica in group.replicas:
            reason = f", {replica.reason}" if replica.reason else ""
            yield _is_good(replica), f"replica {replica.name}: {replica.state}, generation {replica.generation}{reason}"
    for channel in status.channels:
        live = sum(1 for member in channel.members if member.state == "live")
        yield (
            True,
            f"channel {channel.name}: epoch {channel.epoch}, version {channel.committed_version}, {live} live members",
        )


def _is_good(replica: ReplicaStatus) -> bool:
    return replica.state in ("ready", "finished")


def _text(text: str, code: int) -> Response:
    return PlainTextResponse(text, code, headers=_NO_STORE)


def _json(value: object, code: int) -> Response:
    return Response(msgspec.json.encode(value), code, headers=_NO_STORE, media_type="application/json")
