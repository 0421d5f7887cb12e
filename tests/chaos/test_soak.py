"""Nothing piles up: many epochs and many publishes on one store leave every process as
it was.

A trainer publishes, and reduces with a rollout that receives; beside them members come
and go, by closing or by SIGKILL, each a new epoch with lanes of its own. After a
warm-up and at the end everything is held still and counted: store keys, and for each
process its descriptors, threads, memory segments and anonymous memory. ``SOAK_ROUNDS``
sets the length.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import group
from tests.support.runs import Run, running
from tests.support.waits import eventually

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "24"))
"""So many versions and so many epochs after the warm-up."""
WARM_UP = max(16, ROUNDS // 10)
RETIRED = 2
"""As many as an arena has slots: buffers that are left to readers which were killed
just now, or wait for a slot."""
SLACK_NBYTES = 6 * 2**20
"""By how much the memory of a process may differ: what malloc and Python keep for
later."""

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

def visit(replica, kill, told):
    channel = replicas.join("policy", group="guest", replica=replica)
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
            visit(visits % 60, visits % 2, tell)  # many identities: one that flaps is made to wait
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    seen = os.read(told, 1)
    os.close(told)
    if visits % 2:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert seen and status == (signal.SIGKILL if visits % 2 else 0), f"visit {visits} ended with {status}"
    with open(out + "/visits", "w") as file:
        file.write(str(visits))
"""


@dataclass(frozen=True)
class Usage:
    """What one process has. ``anonymous_nbytes``: memory that is its own."""

    descriptors: int
    threads: int
    segments: int
    anonymous_nbytes: int


def usage(pid: int) -> Usage:
    folder = Path(f"/proc/{pid}")
    links = []
    for link in (folder / "fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    (anonymous,) = re.findall(r"RssAnon:\s+(\d+) kB", (folder / "status").read_text())
    segments = {line.split()[4] for line in (folder / "maps").read_text().splitlines() if "memfd:" in line}
    return Usage(len(links), len(list((folder / "task").iterdir())), len(segments), int(anonymous) * 1024)


KINDS = {
    "supervisor": "replicas.supervisor ",
    "store": "store_process",
    "shim": "replicas.supervisor.shim.shim",
    "forkserver": "sidecar.forkserver",
    "trainer": 'replicas.join("outer") as outer:\n    while not',
    "rollout": "deadline=3600",
    "host": "def visit",
}


def census(run: Run) -> dict[str, Usage]:
    """Every process, by kind and the order of pids."""
    found: dict[str, Usage] = {}
    lines = {run.pid: "replicas.supervisor ", **run.processes()}
    forkservers = {pid for pid, line in lines.items() if KINDS["forkserver"] in line}
    for pid, line in sorted(lines.items()):
        if parent_of(pid) in forkservers:
            found[f"sidecar {pid}"] = usage(pid)
            continue
        kind = next((kind for kind, text in KINDS.items() if text in line), "other")
        found[f"{kind} {1 + sum(1 for name in found if name.startswith(kind))}"] = usage(pid)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def hold(run: Run, out: Path) -> tuple[dict[str, Usage], int]:
    """Let everybody stand still, and count: processes' usage, and store keys."""
    (out / "hold").touch()
    for name in ("held-trainer", "held-guest"):
        eventually((out / name).exists, f"{name} in {run.status()}", timeout_s=60)
    eventually(lambda: members(run) == {"trainer/0/0", "rollout/0/0"}, "no guest", timeout_s=30)
    eventually(lambda: sum(KINDS["host"] in one for one in run.processes().values()) == 1, "all ended", timeout_s=30)
    found, keys = census(run), run.status().store.keys
    print(f"{keys} keys at {progress(run)} versions and epochs")
    for name, one in found.items():
        print(f"  {name:16} {one}")
    for name in ("hold", "held-trainer", "held-guest"):
        (out / name).unlink()
    return found, keys


def lasting_of(found: dict[str, Usage]) -> dict[str, Usage]:
    """Without sidecars, of which each lane has new ones."""
    return {name: one for name, one in found.items() if not name.startswith("sidecar")}


def members(run: Run) -> set[str]:
    return {member.name for member in run.status().channels[0].members}


def progress(run: Run) -> tuple[int, int]:
    """Versions and epochs so far."""
    (channel, *_) = [one for one in run.status().channels if one.name == "policy"]
    return channel.committed_version, channel.epoch


@pytest.mark.timeout(600 + 6 * ROUNDS)
def test_nothing_piles_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    patient = 'health = { start_timeout = "24h", load_deadline = "24h", progress_timeout = "24h" }'
    more = f'env = {{ OUT = "{out}" }}\n{patient}\n'
    text = group("trainer", TRAINS, more) + group("rollout", SERVES, more) + group("host", COMES_AND_GOES, more)
    text += '[groups.guest]\nlauncher = "external"\nmin_ready = 0\n'
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout", "guest"]\n'
    text += '[channels.outer]\npeers = ["trainer", "rollout"]\n'
    with running(tmp_path, text) as run:

        def past(start: tuple[int, int], rounds: int) -> bool:
            assert not any(one.restarts for one in run.status().groups), run.said()
            return all(now - then >= rounds for now, then in zip(progress(run), start, strict=True))

        eventually(lambda: past((0, 0), WARM_UP), "the end of the warm-up", timeout_s=240 + 3 * WARM_UP)
        start = progress(run)
        before, keys_before = hold(run, out)
        eventually(lambda: past(start, ROUNDS), "so many rounds", timeout_s=240 + 3 * ROUNDS)
        after, keys = hold(run, out)
        assert keys <= keys_before + 10, "store keys"
        lasting, still = lasting_of(before), lasting_of(after)
        assert len(after) - len(still) <= len(before) - len(lasting) + 2, "sidecars"
        assert lasting.keys() == still.keys(), "processes"
        for name in before.keys() & after.keys():  # with the sidecars of a lane that lasted
            one, then = before[name], after[name]
            assert then.descriptors <= one.descriptors + 4, f"descriptors of {name}"
            assert then.threads <= one.threads + 2, f"threads of {name}"
            assert then.segments <= one.segments + RETIRED, f"segments of {name}"
            assert then.anonymous_nbytes <= one.anonymous_nbytes + SLACK_NBYTES, f"memory of {name}"
        (out / "stop").touch()
        run.end()
