"""One forkserver for each node: its sidecars take the places of their ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from replicas.supervisor.shim.phases import SWEEP_GRACE_S
from tests.support.processes import parent_of, sidecars_of
from tests.support.programs import group
from tests.support.runs import WITHOUT_CGROUPS, Run, alive, running
from tests.support.waits import eventually

RESTART = 'restart = { initial_delay = "100ms" }'
SYNCS = """
import os, time, torch, replicas
with replicas.join("all") as channel:
    while True:
        try:
            channel.all_reduce(torch.ones(4))
        except replicas.SyncError as error:
            print(error, flush=True)
        else:
            print("synced", flush=True)
        time.sleep(0.05)
"""


def test_a_node_has_one_forkserver_whose_sidecars_take_the_place_of_their_ranks(tmp_path: Path) -> None:
    """Also with different variables; but not if one is read only by the loader."""
    text = group("a", SYNCS, 'replicas = 2\nenv = {COLOUR = "red"}\n') + group("b", SYNCS, 'env = {COLOUR = "blue"}\n')
    text += group("c", SYNCS, 'env = {LD_LIBRARY_PATH = "/nowhere"}\n')
    text += '[channels.all]\npeers = ["a", "b", "c"]\n'
    with running(tmp_path, text) as run:
        names = ("a/0", "a/1", "b/0", "c/0")
        for name in names:
            syncs(run, name)
        ranks = dict(zip(names, main_pids(run), strict=True))
        eventually(lambda: all(map(sidecars_of, ranks.values())), "sidecars of all", timeout_s=60)
        sidecars = {name: sidecars_of(pid) for name, pid in ranks.items()}
        served = {name: {parent_of(pid) for pid in pids} for name, pids in sidecars.items()}
        assert served["a/0"] == served["a/1"] == served["b/0"] != served["c/0"]
        assert len(forkservers(run)) == 2
        for name, pids in sidecars.items():
            for pid in pids:
                assert control_group(pid) == control_group(ranks[name])
                assert Path(f"/proc/{pid}/fd/2").samefile(f"/proc/{ranks[name]}/fd/2"), "their output is in its log"
                assert parent_of(parent_of(pid)) == run.find("supervisor.agent.local")
        os.kill(ranks["a/1"], signal.SIGKILL)
        eventually(lambda: not any(alive(pid) for pid in sidecars["a/1"]), "the end of its sidecars", timeout_s=5)
        syncs(run, "a/1", 2)
        assert {parent_of(pid) for pid in sidecars_of(main_pids(run)[1])} == served["a/0"]
        for pid in forkservers(run):  # all lanes of the node end at once, and are made again
            os.kill(pid, signal.SIGKILL)
        for name in names:
            syncs(run, name, 2 if name == "a/1" else 1)
        assert [one.restarts for one in run.status().groups] == [{"signal": 1}, {}, {}]
        run.end()


@pytest.mark.parametrize("command", [None, WITHOUT_CGROUPS], ids=["control groups", "marks"])
def test_a_replica_that_ended_starts_again_when_its_frozen_sidecars_are_gone(
    tmp_path: Path, command: Sequence[str] | None
) -> None:
    """They are not below its shim, and their forkserver, which is frozen too, does not
    kill them."""
    text = group("a", SYNCS, f"replicas = 2\n{RESTART}") + '[channels.all]\npeers = ["a"]\n'
    with running(tmp_path, text, **({} if command is None else {"command": command})) as run:
        syncs(run, "a/0")
        rank = main_pids(run)[1]
        sidecars: list[int] = eventually(lambda: sidecars_of(rank), "its sidecars", timeout_s=60)
        (forkserver,) = forkservers(run)
        for pid in (forkserver, *sidecars):
            os.kill(pid, signal.SIGSTOP)
        os.kill(rank, signal.SIGKILL)
        before = time.monotonic()
        run.wait_line("a/1: starting (generation 2)", timeout_s=10)
        assert not any(alive(pid) for pid in sidecars)
        assert time.monotonic() - before < SWEEP_GRACE_S + 2.5, "the agent gives a frozen forkserver 3 s"
        eventually(lambda: forkserver not in forkservers(run), "its agent kills the frozen forkserver")
        eventually(lambda: sidecars_of(main_pids(run)[1]), "sidecars of another one", timeout_s=60)
        syncs(run, "a/1", 2)
        run.end()


def syncs(run: Run, name: str, generation: int = 1) -> None:
    """Wait until it has synced three times more than it has now."""
    log = run.log(name, generation)

    def count() -> int:
        return log.read_text().count("synced") if log.exists() else 0

    before = count()
    eventually(lambda: count() >= before + 3, f"syncs of {name}", timeout_s=90)


def main_pids(run: Run) -> list[int]:
    return [one.pid or 0 for group in run.status().groups for one in group.replicas]


def forkservers(run: Run) -> list[int]:
    """Those of the agent: a sidecar has the same command line."""
    agent = run.find("supervisor.agent.local")
    return [pid for pid, line in run.processes().items() if "sidecar.forkserver" in line and parent_of(pid) == agent]


def control_group(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()
