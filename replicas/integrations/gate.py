"""The gate of an inference server: no answer before the first version, no control
without the secret.

An ASGI middleware inside the server and its *follower*, the process that loads versions
into the server, share one page of memory, a memfd of the follower's:

====== ===== ======================================================
offset bytes content
====== ===== ======================================================
0      1     1: the gate is open
8      8     the version that is served; 0: none
16     32    the secret that control requests carry
48     8     seconds for which the server was paused for loads, a double
56     8     the version that is being loaded; 0: none
64     1     number of changes of the labels, modulo 256
72     2012  the labels after an even number of changes: length and JSON
2084   2012  the labels after an odd number of changes
====== ===== ======================================================

Numbers are in the host's own format, which :mod:`struct` copies at once: a reader never
sees half of a number. New labels are written beside the present ones and take their
place with one byte, so a follower that is killed meanwhile leaves the old labels.

The server finds the page by the path in ``REPLICAS_GATE``, ``/proc/PID/fd/N`` of the
follower: nothing is on disk, and nothing outlives both processes. All API processes of
a server map the same page, so they open and close at the same instant.

While the gate is closed, it answers requests with 503 at once, except the follower's
own and those for health, metrics and the like. A fresh server would otherwise answer
with its checkpoint, and a server whose update has failed with a mixture of two
versions. ``GET /readyz`` reports the state, for readiness probes: a closed gate is not
a reason to restart the server.

An engine's control routes (pause, update, reset) are not protected by its API key. The
gate answers them with 403 unless the request carries the secret, which only the
follower and the server know. Routes of Starlette, on which the server itself is built,
decide where a path leads: their patterns also match before a trailing newline, and
Starlette treats ``root_path`` in its own way. A path with control characters is
refused.
"""

from __future__ import annotations

import functools
import hmac
import json
import mmap
import os
import secrets
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from starlette.routing import Match, Route

from replicas.engine.demands import VERSION_HEADER, Answer, Send, demand_of

__all__ = ["ALWAYS", "GATE", "HEADER", "READYZ", "SHUT", "Gate", "GatePage", "owner_of"]

GATE = "REPLICAS_GATE"
"""Internal: path of the page by which a follower opens and shuts its server's gate."""
HEADER = "x-replicas-gate"
"""Header that carries the secret of a control request."""
READYZ = "/readyz"
"""The gate's own page: 200 while it is open, else 503."""

SHUT = "no version has been loaded yet, or the last load failed"
"""Error text while the gate is shut."""

ALWAYS = ("/health", "/metrics")
"""Paths that are answered while the gate is shut, too."""

_NBYTES = 4096
_LOADING, _CHANGES, _LABELS = 56, 64, 72
_LABELS_NBYTES = (_NBYTES - _LABELS) // 2
_PATHS = 1024
"""Size of the cache of paths whose route is known."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


def owner_of(path: str) -> int:
    """Return the pid of the follower (the process that loads versions into the server)
    from the path of its gate's shared page, which is ``/proc/PID/fd/N``."""
    return int(path.split("/")[2])


