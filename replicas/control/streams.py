"""Streams of the control port: ``GET /events`` (server-sent events) and ``GET /logs``.

Events are public, like the other pages. The output of programs (logs, and the last
lines in events) may hold secrets and needs the same right as an order. An idle stream
sends an empty line every :data:`BEAT_S`, so that each side notices the other's end. A
slow reader delays only itself: the next part is produced when the last one was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from replicas import errors
from replicas.control.access import Access, public_record
from replicas.control.log_files import POLL_S, Follower, LogLine, Selection, prefixed
from replicas.control.orders_api import NO_STORE, refusal
from replicas.telemetry.events import Record, encode

__all__ = ["BEAT_S", "StreamSource", "stream_routes"]

BEAT_S = 5.0


class StreamSource(Protocol):
    """Source of events and logs."""

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        """Events numbered above ``after`` (None: from now on), then each new one."""
        ...

    @property
    def last_event(self) -> int:
        """Number of the newest event."""
        ...

    @property
    def logs(self) -> Path:
        """The folder of the run's logs."""
        ...


def stream_routes(source: StreamSource, access: Access) -> list[Route]:
    """``/events`` and ``/logs``."""

    async def events(request: Request) -> Response:
        try:
            after = _after(request)
            follow = _flag(request.query_params, "follow", default=True)
        except errors.UsageError as error:
            return refusal(str(error), 400)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=NO_STORE)
        until = None if follow else source.last_event
        stream = _events(source, after, until, whole=not access(request))
        return StreamingResponse(stream, media_type="text/event-stream", headers=NO_STORE)

    async def logs(request: Request) -> Response:
        if why := access(request):
            return refusal(why, 401, **{"WWW-Authenticate": "Bearer"})
        try:
            selection = _selection(request.query_params)
            follow = _flag(request.query_params, "follow")
            as_json = _flag(request.query_params, "json")
        except errors.UsageError as error:
            return refusal(str(error), 400)
        follower = Follower(source.logs, selection)
        try:
            first = await asyncio.to_thread(follower.poll)
        except errors.UsageError as error:
            return refusal(error.message, 404, hint=error.hint)
        kind = "application/x-ndjson" if as_json else "text/plain; charset=utf-8"
        if request.method == "HEAD":
            follower.close()
            return Response(media_type=kind, headers=NO_STORE)
        lines = _logs(follower, first, follow=follow, as_json=as_json)
        return StreamingResponse(lines, media_type=kind, headers=NO_STORE)

    return [Route("/events", events, methods=["GET"]), Route("/logs", logs, methods=["GET"])]


# ------------------------------------------------------------ requests


def _after(request: Request) -> int | None:
    """The event to start after; a reconnecting browser sends it in a header."""
    text = request.headers.get("last-event-id", request.query_params.get("after"))
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise errors.UsageError(f"after must be the number of an event, not {text[:40]!r}")
    return int(text)


def _flag(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = query.get(name)
    return default if text is None else text.lower() not in ("0", "false", "no")


def _selection(query: Mapping[str, str]) -> Selection:
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


# ------------------------------------------------------------ responses


async def _events(source: StreamSource, after: int | None, until: int | None, *, whole: bool) -> AsyncIterator[bytes]:
    if until is not None and until <= (after if after is not None else until):
        return
    records = source.events(after)
    pending: asyncio.Task[Record] | None = None
    try:
        yield b": events of a run\n\n"
        while True:
            pending = pending or asyncio.ensure_future(_next(records))
            if not (await asyncio.wait({pending}, timeout=BEAT_S))[0]:
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
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        if (aclose := getattr(records, "aclose", None)) is not None:
            await aclose()


async def _next(records: AsyncIterator[Record]) -> Record:
    return await anext(records)


async def _logs(follower: Follower, lines: list[LogLine], *, follow: bool, as_json: bool) -> AsyncIterator[bytes]:
    try:
        quiet_since = time.monotonic()
        while True:
            if lines:
                yield await asyncio.to_thread(_encode, lines, as_json=as_json, many=follower.many)
                quiet_since = time.monotonic()
            elif not follow:
                break
            elif as_json and time.monotonic() - quiet_since > BEAT_S:
                yield b"\n"
                quiet_since = time.monotonic()
            else:
                await asyncio.sleep(POLL_S)
            lines = await asyncio.to_thread(follower.poll)
        if rest := follower.rest():
            yield _encode(rest, as_json=as_json, many=follower.many)
    finally:
        follower.close()


def _encode(lines: list[LogLine], *, as_json: bool, many: bool) -> bytes:
    if as_json:
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    return "".join(f"{prefixed(line) if many else line.text}\n" for line in lines).encode()
