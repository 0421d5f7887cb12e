"""Serve a channel's versions with stock vLLM: the plugin, the follower, and ``serve``.

Three ways in, none of which changes a line of vLLM:

- ``vllm serve MODEL --weight-transfer-config '{"backend": "replicas"}'``: the entry
  point :func:`register` registers the backend in every process of vLLM.
- :func:`follow` loads each committed version into such a server, wherever it runs.
- ``python -m replicas.integrations.vllm serve MODEL ...`` starts vLLM's own server
  behind a gate (:mod:`replicas.integrations.gate`) and follows; further arguments are
  vLLM's own. It is the command of a group with ``launcher = "exec"``.

Theory of operation
===================

The *follower* (:func:`replicas.engine.follow`) is rank 0 of the server's replica, and
the server's workers are its other ranks
(:mod:`replicas.integrations.vllm_worker.engine`). So a version counts as loaded when
every worker has it and the server answers with it again; a worker, an engine or a
follower that dies or is stopped is a lost rank. On a channel of LoRA adapters the
follower is the only member. All processes of a server that ``serve`` has started die
with the follower.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import getpass
import importlib.metadata
import itertools
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replicas import engine, errors
from replicas.engine import PauseMode, VerifyLoad
from replicas.engine.following import MIN_SERVING, START_TIMEOUT_S
from replicas.integrations.gate import GATE, GatePage, owner_of
from replicas.integrations.http_engine import ENGINE_TIMEOUT_S
from replicas.integrations.shared import releases
from replicas.integrations.shared.serving import (
    PLAIN_HTTP,
    Child,
    add_following,
    child,
    follow_options,
    refuse_options,
    reserve_port,
    scratch_folder,
    stopped_by_signals,
    url_of,
)
from replicas.integrations.vllm_adapters import VllmAdapters
from replicas.integrations.vllm_verbs import VllmEngine, VllmServer, release_of

__all__ = ["follow", "main", "register"]

logger = logging.getLogger("replicas.integrations.vllm")

BACKEND = "replicas"
API_KEY = "VLLM_API_KEY"
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
"""vLLM 0.33 has a front end in Rust, off by default, which supports no middleware."""
REFUSED = {
    "--grpc": ("the gate refuses requests over HTTP alone", "leave it out: requests and control go over HTTP"),
    **dict.fromkeys(("--uds", "--ssl-"), PLAIN_HTTP),
}
"""Beginnings of options by which the server would listen where neither follower nor
gate reach it."""
QUIET_OPTION = "--disable-access-log-for-endpoints"
QUIET = (0, 32)
"""The first release that is known to have this option."""


def register() -> None:
    """Register the backend ``"replicas"`` with vLLM, which calls this in each process
    that loads plugins (entry point ``vllm.general_plugins``). In a server of ``serve``,
    also start a thread that kills this process when the follower ends."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # already registered: plugins are loaded more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "replicas.integrations.vllm_worker.engine", "ReplicasEngine"
        )
    if GATE in os.environ:
        _end_with(owner_of(os.environ[GATE]))


@functools.cache
def _end_with(follower: int) -> None:
    """Start a thread that ends this process of vLLM by SIGKILL when its follower (the
    process that loads versions into the server) ends, for any reason; the same in
    processes forked from it.

    Otherwise vLLM's engine and workers would stay behind and keep their GPUs. (The
    kernel's parent-death signal is bound to the thread that started a process, so a
    thread watches the follower's pidfd instead.)

    :param follower: its pid.
    """
    try:
        pidfd = os.pidfd_open(follower)
    except ProcessLookupError:
        signal.raise_signal(signal.SIGKILL)
        return

    def watch() -> None:
        """Block until the follower has ended; then kill this process."""
        select.select([pidfd], [], [])
        signal.raise_signal(signal.SIGKILL)

    def begin() -> None:
        """Start the watching thread, here and in each forked process."""
        threading.Thread(target=watch, name="replicas-follower-watch", daemon=True).start()

    begin()
    os.register_at_fork(after_in_child=begin)  # vLLM forks some processes, which load no plugins


