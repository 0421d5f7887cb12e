"""Copies from and to tensors whose storages another thread frees, swaps, resizes and
replaces meanwhile: ``python -m tests.support.channel.moving WAY TIMES [SEED]``, where
WAY is one of :data:`WAYS`, or ``all``.

Every storage holds one value, in all its elements. So each tensor that was copied holds
one value, too: the old or a new one. A copy may end with ManifestMismatch or UsageError
instead; the process lives on.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from replicas.core.base.manifest import PartManifest
from replicas.errors import ManifestMismatch, UsageError
from replicas.messages import Segment
from replicas.weights.feed import Feed
from replicas.weights.loading import load_image, named_views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.packing import Packer, stage

__all__ = ["WAYS"]

SHAPES = [(7,), (700,), (512, 300), (3, 1), *[(64,)] * 40, (1500, 1024), (33,)]
"""Some storages are mappings of their own, which are gone once freed; one tensor takes
several steps."""
VALUES = 120
"""Exact in bfloat16, too."""


def full(shape: tuple[int, ...], value: int) -> torch.Tensor:
    return torch.full(shape, float(value))


def _turned(one: torch.Tensor) -> torch.Tensor:
    """Its transpose; the tensor itself where torch refuses, as its memory shrank just
    now."""
    try:
        return one.data.t() if one.ndim == 2 else one
    except RuntimeError:
        return one


class Model:
    """Parameters, and a thread that is never done with their memory."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self.tensors = {f"t{number}": torch.nn.Parameter(full(shape, 1)) for number, shape in enumerate(SHAPES)}
        self._over = False
        self.done: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Model:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join(60)

    def _run(self) -> None:
        while not self._over:
            self.change()

    def change(self) -> None:
        """Free, shrink, swap, replace or overwrite; whatever was freed is replaced."""
        choose = self._choose
        name = choose.choice(list(self.tensors))
        one, shape = self.tensors[name], SHAPES[int(name[1:])]
        what = choose.choice(("replace", "free", "shrink", "swap", "half", "view"))
        self.done[what] += 1
        new = full(shape, choose.randrange(VALUES))
        if what == "free":
            one.untyped_storage().resize_(0)
        elif what == "shrink":
            one.untyped_storage().resize_(one.untyped_storage().nbytes() // 2)
        elif what == "swap":
            other = self.tensors[choose.choice(list(self.tensors))]
            if other.shape == one.shape:
                one.data, other.data = other.data, one.data
        elif what == "half":
            one.data = new.half()
        elif what == "view":
            one.data = torch.full((*shape, 2), new.flatten()[0].item()).select(-1, 1)
        one.data = new


def uniform(found: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        value = tensor.flatten()[0].item()
        assert tensor.eq(value).all(), f"{name} is torn: {tensor.flatten()[::97].tolist()[:9]}"
        assert value in range(VALUES), f"{name} was never {value}"


class Copies:
    """Ways to copy from and to a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.packer = Packer()
        self.arena = Arena(1, name="moving")
        self.manifest = Feed({name: full(shape, 0) for name, shape in zip(model.tensors, SHAPES, strict=True)}).plan()

    def _slot(self, manifest: PartManifest) -> Slot:
        slot = self.arena.acquire(1, manifest)
        assert slot is not None
        return slot

    def _pack(self, feed: Feed, manifest: PartManifest | None = None) -> None:
        planned = self.packer.plan(feed) or manifest
        assert planned is not None
        slot = self._slot(planned)
        try:
            self.packer.pack(feed, planned, slot).digest.result(60)
            uniform(named_views(slot.data, planned))
        finally:
            self.arena.free(slot)

    def mapping(self) -> None:
        self._pack(Feed(self.model.tensors))

    def cast(self) -> None:
        self._pack(Feed(self.model.tensors, dtype=torch.bfloat16))

    def transposed(self) -> None:
        self._pack(Feed({name: _turned(one) for name, one in self.model.tensors.items()}))

    def walk(self) -> None:
        self._pack(Feed(self._steps()), self.manifest)

    def staged(self) -> None:
        found = stage(Feed(self._steps()))
        uniform({entry.name: entry.tensor for entry in found.entries if entry.tensor is not None})

    def _steps(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.tensors.items()

    def load(self) -> None:
        self._load(torch.float32)

    def load_cast(self) -> None:
        self._load(torch.bfloat16)

    def _load(self, dtype: torch.dtype) -> None:
        value = self.model._choose.randrange(VALUES)
        given = {name: full(shape, value).to(dtype) for name, shape in zip(self.model.tensors, SHAPES, strict=True)}
        feed = Feed(given)
        manifest = Packer().plan(feed)
        assert manifest is not None
        slot = self._slot(manifest)
        try:
            packer = Packer()
            packer.plan(feed)
            packer.pack(feed, manifest, slot).digest.result(60)
            load_image(self.model.tensors, slot.buffer.readable(), manifest.whole)
        finally:
            self.arena.free(slot)

    def operation(self) -> None:
        """The copies of a collective, in and out."""
        from replicas.channel.operations.scratch import Scratch, copy_out, read_segments, write_segments
        from replicas.core.base.manifest import segment_layout

        tensors = tuple(self.model.tensors.values())
        segments = tuple(Segment("float32", shape) for shape in SHAPES)
        scratch = Scratch("moving")
        buffer = scratch.take_buffer(segment_layout(segments)[1])
        try:
            write_segments(buffer, segments, tensors)
            found = read_segments(buffer, segments)
            uniform({str(number): tensor for number, tensor in enumerate(found)})
            copy_out("", tensors, found, buffer, ())
        finally:
            buffer.close()


WAYS: tuple[str, ...] = ("mapping", "cast", "transposed", "walk", "staged", "load", "load_cast", "operation")


def main(way: str, times: str, seed: str = "0") -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(300 + len(WAYS) * int(times), exit=True)
    sys.setswitchinterval(1e-5)
    for one in WAYS if way == "all" else (way,):
        _copy(one, int(times), int(seed))


def _copy(way: str, times: int, seed: int) -> None:
    told: Counter[str] = Counter()
    with Model(random.Random(seed)) as model:
        copies = Copies(model)
        run: Callable[[], None] = getattr(copies, way)
        named = True
        for _ in range(times):
            try:
                run()
            except (ManifestMismatch, UsageError) as error:
                told[type(error).__name__] += 1
                named = named and ("tensor " in str(error) or "the model's 't" in str(error))
            else:
                told["done"] += 1
    copies.arena.close()
    assert named, "an error names the tensor"
    print(way, dict(told), dict(model.done))


if __name__ == "__main__":
    main(*sys.argv[1:])
