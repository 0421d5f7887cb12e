"""A coordinator in a process of its own, with one channel "policy", which kills itself
at a moment that a test chose.

Run as a program it prints the port it listens on. Then each line that it reads is a
moment and how many times it must come: at the last of them the program dies by SIGKILL.
It answers "armed". At the end of its input it stops in good order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicas import messages as wire
from replicas.coordinator import Coordinator, GroupShape
from replicas.core.base.effects import Send
from replicas.core.base.ledger import Decision
from tests.support.root import ROOT

__all__ = ["MOMENTS", "CoordinatorProcess"]


def _sends(kind: type[Any]) -> Callable[[object], bool]:
    return lambda what: isinstance(what, Send) and isinstance(what.message, kind)


def _offers(role: str) -> Callable[[object], bool]:
    return lambda what: (
        isinstance(what, Send) and isinstance(what.message, wire.TransferOffer) and what.message.role == role
    )


def _hears(kind: type[Any]) -> Callable[[object], bool]:
    return lambda what: isinstance(what, kind)


MOMENTS: dict[str, Callable[[object], bool]] = {
    "publish begun": _hears(wire.PublishBegin),
    "admitting": _sends(wire.PublishAdmitted),
    "packed": _hears(wire.Packed),
    "reading": _hears(wire.ManifestPiece),
    "locating": _sends(wire.Locate),
    "going": _sends(wire.OperationGo),
    "mapping": _offers("map"),
    "pulling": _offers("pull"),
    "first done": _hears(wire.TransferDone),
    "decided": lambda what: isinstance(what, Decision),
    "telling": _sends(wire.Commit),
    "told": _sends(wire.PublishEnd),
    "granting": _sends(wire.ReceiveGrant),
    "loaded": _hears(wire.Loaded),
}
"""When it dies: just before the message is handled or sent; a decision is on disk by
then."""


class CoordinatorProcess:
    """The process, from the test's side. ``port`` 0 at the first start; a later one
    listens where the first one did."""

    def __init__(self, config: Mapping[str, Any], groups: Mapping[str, int], state_dir: Path | None) -> None:
        self.token = "secret"
        self.port = 0
        self._arguments = {"config": dict(config), "groups": dict(groups), "state_dir": state_dir and str(state_dir)}
        self._process: Process | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        given = json.dumps({**self._arguments, "port": self.port, "token": self.token})
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, given, stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        self.port = int(await self._line())

    async def arm(self, moment: str, times: int = 1) -> None:
        """From now on it dies when ``moment`` has come so many times."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{moment}:{times}\n".encode())
        assert await self._line() == "armed"

    async def died(self) -> None:
        """Wait until it has killed itself."""
        assert await asyncio.wait_for(self.process.wait(), 60) == -signal.SIGKILL

    async def kill(self) -> None:
        self.process.kill()
        await self.died()

    async def stop(self) -> None:
        """Let it stop in good order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), 30) == 0

    async def clean_up(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _line(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line, "the coordinator ended"
        return line.decode().strip()


async def _serve(given: dict[str, Any]) -> None:
    state_dir = given["state_dir"]
    coordinator = Coordinator(
        {"policy": given["config"]},
        groups={name: GroupShape(1, size) for name, size in given["groups"].items()},
        port=given["port"],
        token=given["token"],
        state_dir=Path(state_dir) if state_dir else None,
    )
    moment, left = "", 0

    def tap(channel: object, what: object) -> None:
        nonlocal left
        if moment and MOMENTS[moment](what):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async with coordinator:
        coordinator.engine.tap = tap
        print(coordinator.endpoint.rpartition(":")[2], flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            moment, _, times = line.strip().partition(":")
            left = int(times)
            print("armed", flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
