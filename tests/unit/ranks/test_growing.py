"""Memory that grows while weights come: what it ends as, and what is left when it does not end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replicas.core.manifest import PartManifest
from replicas.errors import ManifestMismatch, NoCapacity
from replicas.weights import Arena, Buffer, Feed, Mode, Shard, Slot, digest_of, growing, stage
from replicas.weights.growing import Growing, Run
from tests.support.memory import memory_left

PAGE = 4096
Given = list[tuple[str, object]]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pages do for what would take many megabytes; there is always room for them."""
    for name, nbytes in (("STEP_NBYTES", 4), ("CHUNK_NBYTES", 2), ("ROOM_NBYTES", 8), ("_FIRST_NBYTES", 1)):
        monkeypatch.setattr(growing, name, nbytes * PAGE)
    monkeypatch.setattr(growing, "_MAPPED_NBYTES", 8 * PAGE)
    monkeypatch.setattr(growing, "check_capacity", lambda _nbytes, _what: None)  # it reads many small files


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not memory_left()


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weights(*sizes: tuple[str, int]) -> Given:
    """Tensors of so many bytes of these dtypes, random bit by bit."""
    return [
        (f"w{number}", random_bytes(nbytes, number).view(getattr(torch, dtype)))
        for number, (dtype, nbytes) in enumerate(sizes)
    ]


def grow(arena: Arena, given: Given, *, mode: Mode = "image", header_nbytes: int = PAGE) -> Slot:
    slot = arena.acquire(1, None)
    assert slot is not None
    feed = Feed(iter(given), mode=mode)
    with arena.growing(slot, header_nbytes) as memory:
        manifest = memory.fill(feed)
        arena.furnish(slot, manifest, memory)
    assert feed.finished
    return slot


def expected(given: Given, mode: Mode = "image") -> tuple[PartManifest, bytes, str]:
    """Manifest, bytes of the file and digest of the same weights, published in the other way."""
    arena = Arena(1, name="other")
    staged = stage(Feed(iter(given), mode=mode))
    slot = arena.acquire(1, staged.manifest)
    assert slot is not None
    digest = staged.write(slot.data).digest.result()
    image = Path(slot.buffer.path).read_bytes()
    arena.free(slot)
    arena.close()
    return staged.manifest, image, digest


