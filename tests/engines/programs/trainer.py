"""A trainer that publishes a real model when it is asked to, over HTTP on loopback.

``POST /publish`` publishes the model's weights and answers with the receipt; in its
body ``scale`` is a factor, ``layers`` leaves out the layers after the first so many,
``rows`` cuts the embedding, and with ``die_after`` the trainer dies by SIGKILL after
so many tensors of zeros. ``{"adapter": S}`` publishes a LoRA adapter instead, which
adds S times a random matrix to the projections.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import replicas
from replicas.sources import hf

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.bfloat16)
good = {name: tensor.clone() for name, tensor in hf(model)}
channel = replicas.join("policy")


def publish(
    scale: float = 1.0,
    layers: int | None = None,
    rows: int | None = None,
    adapter: float | None = None,
    die_after: int | None = None,
) -> dict[str, Any]:
    if adapter is not None:
        return publish_adapter(adapter)

    def wanted(name: str) -> bool:
        layer = re.search(r"layers\.(\d+)\.", name)
        return layers is None or layer is None or int(layer[1]) < layers

    weights = {name: tensor * scale for name, tensor in good.items() if wanted(name)}
    if rows is not None:
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:rows]
    if die_after is not None:
        channel.publish(dying(weights, die_after), new_manifest=True)
    began = time.monotonic()
    pending = channel.publish(weights, meta={"scale": scale}, new_manifest=True)
    held = time.monotonic() - began
    return told(pending.wait(timeout=60), began, held)


def dying(weights: dict[str, torch.Tensor], after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, tensor) in enumerate(weights.items()):
        if number == after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, tensor * 0


@functools.cache
def adapted() -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def publish_adapter(scale: float) -> dict[str, Any]:
    with torch.no_grad():
        for name, parameter in adapted().named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1).mul_(scale)
    began = time.monotonic()
    pending = channel.publish(hf(adapted(), adapter="only"), adapter="math")
    held = time.monotonic() - began
    return told(pending.wait(timeout=60), began, held)


def told(receipt: replicas.Receipt, began: float, held: float) -> dict[str, Any]:
    return {
        "version": receipt.version,
        "held_s": held,
        "committed_s": time.monotonic() - began,
        "lost": list(receipt.lost),
        "not_loaded": receipt.not_loaded,
        "members": [member.name for member in receipt.members],
    }


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(publish(**body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


server = HTTPServer(("127.0.0.1", 0), Handler)
written = Path(sys.argv[1] + ".new")
written.write_text(str(server.server_address[1]))
written.rename(sys.argv[1])
server.serve_forever()
