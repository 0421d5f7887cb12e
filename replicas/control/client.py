"""Send requests to a running supervisor: by its Unix socket, or TCP with the token.

When a supervisor is dead, any process can take its port, and an endpoint file can name
any address. So for a local address the client first asks the kernel which user's
process listens, and sends the token only to users that may have it.

Each request has its own connection. Each read has a deadline. The supervisor keeps a
long answer alive (:mod:`replicas.control.orders_api`), so silence always means that the
supervisor is gone.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from replicas.common.decoding import MALFORMED
from replicas.control.commands import ORDERS, RUN_HEADER, TOKEN_HEADER, Answer, Order, Problem
from replicas.errors import Disconnected, ReplicasError, UsageError
from replicas.linux.processes import is_stopped, start_time
from replicas.linux.sockets import describe_owner, listener_uids, may_be_foreign, peer_uid, reachable
from replicas.status import RunStatus
from replicas.telemetry.events import Record, decode
from replicas.trust.way import Way, way_to

_T = TypeVar("_T")
_MAX_ANSWER_NBYTES = 64 * 2**20
_TIMEOUT_S = 5.0
_SILENCE_S = 20.0
"""Seconds, several beats of the server; a server that is silent for longer is gone."""
_OTHER_TOKEN = "give an operator's token with --token-file, or none to read state and events, which are public"
_PATHS = {kind: path for path, kind in ORDERS.items()}


class Client:
    """Requests to one supervisor, one at a time.

    :param where: ``host:port`` of the control port, or ``unix:PATH`` of the run's
        socket.
    :param token: a join token of the run, for orders and logs (an operator's) over TCP,
        and to verify the control port if it is not on loopback.
    :param pid: the supervisor's, if known: used to explain why it does not answer.
    :param run: the expected run's name, if known: another run then refuses orders.
    :param owners: users allowed to own a supervisor on this machine; None: any.
    :param token_owners: users on this machine to whom the token may be shown; None:
        any.
    :param timeout_s: deadline of each read, in seconds; default 5.
    :raises UsageError: ``where`` has neither form, or is not on loopback and the token
        does not say how to verify the port.
    """

    def __init__(
        self,
        where: str,
        *,
        token: str = "",
        pid: int = 0,
        run: str = "",
        owners: frozenset[int] | None = None,
        token_owners: frozenset[int] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Check the address ``where`` (``host:port``, or ``unix:PATH``) and the token;
        connect to nothing.

        :param pid: the supervisor's, if known: used to explain why it does not answer.
        :param run: the expected run's name, if known: another run then refuses orders.
        :param owners: users allowed to own a supervisor on this machine; None: any.
        :param token_owners: users here to whom the token may be shown; None: any.
        :param timeout_s: limit of each read, in seconds.
        :raises UsageError: the address or the token cannot be used.
        """
        self.where = where
        self._host, self._port = ("", 0) if where.startswith("unix:") else _host_and_port(where)
        self._pid = pid
        self.run = run
        self._way: Way | None = way_to(where, token) if self._host else None
        self._owners = owners
        self._token_owners = token_owners
        self._withheld: UsageError | None = None
        self._timeout_s = timeout_s

    def status(self) -> RunStatus:
        """Ask for ``GET /status``, and return the run's status; proxies of the
        environment are not used.

        :raises Disconnected: no answer, or not from a supervisor of replicas.
        """
        with self._asked("GET", "/status") as response:
            return self._read(response, "GET /status", RunStatus)

    def order(self, order: Order, *, wait: bool = True) -> Answer:
        """Send an order, and return the answer.

        :param wait: block until it is carried out; False: until it has begun (the
            answer's ``done`` is then False).
        :raises ReplicasError: the order was refused, or ended by this error.
        :raises Disconnected: no answer, or the connection broke; the order may have
            been carried out.
        """
        path = _PATHS[type(order)] + ("" if wait else "?wait=0")
        body = msgspec.json.encode(order)
        with self._asked("POST", path, body, silence_s=_SILENCE_S) as response:
            answer = self._read(response, f"POST {path}", Answer)
        if answer.error is not None:
            raise self._refused(response.status, answer.error)
        return answer

    def events(self, after: int, *, follow: bool = True) -> Iterator[Record]:
        """Request ``GET /events``; yield the records numbered above ``after``. Events
        of a newer release, which are not known here, are left out.

        :param follow: continue, blocking, with new ones until the run ends.
        :raises Disconnected: no answer, or the connection broke.
        """
        for line in self._lines(f"/events?{urlencode({'follow': int(follow), 'after': after})}"):
            if line.startswith(b"data: "):
                with contextlib.suppress(*MALFORMED):
                    yield decode(line[6:])

    def logs(self, query: Mapping[str, str]) -> Iterator[bytes]:
        """Request ``GET /logs``; yield its lines of JSON. Empty ones are only signs of
        life.

        :param query: the parameters of the page, such as ``{"target": "rollout/0"}``.
        :raises UsageError: the client has no access, or there are no such logs.
        :raises Disconnected: no answer, or the connection broke.
        """
        return self._lines(f"/logs?{urlencode({**query, 'json': '1'})}")

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: bytes | None = None, *, silence_s: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Context manager: connect, send a request, and yield its response; close the
        connection at the end.

        :param silence_s: seconds that each read of the response may take; default:
            those of the client's other reads.
        :raises Disconnected: the connection fails, also while the block reads.
        :raises UsageError: the run does not accept the token, or must not see it.
        """
        connection = http.client.HTTPConnection(self._host or "localhost", self._port or None, timeout=self._timeout_s)
        headers = {"Accept": "application/json"}
        if self.run:
            headers[RUN_HEADER] = quote(self.run, safe="")
        try:
            if self._host:
                connection.connect()
            else:
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(self._timeout_s)
                with reachable(Path(self.where.removeprefix("unix:"))) as name:
                    connection.sock.connect(name)
            headers |= self._credentials(connection.sock)
            if self._way is not None and self._way.context is not None:
                connection.sock = self._way.context.wrap_socket(connection.sock, server_hostname=self._way.host)
            if self._withheld is not None and method == "POST":
                raise self._withheld
            with contextlib.suppress(BrokenPipeError):  # refused before the body was sent: the answer says why
                connection.request(method, path, body=body, headers=headers)
            with connection.getresponse() as response:
                if silence_s is not None and connection.sock is not None:
                    connection.sock.settimeout(silence_s)
                if why := response.headers.get(TOKEN_HEADER):
                    raise UsageError(f"{self.where} does not accept the token: {why}", hint=_OTHER_TOKEN)
                yield response
        except (OSError, http.client.HTTPException) as error:
            if self._way is not None and (refusal := self._way.refusal(error)):
                raise refusal from error
            raise Disconnected(
                f"cannot connect to the run at {self.where} ({_why(error)})", hint=self._why_silent()
            ) from error
        finally:
            connection.close()

    def _credentials(self, connection: socket.socket) -> dict[str, str]:
        """Ask the kernel who is the peer; return the Authorization header if the peer
        needs the token and may have it, else no header.

        At a Unix socket the kernel identifies the caller, so no token is needed. If the
        peer may not have the token, the reason is stored in ``_withheld``: an order
        then raises that error before it is sent.

        :raises Disconnected: the peer is another user's process, not the supervisor.
        """
        local = not self._host
        uids = frozenset({peer_uid(connection)}) if local else listener_uids(connection)
        if may_be_foreign(uids, self._owners):
            raise Disconnected(f"{self.where} {describe_owner(uids)}: nothing was sent to it", hint=self._why_silent())
        if self._way is None or not self._way.headers:
            return {}
        if may_be_foreign(uids, self._token_owners):
            text = f"{self.where} {describe_owner(uids)}: the token, which is another user's, was not shown to it"
            self._withheld = UsageError(text, hint="name the token with --token-file, if that port may see it")
            return {}
        return self._way.headers

    def _why_silent(self) -> str:
        """Return a hint why the supervisor does not answer: its process is dead,
        stopped, or busy, as far as its pid is known."""
        if not self._pid:
            return "check that the supervisor is still running"
        if start_time(self._pid) is None:
            return f"its supervisor, process {self._pid}, is dead; start it again with: replicas run CONFIG"
        return f"its supervisor, process {self._pid}, is {'stopped' if is_stopped(self._pid) else 'alive, but busy'}"

    def _read(self, response: http.client.HTTPResponse, what: str, kind: type[_T]) -> _T:
        """Read the response's body, of 64 MiB at most, and return it as a ``kind``.

        :param what: the request, for the error.
        :raises Disconnected: the body is not JSON of that type.
        """
        body = response.read(_MAX_ANSWER_NBYTES)
        try:
            return msgspec.json.decode(body, type=kind)
        except MALFORMED as error:
            text = f"{self.where} answered {what} with HTTP status {response.status}: {error}"
            raise Disconnected(text, hint="check that a supervisor of the same release listens there") from error

    def _refused(self, code: int, problem: Problem) -> ReplicasError:
        """Return (do not raise) the error for a refused request: that the caller has no
        access, or the error in the answer.

        :param code: the HTTP status. :param problem: the error as data.
        """
        if code in (401, 403):
            return self._withheld or UsageError(
                f"{self.where} refuses orders from here: {problem.message}",
                hint="give --token-file, or run this as the user of the supervisor, on its machine",
            )
        return problem.exception()

    def _lines(self, path: str) -> Iterator[bytes]:
        """Request the page ``path``, and yield its lines as they come, without their
        line breaks. An answer with another status than 200 is raised as its error."""
        with self._asked("GET", path, silence_s=_SILENCE_S) as response:
            if response.status != 200:
                answer = self._read(response, f"GET {path.partition('?')[0]}", Answer)
                if answer.error is None:
                    raise Disconnected(f"{self.where} answered with HTTP status {response.status}")
                raise self._refused(response.status, answer.error)
            while line := response.readline():
                yield line.rstrip(b"\r\n")


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a text ``HOST:PORT``; resolve
    no name. Raise UsageError if it has another form, or no port from 1 to 65535."""
    host, _, port = endpoint.rpartition(":")
    if not host or set(host) & set(" /?#@\\") or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        _, url, rest = endpoint.partition("://")
        plain = rest.rpartition("@")[2].partition("/")[0]
        hint = f'write "{plain}"' if url and ":" in plain else 'for example "127.0.0.1:9477"'
        raise UsageError(f'"{endpoint}" is not HOST:PORT', hint=hint)
    return host.strip("[]"), int(port)


def _why(error: Exception) -> str:
    """Return the reason why a connection failed, such as ``connection refused``."""
    said = error.strerror if isinstance(error, OSError) else ""
    return said.lower() if said else str(error) or type(error).__name__
