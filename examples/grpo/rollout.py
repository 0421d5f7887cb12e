"""The demo's rollout: receives weights, samples completions with them, sends the
experience (see grpo.toml).

It may be killed at any time. Its random numbers depend on the seed, its index and the
version alone, so a run in which every rollout takes part in every step is reproducible.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from model import Experience, Policy, TornWeights, prompts, rewards, sample, verify
from records import RecordWriter

import replicas
from replicas import errors

PROMPTS = 24
"""Prompts per step, with a group of completions each."""
RECEIVE_TIMEOUT_S = 600.0
SEND_DEADLINE_S = 20.0


class Rollout:
    """A replica of one rank."""

    def __init__(self, weights: replicas.Channel, replica: int, seed: int) -> None:
        self.weights = weights
        self.replica = replica
        self.seed = seed
        self.policy = Policy()
        self.records = RecordWriter(f"rollout-{replica}")

    def load_newest(self) -> int:
        """Wait for a version newer than the current one, load it, verify that it is
        whole; return its number."""
        with self.weights.receive().wait(RECEIVE_TIMEOUT_S) as update:
            started = time.monotonic()
            step = update.meta["step"]
            if not isinstance(step, int):
                raise TypeError(f"version {update.version} has no step in its meta: {update.meta}")
            update.load_into(self.policy)
            try:
                verify(self.policy, step)
            except TornWeights as error:
                self.records.write("torn", version=update.version, step=step, error=str(error))
                raise
            version = update.version
        self.records.write("load", version=version, step=step, load_s=time.monotonic() - started)
        return version

    def sample(self, version: int) -> Experience:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + version) * 64 + self.replica)
        return sample(self.policy, prompts(PROMPTS, generator), generator)

    def send(self, outbox: replicas.Channel, experience: Experience, version: int) -> None:
        """Send the experience to the trainer; retry while these are the newest
        weights."""
        header = torch.tensor([version])
        for _ in range(3):
            try:
                outbox.send([*experience, header], dst="trainer/0", deadline=SEND_DEADLINE_S).wait(SEND_DEADLINE_S + 10)
            except errors.SyncError as error:
                self.records.write("unsent", version=version, error=str(error))
                if self.weights.latest > version:
                    return
            else:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    replica = int(os.environ["REPLICA_ID"])
    with replicas.join("policy", info={"pid": str(os.getpid())}) as weights:
        rollout = Rollout(weights, replica, options.seed)
        version = rollout.load_newest()
        with replicas.join("experience") as outbox:  # from here on the trainer waits for our batches
            while True:
                experience = rollout.sample(version)
                rollout.send(outbox, experience, version)
                print(f"version {version}: reward {float(rewards(experience.tokens).mean()):.3f}", flush=True)
                version = rollout.load_newest()


if __name__ == "__main__":
    main()
