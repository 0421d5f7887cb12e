"""A trainer that publishes a real model when it is asked to, over HTTP on loopback.

``POST /publish {"scale": S, "layers": N}`` publishes the model's weights times S, of
its first N layers only if N is given, and answers with the receipt.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import replicas
from replicas.sources import hf

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.bfloat16)
good = {name: tensor.clone() for name, tensor in hf(model)}
channel = replicas.join("policy")


def publish(scale: float = 1.0, layers: int | None = None) -> dict[str, Any]:
    def wanted(name: str) -> bool:
        layer = re.search(r"layers\.(\d+)\.", name)
        return layers is None or layer is None or int(layer[1]) < layers

    weights = {name: tensor * scale for name, tensor in good.items() if wanted(name)}
    began = time.monotonic()
    pending = channel.publish(weights, meta={"scale": scale}, new_manifest=True)
    held = time.monotonic() - began
    receipt = pending.wait(timeout=60)
    return {
        "version": receipt.version,
        "held_s": held,
        "committed_s": time.monotonic() - began,
        "lost": list(receipt.lost),
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
