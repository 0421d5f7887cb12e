"""A training run as people have it, under an operator who does anything at any time: no
run ends that should not.

An FSDP2 trainer of two ranks publishes its shards, rollouts check each tensor, and a
few times a minute a random thing happens: a process is killed or frozen, the group is
scaled, restarted, drained, the config reloaded, also a broken one. ``SCENE_MINUTES``
and ``SCENE_SEED`` choose how long and which history (``make scene MINUTES=30 SEED=2``);
``pytest -s`` shows what happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run, running
from tests.support.waits import eventually

MINUTES = float(os.environ.get("SCENE_MINUTES", "0.7"))
SEED = int(os.environ.get("SCENE_SEED", "1"))
A_MINUTE = 20
"""Events."""
PROGRAMS = Path(__file__).parent / "programs"
CLI = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]
PATIENCE_S = 120.0
"""Until all serve the newest version again, on a machine that is busy with other
things, too."""


def config(out: Path, *, load_deadline_s: int = 60) -> str:
    often = 'max_restarts = 100000, no_progress_cycles = 0, max_delay = "1s"'
    return f"""
[groups.trainer]
nproc_per_node = 2
command = ["{PROGRAMS}/scene_trainer.py", "{out}"]
env = {{ TORCHINDUCTOR_CACHE_DIR = "{out}/inductor" }}
stop_timeout = "3s"
restart = {{ policy = "always", {often} }}
health = {{ load_deadline = "{load_deadline_s}s" }}
[groups.rollout]
launcher = "exec"
replicas = 3
command = ["{PROGRAMS}/scene_rollout.py", "{out}"]
stop_timeout = "3s"
restart = {{ policy = "always", {often} }}
health = {{ load_deadline = "{load_deadline_s}s" }}
[channels.policy]
sources = [{{ group = "trainer", ranks = "all" }}]
targets = ["rollout"]
deadline = "30s"
"""


class Operator:
    """What may happen. Each returns a word on what it did."""

    def __init__(self, run: Run, out: Path, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self._out = out
        self._good = run.config.read_text()
        self._frozen: dict[int, float] = {}
        self.done: Counter[str] = Counter()

    def act(self) -> str:
        deeds: list[tuple[int, Callable[[], str]]] = [
            (6, self._kill_rollout),
            (1, self._kill_trainer),
            (2, self._kill_helper),
            (4, self._freeze_rollout),
            (2, self._scale),
            (2, self._restart),
            (1, self._drain),
            (1, self._reload),
            (1, self._reload_nonsense),
            (2, self._look),
        ]
        deed = self.rng.choices([one for _, one in deeds], [weight for weight, _ in deeds])[0]
        self.done[deed.__name__.strip("_")] += 1
        return f"{deed.__name__.strip('_')}: {deed()}"

    def cli(self, *arguments: str) -> int:
        done = subprocess.run(
            [*CLI, *arguments], cwd=self.run.folder, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode in (0, 1, 2, 78), (arguments, done)
        return done.returncode

    def thaw(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for pid in [pid for pid, until in self._frozen.items() if all_of_them or until <= now]:
            del self._frozen[pid]
            self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid in self.run.processes():  # of this run, and of no other
                os.kill(pid, number)

    def _one(self, *texts: str) -> int:
        """Pid of one of its processes with such a command line; 0: there is none."""
        return self.rng.choice(
            sorted(pid for pid, line in self.run.processes().items() if any(text in line for text in texts)) or [0]
        )

    def _kill(self, *texts: str) -> str:
        pid = self._one(*texts)
        if pid:
            self._signal(pid, signal.SIGKILL)
        return str(pid)

    def _kill_rollout(self) -> str:
        return self._kill("scene_rollout.py")

    def _kill_trainer(self) -> str:
        return self._kill("scene_trainer.py")

    def _kill_helper(self) -> str:
        return self._kill("supervisor.shim.shim", "sidecar.forkserver", "store_process")

    def _freeze_rollout(self) -> str:
        pid, seconds = self._one("scene_rollout.py"), self.rng.uniform(1.0, 12.0)
        if pid:
            self._signal(pid, signal.SIGSTOP)
            self._frozen[pid] = time.monotonic() + seconds
        return f"{pid} for {seconds:.1f} s"

    def _scale(self) -> str:
        number = str(self.rng.randint(1, 3))
        return f"{number}: {self.cli('scale', 'rollout', number, '--no-wait')}"

    def _restart(self) -> str:
        words = self.rng.choice([["rollout/0"], ["rollout"], ["rollout", "--rolling"]])
        return f"{words}: {self.cli('restart', *words, '--no-wait')}"

    def _drain(self) -> str:
        drained = self.cli("drain", "rollout/0")
        return f"{drained}, and started again: {self.cli('restart', 'rollout/0', '--no-wait')}"

    def _reload(self) -> str:
        seconds = self.rng.randint(30, 90)
        head, _, _ = self._good.partition("[groups.trainer]")
        self.run.config.write_text(head + config(self._out, load_deadline_s=seconds).lstrip())
        return str(self.cli("reload", "run.toml"))

    def _reload_nonsense(self) -> str:
        kept = self.run.config.read_text()
        self.run.config.write_text(kept.replace("replicas = 3", "replica = 3") + self.rng.choice(["", "[groups.x"]))
        try:
            code = self.cli("reload", "run.toml")
            assert code == 78
            assert self.cli("status") == 0, "it looks for the run of this folder"
        finally:
            self.run.config.write_text(kept)
        return str(code)

    def _look(self) -> str:
        return str([self.cli(word) for word in ("status", "stacks")])


def lines(out: Path, name: str) -> list[list[dict[str, Any]]]:
    """Of each file of this name; the last line may be half of one."""
    found = []
    for path in sorted(out.glob(name)):
        whole = path.read_text().rpartition("\n")[0]
        found.append([json.loads(line) for line in whole.splitlines()])
    return found


def versions(out: Path) -> list[int]:
    return [line["version"] for file in lines(out, "trainer.jsonl") for line in file if "version" in line]


def nothing_wrong(out: Path) -> int:
    """I2 of all that was seen so far; how many versions that were."""
    seen = 0
    for file in lines(out, "rollout-*.jsonl"):
        assert not [line for line in file if line["wrong"]], file[-1]
        order = [line["version"] for line in file]
        assert order == sorted(set(order)), order
        seen += len(order)
    committed = versions(out)
    assert committed == sorted(set(committed)), committed
    return seen


@pytest.mark.timeout(600 + 60 * MINUTES)
def test_no_run_ends_that_should_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with running(tmp_path, config(out)) as run:
        eventually(lambda: len(versions(out)) > 1, "the start", timeout_s=PATIENCE_S)
        operator, until = Operator(run, out, random.Random(SEED)), time.monotonic() + 60 * MINUTES
        while time.monotonic() < until:
            began = time.monotonic()
            print(f"{until - began:6.1f} s left, version {versions(out)[-1]}: {operator.act()}", flush=True)
            while time.monotonic() < began + 60 / A_MINUTE:
                operator.thaw()
                assert run.running, run.said()[-20:]
                time.sleep(0.1)
        operator.thaw(all_of_them=True)
        newest = versions(out)[-1]
        assert operator.cli("scale", "rollout", "3") == 0
        assert operator.cli("wait", "rollout", "-t", f"{PATIENCE_S:g}s") == 0, run.said()[-20:]
        eventually(lambda: versions(out)[-1] > newest + 1, "newer versions", timeout_s=PATIENCE_S)
        errors = [line["error"] for file in lines(out, "trainer.jsonl") for line in file if "error" in line]
        print(f"{len(versions(out))} versions, {nothing_wrong(out)} looked at; {dict(operator.done)}; {errors}")
        port = int(run.status().endpoint.rpartition(":")[2])
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=PATIENCE_S) == 0, run.lines[-20:]
        run.assert_nothing_left(port)
