"""A vLLM server and a trainer that others start, as in pods: the supervisor counts
them, and a server that was killed and started again serves the newest version."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from replicas.linux.processes import die_with_parent
from tests.engines.world import MODEL, ONE_PROCESS, START_S, VLLM_OPTIONS, EngineWorld
from tests.support.house.manifests import container, environment, status_of
from tests.support.runs import MARK, ROOT, Run, running
from tests.support.waits import eventually

EXTERNAL = """
[groups.trainer]
launcher = "external"
[groups.server]
launcher = "external"
nproc_per_node = 2
[channels.policy]
sources = ["trainer"]
targets = ["server"]
slots = 3
"""
SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
ADDRESS = "127.0.0.1"


@contextlib.contextmanager
def started(run: Run, manifest: str, *command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program with the environment of a manifest, but for its paths and names."""
    given = environment(container(manifest), {"status.podIP": ADDRESS})
    given |= {"REPLICAS_ENDPOINT": run.endpoint(), "REPLICAS_TOKEN_FILE": str(run.state_dir / "token")}
    given |= {"REPLICAS_RUN": run.name, MARK: run.mark, "PYTHONPATH": str(ROOT), **variables}
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **given},
        cwd=run.folder,
        preexec_fn=lambda: die_with_parent(parent),
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def probe(port: int) -> int:
    """What the readiness probe of the manifest gets; 0: no answer."""
    path = container("rollout-deployment.yaml")["readinessProbe"]["httpGet"]["path"]
    return status_of(f"http://{ADDRESS}:{port}{path}")


def test_a_server_that_others_start_is_ready_when_it_serves_a_version(tmp_path: Path) -> None:
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    serve = ("-m", "replicas.integrations.vllm", "serve", str(MODEL), *VLLM_OPTIONS, *ONE_PROCESS, "--port", f"{port}")
    trainer = (str(Path(__file__).parent / "programs" / "trainer.py"), "port")
    with running(tmp_path, EXTERNAL) as run, started(run, "trainer-jobset.yaml", *trainer, MODEL=str(MODEL)):
        world = EngineWorld(run)
        with started(run, "rollout-deployment.yaml", *serve, REPLICAS_GROUP="server", **SERVER) as server:
            eventually(lambda: probe(port) == 503, "a server with a gate that is shut", timeout_s=START_S)
            world.publish()
            world.wait_until_served(1)
            assert probe(port) == 200
            assert world.url == f"http://{ADDRESS}:{port}"
            before = run.status().groups[1].replicas[0]
            assert (before.name, before.state, before.generation) == ("server/0", "ready", 1)
            server.kill()
            world.publish()  # without it
            eventually(lambda: run.status().groups[1].replicas[0].state == "pending", "the end of its members")
            assert probe(port) == 0, "vLLM ends with the process that follows the channel for it"
        with started(run, "rollout-deployment.yaml", *serve, REPLICAS_GROUP="server", **SERVER):
            eventually(lambda: probe(port) == 200, "a server that serves a version", timeout_s=START_S)
            assert world.loaded() == world.committed == 2
            after = run.status().groups[1].replicas[0]
            assert (after.name, after.state, after.generation) == ("server/0", "ready", 2)
