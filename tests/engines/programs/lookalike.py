"""A look-alike of vLLM's server for TRL: a rank of the group ``server`` that answers
completions, with random tokens, once it has loaded a version.

It writes number and digest of each version that it loads to ``seen-REPLICA.jsonl``.
"""

from __future__ import annotations

import json
import os
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import replicas
from tests.engines.programs.digests import digest

torch.set_num_threads(1)
FACTS = {
    "/health": {},
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 256}]},
    "/get_world_size": {"world_size": 1},
    "/server_info": {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs"},
            "lora_config": None,
        }
    },
}
RANDOM_LOGPROB = -14.0
"""What the model gives such tokens: trainers weigh a completion by the ratio, and learn
nothing from one that is 0."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted: more are dropped, and tried again after seconds

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        url = f"http://127.0.0.1:{self.server_address[1]}"
        self.channel = replicas.join("policy", info={"url": url})

    def follow(self) -> None:
        seen = Path(f"seen-{os.environ['REPLICA_ID']}.jsonl")
        while True:
            with self.channel.receive().wait() as update, seen.open("a") as file:
                file.write(json.dumps({"version": update.version, "digest": digest(update), "pid": os.getpid()}) + "\n")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self._answer(200 if path in FACTS else 404, FACTS.get(path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._answer(404, {})  # control routes: nobody may call them
        elif self.server.channel.version == 0:
            self._answer(503, {})
        else:
            prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
            choices = [completion(prompt, body["max_tokens"]) for prompt in prompts for _ in range(body["n"])]
            self._answer(200, {"choices": choices})

    def _answer(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def completion(prompt: list[int], count: int) -> dict[str, Any]:
    ids = [random.randrange(100, 20000) for _ in range(count)]
    names = [f"token_id:{one}" for one in ids]
    found = [RANDOM_LOGPROB] * count
    logprobs = {"tokens": names, "token_logprobs": found, "top_logprobs": [{name: RANDOM_LOGPROB} for name in names]}
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


if __name__ == "__main__":
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.follow()