def follow(
    base_url: str,
    channel: str,
    *,
    lora: bool = False,
    mode: PauseMode = "keep",
    every: int = 1,
    min_serving: float = MIN_SERVING,
    verify_load: VerifyLoad = "first",
    complete: bool = True,
    patches: bool = False,
    public_url: str | None = None,
    api_key: str | None = None,
    stop: threading.Event | None = None,
    timeout: float = START_TIMEOUT_S,
    engine_timeout: float = ENGINE_TIMEOUT_S,
    **identity: Any,
) -> None:
    """Load each committed version of a channel into a vLLM server; block until
    ``stop``.

    The server needs ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config
    '{"backend": "replicas"}'``, and this package in its environment. Its control routes
    have no password: bind it to loopback, or use ``serve``, which has a gate.

    :param base_url: ``http://HOST:PORT`` of the server, and perhaps a prefix of its
        paths.
    :param channel: name of the channel.
    :param lora: whether versions are LoRA adapters, published with ``adapter=``. The
        server then needs ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``,
        and access to this machine's temporary folder.
    :param mode: requests in flight during a load are kept (frozen, and continued with
        the new weights), waited for, or aborted.
    :param every: load every n-th version at most; 1: each, unless a newer one is there.
    :param min_serving: the least share of the time in which the server computes, from 0
        to below 1; default 0.5: after a load it serves for as long as that took, and
        then loads the newest version.
    :param verify_load: compare the workers' tensors with the loaded version
        ``"always"``, after the ``"first"`` load of each manifest, or ``"never"``.
    :param complete: False: versions may lack parameters of the model.
    :param patches: write only the changes since the last version, where that is proven
        to be right: on GPUs, for models that are not quantized.
    :param public_url: address for routers, shown as ``info["url"]``; default: base_url.
    :param api_key: the server's API key; default: the environment's ``VLLM_API_KEY``.
    :param stop: ends the call when it is set; default: never.
    :param timeout: seconds until the server must be healthy; default 900.
    :param engine_timeout: seconds for which the server's engine may stay silent while
        its processes are at work (it compiles, say), or cannot be seen from here;
        default 600. An engine whose processes are idle is given up after 30 s.
    :param identity: ``endpoint``, ``token``, ``run``, ``group`` and ``replica`` as for
        :func:`replicas.join`; default: the environment. The server's workers join with
        the same, or with their own environment.
    :raises replicas.errors.SyncError: the server is gone, or a version failed to load
        twice; the server is left paused then.
    :raises replicas.errors.Disconnected: no coordinator answered for 60 s.
    :raises replicas.errors.UsageError: an argument is wrong.
    """
    key = os.environ.get(API_KEY, "") if api_key is None else api_key
    given: dict[str, Any] = {"api_key": key, "public_url": public_url, "engine_timeout_s": engine_timeout}
    with tempfile.TemporaryDirectory(prefix="replicas-adapters-") as folder:
        adapters = Path(folder) if lora else None
        engine.follow(
            _engine(base_url, adapters, complete=complete, patches=patches, **given),
            channel,
            mode=mode,
            every=every,
            min_serving=min_serving,
            verify_load=verify_load,
            stop=stop,
            timeout=timeout,
            **identity,
        )


def _engine(url: str, adapters: Path | None, *, complete: bool, patches: bool, **more: Any) -> VllmServer:
    """Return the object by which a follower controls a vLLM server; send nothing yet.

    :param adapters: folder to which LoRA adapters are written, for a server of
        adapters; None: the server loads whole weights.
    :param complete: whether versions must have all parameters of the model.
    :param patches: whether workers may write only a version's changes.
    :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
    """
    if adapters is not None:
        return VllmAdapters(url, adapters, **more)
    return VllmEngine(url, complete=complete, patches=patches, **more)


# ------------------------------------------------------------ serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m replicas.integrations.vllm serve MODEL ...`` until SIGTERM or
    SIGINT; return the exit code.

    :param arguments: of the command line; default: those of this process.
    """
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
    """Return the parser of our own options of ``serve``; the rest are vLLM's."""
    parser = argparse.ArgumentParser(prog="python -m replicas.integrations.vllm serve", allow_abbrev=False)
    add_following(parser, ENGINE_TIMEOUT_S)
    parser.add_argument("--lora", action="store_true", help="its versions are LoRA adapters")
    parser.add_argument("--patches", action="store_true", help="write only what has changed, where that is possible")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="0: a free one; else this, plus the index of a replica that a supervisor starts",
    )
    return parser


