"""The HTTP routes of the control port and the Unix socket: pages, streams and orders.

The coordinator serves them beside its sessions; they also work in any other Starlette
app. Pages and events are public, without the output of programs, which may have secrets
and needs the same access as an order (:mod:`replicas.control.access`). An idle stream
sends an empty line at intervals, so that each side notices the other's end. A slow
reader delays only its own stream: each part is produced after the last one was sent.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicas import errors
from replicas.common.reason import Reason
from replicas.common.tasks import cancelled
from replicas.control.access import Access, Cached, Lasting, RefusedToken, everyone, hiding_store, public, public_record
from replicas.control.commands import ORDERS, TOKEN_HEADER
from replicas.control.log_files import POLL_S, LogLine, LogReader, Selection, origin
from replicas.control.orders_api import NO_STORE, json_bytes, json_response, order_routes, refusal, unauthorized
from replicas.control.page_routes import file_response, page_routes, wants_page
from replicas.core.lives.ordering import GOOD, needed_replicas
from replicas.page.live import Watched
from replicas.status import RunStatus
from replicas.telemetry.events import Record, encode

_PAGES = {
    "/index": "this list; / is the page of the run, for browsers",
    "/livez": "200 while the supervisor itself works",
    "/readyz": "200 when all that should be ready is; ?verbose lists the checks",
    "/metrics": "for Prometheus",
    "/status": "the whole state of the run, as JSON",
    "/events": "what happens, as server-sent events; ?after=N, ?follow=0",
    "/logs": "?target=, ?rank=, ?generation=, ?lines=, ?since=, ?follow=1, ?json=1; needs the token",
}
_ORDERS = "POST, with a JSON body and the token: " + " ".join(ORDERS)
STREAM_BEAT_S = 5.0
_GZIP_LEVEL = 3

Page = Callable[[Request], Awaitable[Response]]


class ControlledRun(Watched, Protocol):
    """A run as the routes use it. Its methods do not block the event loop.

    Beside these, it has a method for each order (:data:`ORDERS`).
    """

    def scrape(self, accept: str, client: str) -> tuple[bytes, str]:
        """Return the run's metrics and their Content-Type.

        :param accept: the request's header Accept, which selects the format.
        :param client: address of the client, to record when each client scraped.
        """

    def live(self) -> bool:
        """Return True unless the event loop or the store is stuck."""

    def read_logs(self, selection: Selection) -> LogReader:
        """Return a reader of the selected logs of all nodes; it opens them later."""


def control_routes(source: ControlledRun, *, access: Access = everyone) -> list[Route]:
    """Return the routes of a control port. The last one answers unknown paths with JSON
    and status 404. Pages accept GET and HEAD, orders POST; other methods get 405.

    :param source: the run that they show, and that carries out the orders.
    :param access: authorizes orders and the output of programs on this transport.
    """
    endpoints = ["/", *_PAGES, *ORDERS]

    async def livez(_: Request) -> Response:
        """Answer 200 if the run's event loop and store work, else 503."""
        live = source.live()
        return _text("ok\n" if live else "the supervisor's event loop or store is stuck\n", 200 if live else 503)

    async def readyz(request: Request) -> Response:
        """Answer 200 if the run is ready, else 503; with ``?verbose`` list the
        checks."""
        status = source.status()
        code = 200 if status.ready else 503
        if not _flag(request.query_params, "verbose"):
            return _text("ok\n" if status.ready else "not ready; see /readyz?verbose\n", code)
        stranger = bool(access(request.headers))
        checks = readiness_checks(hiding_store(status) if stranger else status)
        lines = [f"[{'+' if good else '-'}] {public(text) if stranger else text}" for good, text in checks]
        lines.append(f"run {status.run} is {'ready' if status.ready else 'not ready'}")
        return _text("\n".join(lines) + "\n", code)

    async def metrics(request: Request) -> Response:
        """Answer with the metrics, compressed in a thread if the client accepts
        that."""
        client = request.client.host if request.client is not None else ""
        body, content_type = source.scrape(request.headers.get("accept", ""), client)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding", **NO_STORE}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            body = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL)
        return Response(body, headers=headers)

    for_strangers = Cached(lambda: public(hiding_store(source.status())))

    async def status(request: Request) -> Response:
        """Answer with the run's status: the present one with all texts if the request
        has access, else a cached one without the output of programs."""
        why = access(request.headers)
        return json_bytes(for_strangers.body(), 200, **_refused(why)) if why else json_response(source.status())

    async def index(request: Request) -> Response:
        """Answer ``/`` of a browser with the page's HTML, else with a list of the
        paths."""
        if request.url.path == "/" and wants_page(request):
            return file_response(request, "index.html")
        run = source.status()
        lines = [f"replicas {run.version}, run {run.run}", "", *(f"{path:10}{text}" for path, text in _PAGES.items())]
        lines += ["", _ORDERS]
        return _text("\n".join(lines) + "\n", 200)

    async def unknown(request: Request) -> Response:
        """Answer 405 for an order that is not POSTed, 404 for any other path."""
        path = request.url.path
        if path in ORDERS:
            return refusal(f"{path} is an order: POST it", 405, Allow="POST")
        return json_response({"error": f"no such page: {path}", "endpoints": endpoints}, 404)

    shown = {"/": index, "/index": index, "/livez": livez, "/readyz": readyz, "/metrics": metrics, "/status": status}
    return [
        *(Route(path, _unless_starting(page), methods=["GET"]) for path, page in shown.items()),
        *_stream_routes(source, access),
        *page_routes(source, access),
        *order_routes(source, access, lambda: source.status().run),
        Route("/{path:path}", unknown, methods=["GET"]),
    ]


