"""One URL for many servers: keep the worker list of an existing router in step with a
channel.

``vllm-router`` and ``sglang-router`` spread requests over workers, and retry a request
on another worker when one dies before it has answered. Workers are added by ``POST
/add_worker?url=`` and removed by ``/remove_worker?url=``. This module calls both:

    python -m replicas.integrations.router --channel policy --port 8000 ...

starts vllm-router with its own further options, and keeps its list; :func:`keep` does
so for a router that is already running. A worker is a replica whose rank 0 shows
``info["url"]``, is live and has loaded a version. A worker that loads the next version
stays in the list: its requests in flight are frozen and continued, not cut. A lost
worker is removed, and a restarted router gets the whole list again.

The supervisor's status is read twice a second. Reading needs no token, but off loopback
the token file (``REPLICAS_TOKEN_FILE``) identifies the right control port. (An embedded
coordinator has no status page.)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from urllib.parse import quote

from replicas import environ, errors
from replicas.common.reason import Reason
from replicas.control.client import Client
from replicas.integrations.engine_server import host_and_port
from replicas.linux.processes import die_with_parent
from replicas.linux.scarce import naming_limits
from replicas.status import ChannelStatus, MemberStatus, RunStatus

__all__ = [
    "WorkerList",
    "channel_of",
    "command_line",
    "keep",
    "keep_in_step",
    "main",
    "ready_leaders",
    "stop_by_signal",
]

logger = logging.getLogger("replicas.integrations.router")

POLL_S = 0.5
TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 6.0
"""Shorter than a group's default ``stop_timeout``."""


def channel_of(status: RunStatus, channel: str) -> ChannelStatus:
    """Return the status of a channel.

    :raises replicas.errors.UnknownChannel: the run has no such channel.
    """
    for found in status.channels:
        if found.name == channel:
            return found
    raise errors.UnknownChannel(
        f"the run {status.run} has no channel {channel}",
        hint=f"name one of: {', '.join(sorted(one.name for one in status.channels)) or 'none'}",
    )


def ready_leaders(channel: ChannelStatus) -> list[MemberStatus]:
    """Return those members that a router should list: rank 0 of each target replica
    that has loaded a version and shows its address as ``info["url"]``. Members in the
    state "behind", which serve an older version than the others, are included."""
    return [
        one
        for one in channel.members
        if one.role == "target"
        and one.name.endswith("/0")
        and one.state in ("live", "behind")
        and one.loaded
        and "url" in one.info
    ]


