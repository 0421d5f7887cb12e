"""The programs of ``bench_goodput.py``: a trainer and rollouts, whose weights move by a
contender's own mechanism.

    goodput_rank.py MECHANISM FOLDER [trainer | rollout]

Theory of operation
===================

All contenders share the folder (:class:`Field`), which moves no weights: a file with
the step that the trainer gathers for, and for each rollout a file to which it appends a
line for each sample. So a rollout that is killed holds up nobody's samples but its own.

The trainer opens step s, and each rollout that has weights generates one sample after
another, until the trainer has its batch and closes the step; a sample that is not ready
by then is dropped. A sample counts if it was made with the trainer's last version or
the one before. Then the trainer trains, makes version s (a model whose values are all
s, so that each sample tells which weights it was made with), and syncs. It starts again
after its last step, from a file, whichever step the others are at.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import replicas
from replicas.linux.processes import start_time

LOOK_S = 0.005
WAIT_S = 60.0
TENSORS = 4
NO_VERSION = -1.0


class Field:
    """The folder of a run, which :func:`bench.goodput_contenders.make_field` makes.

    :ivar plan: the values of :class:`bench.goodput_plan.Plan`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: Any = json.loads((folder / "plan.json").read_text())
        with (folder / "gate").open("r+b") as file:
            self._gate = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def gate(self) -> int:
        """``2 * step + 1`` while samples for the step are wanted, one more when there
        are enough, until the trainer opens the next step."""
        return self._gate[0]

    def open(self, step: int) -> None:
        self._gate[0] = 2 * step + 1

    def close(self, step: int) -> None:
        self._gate[0] = 2 * step + 2


def is_open(gate: int) -> int:
    """The step that is gathered for, or 0."""
    return gate // 2 if gate % 2 else 0


