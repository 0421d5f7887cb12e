"""Serve a channel's versions with stock vLLM: the plugin, the follower, and ``serve``.

Three ways in, none of which changes a line of vLLM:

- ``vllm serve MODEL --weight-transfer-config '{"backend": "replicas"}'``: the entry
  point :func:`register` makes the backend known in every process of vLLM.
- :func:`follow` brings each committed version into such a server, wherever it runs.
- ``python -m replicas.integrations.vllm serve MODEL ...`` starts vLLM's own server
  behind a gate (:mod:`replicas.integrations.gate`) and follows; further arguments are
  vLLM's own. It is the command of a group with ``launcher = "exec"``.

Theory of operation
===================

The *follower* is rank 0 of the server's replica, and the server's workers are its other
ranks (:mod:`replicas.integrations.vllm_engine`). So a version counts as loaded when
every worker has it and the server answers with it again; a worker, an engine or a
follower that dies, or is stopped, is a rank that is lost.

For each version, one after the other: ``pause, start, update(version),
finish(weight_version), reset the prefix cache, resume``. Only this server is paused,
and only for its own load. A failed load leaves it paused and its gate shut, as its
model may be a mixture of two versions; the load is tried once more as a whole, and then
the follower reports the failure and ends, and whoever supervises it starts the server
anew.

Meanwhile a second thread asks for the server's health; one that does not answer is
given up: its connection is broken, so that no call of the follower hangs on it.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import hashlib
import json
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import replicas
from replicas import environ, errors
from replicas.integrations.engine_server import EngineServer, Health
from replicas.integrations.gate import GATE, GatePage
from replicas.linux.processes import die_with_parent

__all__ = ["follow", "main", "register"]

logger = logging.getLogger("replicas.integrations.vllm")

BACKEND = "replicas"
PauseMode = Literal["keep", "wait", "abort"]
START_TIMEOUT_S = 900.0
START_BEAT_S = 0.2
JOIN_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
BEAT_S = 0.5
SCRATCH_MAX = 107 - len("/vllm-0123456789/00000000-0000-0000-0000-000000000000")
"""Longest path of a folder in which vLLM's own sockets still have a name."""


