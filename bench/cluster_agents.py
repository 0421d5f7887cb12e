"""What do a supervisor and its agents cost: 4, 16, 32 nodes with 4 replicas each?

Theory of operation
===================

All agents are processes of this machine, each a node of its own; the supervisor's own
machine is none (``cluster.local = false``). Each node has a label, and a group of its
own. The command is ``sleep``: whatever is measured is ours. *Up*: from the start of the
agents, all at once, to the first status in which every replica is ready; the supervisor
runs already. *Idle*: the time on all cores while nobody asks anything, by kind of
process. *Status*: ``GET /status``, each over a connection of its own. *An agent*: its
PSS and its RSS, the medians of all, and its part of a core.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.supervisor_scale import SETTLE_S, asked, idle_parts
from bench.support import Spread
from bench.trees import Process, Supervised, pss_nbytes, supervised, until
from replicas.control.client import Client

__all__ = ["AGENT", "EACH", "SIZES", "AgentsSample", "measure"]

SIZES = (4, 16, 32)
EACH = 4
"""Replicas on each node."""
AGENT = (sys.executable, "-c", "import sys; from replicas.cli.entry import main; sys.exit(main())", "agent")
UP_TIMEOUT_S = 300.0
LOOK_S = 0.1


@dataclass(frozen=True)
class AgentsSample:
    """Seconds, bytes, and parts of a core. ``idle``: by kind of process."""

    agents: int
    up_s: float
    down_s: float
    idle: dict[str, float]
    status_s: list[float]
    agent_pss_nbytes: float
    agent_rss_nbytes: float
    supervisor_pss_nbytes: int


def _kind(line: str) -> str:
    if AGENT[2] in line:
        return "agent"
    for name in ("shim", "log pump", "store_process"):
        if name in line:
            return name
    return "supervisor" if "replicas.supervisor" in line else "command" if "sleep" in line else "other"


def _rss_nbytes(process: Process) -> int:
    with contextlib.suppress(OSError, StopIteration):  # it has ended
        lines = Path(f"/proc/{process[0]}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
    return 0


def _up(run: Supervised, agents: int) -> float:
    """Seconds from the start of all agents until all replicas are ready."""
    endpoint = run.endpoint()
    invitation = f"{(run.state_dir / 'operator-token').read_text().strip()}@{endpoint}"
    began = time.monotonic()
    for index in range(agents):
        name = f"node-{index}"
        options = ("--name", name, "--label", f"node={index}", "--state-dir", str(run.folder / name))
        run.start([*AGENT, *options], REPLICAS_JOIN=invitation, CUDA_VISIBLE_DEVICES="")

    def ready() -> bool:
        time.sleep(LOOK_S)
        return Client(endpoint).status().ready

    until(ready, f"{agents * EACH} replicas are ready", UP_TIMEOUT_S)
    return time.monotonic() - began


def measure(folder: Path, agents: int) -> AgentsSample:
    text = "[cluster]\nlocal = false\n"
    for index in range(agents):
        text += f'[groups.of-{index}]\nlauncher = "exec"\ncommand = ["sleep", "100000"]\nreplicas = {EACH}\n'
        text += f'placement = {{ labels = {{ node = "{index}" }} }}\n'
    with supervised(folder, text) as run:
        up_s = _up(run, agents)
        time.sleep(SETTLE_S)
        tree = run.processes()
        idle = idle_parts(tree, _kind)
        endpoint = run.endpoint()
        status_s = asked(lambda: Client(endpoint).status())
        ours = [process for process, line in tree.items() if _kind(line) == "agent"]
        main = [process for process, line in tree.items() if _kind(line) == "supervisor"]
        sample = AgentsSample(
            agents,
            up_s,
            0.0,
            idle,
            status_s,
            Spread([pss_nbytes([one]) for one in ours]).median,
            Spread([_rss_nbytes(one) for one in ours]).median,
            pss_nbytes(main),
        )
        began = time.monotonic()
        run.popen.send_signal(signal.SIGTERM)
        run.popen.wait(UP_TIMEOUT_S)
        until(lambda: not run.processes(), "all agents have ended")
        down_s = time.monotonic() - began
    return AgentsSample(**{**vars(sample), "down_s": down_s})
