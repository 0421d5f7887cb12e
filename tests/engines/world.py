"""A supervised run with released vLLM servers and a trainer, and the processes of the
engines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from replicas.status import ReplicaStatus
from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

__all__ = [
    *("CAPITAL", "MODEL", "ON_A_CPU", "ONE_PROCESS", "START_S", "TENSOR_PARALLEL"),
    *("Demanded", "EngineWorld", "ask", "demand", "get", "running_world"),
]

MODEL = Path(sys.prefix) / "model"
START_S = 1800.0
"""On two cores a server is up in 20 to 70 s; on busy ones that takes minutes."""
TENSOR_PARALLEL = int(os.environ.get("TENSOR_PARALLEL", "1"))
VLLM_OPTIONS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"]
ONE_PROCESS = ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
"""The core computes itself, as on GPUs. On a CPU vLLM starts a worker for that, which
imports it all once more, a third of a start; and it takes ``uni`` for that, too."""
CAPITAL = {"model": str(MODEL), "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
ON_A_CPU = """
[groups.server.env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
HF_HUB_OFFLINE = "1"
[channels.policy]
sources = ["trainer"]
targets = ["server"]
slots = 3
"""
"""Servers of a small model, and the channel to them: the end of a config."""


def run_text(*options: str, servers: int = 1) -> str:
    """The run's configuration; the servers get further options."""
    return f"""
[groups.trainer]
launcher = "exec"
command = ["{Path(__file__).parent}/programs/trainer.py", "port"]
[groups.trainer.env]
MODEL = "{MODEL}"
[groups.server]
replicas = {servers}
launcher = "exec"
command = {json.dumps(["-m", "replicas.integrations.vllm", "serve", str(MODEL), *VLLM_OPTIONS, *options])}
restart = {{ max_restarts = 100, window = "1h", initial_delay = "0s", no_progress_cycles = 0 }}
health = {{ start_timeout = "30m" }}
{ON_A_CPU}"""


@contextlib.contextmanager
def running_world(folder: Path, *options: str, servers: int = 1) -> Iterator[EngineWorld]:
    """A run from its start to its clean end."""
    with running(folder, run_text(*options, servers=servers)) as run:
        yield EngineWorld(run)
        run.end(timeout_s=60)


class EngineWorld:
    """The run, its trainer and its servers."""

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
        """The first server's address."""
        return self.url_of(0)

    def url_of(self, replica: int) -> str:
        """A server's address, which may change with a restart."""

        def look() -> str:
            members = [one for one in self.run.status().channels[0].members if one.name == f"server/{replica}/0"]
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

    def servers(self) -> tuple[ReplicaStatus, ...]:
        return self.run.status().groups[1].replicas

    def loaded(self) -> int:
        """The version that all ranks of all servers have loaded; 0: none."""
        return min(one.versions.get("policy", 0) for one in self.servers())

    def wait_until_served(self, version: int) -> None:
        """Every rank of each server has loaded it, and each server says so."""
        eventually(lambda: self.loaded() >= version, f"version {version} is loaded", timeout_s=START_S)
        for replica in range(len(self.servers())):
            assert self.says(replica) >= version

    def says(self, replica: int) -> int:
        """The version that a server itself says that it has."""
        return int(get(f"{self.url_of(replica)}/weight_info")["weight_version"])

    def wait_until_restarted(self, *before: dict[str, int]) -> None:
        """None of the processes is alive, and new ones serve the newest version."""
        pids = [pid for processes in before for pid in processes.values()]
        eventually(lambda: not any(map(alive, pids)), "the end of the engines", timeout_s=90)
        self.wait_until_served(self.committed)

    def answer(self, replica: int = 0, **more: Any) -> str:
        return str(self.complete(replica, **more)["choices"][0]["text"])

    def answers(self) -> list[str]:
        """One of each server."""
        return [self.answer(replica) for replica in range(len(self.servers()))]

    def complete(self, replica: int = 0, **more: Any) -> Any:
        return ask(f"{self.url_of(replica)}/v1/completions", {**CAPITAL, **more})

    def adapters(self) -> list[str]:
        """Names of the adapters that the server lists."""
        return [one["id"] for one in get(f"{self.url}/v1/models")["data"] if one.get("parent")]

    def processes(self, replica: int = 0) -> dict[str, int]:
        """The living processes of a server, by role: follower, api, core, and one
        worker for each rank of the model, worker0 and so on."""
        follower = self.servers()[replica].pid
        assert follower is not None
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


class Demanded(NamedTuple):
    """What came of a request that may demand a version.

    :ivar served: the version that the answer names. :ivar cut: it ended too early.
    """

    status: int
    served: str
    body: bytes
    cut: bool = False


def demand(
    url: str, version: str, body: Any, meanwhile: Callable[[], object] = lambda: None, *, first_nbytes: int = 0
) -> Demanded:
    """Ask for an answer of a version (empty: of any); do something after its first
    bytes."""
    headers = {"content-type": "application/json", **({"X-Replicas-Version": version} if version else {})}
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=120)
    try:
        connection.request("POST", parts.path, json.dumps(body), headers)
        answer = connection.getresponse()
        served, content = answer.headers.get("x-replicas-version", ""), answer.read(first_nbytes)
        meanwhile()
        try:
            return Demanded(answer.status, served, content + answer.read())
        except http.client.IncompleteRead as error:
            return Demanded(answer.status, served, content + error.partial, cut=True)
    finally:
        connection.close()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())