class WorkerList:
    """The list of workers (URLs of inference servers) in one router, by its HTTP
    routes."""

    def __init__(self, url: str) -> None:
        """Check the router's URL, ``http://HOST:PORT``; connect to nothing."""
        self._address = host_and_port(url)

    def bring_to(self, wanted: frozenset[str]) -> None:
        """Have the router remove and add workers until it has exactly the URLs
        ``wanted``.

        :raises OSError: the router does not answer, or refuses; it may have changed a
            part.
        """
        known = self.workers()
        for url in sorted(known - wanted):
            self._request("POST", f"/remove_worker?url={quote(url, safe='')}")
            logger.info("removed server %s from the router", url)
        for url in sorted(wanted - known):
            self._request("POST", f"/add_worker?url={quote(url, safe='')}")
            logger.info("added server %s to the router", url)

    def workers(self) -> frozenset[str]:
        """Ask the router for the URLs of its workers, and return them.

        :raises OSError: the router does not answer, or the server is not a router.
        """
        answer = self._request("GET", "/list_workers")
        try:
            return frozenset(json.loads(answer)["urls"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"GET /list_workers gave no list: {answer[:200].decode(errors='replace')}") from error

    def _request(self, method: str, path: str) -> bytes:
        """Send a request and wait 5 s at most; return the body of the router's answer.
        Raises OSError unless its status is 200."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            content = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ConnectionError(f"{method} {path}: {response.status} {content[:200].decode(errors='replace')}")
        return content


def keep(
    router_url: str,
    channel: str,
    *,
    endpoint: str | None = None,
    stop: threading.Event | None = None,
    is_gone: Callable[[], Reason | None] = lambda: None,
) -> None:
    """Keep a router's worker list in step with a channel, on this thread, until
    ``stop`` is set (None: for ever).

    A router or a run that does not answer is polled again; the router keeps its list
    meanwhile, and also at the end.

    :param router_url: ``http://HOST:PORT`` of the router.
    :param endpoint: ``host:port`` of the run's control port (``REPLICAS_ENDPOINT``).
    :param is_gone: returns why to stop with a SyncError, or None.
    :raises replicas.errors.UsageError: no endpoint is known, or it is not on loopback
        and ``REPLICAS_TOKEN_FILE`` does not identify it.
    :raises replicas.errors.UnknownChannel: the run has no such channel.
    """
    workers = WorkerList(router_url)

    def bring(status: RunStatus) -> None:
        """Have the router add and remove workers until it has those that are ready."""
        workers.bring_to(frozenset(one.info["url"] for one in ready_leaders(channel_of(status, channel))))

    keep_in_step(bring, endpoint=endpoint, stop=stop, is_gone=is_gone)


def keep_in_step(
    bring: Callable[[RunStatus], None],
    *,
    endpoint: str | None,
    stop: threading.Event | None,
    is_gone: Callable[[], Reason | None],
) -> None:
    """Call ``bring`` with the run's status twice a second, on this thread, until
    ``stop`` is set.

    The status is read over HTTP before each call.

    :param bring: brings a router to a status. After an OSError, which is logged, it is
        called again with the next one.
    :param endpoint: ``host:port`` of the run; None: that of the environment.
    :param stop: None: never stop. :param is_gone: called before each status; returns
        why to end with a SyncError, or None.
    :raises replicas.errors.UsageError: no endpoint is known.
    """
    found = environ.read()
    where = endpoint or found.endpoint
    if not where:
        raise errors.UsageError("no endpoint", hint="pass endpoint=..., or set REPLICAS_ENDPOINT")
    token = environ.read_token(found) if found.token_file is not None else ""
    client = Client(where, token=token, token_owners=environ.token_owners(found), timeout_s=TIMEOUT_S)
    ending = threading.Event() if stop is None else stop
    trouble = ""
    while not ending.wait(POLL_S):
        if gone := is_gone():
            raise errors.SyncError(gone, hint="see the router's own log")
        try:
            bring(client.status())
            trouble = ""
        except (OSError, errors.Disconnected) as error:
            if trouble != str(error):
                logger.warning("trying again to update the router's list of servers: %s", error)
            trouble = str(error)


def command_line(module: str) -> argparse.ArgumentParser:
    """Return a parser with the options that the routers' commands share.

    :param module: name of the command's module, for its usage text.
    """
    parser = argparse.ArgumentParser(prog=f"python -m replicas.integrations.{module}", allow_abbrev=False)
    parser.add_argument("--channel", default="policy", help="the channel whose targets are the workers")
    parser.add_argument("--endpoint", help="host:port of the run (default: REPLICAS_ENDPOINT)")
    parser.add_argument("--host", default="127.0.0.1", help="where the router listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    return parser


def stop_by_signal() -> threading.Event:
    """Replace the handlers of SIGTERM and SIGINT, and configure logging to stderr.
    Return the event that the signals set; call on the main thread."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def main(arguments: Sequence[str] | None = None) -> int:
    """Start vllm-router as a child, and keep its list until SIGTERM or SIGINT or its
    end. Then end it, and return 0, or 1 after an error.

    :param arguments: of the command line; default: those of this process. Unknown ones
        are vllm-router's.
    """
    options, rest = command_line("router").parse_known_args(arguments)
    stop = stop_by_signal()
    parent = os.getpid()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", options.host, "--port", str(options.port)]
    with naming_limits():
        process = subprocess.Popen([*command, *rest], preexec_fn=lambda: die_with_parent(parent))

    def is_gone() -> Reason | None:
        """Return how vllm-router has ended, or None while it runs."""
        code = process.poll()
        return None if code is None else f"vllm-router ended with {code}"

    try:
        host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
        keep(f"http://{host}:{options.port}", options.channel, endpoint=options.endpoint, stop=stop, is_gone=is_gone)
    except errors.ReplicasError as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 1
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
