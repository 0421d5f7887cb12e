"""Starts at once, resumes from a checkpoint and deaths in the middle of something:
reports of group E in docs/field.md."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from replicas.status import ReplicaStatus
from tests.support.field.worlds import toys
from tests.support.programs import group
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

COMMAND = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]
CHANNEL = '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
SOON = 'restart = { initial_delay = "0s", no_progress_cycles = 4 }'

RESUMES = """
import os, time
from pathlib import Path
import torch, replicas

out = Path(os.environ["OUT"])
checkpoint = out / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
with replicas.join("policy") as channel:
    if not step:
        channel.publish({"w": torch.zeros(1000)}, meta={"step": 0}).wait()
    (out / f"trainer-{os.environ['REPLICAS_GENERATION']}").write_text(str(os.getpid()))
    while True:
        wanted = {path: path.stat().st_size for path in out.glob("served-*")}
        while not wanted or any(path.stat().st_size < size + 1000 for path, size in wanted.items()):
            time.sleep(0.01)  # a step needs new samples of every rollout
            wanted = wanted or {path: path.stat().st_size for path in out.glob("served-*")}
        step += 1
        channel.publish({"w": torch.full((1000,), float(step))}, meta={"step": step}).wait()
        (out / "new").write_text(str(step))
        (out / "new").rename(checkpoint)  # a reader finds it whole
"""
"""A step needs samples, also the first after a resume; only then a version comes."""

SAMPLES = """
import json, os, time
from pathlib import Path
import replicas

log = open(Path(os.environ["OUT"]) / f"served-{os.environ['REPLICA_ID']}", "a", buffering=1)
with replicas.join("policy") as channel:
    version, step, pending = 0, 0, channel.receive()
    while True:
        try:
            with pending.wait(timeout=None if version == 0 else 0) as update:
                list(update)
                version, step = update.version, update.meta["step"]
            pending = channel.receive()
        except TimeoutError:
            log.write(json.dumps({"pid": os.getpid(), "version": version, "step": step, "at": time.monotonic()}) + "\\n")
            time.sleep(0.01)
"""
"""Samples with the version that it has, and takes a newer one when that is there."""


def samples(out: Path, replica: int) -> list[dict[str, Any]]:
    lines = (out / f"served-{replica}").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def pid_in(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text(), f"{path.name}", timeout_s=90))


@pytest.mark.timeout(200)
def test_prime_rl_3016_a_trainer_that_resumes_needs_samples_before_it_publishes(tmp_path: Path) -> None:
    """Rollouts go on with the version that they have while the trainer is away, and do
    not wait for one of the new trainer's: its step has their samples."""
    out = tmp_path / "out"
    out.mkdir()
    env = f'env = {{ OUT = "{out}" }}\n'
    text = group("trainer", RESUMES, env + SOON) + group("rollout", SAMPLES, env + "replicas = 2") + CHANNEL
    with running(tmp_path, text) as run:
        trainer = pid_in(out / "trainer-1")
        eventually(
            lambda: (out / "checkpoint").exists() and int((out / "checkpoint").read_text()) >= 3,
            "3 steps",
            timeout_s=90,
        )
        os.kill(trainer, signal.SIGKILL)
        killed = [samples(out, replica)[-1] for replica in range(2)]
        pid_in(out / "trainer-2")
        step = int((out / "checkpoint").read_text())
        eventually(lambda: int((out / "checkpoint").read_text()) >= step + 3, "3 steps more", timeout_s=60)
        for replica in range(2):
            found = samples(out, replica)
            assert {one["pid"] for one in found} == {killed[replica]["pid"]}, "no rollout was restarted"
            assert any(one["at"] > killed[replica]["at"] for one in found), "and it went on"
            for key in ("version", "step"):
                assert [one[key] for one in found] == sorted(one[key] for one in found)
            assert found[-1]["version"] > killed[replica]["version"]
        run.end(timeout_s=60)


