"""Ranks of the channel "policy" in processes of their own, which do what a test tells
them.

Run as a program it joins and then obeys: each line that it reads is ``[name,
arguments]``, and it prints one line, what came of it. Weights encode their version:
every element of a publish is one number, so that whatever is mixed, or overwritten
while somebody looks at it, shows by itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import replicas
from replicas import errors
from tests.support.channel.memory import statistics
from tests.support.root import ROOT

__all__ = ["ELEMENTS", "RankProcess"]

ELEMENTS = 300_000
"""More than a megabyte: its memory is made ahead of time, as that of real weights."""
PATIENCE_S = 60.0


class RankProcess:
    """One such rank, from the test's side."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._asked = 0
        self._reading: asyncio.Task[bytes] | None = None

    @classmethod
    async def start(
        cls,
        endpoint: str,
        token: str,
        group: str,
        replica: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> RankProcess:
        """It has joined when this returns. ``env``: beside what this process has.
        ``within``: a command that runs it in other surroundings."""
        given = {"endpoint": endpoint, "token": token, "group": group, "replica": replica, "rank": rank}
        process = await asyncio.create_subprocess_exec(
            *within,
            sys.executable,
            "-m",
            __name__,
            json.dumps({**given, "world_size": world_size}),
            stdin=PIPE,
            stdout=PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        found = cls(process)
        found._asked = 1
        assert await found.answer() == "joined"
        return found

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, name: str, **arguments: Any) -> Any:
        """What comes of it. An error of the rank's comes back as ``{"error": its class,
        "text": ...}``."""
        self.tell(name, **arguments)
        return await self.answer()

    def tell(self, name: str, **arguments: Any) -> None:
        """Have it done; what comes of it is the next :meth:`answer`."""
        assert self.process.stdin is not None
        self._asked += 1
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")

    async def answer(self) -> Any:
        assert self._asked, "nothing was asked"
        self._asked -= 1
        line = await asyncio.wait_for(self._line(), PATIENCE_S)
        self._reading = None
        assert line, f"the rank ended: {self.process}"
        return json.loads(line)

    async def still_at_it(self) -> bool:
        """Whether what it was told last is not done, also after a while."""
        _, waiting = await asyncio.wait([self._line()], timeout=0.5)
        return bool(waiting)

    def _line(self) -> asyncio.Task[bytes]:
        """The next line, which :meth:`answer` takes."""
        assert self.process.stdout is not None
        if self._reading is None:
            self._reading = asyncio.create_task(self.process.stdout.readline())
        return self._reading

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    async def kill(self) -> None:
        """SIGKILL, and its end."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self.process.returncode is None:
            self.process.kill()
        # Its helper holds the pipe for a moment longer.
        await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert self.process.returncode == -signal.SIGKILL

    async def close(self) -> None:
        """Let it leave in good order, whatever is open."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert self.process.returncode == 0

    async def clean_up(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


class _Rank:
    """The same from the inside: a method for each thing that it can be told."""

    def __init__(self, channel: replicas.Channel, rank: int, world_size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._size = world_size
        self._update: replicas.Update | None = None
        self._kept: list[torch.Tensor] = []

    def publish(self, value: int, deadline: float = 30.0) -> dict[str, Any]:
        if self._channel._hub.settings.source_ranks == "all":
            rows = ELEMENTS // self._size
            own = torch.full((rows,), value + self._rank / 2)
            weights: dict[str, Any] = {"w": replicas.Shard(own, (self._rank * rows,), (rows * self._size,))}
        else:
            weights = {"w": torch.full((ELEMENTS,), float(value)), "b": torch.full((7,), float(value))}
        receipt = self._channel.publish(weights, meta={"value": value}, deadline=deadline).wait()
        return {"version": receipt.version, "lost": list(receipt.lost), "phases": sorted(receipt.phases)}

    def publish_many(self, first: int, count: int) -> int:
        """The version of the last one."""
        return max(int(self.publish(value)["version"]) for value in range(first, first + count))

    def receive(self) -> dict[str, Any]:
        """The update stays open, and its tensors are kept."""
        self._update = update = self._channel.receive(deadline=60).wait()
        self._kept = [tensor for _, tensor in update]
        return {"version": update.version, "values": self.values()}

    def values(self) -> list[float]:
        """All values that occur in the kept tensors."""
        return sorted({value for tensor in self._kept for value in tensor.tolist()})

    def again(self) -> list[float]:
        """The values that the open update has now, read anew."""
        assert self._update is not None
        self._kept = [tensor for _, tensor in self._update]
        return self.values()

    def scribble(self, value: float) -> list[float]:
        """Write into the kept tensors."""
        for tensor in self._kept:
            tensor.fill_(value)
        return self.values()

    def loaded(self, forget: bool = True) -> int:
        assert self._update is not None
        self._update.loaded()
        self._update = None
        if forget:
            self.forget()
        return self._channel.version

    def refuse(self, why: str) -> int:
        assert self._update is not None
        self._update.refuse(why)
        self._update = None
        self.forget()
        return self._channel.version

    def adopt(self) -> int:
        """Wait until all can load the open update."""
        assert self._update is not None
        self._update.adopt().wait()
        return self._update.version

    def forget(self) -> None:
        self._kept = []
        gc.collect()

    def load_until(self, version: int) -> list[int]:
        """Receive and load, one version after the other, up to this one; each must be
        whole."""
        versions = []
        while self._channel.version < version:
            with self._channel.receive(deadline=60).wait() as update:
                values = {value for _, tensor in update for value in (tensor.min().item(), tensor.max().item())}
            assert values == {float(str(update.meta["value"]))}, (update.version, values, update.meta)
            versions.append(update.version)
        return versions

    def load_into(self) -> list[float]:
        """Receive, and copy it into a model of one's own."""
        with self._channel.receive(deadline=60).wait() as update:
            model = {name: torch.zeros_like(tensor) for name, tensor in update}
            update.load_into(model)
        return sorted({value for tensor in model.values() for value in tensor.tolist()})

    def usage(self) -> dict[str, int]:
        """What this process has. ``memory``: its own, not shared."""
        gc.collect()
        links = [path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        (anonymous,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        memfds = [
            line for line in Path("/proc/self/maps").read_text(errors="replace").splitlines() if "/memfd:" in line
        ]
        threads = len(list(Path("/proc/self/task").iterdir()))
        return {"fds": len(links), "maps": len(memfds), "threads": threads, "memory": int(anonymous) * 1024}

    def arena(self) -> dict[str, Any]:
        arena = self._channel._hub.arena
        return {**statistics(arena)._asdict(), "in_use": arena.in_use(), "versions": sorted(arena.held())}

    def names(self) -> list[str]:
        """Its threads."""
        return sorted(thread.name for thread in threading.enumerate())


def main() -> None:
    given = json.loads(sys.argv[1])
    with replicas.join("policy", **given) as channel:
        print(json.dumps("joined"), flush=True)
        rank = _Rank(channel, given["rank"], given["world_size"])
        while line := sys.stdin.readline():
            name, arguments = json.loads(line)
            answer: Any
            try:
                answer = getattr(rank, name)(**arguments)
            except errors.ReplicasError as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