def check(slot: Slot, given: Given, mode: Mode = "image") -> None:
    manifest, image, digest = expected(given, mode)
    assert isinstance(slot.manifest, PartManifest)
    assert slot.manifest.hash == manifest.hash
    assert slot.buffer.nbytes == len(image) == Path(slot.buffer.path).stat().st_size
    assert Path(slot.buffer.path).read_bytes() == image
    assert bytes(slot.buffer.tensor().numpy()) == image
    assert digest_of(slot.data) == digest
    assert os.fstat(slot.buffer.fd).st_blocks * 512 <= -(-len(image) // PAGE) * PAGE


def inode(slot: Slot) -> int:
    return slot.place.inode


BULK = [("bfloat16", 30_000), ("bfloat16", 60_002), ("bfloat16", 2)]
FORMS: dict[str, list[tuple[str, int]]] = {
    "one size": BULK,
    "a little in front": [*BULK, ("float32", 400), ("bfloat16", 1000), ("float32", 8)],
    "much in front": [*BULK, ("float32", 90_000), ("uint8", 5), ("float32", 4)],
    "much behind": [("uint8", 30_001), ("float64", 50_000), ("uint8", 3), ("int16", 2)],
    "every size": [("bool", 0), ("int8", 33), ("float16", 66), ("int32", 4), ("complex64", 8), ("complex128", 48)],
    "no bytes": [("float32", 0)],
    "nothing": [],
}


@pytest.mark.parametrize(
    ("form", "header_nbytes"),
    [*((form, PAGE) for form in FORMS), ("one size", 5 * PAGE), ("much in front", 9 * PAGE), ("no bytes", 5 * PAGE)],
)
def test_it_ends_as_the_same_image_as_any_other_way(form: str, header_nbytes: int) -> None:
    given = weights(*FORMS[form])
    if form == "every size":
        given = [(name, tensor.view(torch.bool) if name == "w0" else tensor) for name, tensor in given]  # type: ignore[attr-defined]  # they are tensors
    arena = Arena(1, name="test")
    slot = grow(arena, given, header_nbytes=header_nbytes)
    check(slot, given)
    arena.hold(slot, "digest")
    loaded = load_file(slot.buffer.path)
    assert loaded.keys() == dict(given).keys()
    arena.close()


def test_a_header_longer_than_the_guess() -> None:
    given: Given = [(f"{'n' * 100}{number}", torch.full((7,), number, dtype=torch.bfloat16)) for number in range(100)]
    arena = Arena(1, name="test")
    slot = grow(arena, given)
    assert slot.image is not None
    assert slot.image.data_offset > 3 * PAGE
    check(slot, given)
    arena.close()


def test_a_part_has_no_header() -> None:
    rows = random_bytes(60_000, 1).view(torch.float32).view(150, 100)
    given: Given = [
        ("rows", Shard(rows[20:90], (20, 0), (150, 100))),
        ("empty", Shard(rows[:0], (0, 0), (150, 100))),
        ("whole", random_bytes(5000, 2).view(torch.bfloat16)),
        ("rows", Shard(rows[100:], (100, 0), (150, 100))),
    ]
    arena = Arena(1, name="test")
    slot = grow(arena, given, mode="parts", header_nbytes=0)
    check(slot, given, "parts")
    arena.close()


def test_the_next_publish_of_the_same_weights_uses_the_same_memory() -> None:
    arena = Arena(1, name="test")
    slot = grow(arena, weights(*BULK))
    assert slot.manifest is not None
    before, key = inode(slot), slot.buffer.key
    arena.hold(slot, "digest")
    again = arena.acquire(2, slot.manifest)
    assert again is slot
    assert (inode(again), again.buffer.key) == (before, key)
    arena.close()
    arena.free(again)


@pytest.mark.parametrize(("larger", "same"), [(0, True), (20_000, True), (-20_000, False)])
def test_it_begins_in_memory_that_is_there_and_never_makes_that_shorter(larger: int, same: bool) -> None:
    arena = Arena(1, name="test")
    slot = grow(arena, weights(("bfloat16", 40_000)))
    before, key = inode(slot), slot.buffer.key
    stale = slot.buffer.tensor()
    arena.hold(slot, "digest")
    serial = slot.place.serial
    arena.release(1)
    given = weights(("bfloat16", 40_000 + larger))
    grown = grow(arena, given)
    assert grown is slot
    check(slot, given)
    assert (inode(slot) == before) == same
    assert slot.buffer.key != key
    assert slot.place.serial == (serial if same else 0)
    stale.sum()  # nothing was cut off
    del stale
    arena.close()
    arena.free(slot)


def test_room_is_made_in_memory_that_is_there() -> None:
    arena = Arena(1, name="test")
    given = weights(*[("bfloat16", 20_000), ("float32", 18_000)] * 2)
    slot = grow(arena, given)
    before = inode(slot)
    arena.hold(slot, "digest")
    arena.release(1)
    slot = grow(arena, given)
    check(slot, given)
    assert inode(slot) == before  # though more comes before the first run than it may take new memory for
    arena.close()
    arena.free(slot)


def test_it_begins_in_the_largest_spare_buffer() -> None:
    arena = Arena(2, name="test")
    arena._pool._spare = [(Buffer.allocate(nbytes, "test"), 0) for nbytes in (PAGE, 9 * PAGE, 2 * PAGE)]
    inodes = [buffer.place.inode for buffer in arena._pool.spare]
    slot = grow(arena, weights(*BULK))
    assert inode(slot) == inodes[1]
    assert [buffer.place.inode for buffer in arena._pool.spare] == [inodes[0], inodes[2]]
    arena.close()
    arena.free(slot)


def short(limit: int, seen: list[int]) -> Callable[[int, str], None]:
    """A check of capacity that leaves ``limit`` bytes in all."""
    left = [limit]

    def check_capacity(nbytes: int, what: str) -> None:
        seen.append(nbytes)
        if nbytes > left[0]:
            raise NoCapacity(f"{what} needs {nbytes} bytes, but the machine leaves {left[0]}")
        left[0] -= min(nbytes, 4 * PAGE)

    return check_capacity


def test_what_is_made_ahead_is_left_out_when_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "check_capacity", short(28 * PAGE, []))
    arena = Arena(1, name="test")
    given = weights(("float32", 27 * PAGE))
    check(grow(arena, given), given)
    arena.close()


