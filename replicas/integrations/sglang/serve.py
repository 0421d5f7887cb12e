"""SGLang's follower and its command: ``serve`` and ``follow``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from replicas import engine
from replicas.engine import PauseMode, VerifyLoad
from replicas.engine.following import MIN_SERVING, START_TIMEOUT_S
from replicas.integrations.gate import GATE, GatePage
from replicas.integrations.http_engine import ENGINE_TIMEOUT_S
from replicas.integrations.sglang.engine import SglangEngine
from replicas.integrations.shared import releases
from replicas.integrations.shared.serving import (
    PLAIN_HTTP,
    child,
    follow_options,
    refuse_options,
    reserve_port,
    run_command,
    scratch_folder,
    stopped_by_signals,
    url_of,
)

__all__ = ["follow", "main"]

LISTENERS = (
    "--ssl-",
    "--enable-ssl",
    "--enable-http2",
    "--grpc-mode",
    "--smg-grpc-mode",
    "--encoder-only",
    "--use-ray",
)
"""Beginnings of options by which the server would listen elsewhere."""
REFUSED = {
    **dict.fromkeys(LISTENERS, PLAIN_HTTP),
    "--admin-api-key": ("the gate keeps the control routes for the follower", "leave it out"),
}
QUIET_OPTION = "--uvicorn-access-log-exclude-prefixes"


def follow(
    base_url: str,
    channel: str,
    *,
    mode: PauseMode = "keep",
    every: int = 1,
    min_serving: float = MIN_SERVING,
    verify_load: VerifyLoad = "first",
    complete: bool = True,
    public_url: str | None = None,
    api_key: str = "",
    stop: threading.Event | None = None,
    timeout: float = START_TIMEOUT_S,
    engine_timeout: float = ENGINE_TIMEOUT_S,
    **identity: Any,
) -> None:
    """Load each committed version of a channel into a SGLang server of this machine;
    block until ``stop``.

    The server runs as the same user and sees this process in ``/proc``. Its control
    routes have no password unless it has an API key: bind it to loopback, or use
    ``serve``, which has a gate.

    :param base_url: ``http://HOST:PORT`` of the server, and perhaps a prefix of its
        paths.
    :param channel: name of the channel, of versions of the model's weights.
    :param mode: requests in flight during a load are kept (put back, computed again
        from their tokens, and continued with the new weights), waited for, or aborted.
        SGLang's ``in_place`` would keep prefixes of the old weights.
    :param every: load every n-th version at most; 1: each, unless a newer one is there.
    :param min_serving: the least share of the time in which the server computes, from 0
        to below 1; default 0.5.
    :param verify_load: compare the server's own tensors with the version ``"always"``,
        after the ``"first"`` load of each manifest, or ``"never"``.
    :param complete: False: versions may lack parameters of the model.
    :param public_url: address for routers, shown as ``info["url"]``; default: base_url.
    :param api_key: the server's API key; with an administrator's key, that one alone.
    :param stop: ends the call when it is set; default: never.
    :param timeout: seconds until the server must be up; default 900.
    :param engine_timeout: seconds for which the schedulers may stay silent while they
        are at work, or cannot be seen from here; default 600. A server whose processes
        are idle is given up after 30 s.
    :param identity: ``endpoint``, ``token``, ``run``, ``group`` and ``replica`` as for
        :func:`replicas.join`; default: the environment.
    :raises replicas.errors.SyncError: the server is gone, or a version failed to load
        twice; the server is left paused then.
    :raises replicas.errors.Disconnected: no coordinator answered for 60 s.
    :raises replicas.errors.UsageError: an argument is wrong, or the server cannot be
        followed.
    """
    verbs = SglangEngine(
        base_url, complete=complete, api_key=api_key, public_url=public_url, engine_timeout_s=engine_timeout
    )
    engine.follow(
        verbs,
        channel,
        mode=mode,
        every=every,
        min_serving=min_serving,
        verify_load=verify_load,
        stop=stop,
        timeout=timeout,
        **identity,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m replicas.integrations.sglang serve|follow ...`` until SIGTERM or
    SIGINT; return the exit code.

    :param arguments: of the command line; default: those of this process.
    """
    return run_command(
        "replicas.integrations.sglang",
        "sglang.launch_server",
        arguments,
        _serve,
        _follow,
        engine_timeout_s=ENGINE_TIMEOUT_S,
    )


def _follow(options: argparse.Namespace) -> None:
    """Load the channel's versions into the server at ``options.url``; block until
    SIGTERM or SIGINT."""
    how = follow_options(options)
    follow(options.url, options.channel, api_key=options.api_key, stop=stopped_by_signals(), **how)


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Start SGLang behind the gate as a child, and load the channel's versions into it;
    block until SIGTERM or SIGINT, then end it.

    :param options: our own options. :param rest: options for SGLang's own command.
    """
    refuse_options(rest, REFUSED)
    releases.check("sglang")
    stop, gate, how = stopped_by_signals(), GatePage.create(), follow_options(options)
    complete, timeout_s = how.pop("complete"), how.pop("engine_timeout")
    with reserve_port(options.host, options.port) as port, scratch_folder("sglang") as scratch:
        command = [
            *(sys.executable, "-m", "replicas.integrations.sglang.server", "--model-path", options.model, *rest),
            *("--host", options.host, "--port", str(port)),
            "--skip-server-warmup",  # it requests an answer, while the gate is shut
            *([] if QUIET_OPTION in rest else [QUIET_OPTION, *SglangEngine.watched]),  # else they fill half of its log
            *(["--api-key", options.api_key] if options.api_key else []),
        ]
        variables = {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a paused server is alive
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"),  # noqa: PTH118
            **os.environ,
            "SGLANG_VLM_CACHE_SIZE_MB": "0",  # this cache is keyed by the inputs, and cannot be cleared
            "TMPDIR": str(scratch),
            GATE: gate.path,
        }
        with child("SGLang", command, variables) as server:
            verbs = SglangEngine(
                url_of(options.host, port),
                complete=complete,
                encodes_anew=True,
                scratch=scratch,
                secret=gate.secret,
                api_key=options.api_key,
                is_gone=server.reason_gone,
                engine_timeout_s=timeout_s,
                process=server.pid,
            )
            try:
                engine.follow(verbs, options.channel, gate=gate, stop=stop, **how)
            finally:
                gate.shut()
