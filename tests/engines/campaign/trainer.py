"""A trainer that publishes other random weights all the time, until ``OUT/stop`` is
there.

Each version has a seed of its own; seeds rise with the versions, over restarts too.
``OUT/published.jsonl`` has a line for the begin of each publish, and one for each
commit.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import replicas
from replicas.sources import hf
from tests.engines.programs.small_model import CONFIG, fill

EVERY_S = 2.0


def main(out: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    path = out / "published.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    seed = max((json.loads(line)["seed"] for line in lines), default=0)
    with replicas.join("policy") as channel, path.open("a", buffering=1) as log:

        def note(**told: Any) -> None:
            log.write(json.dumps({"seed": seed, "at": time.monotonic(), **told}) + "\n")

        while not (out / "stop").exists():
            seed += 1
            fill(model, seed)
            note()
            receipt = channel.publish(hf(model)).wait(60)
            note(version=receipt.version)
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main(Path(os.environ["OUT"]))
