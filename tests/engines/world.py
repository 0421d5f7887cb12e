"""A supervised run with a released vLLM and a trainer, and the processes of the
engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

__all__ = ["CAPITAL", "MODEL", "START_S", "TENSOR_PARALLEL", "EngineWorld", "ask", "get", "running_world"]

MODEL = Path(sys.prefix) / "model"
START_S = 900.0
"""On two cores a server is up in 20 to 70 s; on busy ones that takes minutes."""
TENSOR_PARALLEL = int(os.environ.get("TENSOR_PARALLEL", "1"))
VLLM_OPTIONS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"]
CAPITAL = {"model": str(MODEL), "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}


def run_text(*options: str) -> str:
    """The run's configuration; the server gets further options."""
    return f"""
[groups.trainer]
launcher = "exec"
command = ["{Path(__file__).parent}/programs/trainer.py", "port"]
[groups.trainer.env]
MODEL = "{MODEL}"
[groups.server]
launcher = "exec"
command = {json.dumps(["-m", "replicas.integrations.vllm", "serve", str(MODEL), *VLLM_OPTIONS, *options])}
restart = {{ max_restarts = 100, window = "1h", initial_delay = "0s", no_progress_cycles = 0 }}
[groups.server.env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
HF_HUB_OFFLINE = "1"
[channels.policy]
sources = ["trainer"]
targets = ["server"]
slots = 3
"""


@contextlib.contextmanager
def running_world(folder: Path, *options: str) -> Iterator[EngineWorld]:
    """A run from its start to its clean end."""
    with running(folder, run_text(*options)) as run:
        yield EngineWorld(run)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=60) == 0
        run.assert_nothing_left()


class EngineWorld:
    """The run, its trainer and its server."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._port = run.folder / "port"
        self.committed = 0
        self.wait_for_trainer()

    def wait_for_trainer(self) -> None:
        eventually(lambda: self._port.exists() or not self.run.running, "the trainer", timeout_s=START_S)
        assert self.run.running, self.run.said()

    @property
    def url(self) -> str:
        """The server's address, which may change with a restart."""

        def look() -> str:
            members = self.run.status().channels[0].members
            return next((one.info["url"] for one in members if "url" in one.info and one.state != "gone"), "")

        return str(eventually(look, "a follower that has joined", timeout_s=START_S))

    def publish(self, **order: Any) -> dict[str, Any]:
        receipt = ask(f"http://127.0.0.1:{self._port.read_text()}/publish", order)
        assert isinstance(receipt, dict)
        self.committed = receipt["version"]
        return receipt

    def kill_trainer_while_it_publishes(self) -> None:
        port = self._port.read_text()
        self._port.unlink()
        with contextlib.suppress(OSError, http.client.HTTPException):  # it dies of the order
            ask(f"http://127.0.0.1:{port}/publish", {"die_after": 100})
        self.wait_for_trainer()

    def loaded(self) -> int:
        """The version that all ranks of the server have loaded; 0: none."""
        return self.run.status().groups[1].replicas[0].versions.get("policy", 0)

    def wait_until_served(self, version: int) -> None:
        """Every rank of the server has loaded it, and the server says so."""
        eventually(lambda: self.loaded() >= version, f"version {version} is loaded", timeout_s=START_S)
        assert int(get(f"{self.url}/weight_info")["weight_version"]) >= version

    def wait_until_restarted(self, before: dict[str, int]) -> None:
        """None of the processes is alive, and new ones serve the newest version."""
        eventually(lambda: not any(alive(pid) for pid in before.values()), "the end of the engine", timeout_s=90)
        self.wait_until_served(self.committed)

    def answer(self, **more: Any) -> str:
        return str(self.complete(**more)["choices"][0]["text"])

    def complete(self, **more: Any) -> Any:
        return ask(f"{self.url}/v1/completions", {**CAPITAL, **more})

    def adapters(self) -> list[str]:
        """Names of the adapters that the server lists."""
        return [one["id"] for one in get(f"{self.url}/v1/models")["data"] if one.get("parent")]

    def processes(self) -> dict[str, int]:
        """The living processes of the engine, by role: follower, api, core, and one
        worker for each rank of the model, worker0 and so on."""
        (follower,) = _children(self.run.pid, "replicas.integrations.vllm", depth=3)  # below the agent and the shim
        (api,) = _children(follower, "vllm.entrypoints.cli.main")
        (core,) = _children(api, "spawn_main")
        workers = {f"worker{number}": pid for number, pid in enumerate(_children(core, "spawn_main"))}
        return {"follower": follower, "api": api, "core": core, **workers}


def _children(parent: int, word: str, *, depth: int = 1) -> list[int]:
    """Descendants of a process at a depth, by pid, whose command line has a word."""
    pids = [parent]
    for _ in range(depth):
        pids = [child for one in pids for child in _read_children(one)]
    return sorted(pid for pid in pids if word in _read(Path(f"/proc/{pid}/cmdline")))


def _read_children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    return [int(child) for listed in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(listed).split()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def ask(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())