DIES = """
import os, signal, time
from pathlib import Path
import torch, replicas

out, generation = Path(os.environ["OUT"]), int(os.environ["REPLICAS_GENERATION"])

def weights(value, dies):
    yield "a", torch.full((300_000,), float(value))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    yield "b", torch.full((7,), float(value))

signal.signal(signal.SIGTERM, lambda *_: (out / "draining").touch())
with replicas.join("policy") as channel:
    while True:
        dies = generation <= 2 and channel.latest >= 2 * generation
        channel.publish(weights(channel.latest + 1, dies), meta={"step": channel.latest + 1}).wait()
        (out / "published").write_text(f"{generation} {channel.latest}")
        time.sleep(0.02)
"""
CAUGHT = """
import os, signal
from pathlib import Path
import replicas

out, generation = Path(os.environ["OUT"]), int(os.environ["REPLICAS_GENERATION"])
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            for _, tensor in update:
                assert tensor.min() == tensor.max(), "torn"
            if generation < 3 and update.version > 2 + generation:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def replica_of(run: Run, name: str) -> ReplicaStatus:
    return next(one for its in run.status().groups for one in its.replicas if one.name == name)


@pytest.mark.timeout(400)
def test_dlrover_1749_what_a_dead_trainer_had_begun_is_not_held_against_the_next(tmp_path: Path) -> None:
    """It is killed inside two publishes and inside a drain, a rollout inside two
    loads. Each life begins anew: the count of lives without progress is 0 again."""
    out = tmp_path / "out"
    out.mkdir()
    env = f'env = {{ OUT = "{out}" }}\n'
    text = (
        group("trainer", DIES, env + SOON + '\nstop_timeout = "90s"') + group("rollout", CAUGHT, env + SOON) + CHANNEL
    )

    def published(generation: int, more: int = 1) -> int:
        """So many more versions of this generation."""

        def look() -> list[int]:
            if not (out / "published").exists():
                return []
            found = [int(word) for word in (out / "published").read_text().split()]
            return found if len(found) == 2 and found[0] == generation else []

        first = eventually(look, f"a version of generation {generation}; {run.said()[-8:]}", timeout_s=150)[1]
        return int(
            eventually(lambda: (now := look()) and now[1] >= first + more and now[1], "more versions", timeout_s=90)
        )

    with running(tmp_path, text) as run:
        before = published(3, more=20)
        trainer = replica_of(run, "trainer/0")
        assert (trainer.state, trainer.cycles, trainer.restarts) == ("ready", 0, 2)
        order = [*COMMAND, "restart", "trainer/0", "--no-wait", "-c", str(run.config)]
        subprocess.run(order, check=True, cwd=ROOT, capture_output=True, timeout=60)
        eventually((out / "draining").exists, "the drain", timeout_s=60)
        assert trainer.pid is not None
        with suppress(ProcessLookupError):
            os.kill(trainer.pid, signal.SIGKILL)
        assert published(4, more=20) > before
        trainer, rollout = replica_of(run, "trainer/0"), replica_of(run, "rollout/0")
        assert (trainer.state, trainer.cycles, trainer.reason) == ("ready", 0, "")
        assert (rollout.state, rollout.cycles, rollout.restarts) == ("ready", 0, 2)
        (channel,) = run.status().channels
        assert channel.last_sync is not None
        assert channel.last_sync.outcome == "committed"
        eventually(
            lambda: not replica_of(run, "rollout/0").lag_s.get("policy", 0) > 5, "the newest version", timeout_s=30
        )
        eventually(lambda: run.status().ready, "the run is ready", timeout_s=30)


MEETS = """
import os, socket, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.ones(1)
dist.all_reduce(mine)
assert mine.item() == 2
Path(f"met-{os.environ['REPLICA_ID']}-{dist.get_rank()}").touch()
time.sleep(600)
"""
ENGINES, JOBS = 8, 3


@contextmanager
def ports_are_grabbed() -> Iterator[None]:
    """Another program takes free ports, and gives them back a little later."""
    stop = threading.Event()

    def grab() -> None:
        held: deque[socket.socket] = deque()
        while not stop.wait(0.001):
            with suppress(OSError):
                held.append(socket.create_server(("127.0.0.1", 0)))
            while len(held) > 200:
                held.popleft().close()
        for one in held:
            one.close()

    thread = threading.Thread(target=grab)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


@pytest.mark.timeout(300)
def test_verl_6677_engines_that_start_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    """Servers and torchrun jobs, all at once, while another program takes ports: none
    fails to start."""
    (tmp_path / "meets.py").write_text(MEETS)
    more = f'[groups.job]\nreplicas = {JOBS}\nnproc_per_node = 2\ncommand = ["meets.py"]\n'
    with ports_are_grabbed(), toys(tmp_path, servers=ENGINES, more=more) as world:
        world.publish()
        world.wait_for(*[1] * ENGINES, timeout_s=200)
        eventually(lambda: len(list(tmp_path.glob("met-*"))) == 2 * JOBS, "all jobs have met", timeout_s=90)
        urls = {world.url(index) for index in range(ENGINES)}
        assert len(urls) == ENGINES
        restarts = {one.name: one.restarts for its in world.run.status().groups for one in its.replicas}
        assert set(restarts.values()) == {0}, restarts
        world.run.signal(signal.SIGTERM)
        world.run.wait(timeout_s=90)
        world.run.assert_nothing_left()