def register() -> None:
    """Register the backend ``"replicas"`` with vLLM (entry point
    ``vllm.general_plugins``)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "replicas.integrations.vllm_engine", "ReplicasEngine")


@dataclass(frozen=True, kw_only=True)
class Following:
    """What is followed, and how.

    :ivar identity: keyword arguments of :func:`replicas.join`; empty: the environment.
    :ivar url: the server's address for routers.
    :ivar gate: the server's gate, if it has one.
    :ivar is_gone: returns why the server is gone, or an empty text.
    """

    channel: str
    identity: dict[str, Any] = field(default_factory=dict)
    mode: PauseMode = "keep"
    every: int = 1
    complete: bool = True
    url: str
    gate: GatePage | None = None
    is_gone: Callable[[], str] = lambda: ""

    def __post_init__(self) -> None:
        if self.mode not in ("keep", "wait", "abort"):
            raise errors.UsageError(f"follow: mode {self.mode!r}", hint='one of "keep", "wait", "abort"')
        if self.every < 1:
            raise errors.UsageError(f"follow: every must be 1 or more, not {self.every}", hint="1 loads each version")


class Follower:
    """Brings the versions of one channel into one server."""

    def __init__(self, server: EngineServer, following: Following, stop: threading.Event) -> None:
        self._server = server
        self._following = following
        self._stop = stop

    def run(self, start_timeout_s: float) -> None:
        """Load versions until ``stop`` is set.

        :raises replicas.errors.ReplicasError: the server is gone, or a load failed
            twice.
        """
        following, server = self._following, self._server
        if not self._wait_until_healthy(start_timeout_s):
            return
        world_size = server.call("GET", "/get_world_size")["world_size"] + 1
        init = {"channel": following.channel, "world_size": world_size, "complete": following.complete}
        with (
            Health(server, following.is_gone) as health,
            replicas.join(
                following.channel, rank=0, world_size=world_size, info={"url": following.url}, **following.identity
            ) as channel,
        ):
            if following.gate is None:  # a server that is older than this follower
                self._end_open_update()
            server.call(
                "POST",
                "/init_weight_transfer_engine",
                {"init_info": {**init, **following.identity}},
                timeout_s=JOIN_TIMEOUT_S,
            )
            while (update := self._next(channel, health)) is not None:
                self._load(update)

    def _wait_until_healthy(self, timeout_s: float) -> bool:
        """False: it is time to stop."""
        until = time.monotonic() + timeout_s
        while not self._server.is_healthy():
            if gone := self._following.is_gone():
                raise self._lost(gone)
            if time.monotonic() > until:
                raise self._lost(f"{self._server.url} was not healthy within {timeout_s:.0f} s")
            if self._stop.wait(START_BEAT_S):
                return False
        return True

    def _next(self, channel: replicas.Channel, health: Health) -> replicas.Update | None:
        """Wait for a version; None: it is time to stop."""
        served = channel.version
        pending = channel.receive(at_least=served + self._following.every if served else 1)
        while not self._stop.is_set():
            if health.reason:
                raise self._lost(health.reason)
            with contextlib.suppress(TimeoutError):
                return pending.wait(timeout=BEAT_S)
        return None

    def _load(self, update: replicas.Update) -> None:
        gate, version = self._following.gate, update.version
        with update:
            began = time.monotonic()
            self._post("/pause", query={"mode": self._following.mode})
            paused = time.monotonic()
            try:
                self._replace(version)
            except errors.ReplicasError as error:
                logger.warning("version %d did not load, once more: %s", version, error)
                if gate is not None:
                    gate.shut()
                self._end_open_update()
                self._replace(version)
            loaded = time.monotonic()
            self._reset_prefix_cache()
            self._post("/resume")
            if gate is not None:
                gate.open(version)
        logger.info(
            "version %d is served: paused in %.3f s, loaded in %.3f s, resumed in %.3f s",
            *(version, paused - began, loaded - paused, time.monotonic() - loaded),
        )

    def _replace(self, version: int) -> None:
        self._post("/start_weight_update")
        self._update(version)
        self._post("/finish_weight_update", {"weight_version": str(version)})

    def _end_open_update(self) -> None:
        """End an update that an earlier attempt, or a follower that died, left open."""
        with contextlib.suppress(errors.SyncError):  # the answer is the error that ends it, or that there is none
            self._update(0)

    def _reset_prefix_cache(self) -> None:
        """Forget what was computed with the old weights.

        Requests that were kept hold some of it: they are computed anew then.
        """
        for running in ("false", "true"):
            answer = self._post("/reset_prefix_cache", query={"reset_running_requests": running})
            if isinstance(answer, dict) and answer.get("success"):
                return
        raise self._lost("the prefix cache of the old version could not be reset")

    def _update(self, version: int) -> None:
        self._post("/update_weights", {"update_info": {"version": version, "timeout_s": LOAD_TIMEOUT_S / 2}})

    def _post(self, path: str, body: Any = None, *, query: dict[str, str] | None = None) -> Any:
        return self._server.call("POST", path, body, query=query, timeout_s=LOAD_TIMEOUT_S)

    @staticmethod
    def _lost(reason: str) -> errors.SyncError:
        return errors.SyncError(reason, phase="load", hint="see the server's own log")


def follow(
    base_url: str,
    channel: str,
    *,
    mode: PauseMode = "keep",
    every: int = 1,
    complete: bool = True,
    public_url: str | None = None,
    stop: threading.Event | None = None,
    timeout: float = START_TIMEOUT_S,
    **identity: Any,
) -> None:
    """Load each committed version of a channel into a vLLM server; block until
    ``stop``.

    The server needs ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config
    '{"backend": "replicas"}'``, and this package in its environment. Its control routes
    have no password: bind it to loopback, or use ``serve``, which has a gate.

    :param base_url: ``http://HOST:PORT`` of the server.
    :param channel: name of the channel.
    :param mode: requests in flight during a load are kept (frozen, and continued with
        the new weights), waited for, or aborted.
    :param every: load every n-th version at most; 1: each, unless a newer one is there.
    :param complete: False: versions may lack parameters of the model.
    :param public_url: address for routers, shown as ``info["url"]``; default: base_url.
    :param stop: ends the call when it is set; default: never.
    :param timeout: seconds until the server must be healthy; default 900.
    :param identity: ``endpoint``, ``token``, ``run``, ``group`` and ``replica`` as for
        :func:`replicas.join`; default: the environment. The server's workers join with
        the same, or with their own environment.
    :raises replicas.errors.SyncError: the server is gone, or a version failed to load
        twice; the server is left paused then.
    :raises replicas.errors.Disconnected: no coordinator answered for 60 s.
    :raises replicas.errors.UsageError: an argument is wrong.
    """
    following = Following(
        channel=channel, identity=identity, mode=mode, every=every, complete=complete, url=public_url or base_url
    )
    Follower(EngineServer(base_url), following, threading.Event() if stop is None else stop).run(timeout)


# ------------------------------------------------------------ serve


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m replicas.integrations.vllm serve MODEL ...``; return the exit
    code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["serve"]:
        print("usage: python -m replicas.integrations.vllm serve MODEL [options of vllm serve]", file=sys.stderr)
        return 2
    options, rest = _parser().parse_known_args(given[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        return _serve(options, rest)
    except errors.ReplicasError as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m replicas.integrations.vllm serve", allow_abbrev=False)
    parser.add_argument("--channel", default="policy", help="the channel to follow (default: policy)")
    parser.add_argument("--pause-mode", choices=["keep", "wait", "abort"], default="keep")
    parser.add_argument("--every", type=int, default=1, help="load every n-th version at most")
    parser.add_argument("--partial", action="store_true", help="versions may lack parameters of the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; else this plus the replica's index")
    return parser


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    found = environ.read()
    port = options.port + (found.replica or 0) if options.port else _free_port(options.host)
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    gate = GatePage.create()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with _vllm(options.host, port, rest, gate) as process:

        def is_gone() -> str:
            code = process.poll()
            return "" if code is None else f"vLLM's server ended with {_ending(code)}"

        url = f"http://{host}:{port}"
        following = Following(
            channel=options.channel,
            mode=options.pause_mode,
            every=options.every,
            complete=not options.partial,
            url=url,
            gate=gate,
            is_gone=is_gone,
        )
        Follower(EngineServer(url, gate.secret), following, stop).run(START_TIMEOUT_S)
    return 0


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1" if host == "0.0.0.0" else host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the sockets and files that vLLM makes and does not remove.

    A replica has the same one in each generation, so what a killed follower left there
    goes with the next start.
    """
    found = environ.read()
    state = os.environ.get(environ.STATE_ID) or secrets.token_hex(8)
    name = hashlib.sha256(f"{state}/{found.group}/{found.replica}".encode()).hexdigest()[:10]
    base = tempfile.gettempdir()
    folder = Path(base if len(base) <= SCRATCH_MAX else "/tmp") / f"vllm-{name}"  # its sockets need short paths
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _vllm(host: str, port: int, rest: Sequence[str], gate: GatePage) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's own server as a child; it is ended with the block, and dies with this
    process."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *rest),
        *("--host", host, "--port", str(port)),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--middleware", "replicas.integrations.vllm_gate.VllmGate"),
    ]
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # where torch has it by default
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, "VLLM_SERVER_DEV_MODE": "1", GATE: gate.path}
    parent = os.getpid()
    with _scratch() as scratch:
        variables["TMPDIR"] = str(scratch)
        process = subprocess.Popen(command, env=variables, preexec_fn=lambda: die_with_parent(parent))
        try:
            yield process
        finally:
            gate.shut()
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
