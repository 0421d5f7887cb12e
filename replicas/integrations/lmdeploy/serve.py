"""LMDeploy's follower and its command: ``serve`` and ``follow``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from replicas import engine
from replicas.engine.following import MIN_SERVING, START_TIMEOUT_S
from replicas.integrations.gate import GATE, GatePage
from replicas.integrations.http_engine import ENGINE_TIMEOUT_S
from replicas.integrations.lmdeploy.engine import LmdeployEngine
from replicas.integrations.shared.serving import (
    PLAIN_HTTP,
    child,
    follow_options,
    refuse_options,
    reserve_port,
    run_command,
    stopped_by_signals,
    url_of,
)

__all__ = ["follow", "main"]

REFUSED = {
    "--ssl": PLAIN_HTTP,
    "--dp": ("the gate is in front of one API process alone", "start one server for each copy of the model"),
    "--enable-prefix-caching": ("the cache of prefixes outlives a load", "leave it out"),
    "--api-keys": ("the follower needs the key, too", "use --api-key"),
}


def follow(
    base_url: str,
    channel: str,
    *,
    model: str = "",
    every: int = 1,
    min_serving: float = MIN_SERVING,
    complete: bool = True,
    public_url: str | None = None,
    api_key: str = "",
    stop: threading.Event | None = None,
    timeout: float = START_TIMEOUT_S,
    engine_timeout: float = ENGINE_TIMEOUT_S,
    **identity: Any,
) -> None:
    """Load each committed version of a channel into a LMDeploy server of this machine;
    block until ``stop``.

    The server runs as the same user, sees this process in ``/proc``, has this package
    in its environment, and was started without ``--enable-prefix-caching``. Its control
    routes have no password unless it has an API key: bind it to loopback. Requests in
    flight during a load are aborted.

    :param base_url: ``http://HOST:PORT`` of the server, and perhaps a prefix of its
        paths.
    :param channel: name of the channel, of versions of the model's weights.
    :param model: path or name of the model, with whose files versions are compared;
        default: the first version that was loaded.
    :param every: load every n-th version at most; 1: each, unless a newer one is there.
    :param min_serving: the least share of the time in which the server computes, from 0
        to below 1; default 0.5.
    :param complete: False: versions may lack parameters of the model.
    :param public_url: address for routers, shown as ``info["url"]``; default: base_url.
    :param api_key: the server's API key.
    :param stop: ends the call when it is set; default: never.
    :param timeout: seconds until the server must be up; default 900.
    :param engine_timeout: seconds for which the engine may stay silent while it is at
        work, or cannot be seen from here; default 600. An idle one is given up earlier.
    :param identity: ``endpoint``, ``token``, ``run``, ``group`` and ``replica`` as for
        :func:`replicas.join`; default: the environment.
    :raises replicas.errors.SyncError: the server is gone, or a version failed to load
        twice; the server is left asleep then.
    :raises replicas.errors.Disconnected: no coordinator answered for 60 s.
    :raises replicas.errors.UsageError: an argument is wrong.
    """
    verbs = LmdeployEngine(
        base_url,
        model=model,
        complete=complete,
        api_key=api_key,
        public_url=public_url,
        engine_timeout_s=engine_timeout,
    )
    engine.follow(
        verbs,
        channel,
        mode="abort",
        every=every,
        min_serving=min_serving,
        verify_load="never",
        stop=stop,
        timeout=timeout,
        **identity,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m replicas.integrations.lmdeploy serve|follow ...`` until SIGTERM
    or SIGINT; return the exit code.

    :param arguments: of the command line; default: those of this process.
    """
    return run_command(
        "replicas.integrations.lmdeploy",
        "lmdeploy serve api_server",
        arguments,
        _serve,
        _follow,
        engine_timeout_s=ENGINE_TIMEOUT_S,
        modes=("abort",),
    )


def _follow(options: argparse.Namespace) -> None:
    """Load the channel's versions into the server at ``options.url``; block until
    SIGTERM or SIGINT."""
    how = follow_options(options)
    del how["mode"], how["verify_load"]  # LMDeploy has one of each
    follow(options.url, options.channel, api_key=options.api_key, stop=stopped_by_signals(), **how)


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Start LMDeploy behind the gate as a child, and load the channel's versions into
    it; block until SIGTERM or SIGINT, then end it.

    :param options: our own options. :param rest: options for LMDeploy's own command.
    """
    refuse_options(rest, REFUSED)
    stop, gate = stopped_by_signals(), GatePage.create()
    with reserve_port(options.host, options.port) as port:
        command = [
            *(sys.executable, "-m", "replicas.integrations.lmdeploy.server", "serve", "api_server", options.model),
            *rest,
            *("--server-name", options.host, "--server-port", str(port)),
            *(["--api-keys", options.api_key] if options.api_key else []),
        ]
        with child("LMDeploy", command, {**os.environ, GATE: gate.path}) as server:
            verbs = LmdeployEngine(
                url_of(options.host, port),
                model=options.model,
                complete=not options.partial,
                secret=gate.secret,
                api_key=options.api_key,
                is_gone=server.reason_gone,
                engine_timeout_s=options.engine_timeout,
                process=server.pid,
            )
            how = {"every": options.every, "min_serving": options.min_serving}
            try:
                engine.follow(verbs, options.channel, mode="abort", verify_load="never", gate=gate, stop=stop, **how)
            finally:
                gate.shut()