def _refused(why: Reason | None) -> dict[str, str]:
    """Return the header with which a public page tells its reader that the token is
    wrong; none if the request had no token, or a valid one.

    :param why: why the request has no full access, or None.
    """
    return {TOKEN_HEADER: why} if isinstance(why, RefusedToken) else {}


def _unless_starting(page: Page) -> Page:
    """Return a handler that answers 503 until the run has a status, and then as
    ``page`` does: the port opens before the run is set up."""

    async def answer(request: Request) -> Response:
        """Answer as the page; 503 for its UsageError, as the run is starting."""
        try:
            return await page(request)
        except errors.UsageError as error:
            return refusal(error.message, 503)

    return answer


def readiness_checks(status: RunStatus) -> Iterator[tuple[bool, str]]:
    """Yield ``(good, line)`` for the store, groups, replicas and channels of a run;
    ``good`` is False for a thing that is not ready."""
    at = f" at {status.store.host}:{status.store.port}" if status.store.port else ""
    yield status.store.up, f"store: {'up' if status.store.up else 'down'}{at}"
    for group in status.groups:
        good = sum(replica.state in GOOD for replica in group.replicas)
        needed = needed_replicas(group.min_ready, len(group.replicas))
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
    """Return a response of plain text with the HTTP status ``code``, not to be
    cached."""
    return PlainTextResponse(text, code, headers=NO_STORE)


def _stream_routes(source: ControlledRun, access: Access) -> list[Route]:
    """Return the routes of ``/events`` and ``/logs`` of the run ``source``; ``access``
    decides who may see the output of programs."""

    async def events(request: Request) -> Response:
        """Answer with a stream of the run's events, beginning after the number that the
        request names; 400 for an invalid query."""
        try:
            after = _after(request)
            follow = _flag(request.query_params, "follow", default=True)
        except errors.UsageError as error:
            return refusal(str(error), 400)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=NO_STORE)
        until = None if follow else source.last_event
        why = access(request.headers)
        stream, headers = _events(source, after, until, whole=not why), {**NO_STORE, **_refused(why)}
        return Lasting(
            stream, partial(access.watched, request.headers), media_type="text/event-stream", headers=headers
        )

    async def logs(request: Request) -> Response:
        """Answer with the selected log lines, and with ``follow`` with later ones as
        they come; 401 without access, 404 if there is no such log."""
        if why := access(request.headers):
            return unauthorized(why)
        try:
            selection = _selection(request.query_params)
            follow = _flag(request.query_params, "follow")
            as_json = _flag(request.query_params, "json")
        except errors.UsageError as error:
            return refusal(str(error), 400)
        reader = source.read_logs(selection)
        try:
            first = await reader.poll()
        except errors.UsageError as error:
            await reader.aclose()
            return refusal(error.message, 404, hint=error.hint)
        kind = "application/x-ndjson" if as_json else "text/plain; charset=utf-8"
        if (why := access(request.headers)) or request.method == "HEAD":  # a token may end while a node answers
            await reader.aclose()
            return unauthorized(why) if why else Response(media_type=kind, headers=NO_STORE)
        lines = _logs(reader, first, follow=follow, as_json=as_json)
        return Lasting(lines, partial(access.watched, request.headers), media_type=kind, headers=NO_STORE)

    return [Route("/events", events, methods=["GET"]), Route("/logs", logs, methods=["GET"])]


