"""A user's own inference server, without any knowledge of channels: it answers ``x *
weight`` and caches its answers.

    /answer {x}   /shapes   /version
    /pause   /load {path, version}   /differs {path}   /reset   /resume
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from safetensors.numpy import load_file


class Server(ThreadingHTTPServer):
    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = {"weight": np.zeros((8, 1), np.float32)}
        self.version = 0
        self.memory: dict[float, list[float]] = {}
        self.paused = True  # it has no version yet
        self.lock = threading.Lock()

    def do(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/shapes":
                return 200, {name: list(one.shape) for name, one in self.model.items()}
            case "/version":
                return 200, self.version
            case "/answer" if self.paused:
                return 503, "paused"
            case "/answer":
                x = float(asked["x"])
                if x not in self.memory:
                    self.memory[x] = (x * self.model["weight"]).ravel().tolist()
                return 200, {"version": self.version, "answer": self.memory[x]}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/load":
                for name, one in load_file(asked["path"]).items():
                    self.model[name][:] = one
                self.version = asked["version"]
            case "/differs":
                given = load_file(asked["path"])
                return 200, [name for name, one in self.model.items() if not np.array_equal(one, given[name])]
            case "/reset":
                self.memory.clear()
            case _:
                return 404, "no such route"
        return 200, {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        with self.server.lock:
            status, answer = self.server.do(self.path, json.loads(content or b"{}"))
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = Server(int(sys.argv[1]))
    print(server.server_address[1], flush=True)  # where it serves; 0 is any free port
    server.serve_forever()
