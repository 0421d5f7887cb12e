"""The HTTP routes of the control port and the Unix socket: pages, streams and orders.

The coordinator serves them beside its sessions; they also work in any other Starlette
app. Pages are public; programs' output is cut (:mod:`replicas.control.access`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicas import errors
from replicas.control.access import Access, Cached, everyone, hiding_store, public
from replicas.control.commands import ORDERS, Commands
from replicas.control.orders_api import NO_STORE, json_bytes, json_response, order_routes, refusal
from replicas.control.streams import StreamSource, stream_routes
from replicas.core.lives.ordering import GOOD, enough
from replicas.status import RunStatus

__all__ = ["StatusSource", "control_routes", "readiness_checks"]

_PAGES = {
    "/livez": "200 while the supervisor itself works",
    "/readyz": "200 when all that should be ready is; ?verbose lists the checks",
    "/metrics": "for Prometheus",
    "/status": "the whole state of the run, as JSON",
}
_STREAMS = {
    "/events": "what happens, as server-sent events; ?after=N, ?follow=0",
    "/logs": "?target=, ?rank=, ?generation=, ?lines=, ?since=, ?follow=1, ?json=1; needs the token",
}
_ORDERS = "POST, with a JSON body and the token: " + " ".join(ORDERS)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Page = Callable[[Request], Awaitable[Response]]


class StatusSource(Protocol):
    """Data of the pages. All three methods run on the event loop and must not block."""

    def status(self) -> RunStatus: ...

    def metrics_text(self) -> bytes: ...

    def live(self) -> bool: ...


def control_routes(
    source: StatusSource,
    *,
    commands: Commands | None = None,
    streams: StreamSource | None = None,
    access: Access = everyone,
) -> list[Route]:
    """The routes, the last of which answers unknown paths with JSON and status 404.

    Pages take GET and HEAD, orders POST; other methods get 405.

    :param commands: carries out orders; None: no orders are taken.
    :param streams: source of events and logs; None: no such pages.
    :param access: authorizes orders and the output of programs on this transport.
    """
    pages = {**_PAGES, **(_STREAMS if streams is not None else {})}
    endpoints = ["/", *pages, *(ORDERS if commands is not None else ())]

    async def livez(_: Request) -> Response:
        live = source.live()
        return _text("ok\n" if live else "the supervisor's event loop or store is stuck\n", 200 if live else 503)

    async def readyz(request: Request) -> Response:
        status = source.status()
        code = 200 if status.ready else 503
        if request.query_params.get("verbose", "0").lower() in ("0", "false"):
            return _text("ok\n" if status.ready else "not ready; see /readyz?verbose\n", code)
        stranger = bool(access(request))
        checks = readiness_checks(hiding_store(status) if stranger else status)
        lines = [f"[{'+' if good else '-'}] {public(text) if stranger else text}" for good, text in checks]
        lines.append(f"run {status.run} is {'ready' if status.ready else 'not ready'}")
        return _text("\n".join(lines) + "\n", code)

    async def metrics(_: Request) -> Response:
        return Response(source.metrics_text(), headers={"Content-Type": _METRICS_TYPE, **NO_STORE})

    for_strangers = Cached(lambda: public(hiding_store(source.status())))

    async def status(request: Request) -> Response:
        return json_bytes(for_strangers.body()) if access(request) else json_response(source.status())

    async def index(_: Request) -> Response:
        run = source.status()
        lines = [f"replicas {run.version}, run {run.run}", "", *(f"{path:10}{text}" for path, text in pages.items())]
        lines += ["", _ORDERS] if commands is not None else []
        return _text("\n".join(lines) + "\n", 200)

    async def unknown(request: Request) -> Response:
        path = request.url.path
        if path in ORDERS and path in endpoints:
            return refusal(f"{path} is an order: POST it", 405, Allow="POST")
        return json_response({"error": f"no such page: {path}", "endpoints": endpoints}, 404)

    shown = {"/": index, "/livez": livez, "/readyz": readyz, "/metrics": metrics, "/status": status}
    return [
        *(Route(path, _unless_starting(page), methods=["GET"]) for path, page in shown.items()),
        *(stream_routes(streams, access) if streams is not None else ()),
        *(order_routes(commands, access, lambda: source.status().run) if commands is not None else ()),
        Route("/{path:path}", unknown, methods=["GET"]),
    ]


def _unless_starting(page: Page) -> Page:
    """Answer 503 until there is a status: the port opens before the groups start."""

    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except errors.UsageError as error:
            return refusal(error.message, 503)

    return answer


def readiness_checks(status: RunStatus) -> Iterator[tuple[bool, str]]:
    """``(good, line)`` for the store, each group and its replicas, and each channel."""
    at = f" at {status.store.host}:{status.store.port}" if status.store.port else ""
    yield status.store.up, f"store: {'up' if status.store.up else 'down'}{at}"
    for group in status.groups:
        good = sum(replica.state in GOOD for replica in group.replicas)
        needed = enough(group.min_ready, len(group.replicas))
        fewer = f", {needed} are enough" if needed < len(group.replicas) else ""
        yield good >= needed, f"group {group.name}: {good} of {len(group.replicas)} replicas{fewer}"
        for replica in group.replicas:
            reason = f", {replica.reason}" if replica.reason else ""
            yield (
                replica.state in GOOD,
                f"replica {replica.name}: {replica.state}, generation {replica.generation}{reason}",
            )
    for channel in status.channels:
        live = sum(member.state == "live" for member in channel.members)
        facts = f"epoch {channel.epoch}, version {channel.committed_version}, {live} live members"
        yield True, f"channel {channel.name}: {facts}"


def _text(text: str, code: int) -> Response:
    return PlainTextResponse(text, code, headers=NO_STORE)
