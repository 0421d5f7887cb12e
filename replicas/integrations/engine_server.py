"""The HTTP control routes of one inference server, and the watch over its health."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from replicas import errors
from replicas.common.patience import PauseClock
from replicas.integrations.gate import HEADER

__all__ = ["EngineServer", "Health", "host_and_port"]

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 5.0


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of ``http://HOST:PORT``. :raises UsageError: it is something
    else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise errors.UsageError(f"{url!r} is not http://HOST:PORT", hint="for example http://127.0.0.1:8000")
    return parts.hostname, parts.port or 80


class EngineServer:
    """Requests to one server, each on a connection of its own.

    :param url: ``http://HOST:PORT``.
    :param secret: the gate's secret, if the server has one.
    """

    def __init__(self, url: str, secret: str = "") -> None:
        self.url = url.rstrip("/")
        self._address = host_and_port(url)
        self._headers = {HEADER: secret} if secret else {}
        self._connection: http.client.HTTPConnection | None = None
        self._broken = ""

    def call(
        self, method: str, path: str, body: Any = None, *, query: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> Any:
        """One request; return the decoded answer: JSON, or text.

        :raises replicas.errors.SyncError: no answer, or another status than 200. A
            server that did not answer in time is given up.
        """
        if self._broken:
            raise self._failure(method, path, self._broken)
        connection = self._connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {**self._headers, **({"content-type": "application/json"} if payload else {})}
            connection.request(method, f"{path}?{urlencode(query)}" if query else path, payload, headers)
            if self._broken:  # it was given up while this connected
                raise ConnectionAbortedError(self._broken)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:  # it hangs: one more call would do so, too
            self.give_up(f"no answer to {path} within {timeout_s:.0f} s")
            raise self._failure(method, path, self._broken) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(method, path, self._broken or str(error) or type(error).__name__) from error
        finally:
            connection.close()
            self._connection = None
        if response.status != 200:
            raise self._failure(method, path, f"{response.status} {_message(content)}")
        if "json" not in response.getheader("content-type", ""):
            return content.decode(errors="replace")
        try:
            return json.loads(content)
        except ValueError as error:
            raise self._failure(method, path, f"no JSON: {_message(content)}") from error

    def answers(self, path: str) -> bool:
        """Whether ``GET path`` answers with 200 in time."""
        connection = http.client.HTTPConnection(*self._address, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def give_up(self, reason: str) -> None:
        """Break the call under way and every later one; on any thread."""
        self._broken = self._broken or reason
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it has just ended
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _failure(self, method: str, path: str, why: str) -> errors.SyncError:
        return errors.SyncError(f"{self.url} {method} {path}: {why}", phase="load", hint="see the server's own log")


def _message(content: bytes) -> str:
    try:
        found = json.loads(content)
        return str(found.get("error", found.get("detail", found)) if isinstance(found, dict) else found)[:500]
    except ValueError:
        return content[:500].decode(errors="replace")


class Health:
    """A thread that gives the server up when it is gone or does not answer.

    :param is_gone: returns why the server is gone, or an empty text.
    :param watched: seconds for which each path may go without an answer.
    :param while_loading: those that the server answers during a load, too.
    :ivar reason: why it was given up; empty: it was not.
    """

    def __init__(
        self,
        server: EngineServer,
        is_gone: Callable[[], str],
        watched: Mapping[str, float],
        *,
        while_loading: Collection[str],
    ) -> None:
        self._server = server
        self._is_gone = is_gone
        self._watched = watched
        self._while_loading = while_loading
        self._is_loading = False
        self._over = threading.Event()
        self.reason = ""
        self._thread = threading.Thread(target=self._watch, name="replicas-engine-health", daemon=True)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(len(self._watched) * HEALTH_TIMEOUT_S + HEALTH_EVERY_S)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A load is under way in the block; its calls have deadlines of their own."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def _watch(self) -> None:
        answered = dict.fromkeys(self._watched, time.monotonic())
        clock = PauseClock(time.monotonic() + HEALTH_EVERY_S)

        def look(next_s: float) -> float:
            """Note the end of a wait, and how long the next one takes at most."""
            now = time.monotonic()
            if clock.look(now):  # this process was paused, and perhaps the server with it
                answered.update(dict.fromkeys(answered, now))
            clock.due = now + next_s
            return now

        while not self._over.wait(HEALTH_EVERY_S):
            gone = self._is_gone()
            for path, patience_s in self._watched.items():
                look(2 * HEALTH_TIMEOUT_S)  # to connect, and to be answered
                exempt = self._is_loading and path not in self._while_loading
                good = exempt or self._server.answers(path)
                now = look(HEALTH_EVERY_S)
                if good:
                    answered[path] = now
                elif now - answered[path] > patience_s:
                    gone = gone or f"the server has not answered {path} for {now - answered[path]:.0f} s"
            if gone:
                self.reason = gone
                self._server.give_up(gone)
                return
