"""Common parts of the commands that start an inference server and follow it: options, a
reserved port, a folder for the server's files, and the server as a child that dies with
this process."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from replicas import environ, errors
from replicas.common.reason import Reason
from replicas.engine import PauseMode, VerifyLoad
from replicas.engine.following import MIN_SERVING
from replicas.linux.processes import descendants, die_with_parent, is_below, signal_each
from replicas.linux.scarce import naming_limits

__all__ = [
    "PLAIN_HTTP",
    "Child",
    "add_following",
    "child",
    "follow_options",
    "refuse_options",
    "reserve_port",
    "run_command",
    "scratch_folder",
    "stopped_by_signals",
    "url_of",
]

COMMANDS = ("serve", "follow")
PLAIN_HTTP = (
    "gate, follower, router and probes speak plain HTTP on a TCP port",
    "bind the server to loopback or a private network, and put a proxy with TLS in front",
)
"""For :func:`refuse_options`: why a server may have no TLS of its own, and what to
do."""
KILLED_S = 5.0
STOP_TIMEOUT_S = 6.0
"""Shorter than a group's default ``stop_timeout``: a run fails if its supervisor has to
kill processes at its end."""
SCRATCH_MAX = 107 - len("/sglang-0123456789/00000000-0000-0000-0000-000000000000")
"""Longest path of a folder in which the paths of servers' Unix sockets still fit."""


