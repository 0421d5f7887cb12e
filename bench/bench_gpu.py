"""How close do publish and load come to what the GPU and its bus can do, and how much
does a training loop lose?

    python bench/bench_gpu.py [--quick] [--repetitions N] [--only SET …]

On one GPU, with one trainer and one target, each in a process of its own, in both
stagings of the slots, for 1 GiB in 8 tensors and for the 272 tensors of a real model
(269 MB). *Limits*: copies of as many bytes, by torch alone, measured in the same
processes: on the card, and to and from pinned host memory. *Publish*: how long the
trainer's stream is held by the copy (on the GPU's clock, from the receipt), how long
the call takes, and until the commit. *Load*: ``load_into`` on the target. *Hand over*:
another process opens the slot by CUDA IPC and copies it, in one piece. *Steps*: a
training loop of matrix products that never waits; what a publish between two steps
costs all of them together, as a part of the time from its call to its commit; with
``hold=False`` the copies are on a stream beside it. *Memory*: what each staging takes,
as the driver counts it. What a training loop loses is measured on a channel without
targets, too: a target on the same GPU works there, as well. Where there is no GPU it
says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu_report import report
from bench.support import Rank, busy_ratio, machine, run_bench, together, write
from replicas import Coordinator

ROOT = Path(__file__).resolve().parent.parent
SETS = ("few", "smollm2")
STAGINGS = ("device", "host")
STEP_S = 0.01
STEP_SIDE = 8192
BEFORE, AFTER = 5, 5
HOLDS = (True, False)
SCENES = ("alone", "target")


def alone(staging: str) -> str:
    """The channel without targets."""
    return f"{staging}_alone"


class Scene:
    """One trainer and one target on the GPU, with one channel of each staging."""

    def __init__(self, coordinator: Coordinator, trainer: Rank, target: Rank) -> None:
        self._coordinator = coordinator
        self._trainer = trainer
        self._target = target

    async def memory(self) -> dict[str, int]:
        trainer, target = await asyncio.gather(*(one.ask("memory") for one in (self._trainer, self._target)))
        return {"used": trainer["used_nbytes"], "slots": trainer["slots_nbytes"] + target["slots_nbytes"]}

    async def join(self, staging: str) -> dict[str, Any]:
        """Both, and as many versions as there are slots: what comes then finds
        everything warm. The memory that it took."""
        before = await self.memory()
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        await self._trainer.ask("join", channel=staging, group="trainer", **where)
        await self._target.ask("join", channel=staging, group="rollout", **where)
        cold = await self.round(staging)
        for _ in range(2):
            await self.round(staging)
        after = await self.memory()
        took = {name: after[name] - before[name] for name in after}
        return {"cold_s": cold["returned"], "gpu_nbytes": took["used"], "slots_nbytes": took["slots"]}

    async def round(self, staging: str, hold: bool = True) -> dict[str, Any]:
        """A version from the trainer to the target's own weights; the bytes are
        compared then."""
        await self._target.ask("receive", channel=staging)  # it waits for it now
        said, got = await asyncio.gather(self._trainer.ask("publish", channel=staging, hold=hold), self._target.hear())
        if said["staging"] != staging:
            raise RuntimeError(f"the receipt says staging {said['staging']!r}, not {staging!r}")
        sent, found = await asyncio.gather(*(one.ask("digest") for one in (self._trainer, self._target)))
        if sent != found:
            raise RuntimeError("the target's weights are not those of the trainer")
        return {**said, **got, "arrived": got["loaded"] - said["began"]}

    async def hand_over(self, version: int, repetitions: int) -> dict[str, Any]:
        """The trainer's slot, copied by the target."""
        where = await self._trainer.ask("place", channel="device", version=version)
        return await self._target.ask("open_and_copy", version=version, repetitions=repetitions, **where)

    async def join_alone(self, staging: str) -> None:
        """The trainer, on a channel without targets; its slots are warm then."""
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        await self._trainer.ask("join", channel=alone(staging), group="trainer", **where)
        for _ in range(3):
            await self._trainer.ask("publish", channel=alone(staging))

    async def steps(self, staging: str, hold: bool, scene: str) -> dict[str, float]:
        """What one publish costs a training loop; the target loads the version
        meanwhile, if there is one."""
        how = {
            "channel": staging if scene == "target" else alone(staging),
            "hold": hold,
            "before": BEFORE,
            "after": AFTER,
        }
        if scene == "target":
            await self._target.ask("receive", channel=staging)
        found = await self._trainer.ask("train_and_publish", **how)
        if scene == "target":
            await self._target.hear()
        # Of the same loop: from one loop to the next the card's clock changes by more
        # than what is looked for.
        usual = median([*found["steps"][:BEFORE], *found["steps"][-AFTER:]])
        lost = sum(found["steps"]) - usual * len(found["steps"])
        return {"lost": lost, "committed": found["committed"], "step": usual, "returned": found["returned"]}


