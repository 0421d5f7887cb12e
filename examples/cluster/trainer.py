"""Trains, and publishes every tenth step (see cluster_demo.py).

`publish` copies the weights; training continues while the rollouts receive them.
Without a supervisor a new call waits for one, up to its deadline.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import replicas

STEP_S = 0.02
EVERY = 10
"""Steps from one publish to the next, at least."""
SHAPE = (256, 1024)


def main(limit_s: float) -> None:
    torch.set_num_threads(1)
    weight, pending, steps = torch.zeros(SHAPE), None, 0
    with (Path(os.environ["DEMO_RECORDS"]) / "trainer.jsonl").open("a", buffering=1) as records:

        def say(**fields: Any) -> None:
            records.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), "step": steps, **fields}) + "\n")

        with replicas.join("policy") as channel:
            end = time.monotonic() + limit_s
            while time.monotonic() < end:
                began = time.monotonic()
                time.sleep(STEP_S)  # a step of training
                steps += 1
                say(took_s=time.monotonic() - began)
                if pending is not None and pending.done():
                    try:
                        receipt = pending.wait()
                        say(version=receipt.version, targets=len(receipt.members))
                    except replicas.errors.SyncError as error:
                        say(failed=type(error).__name__)
                    pending = None
                if pending is None and steps % EVERY == 0:
                    weight.fill_(steps)
                    pending = channel.publish({"weight": weight}, meta={"step": steps}, deadline=60)


if __name__ == "__main__":
    main(float(sys.argv[1]))