def _api_key(rest: Sequence[str]) -> str:
    """Return the first API key among ``rest``, vLLM's own options; without one the
    environment's ``VLLM_API_KEY``, or an empty text."""
    for option, value in itertools.zip_longest(rest, rest[1:], fillvalue=""):
        name, given, key = option.partition("=")
        if name in ("--api-key", "--api_key"):
            return key if given else value
    return os.environ.get(API_KEY, "")


def _refuse_odd_addresses(rest: Sequence[str]) -> None:
    """Raise UsageError if one of ``rest``, vLLM's own options, would make the server
    listen where the follower or the gate could not reach it (gRPC, a Unix socket,
    TLS)."""
    if os.environ.get(RUST_FRONT_END, "0") not in ("", "0"):
        raise errors.UsageError(
            f"serve: {RUST_FRONT_END} is set, and the gate runs in vLLM's front end in Python alone",
            hint="unset it; or start vLLM on loopback yourself, and follow it with replicas.integrations.vllm.follow",
        )
    refuse_options(rest, REFUSED)


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Start vLLM behind the gate as a child, and load the channel's versions into it;
    block until SIGTERM or SIGINT, then end it, and return the exit code 0.

    :param options: our own options. :param rest: options for vLLM's own command.
    """
    _refuse_odd_addresses(rest)
    releases.check("vllm")
    gate, stop, how = GatePage.create(), stopped_by_signals(), follow_options(options)
    complete, timeout_s = how.pop("complete"), how.pop("engine_timeout")
    if options.lora:
        rest = [*rest, "--enable-lora"]
        if not any(option.startswith(("--api-server-count", "--api_server_count")) for option in rest):
            rest = [*rest, "--api-server-count", "1"]  # with several, vLLM loads no adapters at run time
    with (
        reserve_port(options.host, options.port) as port,
        scratch_folder("vllm", _remove) as scratch,
        _vllm(options.host, port, rest, gate, scratch) as server,
    ):
        verbs = _engine(
            url_of(options.host, port),
            scratch if options.lora else None,
            complete=complete,
            patches=options.patches,
            secret=gate.secret,
            api_key=_api_key(rest),
            is_gone=server.reason_gone,
            engine_timeout_s=timeout_s,
            process=server.pid,
        )
        engine.follow(verbs, options.channel, gate=gate, stop=stop, **how)
    return 0


def _remove(folder: Path) -> None:
    """Remove the folder of a server that has ended, and files of ``/dev/shm`` that are
    named after files in the folder.

    Workers on a CPU meet in a file of the folder, and name their shared memory after
    that file; workers that were killed leave this memory behind.
    """
    for meeting in folder.glob("vllm_dist_*"):
        for left in Path("/dev/shm").glob(f"*{meeting.name}*"):
            left.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _installed() -> str:
    """Return the installed version of vLLM, or an empty text if it is unknown."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _user() -> str:
    """Return the user's name as torch uses it in the default folder of compiled
    code."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that /etc/passwd lacks
        return f"uid_{os.getuid()}"


@contextlib.contextmanager
def _vllm(host: str, port: int, rest: Sequence[str], gate: GatePage, scratch: Path) -> Iterator[Child]:
    """Context manager: run vLLM's own server as a child process, behind the gate; end
    it and shut the gate on leaving.

    :param rest: further options of ``vllm serve``.
    :param gate: the page of memory by which the follower opens the server's gate.
    :param scratch: the server's folder for temporary files.
    """
    release = release_of(_installed())
    if release >= QUIET and not any(option.replace("_", "-").startswith(QUIET_OPTION) for option in rest):
        rest = [*rest, QUIET_OPTION, ",".join(VllmServer.watched)]  # else they fill half of its log
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *rest),
        *("--host", host, "--port", str(port)),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--middleware", "replicas.integrations.vllm_gate.VllmGate"),
    ]
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        RUST_FRONT_END: "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int("--enable-lora" in rest)),
        "TMPDIR": str(scratch),
        GATE: gate.path,
    }
    with child("vLLM", command, variables) as server:
        try:
            yield server
        finally:
            gate.shut()


if __name__ == "__main__":
    sys.exit(main())