class GatePage:
    """A page of memory shared by a server's processes and its follower, the process
    that loads versions into the server. The follower writes, and the server reads,
    whether its gate is open, version, labels and the secret of control requests."""

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        """Wrap a page that is mapped already; :meth:`close` unmaps it.

        :param memory: the mapping.
        :param fd: descriptor of the page if this process has created it, else None;
            :meth:`close` closes it.
        """
        self._memory = memory
        self._fd = fd

    @classmethod
    def create(cls) -> GatePage:
        """Create the page as a memfd, with the gate shut, a new secret and version 0;
        map it."""
        fd = os.memfd_create("replicas-gate")
        os.ftruncate(fd, _NBYTES)
        page = cls(mmap.mmap(fd, _NBYTES), fd)
        page._memory[16:48] = secrets.token_hex(16).encode()
        return page

    @classmethod
    def attach(cls, path: str) -> GatePage:
        """Map another process's page read-only.

        :param path: its :attr:`path`. :raises OSError: the follower is gone.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(fd, _NBYTES, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    @property
    def path(self) -> str:
        """The page's path for processes of the same user, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def secret(self) -> str:
        """The secret that control requests must carry."""
        return self._memory[16:48].decode()

    @property
    def is_open(self) -> bool:
        """True while requests of clients pass the gate to the server."""
        return self._memory[0] == 1

    @property
    def version(self) -> int:
        """The version that is served, also while the gate is shut; 0: none yet."""
        number: int = struct.unpack_from("Q", self._memory, 8)[0]
        return number

    def possible(self) -> set[int]:
        """Return the versions with which the server may answer now: two during a
        load."""
        loading: int = struct.unpack_from("Q", self._memory, _LOADING)[0]
        return {self.version, loading or self.version}

    @property
    def labels(self) -> dict[str, int]:
        """The version of each label (a name such as ``current``), as the follower last
        set them."""
        changes = None
        while changes != self._memory[_CHANGES]:  # again if they were replaced meanwhile
            changes = self._memory[_CHANGES]
            at = _labels_at(changes)
            (nbytes,) = struct.unpack_from("H", self._memory, at)
            data = self._memory[at + 2 : at + 2 + nbytes]
        found: dict[str, int] = json.loads(data or b"{}")
        return found

    def set_labels(self, labels: Mapping[str, int]) -> None:
        """Replace the labels (names that point to versions) on the page; leave out the
        last ones if not all fit. A server sees the old labels or the new ones, never a
        mixture.

        :param labels: version by label.
        """
        known = dict(labels)
        while len(data := json.dumps(known).encode()) > _LABELS_NBYTES - 2:
            known.popitem()
        if known == self.labels:
            return
        changes = (self._memory[_CHANGES] + 1) % 256
        at = _labels_at(changes)
        struct.pack_into("H", self._memory, at, len(data))
        self._memory[at + 2 : at + 2 + len(data)] = data
        self._memory[_CHANGES] = changes

    def load(self, version: int) -> None:
        """Note on the page that the server may answer with this version, too, from now
        on until the next :meth:`open`, as its load begins; 0 ends that, as the load was
        refused."""
        struct.pack_into("Q", self._memory, _LOADING, version)

    @property
    def paused_s(self) -> float:
        """Total seconds for which loads have paused the server."""
        seconds: float = struct.unpack_from("d", self._memory, 48)[0]
        return seconds

    def paused(self, seconds: float) -> None:
        """Add to the total of seconds for which loads have paused the server."""
        struct.pack_into("d", self._memory, 48, self.paused_s + seconds)

    def open(self, version: int) -> None:
        """Set the version that is served, end the note of :meth:`load`, and open the
        gate in all processes of the server."""
        struct.pack_into("Q", self._memory, 8, version)
        struct.pack_into("Q", self._memory, _LOADING, 0)
        self._memory[0] = 1

    def shut(self) -> None:
        """Shut the gate in all processes of the server, until the next :meth:`open`."""
        self._memory[0] = 0

    def close(self) -> None:
        """Unmap the page, and close its descriptor if this process has created it;
        other processes keep their mappings."""
        self._memory.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Gate:
    """ASGI middleware in front of an inference server: it refuses requests until a
    version is loaded and after a failed load, as a page of shared memory says, and
    control requests without the secret on that page.

    :param app: the server's application.
    :param control: paths that change the engine; a path that ends with a slash covers
        all paths below it.
    :param always: paths that are answered while the gate is shut, too.
    :param reads: whether any client may read (GET, HEAD) the paths that change the
        engine.
    :param page: the shared page; default: the page named by ``REPLICAS_GATE``.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        control: Collection[str],
        page: GatePage | None = None,
        *,
        always: Collection[str] = ALWAYS,
        reads: bool = True,
    ) -> None:
        """Map the page and prepare the paths. Raise OSError if the page is gone.

        :param control: paths that change the engine; one that ends with a slash covers
            all paths below it.
        :param page: the shared page; default: the page named by ``REPLICAS_GATE``.
        :param always: paths that are answered while the gate is shut, too.
        :param reads: whether any client may read (GET, HEAD) the paths of ``control``.
        """
        self._app = app
        self._page = GatePage.attach(os.environ[GATE]) if page is None else page
        self._control = [_route(path) for path in control]
        self._always = [_route(path) for path in always]
        self._reads = reads
        self._readyz = [_route(READYZ)]
        self._kind = functools.lru_cache(_PATHS)(self._find_kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the server, or answer it here: ``/readyz``; 403 for a
        control route without the secret; 503 while the gate is shut; 400 for an odd
        path."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        kind = self._kind(scope["path"], scope.get("root_path", ""))
        reads = self._reads and scope.get("method") in ("GET", "HEAD")
        if kind == "odd":
            await _refuse(scope, send, 400, "the path has a control character")
        elif kind == "control" and not reads and not self._may_control(scope):
            await _refuse(scope, send, 403, "this route is for the follower alone: publish a version instead")
        elif kind == "readyz" and self._page.is_open:
            await _answer(send, 200, b'{"version": %d}' % self._page.version)
        elif kind in ("control", "always") or self._may_control(scope):
            await self._app(scope, receive, send)
        elif self._page.is_open:
            await self._answer(scope, receive, send)
        else:
            await _refuse(scope, send, 503, SHUT)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request that an open gate admits on to the server, and add the version
        to the answer's headers.

        Answer it here if its header demands versions of which the server may have none
        or not all now (409 or 503, also if a load begins meanwhile), or is malformed
        (400).
        """
        given = next((value for name, value in scope["headers"] if name == VERSION_HEADER.encode()), None)
        try:
            demand = None if given is None else demand_of(given.decode("latin-1"), self._page.labels)
        except ValueError as error:
            await _refuse(scope, send, 400, str(error))
            return
        answer = Answer(self._page.possible, demand)
        if answer.refusal is None:
            try:
                await self._app(scope, receive, answer.to(send))
            except Exception:  # the server's own frames may wrap the CutOff
                if answer.began or not answer.cut:
                    raise
            else:
                return
        code, why = answer.refusal or (503, SHUT)
        await _refuse(scope, send, code, why, (VERSION_HEADER.encode(), answer.text.encode()))

    def _find_kind(self, path: str, root_path: str) -> str:
        """Return the kind of a path: "control" (changes the engine), "readyz", "always"
        (answered while the gate is shut, too), "odd" (has control characters), or an
        empty text for all others. Starlette's routes decide.

        :param root_path: prefix under which the application is mounted, as in ASGI.
        """
        if any(ord(character) < 32 or ord(character) == 127 for character in path):
            return "odd"
        for kind, routes in (("control", self._control), ("readyz", self._readyz), ("always", self._always)):
            for one in {path, path.rstrip("/")}:  # Starlette redirects between the two
                scope = {"type": "http", "method": "GET", "path": one, "root_path": root_path}
                if any(route.matches(scope)[0] != Match.NONE for route in routes):
                    return kind
        return ""

    def _may_control(self, scope: Scope) -> bool:
        """Return True if the request carries the page's secret, which only the follower
        (the process that loads versions) knows."""
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        return hmac.compare_digest(given, self._page.secret.encode())


def _labels_at(changes: int) -> int:
    """Return the offset on the page of the labels that are valid after this number of
    changes: even and odd numbers have a place each."""
    return _LABELS + changes % 2 * _LABELS_NBYTES


def _route(path: str) -> Route:
    """Return a Starlette route for matching only. It matches ``path``, or, if that ends
    with a slash, all paths below it."""
    return Route(f"{path}{{below:path}}" if path.endswith("/") else path, _refuse)


async def _refuse(scope: Scope, send: Send, status: int, why: str, *more: tuple[bytes, bytes]) -> None:
    """Answer a request with this status and an error as JSON, or close a websocket.

    :param why: text of the error. :param more: further headers.
    """
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013 if status == 503 else 1008, "reason": why})
        return
    body = json.dumps({"error": {"message": f"replicas: {why}", "code": status}}).encode()
    await _answer(send, status, body, *([(b"retry-after", b"1")] if status == 503 else []), *more)


async def _answer(send: Send, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    """Send a whole HTTP response whose body is JSON.

    :param more: further headers.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
