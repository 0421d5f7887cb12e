"""Serves the newest weights, and records their versions (see cluster_demo.py)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

import replicas


def main() -> None:
    torch.set_num_threads(1)
    layer = torch.nn.Linear(1024, 256, bias=False)
    with replicas.join("policy") as channel:
        name = f"rollout-{channel.member.replica}"
        with (Path(os.environ["DEMO_RECORDS"]) / f"{name}.jsonl").open("a", buffering=1) as records:
            while True:
                with channel.receive().wait() as update:
                    update.load_into(layer)
                    whole = bool((layer.weight == float(str(update.meta["step"]))).all())
                    line = {"at": time.monotonic(), "pid": os.getpid(), "version": update.version, "whole": whole}
                    records.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
