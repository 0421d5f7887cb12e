"""A rank of ``bench_steering.py``: the trainer, or the follower of a server of one's
own, which it starts and asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

import replicas
from bench.rank import Driver, Handler
from replicas.engine import follow
from replicas.integrations.gate import GATE, GatePage

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "own_engine"))
from my_engine import MyEngine  # type: ignore[import-not-found]  # noqa: E402  # of the example

WAIT_S = 60.0
LOOK_S = 0.002


class QuietEngine(MyEngine):  # type: ignore[misc]  # of the example
    """Without the line that the example prints of each version."""

    def resume(self, timeout_s: float) -> None:
        self._ask("/resume", timeout_s)


class Trainer:
    def __init__(self, endpoint: str, token: str, nbytes: int) -> None:
        self._channel = replicas.join("policy", endpoint=endpoint, token=token, group="trainer", replica=0)
        self._weight = torch.zeros(nbytes // 4, 1)

    def publish(self, value: float) -> dict[str, Any]:
        """Publish this value as each weight; return when that began."""
        self._weight.fill_(value)
        began = time.monotonic()
        receipt = self._channel.publish({"weight": self._weight}).wait(WAIT_S)
        return {"began": began, "version": receipt.version, "wire": receipt.wire_nbytes}

    def promote(self) -> dict[str, Any]:
        began = time.monotonic()
        self._channel.versions.promote().wait(WAIT_S)
        return {"began": began, "version": self._channel.versions.labels["current"]}

    def rollback(self) -> dict[str, Any]:
        began = time.monotonic()
        self._channel.versions.rollback().wait(WAIT_S)
        return {"began": began, "version": self._channel.versions.labels["current"]}


class Follower:
    """A server as a child, and its follower in a thread."""

    def __init__(self, endpoint: str, token: str, replica: int, nbytes: int) -> None:
        self._page = GatePage.create()
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "bench" / "steering_server.py", "0", str(nbytes)],
            env={**os.environ, GATE: self._page.path},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._url = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"
        self._stop = threading.Event()
        where: dict[str, Any] = {"endpoint": endpoint, "token": token, "group": "server", "replica": replica}
        engine = QuietEngine(self._url, self._process, self._page)
        settings: dict[str, Any] = {"gate": self._page, "verify_load": "never", "min_serving": 0.0, "stop": self._stop}
        self._thread = threading.Thread(target=follow, args=(engine, "policy"), kwargs={**settings, **where})
        self._thread.start()

    def answers(self, value: float, version: int) -> dict[str, Any]:
        """Ask until an answer to a demand of this version is right; return when."""
        request = urllib.request.Request(
            f"{self._url}/answer", json.dumps({"x": 2}).encode(), {"X-Replicas-Version": str(version)}
        )
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    found = json.load(answer)
                if found["version"] != version or set(found["answer"]) != {2 * value}:
                    raise ValueError(f"{found} is not {2 * value} of version {version}")
                return {"at": time.monotonic()}
            except urllib.error.HTTPError as error:
                if error.code not in (409, 503):
                    raise
                time.sleep(LOOK_S)
        raise TimeoutError(f"no answer of version {version} within {WAIT_S:g} s")

    def end(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._process.kill()
        self._process.wait()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    ranks: list[Any] = []

    def begin(kind: str, **about: Any) -> dict[str, Any]:
        ranks.append({"trainer": Trainer, "server": Follower}[kind](**about))
        return {}

    def call(name: str) -> Handler:
        return lambda **about: getattr(ranks[0], name)(**about)

    return {"begin": begin, **{name: call(name) for name in ("publish", "promote", "rollback", "answers", "end")}}
