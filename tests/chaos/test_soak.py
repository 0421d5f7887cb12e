"""Nothing piles up: many epochs and many publishes on one store leave every process as it was.

A trainer publishes, and reduces with a rollout that receives; beside them members come and go, by closing or by SIGKILL,
each a new epoch with lanes of its own. After a warm-up and at the end everything is held still and counted: store keys,
and for each process its descriptors, threads, memory segments and private memory. ``SOAK_ROUNDS`` sets the length.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import group
from tests.support.runs import Run, eventually, running

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "24"))
"""So many versions and so many epochs after the warm-up."""
WARM_UP = max(16, ROUNDS // 5)
SLACK_NBYTES = 6 * 2**20
"""By how much the private memory of a process may differ: what malloc and Python keep for later."""

TRAINS = """
import os, time
import torch, replicas
out = os.environ["OUT"]
step = 0
with replicas.join("policy") as policy, replicas.join("outer") as outer:
    while not os.path.exists(out + "/stop"):
        if os.path.exists(out + "/hold"):
            open(out + "/held-trainer", "w").close()
            time.sleep(0.05)
            continue
        step += 1
        policy.publish({"w": torch.full((50_000,), float(step))}, meta={"step": step}).wait()
        outer.all_reduce([torch.ones(1000)]).wait()
"""

SERVES = """
import torch, replicas
with replicas.join("policy") as policy, replicas.join("outer") as outer:
    while True:
        with policy.receive(deadline=3600).wait() as update:
            for _, tensor in update:
                assert tensor.eq(float(update.meta["step"])).all()
        outer.all_reduce([torch.ones(1000)], deadline=3600).wait()
"""

COMES_AND_GOES = """
import os, signal, time
import torch, replicas
out = os.environ["OUT"]

def visit(kill, told):
    channel = replicas.join("policy")
    with channel.receive(deadline=60).wait() as update:
        for _, tensor in update:
            assert tensor.eq(float(update.meta["step"])).all()
    os.write(told, b"x")
    if kill:
        time.sleep(600)
    channel.close()

visits = 0
while True:
    if os.path.exists(out + "/hold"):
        open(out + "/held-guest", "w").close()
        time.sleep(0.05)
        continue
    visits += 1
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            visit(visits % 2, tell)
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    os.read(told, 1)
    os.close(told)
    if visits % 2:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(out + "/visits", "w") as file:
        file.write(str(visits))
"""


@dataclass(frozen=True)
class Usage:
    """What one process has. ``private_nbytes``: memory that is its own."""

    descriptors: int
    threads: int
    segments: int
    private_nbytes: int


def usage(pid: int) -> Usage:
    folder = Path(f"/proc/{pid}")
    links = []
    for link in (folder / "fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    rollup = (folder / "smaps_rollup").read_text()
    private = sum(int(size) for size in re.findall(r"Private_\w+:\s+(\d+) kB", rollup))
    segments = {line.split()[4] for line in (folder / "maps").read_text().splitlines() if "memfd:" in line}
    return Usage(len(links), len(list((folder / "task").iterdir())), len(segments), private * 1024)


KINDS = {
    "supervisor": "replicas.supervisor ",
    "store": "store_process",
    "shim": "replicas.supervisor.shim",
    "forkserver": "sidecar.forkserver",
    "trainer": 'replicas.join("outer") as outer:\n    while not',
    "rollout": "deadline=3600",
    "guests": "def visit",
}


def census(run: Run) -> dict[str, Usage]:
    """Every lasting process, by kind and the order of pids. Sidecars are counted together: each round has new ones."""
    found: dict[str, Usage] = {}
    lines = {run.pid: f"{run.config} replicas.supervisor ", **run.processes()}
    counts: dict[str, int] = {}
    for pid, line in sorted(lines.items()):
        kind = next((kind for kind, text in KINDS.items() if text in line), "other")
        name = (Path(f"/proc/{pid}/comm")).read_text().strip()
        if name == "replica-sidecar":
            counts["sidecars"] = counts.get("sidecars", 0) + 1
            continue
        counts[kind] = counts.get(kind, 0) + 1
        found[f"{kind} {counts[kind]}"] = usage(pid)
    print({"sidecars": counts.get("sidecars", 0)}, "keys", run.status().store.keys)
    for name, one in found.items():
        print(f"{name:16} {one}")
    return found


def hold(run: Run, out: Path) -> tuple[dict[str, Usage], int, int]:
    """Let everybody stand still, and count: processes' usage, store keys, sidecars."""
    (out / "hold").touch()
    for name in ("held-trainer", "held-guest"):
        eventually((out / name).exists, f"{name} in {run.status()}", timeout_s=60)
    eventually(lambda: members(run) == {"trainer/0/0", "rollout/0/0"}, "no guest", timeout_s=30)
    found = census(run)
    keys = run.status().store.keys
    sidecars = sum(1 for pid in run.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == "replica-sidecar")
    for name in ("hold", "held-trainer", "held-guest"):
        (out / name).unlink()
    return found, keys, sidecars


def members(run: Run) -> set[str]:
    return {member.name for member in run.status().channels[0].members}


def progress(run: Run) -> tuple[int, int]:
    """Versions and epochs so far."""
    (channel, *_) = [one for one in run.status().channels if one.name == "policy"]
    return channel.committed_version, channel.epoch


@pytest.mark.timeout(300 + 3 * ROUNDS)
def test_nothing_piles_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    patient = 'health = { start_timeout = "24h", load_deadline = "24h", progress_timeout = "24h" }'
    more = f'env = {{ OUT = "{out}" }}\n{patient}\n'
    text = group("trainer", TRAINS, more) + group("rollout", SERVES, more) + group("guest", COMES_AND_GOES, more)
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout", "guest"]\n'
    text += '[channels.outer]\npeers = ["trainer", "rollout"]\n'
    with running(tmp_path, text) as run:

        def past(start: tuple[int, int], rounds: int) -> bool:
            return all(now - then >= rounds for now, then in zip(progress(run), start, strict=True))

        eventually(lambda: past((0, 0), WARM_UP), "the end of the warm-up", timeout_s=120)
        start = progress(run)
        before, keys_before, sidecars_before = hold(run, out)
        eventually(lambda: past(start, ROUNDS), "so many rounds", timeout_s=120 + 3 * ROUNDS)
        after, keys, sidecars = hold(run, out)
        print("versions and epochs:", start, "->", progress(run))
        status = run.status()
        assert {one.name: one.restarts for one in status.groups} == {"trainer": {}, "rollout": {}, "guest": {}}
        assert keys <= keys_before + 10, "store keys"
        assert sidecars <= sidecars_before + 2, "sidecars"
        assert before.keys() == after.keys(), "processes"
        for name, one in before.items():
            then = after[name]
            assert then.descriptors <= one.descriptors + 4, f"descriptors of {name}"
            assert then.threads <= one.threads + 2, f"threads of {name}"
            assert then.segments <= one.segments + 1, f"segments of {name}"
            assert then.private_nbytes <= one.private_nbytes + SLACK_NBYTES, f"memory of {name}"
        (out / "stop").touch()
        run.signal(signal.SIGTERM)
        assert run.wait() == 0
        run.assert_nothing_left()
