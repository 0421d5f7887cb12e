"""Storage with faults: a proxy in front of a server of S3, with a door for each client.

    with Proxy(host, port) as proxy:
        door = proxy.door()                       # a port of its own, with its faults
        door.add(Fault("status", "PUT latest", status=503))
        follower = replicas.follow(door.url, ...) # with door.endpoint as AWS_ENDPOINT
        door.heal()

The proxy knows each object that the server took, in their order: so it can show an
older state, and tests can compare what readers hand out with what was written. Writes
go to the server one by one.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from replicas.archive import ArchiveKey
from replicas.archive.format import Entry, Latest, seal, unseal
from replicas.archive.keys import make_pem
from tests.support.archives import CHANNEL

__all__ = ["KINDS", "READ_KINDS", "TAMPERING", "Door", "Fault", "Proxy", "Stop", "Write", "damaged"]

TAMPERING = ("short", "forged", "swapped", "resigned")
"""Kinds that show other bytes than were written."""
READ_KINDS = ("late", "missing", *TAMPERING)
KINDS = (*READ_KINDS, "status", "slow", "cut", "lost", "silent", "delayed")
"""late: an older state is shown. missing: 404. short: the body has an end too early.
swapped: another object's body. resigned: signed by another key. cut: the connection, in
the middle of the body. lost: the connection, when the server has done it. silent: no
answer. delayed: it is done later, even if the client has left."""
ANOTHER = ArchiveKey(make_pem())
CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
CODES |= {507: "QuotaExceeded"}
RATE, DELAY_S = 100e6 / 8, 0.05
"""Of a slow way: 100 Mbit/s, and 50 ms."""


class Write(NamedTuple):
    """One object that the server took; ``data`` is None if it was deleted."""

    name: str
    data: bytes | None
    tag: str


class Request(NamedTuple):
    """What a client asks: GET, LIST, HEAD, PUT, DELETE; BEGIN, PART and END of a large
    object. ``name``: below the channel's folder; a folder for LIST."""

    verb: str
    bucket: str
    name: str
    head: bytes
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return f"{self.verb} {self.name}"


class Answer(NamedTuple):
    """Status, the wanted ones of the headers, body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Fault:
    """A fault of some requests.

    :ivar what: how a request's text begins: ``GET latest``, ``PUT data/``, ``LIST``.
    :ivar times: how many. :ivar status: of an answer that is one.
    :ivar state: of kind ``late``: so many writes are shown. :ivar seconds: how long
        nothing happens.
    """

    kind: str
    what: str = ""
    times: int = 1
    status: int = 503
    state: int = 0
    seconds: float = 60.0

    def __str__(self) -> str:
        more = {"status": f" {self.status}", "late": f" {self.state}", "delayed": f" {self.seconds:.2f} s"}
        return f"{self.kind}{more.get(self.kind, '')} of {self.times} x {self.what!r}"


@dataclass
class Stop:
    """Hold the ``count``-th request whose text begins with ``what``; tell the test.

    :ivar after: when the server has done it, not before.
    """

    what: str
    count: int = 1
    after: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)


class Door:
    """One client's way to the storage."""

    def __init__(self, proxy: Proxy, seed: int) -> None:
        self.faults: list[Fault] = []
        self.hit: list[str] = []
        """Faults that there were, in their order."""
        self.requests: list[str] = []
        self.stop: Stop | None = None
        self.random = random.Random(seed)
        self.port = 0
        self.server: asyncio.Server | None = None
        self.tasks = set[asyncio.Task[None] | None]()
        self._proxy = proxy
        self._healed = asyncio.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    def heal(self) -> None:
        """End all faults; connections that were held are closed."""
        self.faults.clear()
        self.stop = None
        self._proxy.call(self._release)

    def close(self) -> None:
        """Admit nobody; end all connections."""
        self._proxy.run(self._close())

    async def _close(self) -> None:
        if self.server is not None:
            self.server.close()
            tasks = {task for task in self.tasks if task is not None}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _release(self) -> None:
        self._healed.set()
        self._healed = asyncio.Event()

    def take(self, request: Request) -> Fault | None:
        """The fault of this request."""
        for fault in list(self.faults):
            if request.text.startswith(fault.what):
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                self.hit.append(f"{fault.kind} {request.text}")
                return fault
        return None

    async def pause(self, seconds: float) -> bool:
        """Wait; return True if the faults are over before."""
        try:
            async with asyncio.timeout(seconds):
                await self._healed.wait()
        except TimeoutError:
            return False
        return True

    async def halt(self, request: Request, after: bool) -> None:
        """Hold a request at which the test wants to do something."""
        stop = self.stop
        if stop is not None and stop.after == after and request.text.startswith(stop.what):
            stop.count -= 1
            if not stop.count:
                stop.arrived.set()
                await self._healed.wait()
                raise ConnectionAbortedError