def test_spare_memory_is_given_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1, name="test")

    def check_capacity(nbytes: int, what: str) -> None:
        if arena._pool.spare:
            raise NoCapacity("no")

    monkeypatch.setattr(growing, "check_capacity", check_capacity)
    with Growing("test", more=arena._pool.drop_spares) as memory:
        arena._pool._spare = [(Buffer.allocate(PAGE, "test"), 0)]
        memory.fill(Feed(iter(weights(("bfloat16", 100)))))
        assert not arena._pool.spare
    arena.close()


class _Mine(Exception):  # the user's own
    pass


def failing(kind: str, walked: list[str]) -> Iterator[tuple[str, object]]:
    for name, tensor in weights(*[("bfloat16", 20_000)] * 6, ("float32", 400)):
        walked.append(name)
        yield name, tensor
        if name == "w3":
            if kind == "user":
                raise _Mine
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind == "bad value":
                yield "bad", 7


@pytest.mark.parametrize(
    ("kind", "error", "steps"),
    [
        ("user", _Mine, 4),
        ("interrupt", KeyboardInterrupt, 4),
        ("bad value", ManifestMismatch, 7),
        ("no memory", NoCapacity, 7),
    ],
)
def test_after_any_failure_the_memory_is_given_back_at_once(
    kind: str, error: type[BaseException], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "no memory":
        monkeypatch.setattr(growing, "check_capacity", short(12 * PAGE, []))
    arena = Arena(1, name="test")
    slot = arena.acquire(1, None)
    assert slot is not None
    walked: list[str] = []
    files: list[int] = []
    feed = Feed(failing(kind, walked))
    with pytest.raises(error) as caught, arena.growing(slot, PAGE) as memory:
        memory.write(next(iter(feed)))
        files.append(os.dup(memory._runs[2]._fd))
        memory.fill(feed)
    assert len(walked) == steps
    assert feed.finished
    assert os.fstat(files[0]).st_blocks == 0  # though the traceback may have views of it
    os.close(files[0])
    if kind == "no memory":
        assert "which grows with the weights and has" in str(caught.value)
        assert "needs" in str(caught.value)
    del caught, memory, feed
    gc.collect(0)
    arena.free(slot)
    assert slot.state == "free"
    arena.close()


def test_no_room_for_the_last_step_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1, name="test")
    slot = arena.acquire(1, None)
    assert slot is not None
    with pytest.raises(NoCapacity), arena.growing(slot, PAGE) as memory:
        manifest = memory.fill(Feed(iter(weights(*FORMS["much in front"]))))
        monkeypatch.setattr(growing, "check_capacity", short(0, []))
        arena.furnish(slot, manifest, memory)
    arena.free(slot)
    arena.close()
    del memory


def test_a_forked_child_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("test", 0)
    run.append(torch.ones(100), "float32", (100,))
    own = os.dup(run._fd)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        run.close()
    assert os.pread(own, 4, 0) == torch.ones(1).numpy().tobytes()
    os.close(own)