class Model:
    """Weights whose values all are the number of the step."""

    def __init__(self, nbytes: int) -> None:
        self.flat = torch.full((nbytes // 4,), NO_VERSION)
        self.tensors = {f"weight.{number}": part for number, part in enumerate(self.flat.chunk(TENSORS))}

    def fill(self, step: int) -> None:
        self.flat.fill_(step)

    def values(self) -> tuple[float, float]:
        """The least and the greatest value: two, if the model is torn."""
        low, high = torch.aminmax(self.flat)
        return float(low), float(high)


class Rollout:
    """What a rollout does with its weights."""

    def __init__(self, field: Field, number: int) -> None:
        self.field = field
        self._out = os.open(field.folder / f"samples-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        note = field.folder / f"rollout-{number}"
        with note.with_suffix(".new").open("w") as file:
            file.write(json.dumps([os.getpid(), start_time(os.getpid())]))
        note.with_suffix(".new").replace(note)
        self._low = self._high = NO_VERSION

    @property
    def step(self) -> int:
        """Of its weights; -1: it has none."""
        return int(self._low)

    def has(self, model: Model) -> None:
        """From now on samples are made with these weights."""
        self._low, self._high = model.values()

    def generate(self, gate: int) -> None:
        """One sample, unless the trainer has enough of them before it is ready."""
        until = time.monotonic() + self.field.plan["generate_s"]
        while (left := until - time.monotonic()) > 0:
            if self.field.gate != gate:
                return
            time.sleep(min(left, 2 * LOOK_S))
        line = json.dumps([is_open(gate), self._low, self._high, time.monotonic()])
        os.write(self._out, line.encode() + b"\n")

    def work(self, until: Callable[[], bool]) -> None:
        """Samples for the open step, if it has weights, until there is something else
        to do."""
        while not until():
            gate = self.field.gate
            if is_open(gate) and self.step >= 0:
                self.generate(gate)
            else:
                time.sleep(LOOK_S)


class Trainer:
    """What a trainer does between two syncs.

    :ivar step: the last one whose weights were made.
    """

    def __init__(self, field: Field) -> None:
        self.field = field
        self._saved = field.folder / "checkpoint"
        self.step = int(self._saved.read_text()) if self._saved.exists() else 0
        self._steps = field.folder / "steps"
        self._read: dict[Path, int] = {path: path.stat().st_size for path in self._samples()}
        field.close(self.step)

    def _samples(self) -> Iterator[Path]:
        return self.field.folder.glob("samples-*")

    def gather(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """A batch for the next step, made with this trainer's last version or the one
        before; ``meanwhile`` is called while it waits."""
        step, found = self.step + 1, 0
        self.field.open(step)
        while True:
            meanwhile()
            found += sum(1 for one, version in self._new() if one == step and version >= step - 2)
            if found >= self.field.plan["batch"]:
                break
            time.sleep(LOOK_S)
        self.field.close(step)

    def _new(self) -> Iterator[tuple[int, float]]:
        for path in self._samples():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if line.endswith(b"\n"):
                        self._read[path] = self._read.get(path, 0) + len(line)
                        yield tuple(json.loads(line)[:2])

    def train(self) -> int:
        """The next step, whose weights the caller makes; a trainer that starts again
        begins after it."""
        time.sleep(self.field.plan["train_s"])
        self.step += 1
        saving = self._saved.with_suffix(".new")
        saving.write_text(str(self.step))
        saving.replace(self._saved)
        return self.step

    def arrived(self, step: int) -> None:
        """A sync has ended well: the step counts."""
        with self._steps.open("a") as file:
            file.write(json.dumps([step, time.monotonic()]) + "\n")


def replicas_trainer(field: Field) -> None:
    """``publish`` returns when the weights are copied; the step counts with the
    commit."""
    trainer, model = Trainer(field), Model(field.plan["nbytes"])
    with replicas.join("policy") as channel:
        model.fill(trainer.step)
        channel.publish(model.tensors).wait(WAIT_S)
        pending: list[tuple[int, Any]] = []

        def look() -> None:
            while pending and pending[0][1].done():
                step, committed = pending.pop(0)
                committed.wait(0)
                trainer.arrived(step)

        while True:
            trainer.gather(look)
            model.fill(trainer.train())
            pending.append((trainer.step, channel.publish(model.tensors)))


def replicas_rollout(field: Field) -> None:
    rollout, model = Rollout(field, int(os.environ["REPLICA_ID"])), Model(field.plan["nbytes"])
    with replicas.join("policy") as channel:
        while True:
            coming = channel.receive()
            rollout.work(coming.done)
            with coming.wait() as update:
                update.load_into(model.tensors)
            rollout.has(model)


def torchrun(field: Field) -> None:
    """One job: rank 0 trains, and broadcasts after each step."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=field.plan["gloo_s"]))
    model, rank = Model(field.plan["nbytes"]), dist.get_rank()
    if rank == 0:
        trainer = Trainer(field)
        model.fill(trainer.step)
        dist.broadcast(model.flat, 0)
        while True:
            trainer.gather()
            model.fill(trainer.train())
            dist.broadcast(model.flat, 0)
            trainer.arrived(trainer.step)
    rollout = Rollout(field, rank - 1)
    while True:  # closed for the step after its version: the broadcast of that comes
        dist.broadcast(model.flat, 0)
        rollout.has(model)
        rollout.work(lambda: field.gate >= 2 * rollout.step + 4)


class Quorum:
    """torchft's manager of one replica group of one process, and a broadcast within its
    quorum.

    torchft orders a quorum by the groups' names: the trainer's is the first, so it has
    rank 0. A rollout's buffer begins with no version before each broadcast: what came
    out of a quorum without the trainer is not taken for weights.
    """

    def __init__(self, field: Field, name: str, model: Model) -> None:
        torchft: Any = importlib.import_module("torchft")
        c10d: Any = importlib.import_module("torch.distributed")
        timeout = timedelta(seconds=field.plan["torchft_s"])
        self._store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._model, self._options = model, c10d.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0
        self._group = torchft.ProcessGroupGloo(timeout)
        self._manager = torchft.Manager(
            pg=self._group,
            load_state_dict=lambda state: model.flat.copy_(state["flat"]),
            state_dict=lambda: {"flat": model.flat},
            min_replica_size=2,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            hostname="127.0.0.1",
            replica_id=name,
            init_sync=False,
        )

    def begin(self) -> None:
        """Ask for the quorum of the next sync, in the background."""
        self._manager.start_quorum()

    def wait(self) -> None:
        self._manager.wait_quorum()

    def sync(self, weights: torch.Tensor) -> bool:
        """Broadcast ``weights`` from rank 0 into those of the others; whether that went
        well here."""
        self.wait()
        if self._manager.errored() is None:
            try:
                self._group.broadcast([weights], self._options).wait()
            except Exception as error:  # noqa: BLE001  # Gloo's, and torchft's
                self._manager.report_error(error)
                self._group.abort()  # or those that wait for this process find out by their timeout
        return bool(self._manager.should_commit())


def torchft_trainer(field: Field) -> None:
    """A sync that fails is made again in the next quorum, with the same batch."""
    model = Model(field.plan["nbytes"])
    quorum, weights = Quorum(field, "0", model), torch.empty_like(model.flat)
    trainer = Trainer(field)  # closes the gate: from now on no quorum is without the trainer
    model.fill(trainer.step)
    quorum.begin()
    while True:
        weights.fill_(trainer.step)
        while not quorum.sync(weights):
            quorum.begin()
        model.fill(trainer.step)  # what a rollout that starts gets
        trainer.arrived(trainer.step)
        field.open(trainer.step + 1)
        quorum.begin()  # by now rollouts know that this quorum begins with a batch
        trainer.gather()
        trainer.train()


def torchft_rollout(field: Field) -> None:
    """It takes part in a sync when its quorum and the trainer's batch are there."""
    number = int(os.environ["GOODPUT_ROLLOUT"])
    rollout, model = Rollout(field, number), Model(field.plan["nbytes"])
    quorum, weights = Quorum(field, str(1 + number), model), torch.empty_like(model.flat)
    while True:
        quorum.begin()
        rollout.work(lambda: not is_open(field.gate))
        quorum.wait()  # not for long, unless it had to wait for the next step
        rollout.work(lambda: not is_open(field.gate))
        weights[0] = NO_VERSION
        if quorum.sync(weights) and weights[0] >= 0:
            model.flat.copy_(weights)
            rollout.has(model)


PROGRAMS: dict[tuple[str, ...], Callable[[Field], None]] = {
    ("replicas", "trainer"): replicas_trainer,
    ("replicas", "rollout"): replicas_rollout,
    ("torchrun",): torchrun,
    ("torchft", "trainer"): torchft_trainer,
    ("torchft", "rollout"): torchft_rollout,
}


def main() -> None:
    mechanism, folder, *role = sys.argv[1:]
    torch.set_num_threads(1)
    PROGRAMS[mechanism, *role](Field(Path(folder)))


if __name__ == "__main__":
    main()
