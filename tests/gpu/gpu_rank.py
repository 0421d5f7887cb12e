"""Ranks of a channel that hold weights on the GPU, in processes of their own, which do
what a test tells them.

The protocol is that of :mod:`tests.support.ranks`. A rank has a default process group
of its own besides, which must go on whatever becomes of its sidecars. Every element of
a published tensor is one number.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import replicas
from replicas import errors
from replicas.weights.packing import Packer, Packing
from tests.gpu import card
from tests.support.channels import ChannelWorld, channel_world
from tests.support.ranks import RankProcess
from tests.support.root import ROOT

__all__ = ["NUMEL", "GpuRank", "GpuWorld", "gpu_world"]

NUMEL = 3 << 20
"""12 MiB of weights: several 2 MiB blocks of device memory."""
WAIT_S = 90.0
START_S = 60.0
"""For torch, a first use of the GPU, and the join, before the patience of
:meth:`RankProcess.answer` begins."""
ALWAYS = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


class GpuRank(RankProcess):
    """One such rank, from the test's side. It is a member of the channel "policy"."""

    @classmethod
    async def start_on_gpu(
        cls, world: ChannelWorld, group: str, replica: int = 0, environment: Mapping[str, str] | None = None
    ) -> GpuRank:
        """It has joined when this returns.

        :raises JoinRefused: it could not.
        """
        given = {"endpoint": world.endpoint, "token": world.coordinator.token, "group": group, "replica": replica}
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        host = card.as_host(f"{group}-{replica}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, json.dumps({**given, "rank": 0, "world_size": 1})),
            stdin=PIPE,
            stdout=PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, **ALWAYS, **host, **(environment or {})},
        )
        found = cls(process)
        found._asked = 1
        try:
            await asyncio.wait([found._line()], timeout=START_S)
            said = await found.answer()
            if said != "joined":
                raise JoinRefused(said["error"], said["text"])
        except BaseException:
            await found.clean_up()
            raise
        return found


