"""The demo's trainer: one replica of two ranks, run by the supervisor through torchrun
(see grpo.toml).

A step: the leader receives experience from every live rollout, all ranks share it over
their own default group, DDP makes one GRPO update, and the new weights are published. A
rollout that dies costs its part of one batch.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from model import DIGITS, GROUP, Experience, Policy, grpo_loss, rewards, stamp, text
from records import RecordWriter
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import replicas
from replicas import errors

UPDATES = 2
"""Gradient steps on each batch."""
LEARNING_RATE = 1e-3
SYNC_TIMEOUT_S = 60.0
COLLECT_DEADLINE_S = 15.0
"""Time limit for a live rollout to send its batch."""
START_DEADLINE_S = 90.0
"""Time limit for rollouts to start, in the first step."""
ATTEMPTS = 60
"""Attempts of a step to receive any experience at all."""
PAUSE_S = 1.0
"""Pause before the next attempt: all rollouts may be restarting."""


class Inbox:
    """Receives experience from the live rollouts; the leader of the trainer has it."""

    def __init__(self, channel: replicas.Channel, rollouts: int, records: RecordWriter) -> None:
        self._channel = channel
        self._records = records
        self._names = [f"rollout/{replica}" for replica in range(rollouts)]
        self._last_version: dict[str, int] = {}
        self._deadline_s = START_DEADLINE_S

    def collect(self, latest: int) -> list[Experience]:
        """Return one batch from each rollout, sampled with version ``latest`` or the
        one before.

        The first call waits for rollouts that have not joined yet. Later, the receive
        from a lost rollout fails at once with PeersLost, until it has joined again.
        """
        receiving = {name: self._channel.recv(src=name, deadline=self._deadline_s) for name in self._names}
        arrived = []
        for name, pending in receiving.items():
            try:
                tokens, log_probs, header = pending.wait(self._deadline_s + 10).tensors
            except errors.SyncError as error:  # dead or too slow: continue with the other rollouts
                self._records.write("missed", replica=name, kind=type(error).__name__, error=str(error))
                continue
            if self._usable(name, int(header[0]), latest):
                arrived.append(Experience(tokens, log_probs))
        self._deadline_s = COLLECT_DEADLINE_S
        return arrived

    def _usable(self, name: str, version: int, latest: int) -> bool:
        if version > latest or version < self._last_version.get(name, 0):
            self._records.write("backwards", replica=name, version=version, latest=latest)
            return False
        self._last_version[name] = version
        if version < latest - 1:
            self._records.write("stale", replica=name, version=version, latest=latest)
            return False
        return True


class Batch(NamedTuple):
    experience: Experience
    rollouts: int


def share(arrived: list[Experience]) -> Batch | None:
    """Broadcast the leader's experience to all ranks of the trainer, over its own
    default group. Return None if there is no experience."""
    counts = torch.tensor([len(arrived), sum(len(part.tokens) for part in arrived)])
    dist.broadcast(counts, src=0)
    rollouts, rows = counts.tolist()
    if not rows:
        return None
    if dist.get_rank() == 0:
        tokens, log_probs = (torch.cat(parts) for parts in zip(*arrived, strict=True))
    else:
        tokens = torch.empty(rows, 2 * DIGITS + 1, dtype=torch.uint8)
        log_probs = torch.empty(rows, DIGITS)
    dist.broadcast(tokens, src=0)
    dist.broadcast(log_probs, src=0)
    return Batch(Experience(tokens, log_probs), int(rollouts))


def my_part(experience: Experience) -> Experience:
    """Return this rank's share of the groups of completions."""

    def part(rows: Tensor) -> Tensor:
        groups = rows.view(-1, GROUP, rows.shape[1])
        return groups[dist.get_rank() :: dist.get_world_size()].flatten(0, 1)

    return Experience(part(experience.tokens), part(experience.log_probs))


class Trainer:
    """The model on this rank, and its channel to the rollouts."""

    def __init__(self, weights: replicas.Channel, inbox: Inbox | None, records: RecordWriter) -> None:
        self.weights = weights
        self.inbox = inbox
        self.records = records
        self.policy = Policy()
        self.ddp = DistributedDataParallel(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0
        )

    def publish(self, step: int) -> replicas.Receipt | None:
        """Publish the weights, stamped with ``step``. Return None if the sync failed;
        training continues."""
        stamp(self.policy, step)
        try:
            return self.weights.publish(self.policy, meta={"step": step}).wait(SYNC_TIMEOUT_S)
        except errors.SyncError as error:
            self.records.write("sync_failed", step=step, kind=type(error).__name__, error=str(error))
            return None

    def collect(self, step: int) -> Batch:
        """Return a batch for this step; while there is none, publish the weights again
        to wake the rollouts."""
        for _ in range(ATTEMPTS):
            batch = share(self.inbox.collect(self.weights.latest) if self.inbox else [])
            if batch is not None:
                return batch
            time.sleep(PAUSE_S)
            self.publish(step - 1)
        raise RuntimeError(f"step {step}: no rollout sent anything in {ATTEMPTS} attempts")

    def learn(self, batch: Batch) -> None:
        mine = my_part(batch.experience)
        for _ in range(UPDATES):
            self.optimizer.zero_grad()
            grpo_loss(self.ddp, mine).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()

    def step(self, step: int) -> None:
        started = time.monotonic()
        batch = self.collect(step)
        collected = time.monotonic()
        self.learn(batch)
        learned = time.monotonic()
        receipt = self.publish(step)
        if dist.get_rank() != 0:
            return
        reward = float(rewards(batch.experience.tokens).mean())
        self.records.write(
            "step",
            step=step,
            reward=reward,
            rollouts=batch.rollouts,
            sample=text(batch.experience.tokens[0]),
            collect_s=collected - started,
            learn_s=learned - collected,
            step_s=time.monotonic() - started,
            version=receipt.version if receipt else None,
            sync_s=receipt.seconds if receipt else None,
            sync_nbytes=receipt.nbytes if receipt else 0,
            phases=dict(receipt.phases) if receipt else {},
            lost=[str(name) for name in receipt.lost] if receipt else [],
        )
        if step % 10 == 0:
            print(f"step {step}: reward {reward:.3f}, {batch.rollouts} rollouts, {text(batch.experience.tokens[0])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=2, help="replicas of the rollout group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # the same weights on every rank
    dist.init_process_group("gloo")  # the trainer's own group: the library does not touch it
    records = RecordWriter("train" if dist.get_rank() == 0 else f"trainer-rank-{dist.get_rank()}")
    with contextlib.ExitStack() as stack:
        weights = stack.enter_context(replicas.join("policy"))
        inbox = None
        if dist.get_rank() == 0:
            inbox = Inbox(stack.enter_context(replicas.join("experience")), options.rollouts, records)
        trainer = Trainer(weights, inbox, records)
        trainer.publish(0)
        for step in range(1, options.steps + 1):
            trainer.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
