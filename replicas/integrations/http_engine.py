"""The base of engines that are controlled over HTTP.

Such a server has an API process and an engine behind it, which answers between two
steps only, and not during a load. So :mod:`replicas.integrations.engine_health` watches
both: ``timeout_s`` of a call counts only while the engine's processes are idle. When a
server is given up its connections are broken, so that no call hangs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicas import errors
from replicas.common.reason import Reason
from replicas.engine import Engine
from replicas.integrations import engine_health
from replicas.integrations.engine_health import EngineHealth, ProcessorTime
from replicas.integrations.engine_server import API, EngineServer, RequestRefused
from replicas.integrations.gate import READYZ, SHUT

__all__ = ["ENGINE_TIMEOUT_S", "HttpEngine"]

START_BEAT_S = 0.2
ENGINE_TIMEOUT_S = 600.0
BACKSTOP_S = 60.0


class HttpEngine(Engine):
    """Controls one inference server over HTTP, and watches its health; base class of
    the engines.

    :param url: ``http://HOST:PORT``, and perhaps a prefix of its paths.
    :param secret: the gate's secret, if the server has one.
    :param api_key: the server's API key, if it has one.
    :param public_url: the server's address for routers; default: ``url``.
    :param is_gone: returns why the server is gone, or None.
    :param engine_timeout_s: how long the engine may stay silent while its processes are
        at work (it compiles), or cannot be seen from here.
    :param process: the pid of the server's API process; None: the process that listens
        on the port, if the address is this machine's loopback.
    :cvar api: a path that the server's API process answers without the engine.
    :cvar watched: seconds for which a path of the server may go unanswered while its
        processes are idle.
    :cvar titles: prefix of the titles of the engine's processes, none of which may end:
        not every server notices that. Empty: the server itself notices.
    """

    api: str = API
    titles: str = ""
    watched: Mapping[str, float] = {API: 15.0}

    def __init__(
        self,
        url: str,
        *,
        secret: str = "",
        api_key: str = "",
        public_url: str | None = None,
        is_gone: Callable[[], Reason | None] = lambda: None,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        process: int | None = None,
    ) -> None:
        """Store the server's address and secrets; send nothing before
        :meth:`wait_until_up`.

        :param secret: the secret of the server's gate, a middleware that refuses
            control requests without it; empty: the server has no gate.
        :param public_url: the server's address for routers; default: ``url``.
        :param is_gone: returns why the server is gone, or None.
        :param engine_timeout_s: how many seconds a busy engine may stay silent.
        :param process: pid of the server's API process; None: found by its port.
        """
        if not engine_timeout_s > 0:
            text = f"follow: engine_timeout must be above 0, not {engine_timeout_s}"
            raise errors.UsageError(text, hint="seconds for which a busy engine may stay silent")
        self.url = public_url or url
        self.server = EngineServer(url, secret, api_key, self.api)
        self.has_gate = bool(secret)
        self._is_gone, self._engine_timeout_s, self._process = is_gone, engine_timeout_s, process
        self._health: EngineHealth | None = None

    def wait_until_up(self, timeout_s: float) -> None:
        """Block until the server answers; check that it has its gate (the middleware
        that refuses requests before the first version), read its identity, and start
        the threads that watch its health.

        :raises replicas.errors.SyncError: it is gone, or does not answer within
            ``timeout_s``.
        :raises replicas.errors.UsageError: it has no gate in place, or cannot be
            followed.
        """
        until = time.monotonic() + timeout_s
        while not self.server.answers(self.api):
            if reason := self.health():
                raise self.server_lost_error(reason)
            if time.monotonic() > until:
                raise self.server_lost_error(f"{self.server.url} was not healthy within {timeout_s:.0f} s")
            time.sleep(START_BEAT_S)
        if self.has_gate:
            self._prove_gate()
        self.read_identity()
        process = self._process
        if process is None and self.server.local_port is not None:
            process = engine_health.serving_process(self.server.local_port)

        def spent() -> ProcessorTime | None:
            """Return the processor time that the server's processes have used, or None
            if unknown."""
            return None if process is None else engine_health.processor_time(process)

        ended = engine_health.watch_processes(process, self.titles) if process and self.titles else None

        def is_gone() -> Reason | None:
            """Return why the server or one of its processes is gone, or None."""
            return self._is_gone() or (ended() if ended is not None else None)

        limit_s = self._engine_timeout_s
        self._health = EngineHealth(
            self.server, is_gone, self.watched, while_loading=(self.api,), limit_s=limit_s, spent=spent
        )
        self._health.__enter__()

    def _prove_gate(self) -> None:
        """Send a request without the secret, and check that the server's gate (a
        middleware), which is shut, refuses it. A new release may start a front end
        without the gate.

        :raises replicas.errors.UsageError: the answer is not that of the shut gate.
        """
        try:
            EngineServer(self.server.url).call("GET", READYZ)
        except RequestRefused as refused:
            if SHUT in refused.message:
                return
        raise errors.UsageError(
            f"{self.server.url} serves without the gate: its control routes are open, and it answers before a version",
            hint="start a release of the server that this package knows, with its front end in Python",
        )

    def read_identity(self) -> None:
        """Read the server's ``name`` and number of ``workers`` from the server. A
        subclass does so; here nothing is read, and both keep their defaults.

        :raises replicas.errors.UsageError: the server cannot be followed.
        """

    def health(self) -> str:
        """Return why the server is gone, or an empty text while it is not, as the
        threads that watch it have found so far; do not wait."""
        watched = "" if self._health is None else self._health.reason
        return watched or self.server.broken or ((not self._health and self._is_gone()) or "")

    def abort(self, reason: str) -> None:
        """Break the connection of the call that is under way; it and every later call
        raise SyncError. Any thread may call this.

        :param reason: the text of these errors.
        """
        self.server.give_up(reason)

    def close(self) -> None:
        """Stop the threads of the health watch; the server keeps running."""
        if self._health is not None:
            self._health.__exit__(None, None, None)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: dict[str, str] | None = None,
        timeout_s: float,
        serving: bool = False,
    ) -> Any:
        """Send one control request by POST and wait; return the decoded answer: JSON,
        or text.

        :param body: sent as JSON. :param query: parameters to append to the path.
        :param timeout_s: seconds for which the engine may be idle before it answers;
            one at work gets :meth:`longest_s`. Then the server is given up.
        :param serving: whether the engine answers other requests meanwhile; False: the
            health watch expects no answers from it.
        :raises RequestRefused: the server answered with an error.
        :raises replicas.errors.SyncError: the server is gone, or was given up.
        """
        with contextlib.ExitStack() as stack:
            if self._health is not None:
                stack.enter_context(self._health.calling(path, timeout_s))
                if not serving:
                    stack.enter_context(self._health.loading())
            return self.server.call("POST", path, body, query=query, timeout_s=self.longest_s(timeout_s))

    def longest_s(self, timeout_s: float = 0.0) -> float:
        """Return the seconds after which a call is given up even if the server is at
        work: 60 more than the larger of ``timeout_s`` and the engine's timeout."""
        return max(timeout_s, self._engine_timeout_s) + BACKSTOP_S

    def raise_if_dying(self) -> None:
        """Find out, after the server has refused a request, whether its engine is dead:
        block until the server answers as healthy, and return.

        :raises replicas.errors.SyncError: the server reports a dead engine, refuses
            connections, or is given up by its health watch.
        """
        while (answer := self.server.check_path(self.api)) != "good":
            if reason := self.health():
                raise self.server_lost_error(reason)
            if answer == "dead":
                raise self.server_lost_error("the server died while it checked a new version")
            time.sleep(START_BEAT_S)

    def server_lost_error(self, reason: str) -> errors.SyncError:
        """Return a SyncError with this reason, for a server that is gone; raise
        nothing."""
        return errors.SyncError(reason, phase="load", hint="see the server's own log")