async def measure(what: str, repetitions: int, quick: bool) -> dict[str, Any]:
    """All figures of one set of tensors."""
    base: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"]}
    channels = {name: {**base, "staging": staging} for staging in STAGINGS for name in (staging, alone(staging))}
    async with (
        Coordinator(channels, groups={"trainer": 1, "rollout": 1}) as coordinator,
        together("gpu_rank", ("trainer", "target")) as (trainer, target),
    ):
        card = await trainer.ask("card")
        facts = await trainer.ask("fill", what=what, seed=1)
        await target.ask("fill", what=what, seed=2)
        limits = (await trainer.ask("limits", repetitions=repetitions))["seconds"]
        side, step_s = (256, STEP_S / 10) if quick else (STEP_SIDE, STEP_S)
        step = await trainer.ask("prepare_steps", side=side, step_s=step_s)
        scene = Scene(coordinator, trainer, target)
        found: dict[str, Any] = {"card": card, **facts, "limits": limits, "step": step, "staging": {}}
        for staging in STAGINGS:
            taken = await scene.join(staging)
            rounds = [await scene.round(staging) for _ in range(repetitions)]
            await scene.join_alone(staging)
            stalls: dict[str, list[dict[str, float]]] = {}
            for _ in range(repetitions):
                for where in SCENES:
                    for hold in HOLDS:
                        stalls.setdefault(f"{where} {hold}", []).append(await scene.steps(staging, hold, where))
            found["staging"][staging] = {**taken, "rounds": rounds, "steps": stalls}
            if staging == "device":
                found["hand over"] = await scene.hand_over(await newest(trainer, scene), repetitions)
        await asyncio.gather(*(one.ask("leave") for one in (trainer, target)))
    return found


async def newest(trainer: Rank, scene: Scene) -> int:
    """A version of the device's channel that its trainer has for certain."""
    return int((await scene.round("device"))["version"])


def without_gpu() -> str:
    """Why there is nothing to measure; empty: there is a GPU. Another process is asked:
    torch stays out of this one."""
    code = (
        "import sys; from replicas.weights.copies.accelerator import accelerator as a; f = a(); "
        "sys.exit(not f or not f.device())"
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=False)
    return "" if done.returncode == 0 else "no GPU can be used here: bench_gpu measures nothing"


async def run(sets: Sequence[str], quick: bool, repetitions: int) -> None:
    busy = await busy_ratio()
    results: dict[str, Any] = {}
    for name in sets:
        results[name] = await measure(f"{name}-small" if quick else name, repetitions, quick)
        report(name, results[name])
    if any(result["card"]["fake"] for result in results.values()):
        print("on a fake accelerator: these figures mean nothing, and are not saved")
        return
    facts = {"busy_before": busy, "quick": quick, "repetitions": repetitions}
    write("bench_gpu", {"machine": machine(), **facts, "sets": results})


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish and load against the limits of the GPU and of its bus.")
    parser.add_argument("--quick", action="store_true", help="a part of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS, help="sets of tensors; default: all")
    options = parser.parse_args()
    why = without_gpu()
    if why:
        print(why)
        return
    run_bench(run(options.only, options.quick, options.repetitions or (3 if options.quick else 7)))


if __name__ == "__main__":
    main()