def _after(request: Request) -> int | None:
    """Return the number of the event to start after, from the query or (a browser that
    reconnects) from a header, or None if the request has none. Raise UsageError for
    another text."""
    text = request.headers.get("last-event-id", request.query_params.get("after"))
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise errors.UsageError(f"after must be the number of an event, not {text[:40]!r}")
    return int(text)


def _flag(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return a parameter of the query as a bool: False for "0", "false" and "no", True
    for any other text, and ``default`` if it is missing."""
    text = query.get(name)
    return default if text is None else text.lower() not in ("0", "false", "no")


def _selection(query: Mapping[str, str]) -> Selection:
    """Return which log lines the parameters of a query select; raise UsageError for an
    unknown or invalid parameter."""
    known = (*Selection.__struct_fields__, "follow", "json")
    if unknown := [name for name in query if name not in known]:
        raise errors.UsageError(f"unknown parameter {unknown[0][:40]!r}", hint=f"known: {', '.join(known)}")
    try:
        return msgspec.convert(
            {name: value for name, value in query.items() if name in Selection.__struct_fields__},
            Selection,
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise errors.UsageError(f"invalid query: {error}") from error


async def _events(source: ControlledRun, after: int | None, until: int | None, *, whole: bool) -> AsyncIterator[bytes]:
    """Yield the run's events as server-sent events until the run is over, and an empty
    one after 5 s of silence; close the run's stream at the end.

    :param after: yield events with greater numbers; None: only events to come.
    :param until: number of the last event to yield; None: until the run is over.
    :param whole: whether the reader may see the output of programs in events.
    """
    if until is not None and until <= (after if after is not None else until):
        return
    records = source.events(after)
    pending: asyncio.Task[Record] | None = None
    try:
        yield b": events of a run\n\n"
        while True:
            pending = pending or asyncio.ensure_future(anext(records))
            if not (await asyncio.wait({pending}, timeout=STREAM_BEAT_S))[0]:
                yield b":\n\n"
                continue
            record, pending = pending.result(), None
            told = encode(record) if whole else public_record(record)
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (record.seq, type(record.event).__name__.encode(), told)
            if until is not None and record.seq >= until:
                return
    except StopAsyncIteration:  # the run is over
        return
    finally:
        if pending is not None:
            await cancelled(pending)
        if (aclose := getattr(records, "aclose", None)) is not None:
            await aclose()


async def _logs(reader: LogReader, lines: list[LogLine], *, follow: bool, as_json: bool) -> AsyncIterator[bytes]:
    """Yield ``lines`` and then those that the reader has, as bytes; close the reader at
    the end.

    :param follow: continue with new lines, polling; else end when there is none.
    :param as_json: as lines of JSON, with an empty line after 5 s of silence.
    """
    try:
        quiet_since = time.monotonic()
        while True:
            if lines:
                yield await asyncio.to_thread(_encode, lines, as_json=as_json, many=reader.many)
                quiet_since = time.monotonic()
            elif not follow:
                break
            elif as_json and time.monotonic() - quiet_since > STREAM_BEAT_S:
                yield b"\n"
                quiet_since = time.monotonic()
            else:
                await asyncio.sleep(POLL_S)
            lines = await reader.poll()
        many = reader.many
        if rest := await reader.aclose():
            yield _encode(rest, as_json=as_json, many=many)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.aclose()


def _encode(lines: list[LogLine], *, as_json: bool, many: bool) -> bytes:
    """Return the lines as bytes, each with a line break.

    :param as_json: each line is an object with the fields of :class:`LogLine`; else
        only its text.
    :param many: the lines are of several ranks: begin each line of plain text with the
        name of its rank.
    """
    if as_json:
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    return "".join(f"{origin(line) if many else ''}{line.text}\n" for line in lines).encode()
