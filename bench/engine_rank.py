"""``engine_rank.py MODEL FOLDER ROUNDS PORT PORT``: the trainer of
:mod:`bench.bench_engines`, which writes one row for each round to
``FOLDER/rounds.jsonl``."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import replicas
from replicas.sources import hf

START_TIMEOUT_S = 500.0
CALL_TIMEOUT_S = 60.0
BEAT_S = 0.5


def post(url: str, body: Any = None) -> None:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
        response.read()


def wait_until_healthy(url: str) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=CALL_TIMEOUT_S):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(BEAT_S)


class Trainer:
    """A model, and the ways in which its weights reach the servers."""

    def __init__(self, model: Path, folder: Path, ports: list[str]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.tensors = dict(hf(self.model))
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.warm = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.channel = replicas.join("policy")
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.checkpoint = folder / "checkpoint"
        shutil.copytree(model, self.checkpoint)
        self.pool = ThreadPoolExecutor(len(ports))

    def train(self) -> None:
        """Change all weights, a little."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.mul_(1.0 + 2.0**-7)

    def copy(self) -> dict[str, Any]:
        began = time.monotonic()
        for name, tensor in self.tensors.items():
            self.warm[name].copy_(tensor)
        return {"copied_s": time.monotonic() - began}

    def publish(self) -> dict[str, Any]:
        began = time.monotonic()
        pending = self.channel.publish(hf(self.model))
        held = time.monotonic()
        receipt = pending.wait()
        committed = time.monotonic()
        self.channel.loaded(receipt.version, deadline=CALL_TIMEOUT_S).wait()
        served = time.monotonic()
        if len(receipt.members) != 4:  # of each server the follower and one worker
            raise RuntimeError(f"{receipt.members} have version {receipt.version}")
        return {
            "version": receipt.version,
            "held_s": held - began,
            "committed_s": committed - began,
            "served_s": served - began,
        }

    def save(self) -> dict[str, Any]:
        began = time.monotonic()
        save_file(self.tensors, self.checkpoint / "model.safetensors", metadata={"format": "pt"})
        saved = time.monotonic()
        paused = list(self.pool.map(self.reload, self.urls))
        return {"saved_s": saved - began, "paused_s": paused, "reloaded_s": time.monotonic() - began}

    def reload(self, url: str) -> float:
        """Returns for how long the engine was paused."""
        post(f"{url}/pause?mode=keep")
        began = time.monotonic()
        post(f"{url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.checkpoint)}})
        post(f"{url}/reset_prefix_cache")
        post(f"{url}/resume")
        return time.monotonic() - began


def main(model: Path, folder: Path, rounds: int, ports: list[str]) -> None:
    trainer = Trainer(model, folder, ports)
    for url in trainer.urls:
        wait_until_healthy(url)
    first = trainer.channel.publish(hf(trainer.model)).wait()
    while sum(member.group == "server" for member in trainer.channel.members) < 4:
        time.sleep(BEAT_S)
    trainer.channel.loaded(first.version, deadline=START_TIMEOUT_S).wait()
    ways: list[Callable[[], dict[str, Any]]] = [trainer.copy, trainer.publish, trainer.save]
    for number in range(rounds):
        row: dict[str, Any] = {"nbytes": trainer.nbytes}
        for way in range(len(ways)):
            trainer.train()
            row |= ways[(number + way) % len(ways)]()
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
