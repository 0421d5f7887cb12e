"""The server of ``examples/own_engine`` with a model of some size: ``steering_server.py
NBYTES``. It answers from the first rows alone."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "own_engine"))
example: Any = importlib.import_module("server")

SHOWN = 8


class BigServer(example.Server):  # type: ignore[misc]  # of the example
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.model = {"weight": np.zeros((nbytes // 4, 1), np.float32)}

    def do(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        if path == "/load":  # in one copy
            with Path(asked["path"]).open("rb", buffering=0) as file:
                size = int.from_bytes(file.read(8), "little")
                begin = 8 + size + json.loads(file.read(size))["weight"]["data_offsets"][0]
                file.seek(begin)
                file.readinto(self.model["weight"].data.cast("B"))
            self.version = asked["version"]
            return 200, {}
        if path == "/answer" and not self.paused:
            weight = self.model["weight"]
            found = float(asked["x"]) * np.concatenate([weight[: SHOWN // 2], weight[-SHOWN // 2 :]])
            return 200, {"version": self.version, "answer": found.ravel().tolist()}
        return super().do(path, asked)  # type: ignore[no-any-return]


if __name__ == "__main__":
    example.serve(BigServer(int(sys.argv[2])), int(sys.argv[1]))
