"""The HTTP control routes of one inference server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from replicas import errors
from replicas.integrations.gate import HEADER

__all__ = ["API", "Answer", "EngineServer", "RequestRefused", "host_and_port"]

ASK_TIMEOUT_S = 5.0
API = "/health"
"""The path that the API process of most servers answers itself."""

Answer = Literal["good", "none", "dead"]
"""``dead``: the connection is refused, or the server reports that its engine is
dead."""


class RequestRefused(errors.SyncError):
    """The server refused the request: it answered with another status than 200."""


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of ``http://HOST:PORT``; the port is 80 if the URL has none.

    :raises replicas.errors.UsageError: the URL has another form.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname:
            return parts.hostname, parts.port or 80
    except ValueError:  # an invalid port, unbalanced brackets
        pass
    raise errors.UsageError(
        f"the server's address must be http://HOST:PORT, not {url!r}",
        hint="for example http://127.0.0.1:8000; of a server with TLS or on a Unix socket, pass a plain address",
    )


class EngineServer:
    """Sends HTTP requests to one inference server, each on its own connection.

    :param url: ``http://HOST:PORT``, and perhaps a prefix of all paths.
    :param secret: the gate's secret, if the server has one.
    :param api_key: the server's API key, if it has one.
    :param api: a path that the API process answers itself; others need its engine.
    :ivar broken: why the server was given up; empty: it was not.
    """

    def __init__(self, url: str, secret: str = "", api_key: str = "", api: str = API) -> None:
        """Check the URL; connect to nothing.

        :param url: ``http://HOST:PORT``, and perhaps a prefix of all paths.
        :param secret: sent with each request, for the server's gate (a middleware that
            refuses control requests without it); empty: there is no gate.
        :param api_key: the server's API key, if it has one.
        :param api: a path that the server's API process answers without its engine.
        """
        self.url = url.rstrip("/")
        self.api = api
        self._address = host_and_port(url)
        self._prefix = urlsplit(url).path.rstrip("/")
        self._headers = {HEADER: secret} if secret else {}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None
        self._asking: set[http.client.HTTPConnection] = set()
        self.broken = ""

    @property
    def local_port(self) -> int | None:
        """The server's port if it listens on this machine's loopback, else None."""
        host, port = self._address
        return port if host in ("localhost", "::1") or host.startswith("127.") else None

    def call(
        self, method: str, path: str, body: Any = None, *, query: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> Any:
        """Send one request and wait; return the decoded answer: JSON, or text. Calls
        must not overlap.

        :param query: parameters to append to the path. :param body: sent as JSON.
        :param timeout_s: limit of the connect and of each read of the answer.
        :raises RequestRefused: the status is not 200.
        :raises replicas.errors.SyncError: no answer, or a malformed one. After a
            timeout the server is given up: every later call raises.
        """
        if self.broken:
            raise self._failure(method, path, self.broken)
        connection = self._connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {**self._headers, **({"content-type": "application/json"} if payload else {})}
            below = f"{self._prefix}{path}"
            connection.request(method, f"{below}?{urlencode(query)}" if query else below, payload, headers)
            if self.broken:  # given up during the connect
                raise ConnectionAbortedError(self.broken)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:  # the server hangs: the next call would hang, too
            self.give_up(f"no answer to {path} within {timeout_s:.0f} s")
            raise self._failure(method, path, self.broken) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(method, path, self.broken or str(error) or type(error).__name__) from error
        finally:
            connection.close()
            self._connection = None
        if response.status != 200:
            raise self._failure(method, path, f"{response.status} {_message(content)}", RequestRefused)
        if "json" not in response.getheader("content-type", ""):
            return content.decode(errors="replace")
        try:
            return json.loads(content)
        except ValueError as error:
            raise self._failure(method, path, f"not JSON: {_message(content)}") from error

    def answers(self, path: str) -> bool:
        """Return True if ``GET path`` answers with 200 within 5 s."""
        return self.check_path(path) == "good"

    def check_path(self, path: str) -> Answer:
        """Request ``GET path``; return "good" for 200, "dead" for a refused connection
        or a 503 of the path :attr:`api`, "none" for any other answer or none within 5
        s."""
        connection = http.client.HTTPConnection(*self._address, timeout=ASK_TIMEOUT_S)
        self._asking.add(connection)
        try:
            connection.request("GET", f"{self._prefix}{path}", headers=self._headers)
            status = connection.getresponse().status
        except ConnectionRefusedError:
            return "dead"
        except (OSError, http.client.HTTPException):
            return "none"
        finally:
            self._asking.discard(connection)
            connection.close()
        return "good" if status == 200 else "dead" if status == 503 and path == self.api else "none"

    def break_health_requests(self) -> None:
        """Break the connections of pending :meth:`check_path` calls: they return
        "none". Called on any thread."""
        for connection in list(self._asking):
            _break(connection)

    def give_up(self, reason: str) -> None:
        """Break the connection of the current call; it and every later :meth:`call`
        raise SyncError with the first reason. Called on any thread."""
        self.broken = self.broken or reason
        _break(self._connection)

    def _failure(
        self, method: str, path: str, why: str, kind: type[errors.SyncError] = errors.SyncError
    ) -> errors.SyncError:
        """Return (do not raise) the error of a failed request, of class ``kind``.

        :param why: the reason, a clause.
        """
        return kind(f"{self.url} {method} {path}: {why}", phase="load", hint="see the server's own log")


def _break(connection: http.client.HTTPConnection | None) -> None:
    """Shut a connection's socket down, so that its pending request fails; ignore
    None."""
    sock = None if connection is None else connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):  # it has just ended
            sock.shutdown(socket.SHUT_RDWR)


def _message(content: bytes) -> str:
    """Return the error text in a server's answer, shortened; the answer itself if it is
    not JSON."""
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            found = found.get("error", found.get("detail", found))
        if isinstance(found, dict):
            found = found.get("message", found)
        return str(found)[:2000]
    except ValueError:
        return content[:500].decode(errors="replace")
