"""What does a rollout on a channel cost in memory beyond its own program?

Theory of operation
===================

A trainer and 2 or 6 rollouts of one machine, which share memory (``auto``) or have
process groups (``group``): one version is published, all have loaded it, and nothing
more happens. *Memory*: the PSS of all processes but the programs themselves; by its
growth with the number of rollouts, that of one rollout: its shim, its log pump, and its
sidecars if it has any. What is left is that of the run: supervisor, coordinator, store,
agent, and the node's forkserver if there is one.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.trees import pss_nbytes, supervised, until

__all__ = ["SIZES", "TRANSPORTS", "ChannelSample", "measure"]

SIZES = (2, 6)
TRANSPORTS = ("auto", "group")
SETTLE_S = 3.0
UP_TIMEOUT_S = 120.0
TRAINER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    channel.publish({"w": torch.zeros(1 << 18)}).wait(60)
    time.sleep(3600)
"""
ROLLOUT = """
import time, replicas
with replicas.join("policy") as channel:
    with channel.receive().wait(60):
        pass
    time.sleep(3600)
"""


@dataclass(frozen=True)
class ChannelSample:
    transport: str
    rollouts: int
    memory_nbytes: int
    processes: int


def measure(folder: Path, transport: str, rollouts: int) -> ChannelSample:
    text = ""
    for name, program, count in (("trainer", TRAINER, 1), ("rollout", ROLLOUT, rollouts)):
        code = "'''" + program + "'''"
        text += (
            f'[groups.{name}]\nlauncher = "exec"\nreplicas = {count}\ncommand = ["{sys.executable}", "-c", {code}]\n'
        )
    text += f'[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\nmin_targets = {rollouts}\n'
    text += f'transport = "{transport}"\n'
    with supervised(folder, text) as run:

        def loaded() -> bool:
            time.sleep(0.1)
            return all(one.versions.get("policy") == 1 for one in run.status().groups[1].replicas)

        until(loaded, "all have loaded the version", UP_TIMEOUT_S)
        time.sleep(SETTLE_S)
        ours = [process for process, line in run.processes().items() if "replicas.join" not in line]
        return ChannelSample(transport, rollouts, pss_nbytes(ours), len(ours))
