"""The engine between a channel and your own server (server.py): it starts the server,
and loads each version into it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from replicas import Update, errors
from replicas.engine import Engine, PauseMode, follow
from replicas.integrations.gate import GATE, HEADER, GatePage


class MyEngine(Engine):
    """The verbs of one server, which is a child of this process."""

    name = "my server"

    def __init__(self, url: str, process: subprocess.Popen[str], page: GatePage) -> None:
        self.url, self._process, self._page = url, process, page

    def check(self, update: Update, timeout_s: float) -> str:
        shapes = {name: tuple(shape) for name, shape in self._ask("/shapes", timeout_s).items()}
        wrong = shapes.items() ^ {(spec.name, spec.shape) for spec in update.manifest.tensors}
        return f"these do not fit the model: {sorted(wrong)}" if wrong else ""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._ask("/pause", timeout_s)

    def load(self, update: Update, timeout_s: float) -> None:
        self._ask("/load", timeout_s, path=update.path_to_copy, version=update.version)

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        return ", ".join(self._ask("/differs", timeout_s, path=update.path_to_copy))

    def reset_caches(self, timeout_s: float) -> None:
        self._ask("/reset", timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._ask("/resume", timeout_s)
        found = self._ask("/answer", timeout_s, x=2)  # with the secret: the gate is still shut for others
        print(f"RESULT server: version {found['version']} answers {found['answer']}", flush=True)

    def version(self) -> int | None:
        return int(self._ask("/version", 10.0))

    def health(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"the server ended with {code}"

    def _ask(self, route: str, timeout_s: float, **body: object) -> Any:
        try:
            request = urllib.request.Request(self.url + route, json.dumps(body).encode(), {HEADER: self._page.secret})
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except OSError as error:
            raise errors.SyncError(f"{self.url}{route}: {error}", phase="load") from error


def start(page: GatePage) -> tuple[str, subprocess.Popen[str]]:
    """Start a server on a free port, with the gate; return its URL and process."""
    process = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "server.py", "0"],
        env={**os.environ, GATE: page.path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return f"http://127.0.0.1:{process.stdout.readline().strip()}", process


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    page = GatePage.create()
    url, process = start(page)
    try:
        follow(MyEngine(url, process, page), "policy", gate=page, verify_load="always", stop=stop)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
