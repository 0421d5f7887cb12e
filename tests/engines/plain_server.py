"""An engine's own server, which nobody supervises and which has no gate; and what a
trainer's program has beside it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import replicas
from replicas import Coordinator, errors
from replicas.linux.processes import die_with_parent
from tests.engines.world import ONE_PROCESS, START_S, get
from tests.support.waits import eventually

__all__ = ["TrainerSide", "plain_server", "plain_vllm"]

VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
VLLM_OPTIONS = [*ONE_PROCESS, "--dtype", "bfloat16", "--enforce-eager", "--weight-transfer-config"]
VLLM_OPTIONS += ['{"backend": "replicas"}']
ENDS_S = 30.0


@contextmanager
def plain_server(
    folder: Path, command: Sequence[str], health: str, environment: Mapping[str, str], *, dies: bool = False
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start it on a free port, wait until its path ``health`` answers, and end it.

    :param dies: its engine may be dead then, so that it does not end by itself.
    :return: its URL and its process.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log, parent = folder / "server.log", os.getpid()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1", "--port", f"{port}"],
            env={**os.environ, **environment},
            stdout=file,
            stderr=file,
            preexec_fn=lambda: die_with_parent(parent),
        )

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            get(f"http://127.0.0.1:{port}{health}")
            return True
        return False

    try:
        eventually(healthy, "a healthy server", timeout_s=START_S)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            if not dies:
                raise
        finally:
            process.kill()
            process.wait()


@contextmanager
def plain_vllm(
    folder: Path, model: Path, *options: str, dies: bool = False, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM's own server with the backend "replicas"."""
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *VLLM_OPTIONS, *options]
    with plain_server(folder, command, "/version", {**VLLM_ENVIRONMENT, **environment}, dies=dies) as found:
        yield found


class TrainerSide:
    """A coordinator, a channel, and followers of the server.

    :ivar address: of the coordinator, as :func:`replicas.join` takes it.
    """

    def __init__(self, url: str, stack: ExitStack, **channel: Any) -> None:
        self.url = url
        channels = {"policy": {"sources": ["trainer"], "targets": ["server"], "slots": 3, **channel}}
        coordinator = stack.enter_context(Coordinator(channels, groups={"server": 100}).in_thread())
        self.address: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        self.trainer = stack.enter_context(replicas.join("policy", group="trainer", **self.address))
        self._followers = 0

    def identity(self) -> dict[str, Any]:
        """Of the next follower: each is a replica of its own."""
        self._followers += 1
        return {"group": "server", "replica": self._followers, **self.address}

    @contextmanager
    def running(self, follows: Callable[..., None], *, fails: bool = False) -> Iterator[list[errors.ReplicasError]]:
        """A follower on a thread; what it failed of."""
        stop, failed, identity = threading.Event(), list[errors.ReplicasError](), self.identity()

        def run() -> None:
            try:
                follows(stop=stop, **identity)
            except errors.ReplicasError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield failed
        finally:
            stop.set()
            thread.join(120)
        assert not thread.is_alive()
        assert bool(failed) is fails, failed
