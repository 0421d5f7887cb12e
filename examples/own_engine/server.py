"""A user's own inference server, without any knowledge of channels: it answers ``x *
weight`` and caches its answers.

    /answer {x}   /shapes   /version
    /pause   /load {path, version}   /differs {path}   /reset   /resume

What is new to it is the gate, around all of it: only the follower (my_engine.py) may
use the second row, and no answer is of another version than its request demands.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np
import uvicorn
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from replicas.integrations.gate import Gate

CONTROL = ("/pause", "/load", "/differs", "/reset", "/resume")


class Server:
    def __init__(self) -> None:
        self.model = {"weight": np.zeros((8, 1), np.float32)}
        self.version = 0
        self.memory: dict[float, list[float]] = {}
        self.paused = True  # it has no version yet

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
        return 200, {}

    async def answer(self, request: Request) -> JSONResponse:
        status, answer = self.do(request.url.path, await request.json() if await request.body() else {})
        return JSONResponse(answer, status)


def serve(server: Server, port: int) -> None:
    """Answer until the process ends; print the port, as 0 is any free one."""
    paths = ("/answer", "/shapes", "/version", *CONTROL)
    app = Starlette(routes=[Route(path, server.answer, methods=["GET", "POST"]) for path in paths])
    listener = socket.create_server(("127.0.0.1", port))
    print(listener.getsockname()[1], flush=True)
    uvicorn.run(Gate(app, CONTROL, always=("/shapes", "/version")), fd=listener.fileno(), log_level="warning")


if __name__ == "__main__":
    serve(Server(), int(sys.argv[1]))
