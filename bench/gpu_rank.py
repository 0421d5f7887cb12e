"""A rank of ``bench_gpu.py``: a trainer or a target with weights on the GPU, and the
limits of that card beside them.

Everything that only a GPU can do goes through
:mod:`replicas.weights.copies.accelerator`, so that this file also runs on the fake
accelerator of the tests, where its figures mean nothing. Times of work on the GPU are
of events on its own clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import xxhash

import replicas
from bench.rank import Driver, Handler
from bench.shapes import SETS
from replicas.messages import SlotPlace
from replicas.weights.copies.accelerator import Accelerator, Event, accelerator
from replicas.weights.memory.buffers import Buffer

__all__ = ["GpuRank", "handlers"]

WAIT_S = 60.0
RUN_AHEAD = 2
"""Steps of training that are enqueued before the first of them has ended, as a training
loop does that never waits."""


class GpuRank:
    """All commands; a process uses those of its part."""

    def __init__(self, driver: Driver) -> None:
        found = accelerator()
        if found is None:
            raise RuntimeError("this process has no GPU")
        self._accelerator: Accelerator = found
        self._uuid = found.device()
        self._device = found.torch_device(self._uuid)
        self._real = self._device.type == "cuda"  # the fake's device memory is the host's
        self._driver = driver
        self._weights: dict[str, torch.Tensor] = {}
        self._matrix = torch.empty(0)
        self._products = 1
        self._channels: dict[str, replicas.Channel] = {}
        self._update: replicas.Update | None = None

    def _timed(self, work: Callable[[], object]) -> float:
        """How long what ``work`` enqueues on this thread's stream takes on the GPU;
        waits for it."""
        began, ended = self._event(), self._event()
        self._accelerator.synchronize()
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return ended.seconds_since(began)

    def _event(self) -> Event:
        return self._accelerator.event(timing=True)

    # ------------------------------------------------------------ the card

    def card(self) -> dict[str, Any]:
        """What it is."""
        name = torch.cuda.get_device_name() if self._real else "fake"
        free, total = self._accelerator.free_nbytes(self._uuid)
        release = ".".join(map(str, torch.cuda.nccl.version())) if self._real else ""  # type: ignore[no-untyped-call]  # torch leaves it untyped
        facts = {"name": name, "uuid": self._uuid, "free_nbytes": free, "total_nbytes": total, "nccl": release}
        return {**facts, "fake": not self._real}

    def memory(self) -> dict[str, Any]:
        """Bytes in use on the whole card, as the driver counts them, and those of this
        rank's slots, wherever they are."""
        self._accelerator.synchronize()
        free, total = self._accelerator.free_nbytes(self._uuid)
        arenas = [channel._hub.arena for channel in self._channels.values()]
        slots = [slot._buffer for arena in arenas for slot in arena.slots]
        others = [
            buffer for arena in arenas for buffer in (*arena.pool.retired, *(one for one, _ in arena.pool._spare))
        ]
        nbytes = sum(buffer.nbytes for buffer in (*slots, *others) if buffer is not None)
        return {"used_nbytes": total - free, "slots_nbytes": nbytes}

    def fill(self, what: str, seed: int) -> dict[str, Any]:
        """Make the weights, of the set of that name, each tensor by itself."""
        torch.manual_seed(seed)
        shapes = dict(SETS[what]())
        self._weights = {name: torch.randn(*shape, device=self._device).bfloat16() for name, shape in shapes.items()}
        self._accelerator.synchronize()
        return {"tensors": len(self._weights), "nbytes": sum(tensor.nbytes for tensor in self._weights.values())}

    def limits(self, repetitions: int) -> dict[str, Any]:
        """Seconds of copies of as many bytes: on the card in one piece and tensor by
        tensor, to and from pinned memory."""
        nbytes = sum(tensor.nbytes for tensor in self._weights.values())
        here = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        there = torch.ones_like(here)
        pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=self._real)
        originals = list(self._weights.values())
        copies = [torch.empty_like(tensor) for tensor in originals]
        kinds: dict[str, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {
            "card": ([there], [here]),
            "tensors": (copies, originals),
            "to host": ([pinned], [here]),
            "to card": ([there], [pinned]),
        }
        found: dict[str, list[float]] = {}
        for number in range(repetitions + 1):  # the first of each is not counted
            for kind, (destinations, sources) in kinds.items():
                seconds = self._timed(partial(_copy, destinations, sources))
                if number:
                    found.setdefault(kind, []).append(seconds)
        return {"seconds": found}

    # ------------------------------------------------------------ a trainer

    def join(self, channel: str, endpoint: str, token: str, group: str) -> dict[str, Any]:
        self._channels[channel] = replicas.join(
            channel, endpoint=endpoint, token=token, group=group, replica=0, rank=0, world_size=1
        )
        return {}

    def publish(self, channel: str, hold: bool = True) -> dict[str, Any]:
        """``returned``: how long the call took; ``held``: how long the stream of the
        caller did nothing else."""
        self._change()
        self._accelerator.synchronize()
        began = time.monotonic()
        pending = self._channels[channel].publish(self._weights, hold=hold)
        returned = time.monotonic()
        receipt = pending.wait(WAIT_S)
        committed = time.monotonic()
        return {
            "began": began,
            "returned": returned - began,
            "committed": committed - began,
            "held": receipt.phases.get("hold", 0.0),
            "staging": receipt.staging,
            "phases": receipt.phases,
            "version": receipt.version,
        }

    def place(self, channel: str, version: int) -> dict[str, Any]:
        """Where others find what this rank has published."""
        slot = self._channels[channel]._hub.arena.find(version)
        if slot is None:
            raise RuntimeError(f"version {version} is not held here")
        return {"place": msgspec.to_builtins(slot.buffer.place)}

    def prepare_steps(self, side: int, step_s: float) -> dict[str, Any]:
        """A training step: as many products of such matrices as take about
        ``step_s``."""
        dtype = torch.bfloat16 if self._real else torch.float32
        self._matrix = torch.randn(side, side, device=self._device, dtype=dtype)
        self._products = 1
        self._timed(self._step)
        one = self._timed(self._step)
        self._products = max(1, round(step_s / max(one, 1e-6)))
        self._timed(self._step)
        return {"products": self._products, "step_s": self._timed(self._step)}

    def _step(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def train_and_publish(self, channel: str, hold: bool, before: int, after: int) -> dict[str, Any]:
        """Steps without a pause, and a publish between two of them: how long each took,
        from ``before`` steps before the call to ``after`` steps behind the commit, and
        how long it was from the call to the commit."""
        self._change()
        loop = _Steps(self)
        for _ in range(before):
            loop.one()
        began = time.monotonic()
        pending = self._channels[channel].publish(self._weights, hold=hold)
        returned = time.monotonic()
        while not pending.done():
            loop.one()
        committed = time.monotonic()
        for _ in range(after):
            loop.one()
        pending.wait(WAIT_S)
        return {"steps": loop.end(), "returned": returned - began, "committed": committed - began}

    def _change(self) -> None:
        """Another value in each tensor, so that no digest fits by itself; after all
        copies that are under way."""
        for channel in self._channels.values():
            if channel.role == "source":
                channel.fence()
        for tensor in self._weights.values():
            tensor.view(-1)[0] += 1

    # ------------------------------------------------------------ a target

    def receive(self, channel: str) -> dict[str, Any]:
        """Ask for the next version, say so, and load it into weights of one's own.
        ``load_s``: on the GPU's clock."""
        pending = self._channels[channel].receive()
        self._driver.say(waiting=True)
        with pending.wait(WAIT_S) as update:
            readable = time.monotonic()
            load_s = self._timed(lambda: update.load_into(self._weights))
            loaded = time.monotonic()
        return {"readable": readable, "loaded": loaded, "load_s": load_s, "version": update.version}

    def open_and_copy(self, place: dict[str, Any], version: int, repetitions: int) -> dict[str, Any]:
        """What is given from hand to hand: open a slot of the other process and copy it
        within the card, in one piece.

        ``open_s``: until it can be read, the first time; ``seconds``: of the copies, on
        the GPU's clock.
        """
        began = time.monotonic()
        theirs = Buffer.open(msgspec.convert(place, SlotPlace), version)
        try:
            source = theirs.readable()
            opened = time.monotonic() - began
            own = torch.empty(theirs.nbytes, dtype=torch.uint8, device=self._device)
            seconds = [self._timed(partial(_copy, [own], [source])) for _ in range(repetitions + 1)]
            reference = torch.empty_like(own)
            card = [self._timed(partial(_copy, [reference], [own])) for _ in range(repetitions + 1)]
            del source
        finally:
            self._accelerator.synchronize()
            theirs.close()
        return {"open_s": opened, "nbytes": own.nbytes, "seconds": seconds[1:], "card": card[1:]}

    # ------------------------------------------------------------ both

    def digest(self) -> dict[str, Any]:
        """Of all bytes of the weights."""
        state = xxhash.xxh3_128()
        for tensor in self._weights.values():
            state.update(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data)
        return {"digest": state.hexdigest()}

    def leave(self) -> dict[str, Any]:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        return {}

    def handlers(self) -> list[Handler]:
        card = (self.card, self.memory, self.fill, self.limits)
        trainer = (self.publish, self.place, self.prepare_steps, self.train_and_publish)
        return [*card, self.join, *trainer, self.receive, self.open_and_copy, self.digest, self.leave]


class _Steps:
    """A training loop that is a little ahead of the GPU, and the time that each step
    took there."""

    def __init__(self, rank: GpuRank) -> None:
        self._rank = rank
        self._events: list[Event] = []
        self._open: deque[Event] = deque()
        rank._accelerator.synchronize()
        self._mark()

    def _mark(self) -> None:
        event = self._rank._event()
        event.record()
        self._events.append(event)
        self._open.append(event)

    def one(self) -> None:
        self._rank._step()
        self._mark()
        if len(self._open) > RUN_AHEAD:
            self._open.popleft().synchronize()

    def end(self) -> list[float]:
        """Seconds of each step, what came in between included."""
        self._rank._accelerator.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [later.seconds_since(earlier) for earlier, later in pairs]


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """With torch alone, on its current stream: what our figures are compared with must
    not be ours."""
    torch._foreach_copy_(list(destinations), list(sources), non_blocking=True)


def handlers(driver: Driver) -> dict[str, Handler]:
    return {one.__name__: one for one in GpuRank(driver).handlers()}
