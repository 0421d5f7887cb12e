"""Ranks that end slowly, or never, and who waits for them: reports of group C in
docs/field.md. torchrun alone and Gloo alone are put into the same situation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from replicas.linux.processes import command_line, descendants, signal_each
from tests.support.machine.freezer import freezes, frozen
from tests.support.nodes import over_nodes, placed, ready
from tests.support.programs import PUBLISHES, SERVES, group
from tests.support.runs import running
from tests.support.waits import eventually

STUCK = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path(f"rank-{rank}").write_text(str(os.getpid()))
while rank == "1" or not Path("go").exists():
    time.sleep(0.05)
sys.exit(3)
"""
STAYS_S = 12.0
"""So long we watch torchrun wait for a rank that does not die."""


def has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


@contextmanager
def torchrun_alone(folder: Path, program: Path, *options: str, ranks: int = 1) -> Iterator[subprocess.Popen[str]]:
    """torch's own launcher, without this project; killed at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen([*command, str(program)], cwd=folder, env=env, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait(30)
        signal_each(below, signal.SIGKILL, lambda pid: program.name in command_line(pid, 1000))


@pytest.mark.skipif(not freezes(), reason="needs a control group of the freezer, as root")
@pytest.mark.timeout(240)
def test_pytorch_185414_a_rank_that_does_not_die_of_sigkill(tmp_path: Path) -> None:
    """torchrun alone waits for it, by its code for two minutes. Here the pid is named,
    and the replica's next generation waits for it. That no other replica is touched:
    tests/integration/supervisor/cleanup/test_slow_deaths.py."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "stuck.py").write_text(STUCK)
    text = (
        '[groups.stuck]\nnproc_per_node = 2\ncommand = ["stuck.py"]\nstop_timeout = "1s"\n'
        'restart = { initial_delay = "0s" }\n'
    )
    with (
        running(ours, text) as run,
        torchrun_alone(theirs, theirs / "stuck.py", "--shutdown-timeout=1", ranks=2) as launcher,
        ExitStack() as stack,
    ):
        pids = []
        for folder in (ours, theirs):
            told = [folder / "rank-0", folder / "rank-1"]
            for path in told:
                eventually(partial(has_text, path), "both ranks", timeout_s=90)
            pids.append(int(told[1].read_text()))
            stack.enter_context(frozen(pids[-1]))
            (folder / "go").touch()
        run.wait_line(f"held up by process {pids[0]} (", timeout_s=90)
        began = time.monotonic()
        (replica,) = run.status().groups[0].replicas
        assert f"held up by process {pids[0]} (" in replica.reason
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(STAYS_S)
        assert run.status().groups[0].replicas[0].generation == 1, "nothing is started beside it"
        assert time.monotonic() - began >= STAYS_S
        (ours / "go").unlink()
        stack.close()
        run.wait_line("stuck/0: starting (generation 2)", timeout_s=90)
        assert launcher.wait(60) == 1
        run.signal(signal.SIGTERM)
        run.wait(timeout_s=60)
        run.assert_nothing_left()


SAVES_S = 33.0
"""torchrun's own limit is 30."""
SAVES = f"""
import signal, time
from pathlib import Path
def save(*_):
    Path("saving").touch()
    time.sleep({SAVES_S})
    Path("saved").touch()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
Path("up").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.timeout(240)
def test_pytorch_119856_a_trainer_that_saves_for_longer_than_30_s(tmp_path: Path) -> None:
    """torchrun alone kills it after 30 s, unless it is given ``--shutdown-timeout``
    (which torch has had since). Here it has the whole ``stop_timeout``."""
    folders = [tmp_path / name for name in ("ours", "default", "told")]
    for folder in folders:
        folder.mkdir()
        (folder / "saves.py").write_text(SAVES)
    ours, default, told = folders
    text = '[groups.trainer]\ncommand = ["saves.py"]\nstop_timeout = "90s"\n'
    with (
        running(ours, text) as run,
        torchrun_alone(default, default / "saves.py") as first,
        torchrun_alone(told, told / "saves.py", "--shutdown-timeout=90") as second,
    ):
        for folder in folders:
            eventually((folder / "up").exists, "the trainer", timeout_s=90)
        run.signal(signal.SIGTERM)
        first.terminate()
        second.terminate()
        assert run.wait(timeout_s=90) == 0
        first.wait(90)
        second.wait(90)
        run.assert_nothing_left()
    assert [(folder / "saving").exists() for folder in folders] == [True] * 3
    assert [(folder / "saved").exists() for folder in folders] == [True, False, True]


GLOO = """
import datetime, os, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GLOO_S))
rank, weights = dist.get_rank(), torch.zeros(16_000_000)
dist.broadcast(weights, 0)
Path(f"rank-{rank}").write_text(str(os.getpid()))
while not Path("go").exists():
    time.sleep(0.05)
began = time.monotonic()
try:
    dist.broadcast(weights, 0)
    dist.barrier()
except RuntimeError:
    Path("new").write_text(str(time.monotonic() - began))
    Path("new").rename("failed")
os._exit(0)
"""
GLOO_S = 10.0
COMMIT_S = 20.0
"""A commit comes within 5 s; more on a machine that is busy with other tests. In the
report the limit was 600 s."""


def commits(out: Path) -> list[tuple[float, int]]:
    log = out / "trainer-0.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(one["at"], one["version"]) for one in map(json.loads, lines) if "version" in one]


@pytest.mark.timeout(240)
def test_skyrl_1688_a_node_that_is_evicted_in_the_middle_of_a_sync(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its rollout is frozen in a sync (a half-open link) and its agent is told to end.
    The trainer and the other rollout go on. In a Gloo broadcast the sender waits for
    the group's whole timeout."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    out.mkdir()
    theirs.mkdir()
    (theirs / "gloo.py").write_text(GLOO.replace("GLOO_S", f"{GLOO_S}"))
    where = f'env = {{ OUT = "{out}" }}'
    text = (
        group("trainer", PUBLISHES, where)
        + placed("here").format("trainer")
        + group("rollout", SERVES, f'{where}\nreplicas = 2\nstop_timeout = "3s"')
        + placed("there").format("rollout")
        + '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    )
    with over_nodes(tmp_path, text, ["n1", "n2"]) as (run, agents), torchrun_alone(theirs, theirs / "gloo.py", ranks=2):
        found = ready(run, "rollout")
        (name,) = (name for name, (*_, nodes) in found.items() if nodes == "n1")
        pid = found[name][2]
        assert pid is not None
        eventually(lambda: commits(out), "the first commit", timeout_s=60)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        agents["n1"].popen.terminate()
        eventually(lambda: [at for at, _ in commits(out) if at > began], "a commit", timeout_s=COMMIT_S)
        record_property("commit_s", next(at for at, _ in commits(out) if at > began) - began)
        assert agents["n1"].wait(120) == 0
        after = ready(run, "rollout")
        assert {nodes for *_, nodes in after.values()} == {"n2"}
        eventually(lambda: (theirs / "rank-1").exists() and (theirs / "rank-0").exists(), "Gloo's ranks", timeout_s=90)
        os.kill(int((theirs / "rank-1").read_text()), signal.SIGSTOP)
        (theirs / "go").touch()
        eventually((theirs / "failed").exists, "the end of Gloo's broadcast", timeout_s=GLOO_S + 60)
        assert float((theirs / "failed").read_text()) > GLOO_S / 2
        versions = [version for _, version in commits(out)]
        assert versions == sorted(set(versions))
        (out / "stop").touch()
        run.end(timeout_s=60)
