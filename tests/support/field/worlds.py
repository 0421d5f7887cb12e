"""Worlds of the field suite: a trainer that publishes what a test tells it, and toy
servers under ``replicas.integrations.vllm serve``."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.programs import group
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

__all__ = ["ON_ORDER", "TOY", "Toys", "ask", "toys"]

TOY = ROOT / "tests/support/field/toy"

ON_ORDER = """
import json, os, time
from pathlib import Path
import torch, replicas

out = Path(os.environ["OUT"])
with replicas.join("policy") as channel:
    (out / "trainer.pid").write_text(str(os.getpid()))
    while not (out / "stop").exists():
        done = len(list(out.glob("receipt-*")))
        if not (out / f"publish-{done + 1}").exists():
            time.sleep(0.01)
            continue
        began = time.monotonic()
        receipt = channel.publish({"a": torch.full((10,), float(done + 1))}, meta={"step": done + 1}).wait(60)
        told = {"version": receipt.version, "seconds": time.monotonic() - began, "lost": list(receipt.lost),
                "not_loaded": receipt.not_loaded, "members": [one.name for one in receipt.members]}
        (out / "new").write_text(json.dumps(told))
        (out / "new").rename(out / f"receipt-{done + 1}")
"""
"""Publishes version N when there is a file ``publish-N``, and writes ``receipt-N``."""


class Toys:
    """The run, its trainer and its servers.

    :ivar folder: where orders and answers are.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self._published = 0

    def publish(self) -> dict[str, Any]:
        """Publish the next version; what the trainer's receipt says."""
        self._published += 1
        (self.folder / f"publish-{self._published}").touch()
        answer = self.folder / f"receipt-{self._published}"
        eventually(answer.exists, f"the receipt of version {self._published}; {self.run.said()}", timeout_s=90)
        found = json.loads(answer.read_text())
        assert isinstance(found, dict)
        return found

    def versions(self) -> list[int]:
        """What each server says that it has loaded, by the status; 0: none."""
        (servers,) = (one for one in self.run.status().groups if one.name == "server")
        return [one.versions.get("policy", 0) if one.state == "ready" else 0 for one in servers.replicas]

    def wait_for(self, *versions: int, timeout_s: float = 90.0) -> None:
        def look() -> bool:
            return self.versions() == [*versions]

        try:
            eventually(look, f"versions {versions}", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.versions()}; {self.run.said()}") from None

    def url(self, replica: int) -> str:
        members = self.run.status().channels[0].members
        return next(str(one.info["url"]) for one in members if one.name.startswith(f"server/{replica}") and one.info)

    def processes(self, replica: int = 0) -> dict[str, int]:
        """Pids of a server's processes, by role: serve (the follower), api, core,
        worker0, worker1."""
        path = self.folder / f"pids-{replica}.json"
        eventually(path.exists, "a started server", timeout_s=60)
        (servers,) = (one for one in self.run.status().groups if one.name == "server")
        return {"serve": servers.replicas[replica].pid or 0, **json.loads(path.read_text())}


@contextmanager
def toys(folder: Path, servers: int, *, more: str = "", head: str = "") -> Iterator[Toys]:
    """A run with toy servers and a trainer that publishes on order."""
    out = folder / "out"
    out.mkdir()
    serve = [sys.executable, "-m", "replicas.integrations.vllm", "serve", "MODEL", "--min-serving", "0"]
    variables = f'{{ OUT = "{out}", TOY = "{out}", PYTHONPATH = "{TOY}:{ROOT}" }}'
    text = (
        group("trainer", ON_ORDER, f"env = {variables}")
        + f'[groups.server]\nreplicas = {servers}\nlauncher = "exec"\ncommand = {json.dumps(serve)}\n'
        + f"env = {variables}\n"
        + 'restart = { initial_delay = "0s", max_restarts = 100, no_progress_cycles = 0 }\n'
        + '[channels.policy]\nsources = ["trainer"]\ntargets = ["server"]\nslots = 3\n'
        + more
    )
    with running(folder, text, head=head) as run:
        found = Toys(run, out)
        eventually((out / "trainer.pid").exists, f"the trainer; {run.said()}", timeout_s=90)
        yield found


def ask(url: str, body: Any = None, *, timeout_s: float = 30.0) -> Any:
    """POST JSON, and read the answer."""
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.loads(response.read())