class JoinRefused(Exception):
    """What the rank's join raised: the name of the error, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class GpuWorld:
    """A coordinator in this process, and ranks in processes of their own; all end with
    the test."""

    def __init__(self, inside: ChannelWorld) -> None:
        self.inside = inside
        self.ranks: list[GpuRank] = []

    async def start(self, group: str, replica: int = 0, environment: Mapping[str, str] | None = None) -> GpuRank:
        found = await GpuRank.start_on_gpu(self.inside, group, replica, environment)
        self.ranks.append(found)
        return found

    async def start_all(self, *members: tuple[str, int]) -> list[GpuRank]:
        return list(await asyncio.gather(*(self.start(group, replica) for group, replica in members)))

    def lanes(self) -> list[tuple[str, list[str]]]:
        """Backend and members of each process group that there is on the channel."""
        lanes = self.inside.coordinator.engine.channels[self.inside.channel].lanes._lanes.values()
        return [(lane.backend, sorted(member.name for member in lane.members)) for lane in lanes]


@asynccontextmanager
async def gpu_world(config: dict[str, Any], **groups: Any) -> AsyncIterator[GpuWorld]:
    async with channel_world({"deadline": f"{WAIT_S:g}s", **config}, **groups) as inside:
        world = GpuWorld(inside)
        try:
            yield world
        finally:
            await asyncio.gather(*(rank.clean_up() for rank in world.ranks))


class _Rank:
    """The same from the inside: a method for each thing that it can be told."""

    def __init__(self, channel: replicas.Channel) -> None:
        self._channel = channel
        self._weights = {
            "w": torch.zeros(NUMEL, device=card.DEVICE),
            "rows": torch.zeros(30, 70, device=card.DEVICE, dtype=torch.bfloat16).t(),
            "on the host": torch.zeros(11),
        }
        self._side = card.new_stream()
        self._on: object = None
        self._tensor = torch.zeros(0)
        self._pending: replicas.Pending[replicas.Receipt] | None = None

    def write(self, value: float) -> None:
        """Into all weights, on the current stream."""
        for tensor in self._weights.values():
            card.write(tensor, value)

    def publish(
        self, value: float, side: bool = False, hold: bool = True, busy: float = 0.0, then: float | None = None
    ) -> dict[str, Any]:
        """:meth:`start_publish`, and its end."""
        self.start_publish(value, side, hold, busy, then)
        return self.end_publish()

    def start_publish(
        self, value: float, side: bool = False, hold: bool = True, busy: float = 0.0, then: float | None = None
    ) -> bool:
        """Write ``value`` into the weights and publish them, on a stream of one's own
        if ``side``, which is ``busy`` for so many seconds before; write ``then`` into
        them as soon as that is allowed."""
        self._on = self._side if side else None
        card.card().synchronize()
        with card.card().on_stream(self._on):
            if busy:
                card.busy(busy)
            self.write(value)
            self._pending = self._channel.publish(self._weights, hold=hold)
            if then is not None:
                if not hold:
                    self._channel.fence()
                self.write(then)
        return self._pending.done()

    def end_publish(self) -> dict[str, Any]:
        assert self._pending is not None
        receipt = self._pending.wait(WAIT_S)
        with card.card().on_stream(self._on):
            self._channel.fence()
            card.card().synchronize()
        found = {"version": receipt.version, "staging": receipt.staging, "lost": list(receipt.lost)}
        return {**found, "held": receipt.phases.get("hold"), "now": self.values()}

    def version(self) -> int:
        """The newest that it has heard of."""
        return self._channel.latest

    def publish_many(self, count: int) -> int:
        """So many versions, each of which is its number; the last one."""
        for _ in range(count):
            version = int(self.publish(float(self._channel.latest + 1))["version"])
        return version

    def load(self) -> dict[str, Any]:
        """Receive, and load into weights of one's own."""
        with self._channel.receive(deadline=WAIT_S).wait() as update:
            update.load_into(self._weights)
        return {"version": update.version, "values": self.values()}

    def look(self) -> dict[str, Any]:
        """Receive, and look at the tensors of the update one by one."""
        with self._channel.receive(deadline=WAIT_S).wait() as update:
            values = {value for _, tensor in update for value in _extremes(tensor)}
            on_card = sum(card.card().owns(tensor) for _, tensor in update)
        return {"version": update.version, "values": sorted(values), "on card": on_card}

    def load_many(self, version: int) -> list[int]:
        """Load one version after the other, up to this one. Each must be whole, and its
        number in every element."""
        versions: list[int] = []
        while self._channel.version < version:
            found = self.load()
            assert found["values"] == [float(found["version"])], found
            versions.append(found["version"])
        return versions

    def values(self) -> list[float]:
        """All values that occur in this rank's weights."""
        card.card().synchronize()
        return sorted({value for tensor in self._weights.values() for value in _extremes(tensor)})

    def post(self, value: float, numel: int) -> bool:
        """Begin to take the mean with the others."""
        self._tensor = torch.full((numel,), value, device=card.DEVICE)
        self._pending = self._channel.all_reduce(self._tensor, "mean")
        return True

    def outcome(self) -> dict[str, Any]:
        """Of what was posted."""
        assert self._pending is not None
        receipt = self._pending.wait(WAIT_S)
        card.card().synchronize()
        return {"values": sorted(set(_extremes(self._tensor))), "members": [one.name for one in receipt.members]}

    def spoil(self, which: str, how: str) -> bool:
        """Free the memory of a tensor, give it other memory, or put one in its place
        that has none of its own; "mend" makes it anew."""
        tensor = self._weights[which]
        if not how:
            pass
        elif how == "free":
            tensor.untyped_storage().resize_(0)
        elif how == "swap":
            tensor.data = torch.full_like(tensor, 7.0)
        elif how == "half":
            tensor.data = tensor.to(torch.float16)
        elif how == "fake":
            with FakeTensorMode():
                self._weights[which] = torch.zeros(tensor.shape, device=card.DEVICE)
        else:
            self._weights[which] = torch.zeros(tensor.shape, device=card.DEVICE if which == "w" else "cpu")
        return True

    def publish_spoiled(self, which: str, how: str) -> bool:
        """Publish; the memory changes when there is a slot, before the copy begins."""
        pack = Packer.pack

        def late(packer: Packer, *arguments: Any, **named: Any) -> Packing:
            self.spoil(which, how)
            return pack(packer, *arguments, **named)

        Packer.pack = late  # type: ignore[method-assign,assignment]  # for this call
        try:
            self._channel.publish(self._weights).wait(WAIT_S)
        finally:
            Packer.pack = pack  # type: ignore[method-assign]
        return True

    def reduce_freed(self) -> bool:
        tensor = torch.ones(5, device=card.DEVICE)
        tensor.untyped_storage().resize_(0)
        self._channel.all_reduce(tensor)
        return True

    def sidecars(self) -> list[int]:
        """Their pids."""
        lanes = self._channel._lanes._lanes.values()
        return [lane.sidecar.pid for lane in lanes if lane.sidecar is not None]

    def go_on(self) -> bool:
        """The CUDA context and the default group of this process work."""
        card.use_default_group()
        return True

    def usage(self) -> dict[str, int]:
        """What this process has."""
        gc.collect()
        maps = sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return {"fds": len(list(Path("/proc/self/fd").iterdir())), "maps": maps}


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    return float(tensor.min()), float(tensor.max())


def main() -> None:
    given = json.loads(sys.argv[1])
    with card.default_group() if card.card().device() else contextlib.nullcontext():
        try:
            channel = replicas.join("policy", **given)
        except errors.ReplicasError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
            return
        with channel:
            print(json.dumps("joined"), flush=True)
            rank = _Rank(channel)
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
