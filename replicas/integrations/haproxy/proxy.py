"""The process of HAProxy, and the commands of its runtime API."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import BinaryIO
from urllib.parse import urlsplit

from replicas import errors
from replicas.common.background_queue import BackgroundQueue
from replicas.common.foreign import one_line
from replicas.common.reason import Reason
from replicas.integrations.engine_server import host_and_port
from replicas.integrations.haproxy.configuration import BACKENDS, TABLES, Options, text_of
from replicas.integrations.haproxy.routes import WEIGHT_MAX, Routes, Server
from replicas.linux.processes import die_with_parent
from replicas.linux.scarce import naming_limits

logger = logging.getLogger("replicas.integrations.haproxy")

_ASK_TIMEOUT_S = 5.0
_AGAIN_S = 30.0
"""Time until a server that could not be added is tried again."""
_PROMPT = b"\n> "


class Haproxy:
    """A child process ``haproxy`` that leads requests to servers by :class:`Routes`. It
    runs while this context manager is entered.

    :param host: and :param port: where it listens; 0: any free port.
    :ivar url: where it listens.
    :raises replicas.errors.UsageError: there is no program ``haproxy``, it refuses the
        options, or the address cannot be bound.
    """

    def __init__(self, host: str, port: int, options: Options = Options()) -> None:
        """Bind the listening socket, which :attr:`url` then names.

        Start haproxy only on entering.

        :param host: where it listens. :param port: likewise; 0: any free port.
        :param options: of haproxy.
        :raises replicas.errors.UsageError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
        except OSError as error:
            self._listener.close()
            raise errors.UsageError(f"{host}:{port}: {error}", hint="name another --host or --port") from error
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._listener.getsockname()[1]}"
        self._options = options
        self._places: dict[str, int] = {}
        self._free = deque(range(1, options.servers + 1))
        """Places without a server, those that have been free for longest first: clients
        may still have connections to the last server of a place."""
        self._states: dict[tuple[str, int], int] = {}
        self._backends: dict[int, int] = {}
        self._refused: dict[str, float] = {}
        """When to try again to add a server."""
        self._lookups: dict[str, Future[tuple[str, int]]] = {}
        self._names = BackgroundQueue("replicas-haproxy-names", _look_up, lambda _: None)
        """Looks up the names of servers, which may take long."""
        self._lost: Reason | None = None
        self._tables: dict[str, Mapping[str, object]] = {}

    def __enter__(self) -> Haproxy:
        """Start haproxy, and block until it answers commands; it has no servers yet.
        After an error nothing is left running.

        :raises replicas.errors.UsageError: it is not installed, or refuses the options.
        :raises OSError: it does not answer.
        """
        with ExitStack() as stack:
            stack.enter_context(self._listener)
            self._tables_at = {table: stack.enter_context(_memory(table)) for table in TABLES}
            ours, theirs = (stack.enter_context(one) for one in socket.socketpair())
            self._process = self._start(theirs)
            stack.callback(self._process.wait)
            stack.callback(self._process.kill)
            self._socket, other = (stack.enter_context(one) for one in socket.socketpair())
            socket.send_fds(ours, [b"-"], [other.fileno()])  # haproxy accepts this as a connection
            other.close()
            self._socket.settimeout(_ASK_TIMEOUT_S)
            self._ask("prompt")
            self.bring_to(Routes(frozenset()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill haproxy, wait for its end, and close the sockets and files."""
        self._stack.close()

    def _start(self, connections: socket.socket) -> subprocess.Popen[bytes]:
        """Check the configuration by a first run of haproxy (60 s at most), then start
        the process and return it; it dies with this one. All files that it reads are in
        memory.

        :param connections: socket over which it is sent connected sockets, for commands
            to its runtime API.
        :raises UsageError: it is not installed, or refuses the configuration.
        """
        paths = {table: _path(file) for table, file in self._tables_at.items()}
        text = text_of(self._options, paths, self._listener.fileno(), connections.fileno())
        with _memory("haproxy.cfg") as config:
            config.write(text.encode())
            config.flush()
            fds = [self._listener.fileno(), connections.fileno(), config.fileno()]
            fds += [file.fileno() for file in self._tables_at.values()]
            files, parent = ["-f", _path(config)], os.getpid()
            try:
                with naming_limits():
                    checked = subprocess.run(
                        ["haproxy", "-c", *files], pass_fds=fds, capture_output=True, text=True, timeout=60
                    )
                    if checked.returncode:
                        raise errors.UsageError("haproxy refuses its options", hint=one_line(checked.stderr))
                    return subprocess.Popen(  # -q: without a line for each server that changes
                        ["haproxy", "-db", "-q", *files], pass_fds=fds, preexec_fn=lambda: die_with_parent(parent)
                    )
            except FileNotFoundError as error:
                hint = "install it (Debian: apt-get install haproxy)"
                raise errors.UsageError("there is no program haproxy", hint=hint) from error

    def is_gone(self) -> Reason | None:
        """Return how haproxy has ended, or why it is given up (since a :meth:`bring_to`
        has failed), or None. Do not wait."""
        code = self._process.poll()
        return self._lost if code is None else f"haproxy ended with {code}"

    def bring_to(self, routes: Routes) -> None:
        """Send haproxy the commands by which it leads requests by these routes from now
        on; block until it has answered each.

        :raises OSError: haproxy does not answer, or refuses a command. It may have
            carried out a part, so :meth:`is_gone` then says that it is lost.
        """
        try:
            self._ask("show version", silent=False)  # it notices a haproxy that hangs, and keeps the connection alive
            servers = {server.url: server for server in sorted(routes.servers)}
            for url in self._lookups.keys() - servers.keys():
                del self._lookups[url]  # its answer would be old when the server comes back
            for url in sorted(self._places.keys() - servers.keys()):
                self._remove(url)
            self._lead(routes, servers)
            added = [self._add(url) for url in sorted(servers.keys() - self._places.keys())]
            if any(added):
                self._lead(routes, servers)
        except OSError as error:
            self._lost = f"haproxy does not take commands: {error}"
            raise

    def _lead(self, routes: Routes, servers: Mapping[str, Server]) -> None:
        """Send haproxy the weight and state of each server that has a place (its number
        in all backends), and the tables from labels and versions to backends.

        :param routes: has the weights and labels.
        :param servers: the servers of ``routes`` by URL; those without a place get no
            requests yet.
        """
        placed = {self._places[url]: server for url, server in servers.items() if url in self._places}
        self._choose_backends({server.version for server in placed.values()})
        wanted = {("any", place): routes.weights[server] for place, server in placed.items()}
        for place, server in placed.items():
            if server.version in self._backends:
                wanted[f"version_{self._backends[server.version]}", place] = WEIGHT_MAX
        self._set_states(wanted)
        self._fill("versions", {version: f"version_{number}" for version, number in self._backends.items()})
        self._fill("labels", routes.labels)
        served = " and ".join(map(str, sorted(self._backends))) or "none"
        numbers = {name: getattr(routes, name) for name in ("oldest", "settled", "newest", "current")}
        self._fill("state", numbers | {"served": served})

    def _remove(self, url: str) -> None:
        """Disable the server of this URL in haproxy, and free its place (its number in
        all backends); answers that it has begun go on."""
        place = self._places.pop(url)
        self._set_states({where: weight for where, weight in self._states.items() if where[1] != place})
        self._free.append(place)
        logger.info("removed %s", url)

    def _add(self, url: str) -> bool:
        """Give the server of this URL a free place (its number) in all backends, still
        disabled, unless its name is still being looked up. If that cannot be done, log
        why, and do not try again for 30 s.

        :returns: whether it has a place now.
        :raises OSError: haproxy does not answer, or refuses.
        """
        if self._refused.get(url, 0.0) > (now := time.monotonic()):
            return False
        try:
            found = self._find_address(url)
            if found is None:
                return False
            address, port = found
            if not self._free:
                raise errors.UsageError(f"--servers allows {self._options.servers}")
        except (OSError, UnicodeError, errors.UsageError) as error:
            if url not in self._refused:
                logger.warning("not adding server %s to haproxy: %s", url, error)
            self._refused[url] = now + _AGAIN_S
            return False
        self._refused.pop(url, None)
        place = self._free[0]
        for backend in ("any", *(f"version_{number}" for number in range(BACKENDS))):
            command = f"set server {backend}/s{place} addr {address} port {port}"
            if "change" not in (answer := self._ask(command, silent=False)):
                raise ConnectionError(f"{command!r}: haproxy answers {answer!r}")
        self._places[url] = self._free.popleft()
        logger.info("added %s", url)
        return True

    def _find_address(self, url: str) -> tuple[str, int] | None:
        """Return the numeric address and port of a server; None while a thread looks
        its name up, so ask again.

        :raises UsageError, OSError, UnicodeError: as :func:`_address`.
        """
        try:
            return _address(url, socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name
            pass
        if url not in self._lookups:
            self._lookups[url] = Future()
            self._names.put((url, self._lookups[url]))
        return self._lookups.pop(url).result() if self._lookups[url].done() else None

    def _choose_backends(self, versions: set[int]) -> None:
        """Assign each of the newest 8 of these versions the number of a backend of
        haproxy; those that have one keep it. Send nothing."""
        newest = sorted(versions)[-BACKENDS:]
        kept = {version: number for version, number in self._backends.items() if version in newest}
        free = sorted(set(range(BACKENDS)) - set(kept.values()))
        self._backends = kept | dict(zip([one for one in newest if one not in kept], free, strict=False))

    def _set_states(self, wanted: dict[tuple[str, int], int]) -> None:
        """Send haproxy the weights of these servers, and disable all others.

        :param wanted: weight by (backend's name, server's place in it).
        """
        for backend, place in self._states.keys() - wanted.keys():
            self._ask(f"set server {backend}/s{place} state maint")
        for (backend, place), weight in wanted.items():
            if self._states.get((backend, place)) != weight:
                self._ask(f"set server {backend}/s{place} weight {weight}")
                self._ask(f"set server {backend}/s{place} state ready")
        self._states = wanted

    def _fill(self, table: str, content: Mapping[int, object] | Mapping[str, object]) -> None:
        """Replace the content of one of haproxy's tables (maps) in one step; send
        nothing if it has this content already.

        :param table: name of the table. :param content: value by key.
        """
        wanted = {str(key): value for key, value in content.items()}
        if self._tables.get(table) == wanted:
            return
        path = _path(self._tables_at[table])
        number = self._ask(f"prepare map {path}", silent=False).rpartition(" ")[2]
        if wanted:
            lines = "".join(f"{key} {value}\n" for key, value in wanted.items())
            self._ask(f"add map @{number} {path} <<\n{lines}")
        self._ask(f"commit map @{number} {path}")
        self._tables[table] = wanted

    def _ask(self, command: str, *, silent: bool = True) -> str:
        """Send haproxy a command of its runtime API; wait for the answer, and return
        it.

        :param silent: whether the command succeeds without a text, so that one is an
            error.
        :raises OSError: it was refused, or haproxy did not answer within 5 s.
        """
        self._socket.sendall(f"{command}\n".encode())
        data = b""
        while not data.endswith(_PROMPT):
            more = self._socket.recv(65536)
            if not more:
                raise ConnectionError(f"{command!r}: haproxy closed its runtime API")
            data += more
        # It prompts for each further line of a command, too.
        answer = data.removesuffix(_PROMPT).decode(errors="replace").lstrip("+ ").strip()
        if silent and answer:
            raise ConnectionError(f"{command!r}: haproxy answers {answer!r}")
        return answer


def _look_up(wanted: tuple[str, Future[tuple[str, int]]]) -> None:
    """Look up the name in a URL, and set the future to its address, or to the error."""
    url, found = wanted
    try:
        found.set_result(_address(url))
    except (OSError, UnicodeError, errors.UsageError) as error:
        found.set_exception(error)


def _address(url: str, flags: int = 0) -> tuple[str, int]:
    """Return the numeric address and port of a server; look its name up, which may
    block.

    :param flags: of ``getaddrinfo``; AI_NUMERICHOST: a name is an error.
    :raises UsageError: haproxy cannot send requests there.
    :raises OSError: its name is not known.
    :raises UnicodeError: its name is not valid.
    """
    host, port = host_and_port(url)
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0][4][0])
    if "%" in address:
        raise errors.UsageError(f"{address} is an address of one link alone")
    if path := urlsplit(url).path.strip("/"):
        raise errors.UsageError(f"its paths begin with /{path}, which requests to haproxy do not have")
    return address, port


def _memory(name: str) -> BinaryIO:
    """Return a new open file in memory (a memfd), with nothing on disk.

    :param name: shown in ``/proc`` only.
    """
    return os.fdopen(os.memfd_create(name), "r+b")


def _path(file: BinaryIO) -> str:
    """Return the path of an open file, for a process that has inherited it."""
    return f"/dev/fd/{file.fileno()}"
