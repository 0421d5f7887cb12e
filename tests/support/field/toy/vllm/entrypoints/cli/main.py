"""A stand-in for vLLM's server, which ``replicas.integrations.vllm serve`` starts as
``python -m vllm.entrypoints.cli.main`` when this folder is on the path.

It has vLLM's control routes and vLLM's processes: an API process, below it an
"EngineCore" and below that one process for each rank of the model, each in a session
and with an environment of its own, as vLLM's retitle themselves. Their pids are in
``TOY/pids-R.json``. Files in the folder ``TOY`` are its faults: ``freeze-R`` stops
the API process of replica R at its next ``/pause``, ``refuse-R`` has the version in it
fail to load. ``overlap`` is made by an engine that starts while one of the last one's
processes is alive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from replicas.integrations.gate import GATE, READYZ, SHUT, GatePage
from replicas.linux.processes import start_time
from tests.support.engines import FakeEngine

FOLDER = Path(os.environ["TOY"])
REPLICA = os.environ["REPLICA_ID"]
LEAF = "import time; time.sleep(600)"
CORE = f"""
import subprocess, sys, time
leaves = [subprocess.Popen([sys.executable, "-c", {LEAF!r}], start_new_session=True, env={{}}) for _ in sys.argv[1:]]
print(*[leaf.pid for leaf in leaves], flush=True)
time.sleep(600)
"""


class Toy(FakeEngine):
    """The fake engine on a port that is given, with faults by files.

    :ivar port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.gate = GatePage.attach(os.environ[GATE])
        super().__init__()

    def server_bind(self) -> None:
        self.server_address = ("127.0.0.1", self.port)
        super().server_bind()

    def control(self, path: str, body: dict[str, Any], query: str = "") -> Any:
        if path == READYZ:  # as the gate answers before vLLM's own routes
            if not self.gate.is_open:
                raise RuntimeError(SHUT)
            return {"version": self.gate.version}
        if path == "/v1/completions":
            return self._complete()
        if path == "/pause" and (freeze := FOLDER / f"freeze-{REPLICA}").exists():
            freeze.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        if path == "/update_weights" and not body["update_info"].get("check"):
            refused = FOLDER / f"refuse-{REPLICA}"
            if refused.exists() and body["update_info"]["version"] == int(refused.read_text()):
                self.active = False
                raise RuntimeError("load_weights: a tensor that this server cannot take")
        return super().control(path, body, query)

    def _complete(self) -> Any:
        """The version that answers; a paused server answers later."""
        until = time.monotonic() + 60
        while self.paused and time.monotonic() < until:
            time.sleep(0.01)
        return {"version": self.version, "pid": os.getpid()}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    options, _ = parser.parse_known_args()
    ranks = [str(rank) for rank in range(options.tensor_parallel_size)]
    command = [sys.executable, "-c", CORE, *ranks]
    core = subprocess.Popen(  # noqa: ASYNC220  # nothing runs on the loop yet
        command, start_new_session=True, env={}, stdout=subprocess.PIPE, text=True
    )
    assert core.stdout is not None
    leaves = [int(one) for one in core.stdout.readline().split()]
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Toy(options.port):
        found = {"api": os.getpid(), "core": core.pid, "worker0": leaves[0], "worker1": leaves[-1]}
        told, written = FOLDER / f"pids-{REPLICA}.json", FOLDER / f"pids-{REPLICA}.new"
        written.write_text(json.dumps(found))
        if told.exists() and any(start_time(pid) is not None for pid in json.loads(told.read_text()).values()):
            (FOLDER / "overlap").touch()
        written.rename(told)
        await stopped.wait()
    for pid in (*leaves, core.pid):
        os.kill(pid, signal.SIGKILL)
    core.wait()


if __name__ == "__main__":
    asyncio.run(main())
