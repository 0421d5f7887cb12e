"""Replicas that join a channel: readiness comes from their sessions, and a frozen rank
is replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from replicas.linux.processes import start_time
from tests.support.processes import kill
from tests.support.programs import SERVES, SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

JOINS = """
import time, replicas
channel = replicas.join('c')
print('joined', flush=True)
time.sleep(600)
"""

PUBLISHES_ONCE = """
import time, torch, replicas
with replicas.join("policy") as channel:
    channel.publish({"w": torch.zeros(1000)}).wait(60)
    time.sleep(600)
"""

LEAVES = """
import time, replicas
with replicas.join('c') as channel:
    print('joined', flush=True)
time.sleep(1)
"""


def test_a_frozen_rank_is_replaced_and_one_that_left_is_not(tmp_path: Path) -> None:
    more = 'restart = { initial_delay = "100ms" }\nstop_timeout = "1s"\nhealth = { heartbeat_timeout = "6s" }'
    text = group("a", JOINS, more) + group("b", LEAVES, 'health = { load_deadline = "1ms" }')
    text += '[channels.c]\npeers = ["a", "b"]\n'
    with running(tmp_path, text) as run:
        run.wait_line("a/0: ready after", timeout_s=60)
        eventually(lambda: run.status().groups[1].replicas[0].state == "finished", "the end of b/0", timeout_s=60)
        replica = run.status().groups[0].replicas[0]
        assert replica.heartbeat_age_s is not None
        assert replica.pid is not None
        kill(replica.pid, signal.SIGSTOP)
        run.wait_line("a/0: silent: no heartbeat from rank 0 (limit: 6 s)", timeout_s=15)
        silent = run.status().groups[0].replicas[0]
        assert (silent.state, silent.reason) == ("silent", "no heartbeat from rank 0 (limit: 6 s)")
        assert silent.state_age_s > 3.0, "since the last heartbeat"
        run.wait_line("heartbeat for 6 s; stopping it", timeout_s=15)
        run.wait_line("a/0: ready after", timeout_s=60)
        status = run.status()
        assert status.groups[0].restarts == {"heartbeat_timeout": 1}
        assert status.groups[1].restarts == {}
        run.end()


def forkservers(run: Run) -> list[int]:
    return [pid for pid, line in run.processes().items() if "sidecar.forkserver" in line]


def test_members_that_share_memory_have_no_forkserver_until_one_needs_it(tmp_path: Path) -> None:
    text = group("trainer", PUBLISHES_ONCE) + group("rollout", SERVES) + group("idle", SLEEPS)
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with running(tmp_path, text) as run:
        eventually(lambda: run.status().groups[1].replicas[0].versions == {"policy": 1}, "a version", timeout_s=60)
        assert forkservers(run) == []
        rank = run.status().groups[1].replicas[0].pid
        assert rank is not None
        with run.asking_for_sidecars(rank):
            first = run.find("sidecar.forkserver")
        os.kill(first, signal.SIGKILL)  # a process that this test has started
        eventually(lambda: start_time(first) is None, "its end")
        with run.asking_for_sidecars(rank):
            eventually(lambda: set(forkservers(run)) - {first}, "another one")
        run.end()