def stopped_by_signals() -> threading.Event:
    """Replace the handlers of SIGTERM and SIGINT; return the event that they set from
    now on. Call on the main thread."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def url_of(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens on ``host``:
    loopback if that is a wildcard address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_command(
    package: str,
    server: str,
    arguments: Sequence[str] | None,
    serve: Callable[[argparse.Namespace, Sequence[str]], None],
    follow: Callable[[argparse.Namespace], None],
    *,
    engine_timeout_s: float,
    modes: Sequence[PauseMode] = get_args(PauseMode),
) -> int:
    """Run ``python -m PACKAGE serve MODEL [options] | follow URL [options]``; return
    the exit code: 1 after an error of this package, 2 if the command makes no sense.

    :param package: the module that is run. :param server: the command of the server,
        which gets all options of ``serve`` that are not ours.
    :param arguments: of the command line; default: those of this process.
    :param serve: starts the server and follows; gets our options and the others.
    :param follow: follows a server that runs already.
    :param engine_timeout_s: default of ``--engine-timeout``.
    :param modes: the pause modes that the server has; the first is the default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) < 2 or given[0] not in COMMANDS or given[1].startswith("-"):
        print(f"usage: python -m {package} serve MODEL [options of {server}] | follow URL", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog=f"python -m {package} {given[0]}", allow_abbrev=False)
    if given[0] == "serve":
        parser.add_argument("model", metavar="MODEL", help="the model's folder, or its name on the hub")
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=0, help="plus the replica's index; default: a free one")
    else:
        parser.add_argument("url", metavar="URL", help="http://HOST:PORT of a server on this machine")
    add_following(parser, engine_timeout_s, modes)
    parser.add_argument("--api-key", default="", help="the server's API key")
    options, rest = parser.parse_known_args(given[1:])
    if given[0] == "follow" and rest:
        parser.error(f"unknown options: {' '.join(rest)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        if given[0] == "serve":
            serve(options, rest)
        else:
            follow(options)
    except errors.ReplicasError as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 1
    return 0


def follow_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments for an integration's ``follow``, by name: ``mode``,
    ``every``, ``min_serving``, ``verify_load``, ``complete`` and ``engine_timeout``.

    :param options: what a parser with the options of :func:`add_following` has read.
    """
    return {
        "mode": options.pause_mode,
        "every": options.every,
        "min_serving": options.min_serving,
        "verify_load": options.verify_load,
        "complete": not options.partial,
        "engine_timeout": options.engine_timeout,
    }


def refuse_options(rest: Sequence[str], refused: Mapping[str, tuple[str, str]]) -> None:
    """Raise UsageError if an option of the server is one that ``serve`` cannot allow.

    :param rest: options for the server's own command.
    :param refused: beginning of an option: (why it is not supported, what to do).
    """
    for option in rest:
        name = option.partition("=")[0].replace("_", "-")
        for beginning, (why, hint) in refused.items():
            if name.startswith(beginning):
                raise errors.UsageError(f"serve: {name} is not supported: {why}", hint=hint)


def add_following(
    parser: argparse.ArgumentParser, engine_timeout_s: float, modes: Sequence[PauseMode] = get_args(PauseMode)
) -> None:
    """Add the options of a command that follows a channel to the parser.

    :param engine_timeout_s: default of ``--engine-timeout``.
    :param modes: the pause modes that the server has; the first is the default.
    """
    parser.add_argument("--channel", default="policy", help="the channel to follow (default: policy)")
    parser.add_argument("--pause-mode", choices=modes, default=modes[0])
    parser.add_argument("--every", type=int, default=1, help="load every n-th version at most")
    parser.add_argument(
        "--min-serving",
        type=float,
        default=MIN_SERVING,
        help="the least share of the time in which the server serves (default: %(default)g)",
    )
    parser.add_argument(
        "--verify-load",
        choices=get_args(VerifyLoad),
        default="first",
        help="when the engine's tensors are compared with the version (default: %(default)s)",
    )
    parser.add_argument("--partial", action="store_true", help="versions may lack parameters of the model")
    parser.add_argument(
        "--engine-timeout",
        type=float,
        default=engine_timeout_s,
        help="seconds for which the engine may answer nothing while it is at work (default: %(default)g)",
    )


@contextlib.contextmanager
def reserve_port(host: str, port: int) -> Iterator[int]:
    """Context manager: choose the port to serve on, and yield it.

    It is ``port + i`` for replica i of a supervised group. For port 0 it is a free port
    of ``host``, reserved in the block by a socket that does not listen. Servers, which
    set SO_REUSEADDR, can still bind to the port; the kernel gives it to no other
    process meanwhile.
    """
    if port:
        yield port + _supervised_index(environ.read())
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        found: int = holder.getsockname()[1]
        yield found


def _supervised_index(found: environ.Environment) -> int:
    """Return the index of this replica if a supervisor has started it on this host,
    else 0: a replica started otherwise is expected to have its own network address, as
    in a pod.

    :param found: the ``REPLICAS_*`` variables of this process.
    """
    started_here = environ.REPLICAS in os.environ
    return found.replica if started_here and isinstance(found.replica, int) else 0


def _remove(folder: Path) -> None:
    """Remove the folder and its content; ignore errors."""
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder(kind: str, remove: Callable[[Path], None] = _remove) -> Iterator[Path]:
    """Context manager: create a folder for sockets and files that a server creates and
    does not remove; remove it on leaving.

    A replica has the same folder in each generation, so the next start removes what a
    killed follower left.

    :param kind: kind of server: the beginning of the folder's name.
    :param remove: removes the folder, and other files named after it.
    """
    found = environ.read()
    state = os.environ.get(environ.STATE_ID) or secrets.token_hex(8)
    name = hashlib.sha256(f"{state}/{found.group}/{found.replica}".encode()).hexdigest()[:10]
    base = tempfile.gettempdir()
    folder = Path(base if len(base) <= SCRATCH_MAX else "/tmp") / f"{kind}-{name}"
    remove(folder)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        remove(folder)


class Child:
    """A server that this process has started.

    :ivar process: its first process.
    """

    def __init__(self, process: subprocess.Popen[bytes], kind: str) -> None:
        """Take ownership of a started process; ``kind`` is the server's name in
        errors."""
        self.process, self._kind = process, kind
        self.pid = process.pid

    def reason_gone(self) -> Reason | None:
        """Return how the server ended, or None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self._kind}'s server ended with {ending}"

    def end(self) -> None:
        """Send SIGTERM to the server's first process, and block until it has ended;
        after 6 s kill it and all processes below it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it still waits for its requests
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server and all processes below it; block 5 s at most for
        its end."""
        signal_each(descendants(self.pid), signal.SIGKILL, lambda pid: is_below(pid, self.pid))
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a system call
            self.process.wait(KILLED_S)


@contextlib.contextmanager
def child(kind: str, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[Child]:
    """Context manager: start a server as a child that dies with this process; on
    leaving end it (:meth:`Child.end`). After an error of this package in the block kill
    it first: it is gone or frozen, and would wait for its own requests.

    :param kind: the server's name in errors.
    :param command: program and arguments.
    :param variables: its whole environment.
    """
    parent = os.getpid()
    with naming_limits():
        process = subprocess.Popen(command, env=dict(variables), preexec_fn=lambda: die_with_parent(parent))
    server = Child(process, kind)
    try:
        yield server
    except errors.ReplicasError:
        server.kill()
        raise
    finally:
        server.end()