class Proxy:
    """The proxy, on a thread of its own.

    :ivar writes: by bucket, in their order.
    """

    def __init__(self, host: str, port: int) -> None:
        self.writes: dict[str, list[Write]] = {}
        self._upstream = host, port
        self._parts: dict[tuple[str, str], dict[int, bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._doors: list[Door] = []
        self._write = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for door in self._doors:
            door.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def door(self, seed: int = 0) -> Door:
        """A new way to the storage; without faults yet."""
        door = Door(self, seed)

        async def open_it() -> None:
            server = await asyncio.start_server(lambda *pair: self._serve(door, *pair), "127.0.0.1", 0, limit=1 << 20)
            door.server, door.port = server, server.sockets[0].getsockname()[1]

        self.run(open_it())
        self._doors.append(door)
        return door

    def objects(self, bucket: str, state: int | None = None) -> dict[str, Write]:
        """The objects after so many writes, by name."""
        found: dict[str, Write] = {}
        for write in self.writes.get(bucket, [])[:state]:
            found.pop(write.name, None)
            if write.data is not None:
                found[write.name] = write
        return found

    # -------------------------------------------------- the requests

    async def _serve(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        door.tasks.add(asyncio.current_task())
        try:
            while await self._one(door, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            door.tasks.discard(asyncio.current_task())

    async def _one(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return False if the connection is to be closed."""
        request, body = _parsed(await reader.readuntil(b"\r\n\r\n")), b""
        nbytes = int(request.headers.get("content-length", "0"))
        if request.verb == "DELETE":
            body, nbytes = await reader.readexactly(nbytes), 0
            request = request._replace(name=" ".join(_deleted(body)))
        door.requests.append(request.text)
        fault = door.take(request)
        kind = "" if fault is None else fault.kind
        if kind == "cut" and request.verb == "PUT":
            await reader.readexactly(nbytes // 2)
            return False
        body += await reader.readexactly(nbytes)
        await door.halt(request, False)
        if kind == "silent":
            await door.pause(60.0)
            return False
        if fault is not None and kind == "delayed":
            await door.pause(fault.seconds)
        answer = await self._answer(door, request, fault, body)
        await door.halt(request, True)
        if kind == "lost":
            return False
        if kind == "slow":
            await asyncio.sleep(DELAY_S + (len(body) + len(answer.body)) / RATE)
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {answer.status} _\r\n{head}\r\n".encode())
        if request.verb == "HEAD":
            await writer.drain()
            return True
        writer.write(answer.body[: len(answer.body) // 2] if kind == "cut" else answer.body)
        await writer.drain()
        if kind == "cut":
            await asyncio.sleep(0.01)  # so that what was sent is not lost with the connection
        return kind != "cut"

    async def _answer(self, door: Door, request: Request, fault: Fault | None, body: bytes) -> Answer:
        if fault is not None and fault.kind in ("status", "missing"):
            status = 404 if fault.kind == "missing" else fault.status
            text = f"<?xml version='1.0'?><Error><Code>{CODES[status]}</Code><Message>no</Message></Error>"
            return Answer(status, {"Content-Type": "application/xml"}, text.encode())
        if fault is not None and fault.kind == "late" and request.verb in ("GET", "LIST"):
            return self._old(request, fault.state)
        if request.verb in ("GET", "LIST", "HEAD"):
            found = await self._forward(request, body)
            if fault is not None and request.verb == "GET" and found.status in (200, 206):
                changed = self._changed(door, request, fault.kind, found.body)
                return found._replace(body=changed)
            return found
        async with self._write:
            found = await self._forward(request, body)
            if found.status in (200, 204):
                data = self._data(request, body)
                names = [request.name] if data is not None else request.name.split()
                written = [Write(name, data, found.headers.get("ETag", "")) for name in names]
                if request.verb in ("PUT", "DELETE", "END"):
                    self.writes.setdefault(request.bucket, []).extend(written)
        return found

    def _data(self, request: Request, body: bytes) -> bytes | None:
        """The content of what is written; parts are kept until the last one."""
        if request.verb == "PART":
            self._parts.setdefault((request.bucket, request.name), {})[int(request.headers["part"])] = body
        if request.verb == "END":
            parts = self._parts.pop((request.bucket, request.name))
            return b"".join(parts[number] for number in sorted(parts))
        return None if request.verb == "DELETE" else body

    async def _forward(self, request: Request, body: bytes) -> Answer:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request.head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
            await writer.drain()
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        wanted = ("ETag", "Content-Range", "Content-Type", "Last-Modified")
        found = {name: fields[name.lower()] for name in wanted if name.lower() in fields}
        if request.verb == "HEAD" and "content-length" in fields:
            found["Content-Length"] = fields["content-length"]
        return Answer(int(first.split()[1]), found, content)

    def _old(self, request: Request, state: int) -> Answer:
        """What the storage showed after so many writes."""
        objects = self.objects(request.bucket, state)
        if request.verb == "LIST":
            names = [name for name in objects if name.startswith(f"{request.name}/")]
            found = "".join(_listed(f"run/{CHANNEL}/{name}", objects[name]) for name in names)
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
            return Answer(200, {"Content-Type": "application/xml"}, text.encode())
        write = objects.get(request.name)
        if write is None or write.data is None:
            return Answer(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": write.tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if request.headers.get("if-none-match") == write.tag:
            return Answer(304, headers, b"")
        data, size = write.data, len(write.data)
        if (start := _range(request)) is None:
            return Answer(200, headers, data)
        data = data[start[0] : start[1]]
        return Answer(206, headers | {"Content-Range": f"bytes {start[0]}-{start[0] + len(data) - 1}/{size}"}, data)

    def _changed(self, door: Door, request: Request, kind: str, data: bytes) -> bytes:
        if kind == "swapped":
            folder = request.name.partition("/")[0]
            kin = [one for name, one in self.objects(request.bucket).items() if name.startswith(folder)]
            other = door.random.choice([one.data or b"" for one in kin if one.name != request.name] or [data])
            where = _range(request)
            return other if where is None else other[where[0] : where[1]].ljust(len(data), b"\0")[: len(data)]
        return damaged(request.name, data, kind, door.random)


def damaged(name: str, data: bytes, kind: str, rng: random.Random) -> bytes:
    """These bytes of an object, with a fault that changes bytes."""
    if kind == "short":
        return data[: rng.randrange(len(data))]
    if kind == "forged" or (kind == "resigned" and name.startswith("data/")):
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "resigned":
        latest = name == "latest"
        return seal(unseal(data, Latest, None, name) if latest else unseal(data, Entry, None, name), ANOTHER.sign)
    return data


def _parsed(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    verb, target, _ = first.split(" ")
    where = urlsplit(target)
    bucket, _, key = unquote(where.path).lstrip("/").partition("/")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    query = parse_qs(where.query, keep_blank_values=True)
    if verb == "GET" and "list-type" in query:
        verb, key = "LIST", query["prefix"][0].rstrip("/")
    if "uploadId" in query or "uploads" in query:  # a large object: its start, its parts, its end
        headers["part"] = query.get("partNumber", [""])[0]
        verb = {"PUT": "PART", "DELETE": "ABORT"}.get(verb, "END" if "uploadId" in query else "BEGIN")
    elif verb == "POST":  # deletes what its body names
        verb = "DELETE"
    return Request(verb, bucket, key.partition(f"{CHANNEL}/")[2], head, headers)


def _deleted(body: bytes) -> list[str]:
    return [key.partition(f"{CHANNEL}/")[2] for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]


def _range(request: Request) -> tuple[int, int] | None:
    first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
    return (int(first), int(last) + 1) if first else None


def _listed(key: str, write: Write) -> str:
    when, size = "2026-01-01T00:00:00.000Z", len(write.data or b"")
    tag = escape(write.tag)
    return (
        f"<Contents><Key>{key}</Key><LastModified>{when}</LastModified><Size>{size}</Size><ETag>{tag}</ETag></Contents>"
    )
