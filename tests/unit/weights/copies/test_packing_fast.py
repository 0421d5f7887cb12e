"""Packing at once: threads, digests beside the copy, and what one publish leaves to the
next.

Covers: weights/copies/copy_pool.py, weights/copies/digest.py,
weights/copies/tensors.py, weights/layout.py.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import xxhash
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from replicas.core.base.manifest import Manifest, PartManifest, Piece, TensorSpec
from replicas.errors import ManifestMismatch, UsageError
from replicas.weights.copies import streaming
from replicas.weights.copies.copy_pool import ALONE_NBYTES, CopyPool, helpers_for, one_thread
from replicas.weights.copies.copying import PROGRESS_NBYTES, Copier, Prefix, copy_pairs
from replicas.weights.copies.digest import BLOCK_NBYTES, digest_of
from replicas.weights.copies.host_copies import LOOK, STEP_NBYTES
from replicas.weights.copies.tensors import bits
from replicas.weights.feed import Feed, Shard
from replicas.weights.layout import Places
from replicas.weights.loading import piece_pairs, views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.packing import Packer, Packing, stage
from replicas.weights.writable import WritableSlot
from tests.support.channel.packing import pack

WAIT_S = 60.0
MIB = 1 << 20


def ints(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.int32).view(shape)


LARGE = BLOCK_NBYTES + STEP_NBYTES + 4096


# ---------------------------------------------------------------- crews


def test_a_crew_does_every_task_once_and_leaves_no_thread() -> None:
    before = threading.active_count()
    crew, done, lock = CopyPool(3), list[int](), threading.Lock()

    def note(number: int) -> None:
        with lock:
            done.append(number)

    for _ in range(3):
        done.clear()
        crew.run([lambda number=number: note(number) for number in range(50)])  # type: ignore[misc]  # it infers no default
        assert sorted(done) == list(range(50))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("replicas-crew")]
    crew.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert threading.active_count() <= before


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_task_that_fails_ends_the_run_and_is_raised(helpers: int) -> None:
    crew = CopyPool(helpers)

    def fail() -> None:
        raise KeyError("mine")

    try:
        with pytest.raises(KeyError, match="mine"):
            crew.run([fail, *[lambda: None] * 5])
    finally:
        crew.close()


def test_one_thread_holds_for_this_thread_alone() -> None:
    before = torch.get_num_threads()
    elsewhere: list[int] = []
    with one_thread():
        here = torch.get_num_threads()
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join(WAIT_S)
    assert torch.get_num_threads() == before
    assert elsewhere == [before]
    assert here in (1, before)


def test_helpers_by_size_and_by_who_else_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.weights.copies.copy_pool.os.sched_getaffinity", lambda pid: set(range(8)))
    assert helpers_for(ALONE_NBYTES - 1) == 0
    assert helpers_for(2 * ALONE_NBYTES) == 2
    assert helpers_for(1 << 30) == 7
    assert helpers_for(1 << 30, sharing=4) == 1
    assert helpers_for(1 << 30, sharing=100) == 0


# ---------------------------------------------------------------- the digest


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_NBYTES, LARGE])
def test_a_digest_is_that_of_the_digests_of_its_blocks(nbytes: int) -> None:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    data[::997] = 7
    raw = data.numpy().tobytes()
    blocks = [xxhash.xxh3_128_digest(raw[start : start + BLOCK_NBYTES]) for start in range(0, nbytes, BLOCK_NBYTES)]
    found = xxhash.xxh3_128_hexdigest(b"".join(blocks))
    assert digest_of(data) == digest_of(raw) == found
    if nbytes:
        data[nbytes // 2] += 1
        assert digest_of(data) != found


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_the_digest_is_of_what_was_copied_in_any_order(helpers: int, beside: bool) -> None:
    source = torch.zeros(LARGE, dtype=torch.uint8)
    source[::991] = 3
    data = torch.zeros(LARGE, dtype=torch.uint8)
    runs = [(start, min(start + STEP_NBYTES + 777, LARGE)) for start in range(0, LARGE, STEP_NBYTES + 777)]
    with Copier(data, helpers=helpers, beside=beside) as copier:
        for start, end in reversed(runs):
            copier.put(data[start:end], source[start:end], start, end)
        copier.finish()
    assert torch.equal(data, source)
    assert copier.digest.result(WAIT_S) == digest_of(source)


@pytest.mark.parametrize("had", [0, 1])
def test_the_digest_comes_though_no_more_threads_can_be_had(had: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes may refuse the helper, or only the one that takes the
    caller's core when all is filled."""
    data = torch.ones(LARGE, dtype=torch.uint8)
    wanted, start, started = digest_of(data), threading.Thread.start, list[threading.Thread]()
    refused: list[str] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == had:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr("replicas.weights.copies.copying.cores", lambda: 3)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with Copier(data, helpers=1, beside=False) as copier:
        copier.filled(0, LARGE)
        copier.finish()
    assert copier.digest.result(WAIT_S) == wanted
    assert refused


def test_a_copy_that_is_not_finished_has_no_digest() -> None:
    data = torch.zeros(LARGE, dtype=torch.uint8)
    with Copier(data) as copier:
        copier.filled(0, BLOCK_NBYTES)
        with pytest.raises(ValueError, match="bytes were not filled"):
            copier.finish()
    assert copier.digest.cancelled()


# ---------------------------------------------------------------- a packer


class Versions:
    """An arena with two slots that are filled in turn."""

    def __init__(self) -> None:
        self.arena = Arena(2, name="test")
        self.packer = Packer()
        self.version = 0
        self.quick = 0

    def publish(
        self, weights: object, manifest: PartManifest | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Slot, Packing]:
        feed = Feed(weights, dtype=dtype)
        known = self.packer._planned
        found = self.packer.plan(feed) or manifest
        assert found is not None
        self.quick += known is not None and self.packer._planned is known
        self.version += 1
        slot = self.arena.acquire(self.version, found)
        assert slot is not None
        packing = self.packer.pack(feed, found, slot)
        assert feed.finished
        assert packing.digest.result(WAIT_S) == digest_of(slot.data)
        self.arena.hold(slot, "")
        return slot, packing


def found_in(slot: Slot) -> dict[str, torch.Tensor]:
    assert slot.manifest is not None
    return views(slot.buffer.private(), slot.manifest)


def test_the_second_publish_of_a_module_is_not_planned_anew() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
    versions = Versions()
    for step in range(4):
        with torch.no_grad():
            for value in model.parameters():
                value.fill_(step)
        slot, _ = versions.publish(model)
        found = found_in(slot)
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert versions.quick == 3


def tied() -> dict[str, torch.Tensor]:
    weight = torch.rand(4, 4)
    return {"a": weight, "b": weight, "c": torch.rand(4, 4), "d": torch.rand(2)}


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "the tie is gone": lambda was: was | {"b": was["a"].clone()},
    "another tie": lambda was: was | {"c": was["a"]},
    "a tie to the transposed": lambda was: was | {"b": was["a"].t()},
    "another shape": lambda was: was | {"d": torch.rand(3)},
    "another dtype": lambda was: was | {"d": torch.ones(2, dtype=torch.int32)},
    "one more": lambda was: was | {"e": torch.rand(1)},
    "one less": lambda was: {name: value for name, value in was.items() if name != "d"},
    "another order": lambda was: dict(reversed(was.items())),
    "a parameter": lambda was: was | {"d": nn.Parameter(torch.rand(2))},
    "none": lambda was: was | {"d": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_is_planned_anew(change: str) -> None:
    versions, before = Versions(), tied()
    versions.publish(before)
    after = CHANGES[change](before)
    slot, _ = versions.publish(after)
    assert versions.quick == 0
    assert slot.manifest == Feed(after).plan()
    assert versions.packer.plan(Feed(after)) == Feed(after).plan()
    assert all(torch.equal(value, after[name]) for name, value in found_in(slot).items())  # type: ignore[index]  # a mapping


def test_other_tensors_that_look_alike_are_not_planned_anew() -> None:
    versions = Versions()
    for _ in range(3):
        given = tied()
        given["c"] = given["c"].t()
        slot, _ = versions.publish(given, dtype=torch.bfloat16)
        assert all(torch.equal(value, given[name].bfloat16()) for name, value in found_in(slot).items())
    assert versions.quick == 2
    versions.publish(tied())
    assert versions.quick == 2


def test_a_value_of_no_use_is_refused_also_the_second_time() -> None:
    versions, given = Versions(), tied()
    versions.publish(given)
    for bad in (torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), 3):
        with pytest.raises(ManifestMismatch):
            versions.publish(given | {"d": bad})


@pytest.mark.slow
def test_very_many_tensors_that_have_moved_away_are_looked_at_anew() -> None:
    """More than one look; those of the meta device stand for those of any other."""
    versions = Versions()
    given = {f"t{number}": torch.ones(2) for number in range(2 * LOOK + 1)}
    versions.publish(given)
    with pytest.raises(ManifestMismatch, match="meta"):
        versions.publish({name: value.to("meta") for name, value in given.items()})
    versions.publish(given)


def test_a_conjugate_view_is_no_tie() -> None:
    value = torch.tensor([1 + 2j])
    slot, _ = Versions().publish({"a": value, "b": value.conj()})
    assert found_in(slot)["b"].item() == 1 - 2j


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "transposed": lambda: torch.rand(3, 5).t(),
    "every other one": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.rand(1).expand(4),
    "none": lambda: torch.rand(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_bytes_and_views_are_copied_alike(unusual: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Very many, very large, without elements, at odd places: by their addresses, or
    (one of them is odd) by torch."""
    monkeypatch.setattr(streaming, "available", compiled and streaming.available)
    torch.manual_seed(3)
    memory = torch.randn(17_500)
    versions = Versions()
    given: dict[str, torch.Tensor] = {f"small{number}": memory[7 * number : 7 * number + 5] for number in range(2500)}
    given |= {
        "large": torch.randn(3, (STEP_NBYTES >> 2) + 13),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flags": torch.rand(13) < 0.5,
        "tiny": torch.randn(11).to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(torch.rand(3, 3)),
        "unusual": UNUSUAL[unusual](),
    }
    given["tied"] = given["large"]
    for step in range(3):
        memory += step
        slot, _ = versions.publish(given)
        found = found_in(slot)
        assert found.keys() == given.keys() - {"tied"}
        assert all(torch.equal(bits(value), bits(given[name].detach())) for name, value in found.items())
    assert versions.quick == 2
    by_address = streaming.available and unusual == "none"
    assert (not versions.packer._views) == by_address


@pytest.mark.parametrize("count", [0, 10, 3 << 20])
def test_memory_is_given_back_without_a_collection(count: int) -> None:
    """A slot may be larger than all the rest of the process: it does not wait for
    Python to look for cycles."""
    versions = Versions()
    versions.arena = Arena(2, name="given-back")

    def mapped() -> bool:
        return "memfd:given-back" in Path("/proc/self/maps").read_text()

    def failing(given: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from given.items()
        raise KeyError("mine")

    gc.collect()
    gc.disable()
    try:
        given = {"a": torch.zeros(count)}
        versions.publish(given)
        versions.publish(given, dtype=torch.float64)
        versions.publish(iter(given.items()), Feed(given).plan())
        with suppress(KeyError):
            versions.publish(failing(given), Feed(given).plan())
        slot = versions.arena.find_filling(versions.version)
        assert slot is not None
        versions.arena.free(slot)
        del slot
        assert mapped()
        versions.arena.close()
        for thread in threading.enumerate():
            if thread.name.startswith("replicas-crew-"):
                thread.join(5)
        assert not mapped()
    finally:
        gc.enable()


def test_a_packer_keeps_no_tensor_and_no_memory() -> None:
    versions = Versions()
    given = {"a": torch.zeros(10)}
    kept = weakref.ref(given["a"])
    slot, _ = versions.publish(given, dtype=torch.bfloat16)  # by torch, which takes views
    memory = weakref.ref(slot.buffer)
    del given
    gc.collect()
    assert kept() is None
    assert len(versions.packer._views) == 1
    versions.arena.close()
    del slot
    gc.collect()
    assert memory() is None
    assert not versions.packer._views


def test_large_tensors_are_cut_and_small_ones_batched() -> None:
    given = {
        "large": ints(3, 1024, 1024),
        **{f"small{number}": ints(number, start=number) for number in range(1, 200)},
        "long": ints(1, 4 * STEP_NBYTES // 4 + 3),
        "bytes": torch.zeros(5, dtype=torch.uint8),
        "wide": torch.ones(2, 3, dtype=torch.float64),
    }
    places = Places(Feed(given).plan())  # type: ignore[arg-type]  # a mapping has a plan
    cuts = places.cuts()
    assert [cut.start for cut in cuts[1:]] == [cut.end for cut in cuts[:-1]]
    assert all(cut.end - cut.start <= STEP_NBYTES for cut in cuts)
    assert len(cuts) < 20
    slot, _ = Versions().publish(given)
    assert all(torch.equal(value, given[name]) for name, value in found_in(slot).items())


def test_a_stream_with_the_last_manifest_is_copied_step_by_step() -> None:
    given = {"a": torch.rand(7), "b": torch.rand(3, 3)}
    alive: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in given.items():
            passing = value.clone()
            yield name, passing
            passing.fill_(-1)
            alive.append(name)

    slot, _ = Versions().publish(stream(), Feed(given).plan())
    assert alive == ["a", "b"]
    assert all(torch.equal(value, given[name]) for name, value in found_in(slot).items())


def test_a_part_twice_is_refused() -> None:
    shard = Shard(torch.zeros(2), (0,), (4,))
    with pytest.raises(ManifestMismatch, match="tensor 'w' was published twice"):
        stage(Feed(iter([("w", shard), ("w", shard)]), mode="parts"))


def test_parts_are_packed_at_once_and_scattered_to_their_places() -> None:
    whole = ints(6, 5)
    odd = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    halves: list[dict[str, object]] = [
        {"w": Shard(whole[:4], (0, 0), (6, 5)), "o": odd},
        {"w": Shard(whole[4:], (4, 0), (6, 5)), "o": None},
    ]
    slots = []
    for half in halves:
        packer = Packer()
        for _ in range(2):
            feed = Feed(half, mode="parts")
            manifest = packer.plan(feed)
            assert manifest is not None
            assert feed.sources is not None
            slot = Arena(1).acquire(1, manifest)
            assert slot is not None
            assert packer.pack(feed, manifest, slot).digest.result(WAIT_S) == digest_of(slot.data)
        slots.append(slot)
    merged = Manifest(
        (TensorSpec("w", "int32", (6, 5)), TensorSpec("o", "float8_e4m3fn", (8,))),
        (),
        ((Piece(0, (0, 0), (4, 5), 0), Piece(1, (0,), (8,), 80)), (Piece(0, (4, 0), (2, 5), 0),)),
    )
    data = torch.zeros(merged.data_nbytes, dtype=torch.uint8)
    for part, slot in enumerate(slots):
        assert slot is not None
        copy_pairs(piece_pairs(merged, (merged.parts or ())[part], slot.data, data))
    assert torch.equal(data[:120].view(torch.int32).view(6, 5), whole)
    assert data[120:].tolist() == list(range(8))


def test_an_error_leaves_no_helper_at_work() -> None:
    given = {"a": torch.zeros(ALONE_NBYTES, dtype=torch.uint8), "b": torch.zeros(3)}
    manifest = Feed(given).plan()
    assert manifest is not None
    data = torch.zeros(manifest.whole.data_nbytes, dtype=torch.uint8)
    feed = Feed(iter([("a", given["a"]), ("b", torch.zeros(4))]))
    with pytest.raises(ManifestMismatch):
        pack(feed, manifest, data)
    for thread in threading.enumerate():
        if thread.name.startswith("replicas-crew"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


# ---------------------------------------------------------------- pairs


def test_pairs_are_cast_cut_and_batched() -> None:
    sources = [torch.rand(3, 1_000_000), torch.rand(7).double(), torch.rand(4, 4).t(), torch.rand(0, 3)]
    targets = [torch.zeros(source.shape, dtype=torch.float32) for source in sources]
    copy_pairs([(targets[3], sources[3]), *zip(targets[:3], sources[:3], strict=True)])
    assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources, strict=True))
    copy_pairs([])


# ---------------------------------------------------------------- slots to write into


def writable(weights: object, dtype: torch.dtype | None = None) -> tuple[Arena, Slot, WritableSlot]:
    manifest = Feed(weights, dtype=dtype).plan()
    assert manifest is not None
    arena = Arena(1)
    slot = arena.acquire(0, manifest)
    assert slot is not None
    return arena, slot, WritableSlot(slot, manifest, partial(arena.free, slot))


def test_what_is_written_in_place_is_what_is_published() -> None:
    shared = torch.rand(3, 2)
    given = {"w": shared, "tied": shared, "e": torch.zeros(0, 4), "n": torch.ones(5, dtype=torch.int64)}
    arena, slot, written = writable(given, torch.bfloat16)
    with written:
        assert list(written) == ["w", "e", "n", "tied"]
        assert len(written) == 4
        assert written["tied"] is written["w"]
        kept = written["w"]
        for name, value in given.items():
            assert written[name].shape == value.shape
            written[name].copy_(value)
        written.check_open()
        written.mark_taken()
        assert written.slot is slot
        arena.assign(slot, 7)
        assert written.digest().digest.result(WAIT_S) == digest_of(slot.data)
        arena.hold(slot, "")
    assert arena.find(7) is slot
    found = found_in(slot)
    assert torch.equal(found["w"], shared.bfloat16())
    assert torch.equal(found["n"], given["n"])
    with pytest.raises(RuntimeError, match=r"must match the size"):
        kept.copy_(shared)
    with pytest.raises(UsageError, match="was published"):
        written["w"]
    with pytest.raises(UsageError, match="was published"):
        written.check_open()


def test_a_block_that_is_left_gives_the_slot_back() -> None:
    arena, slot, written = writable({"w": torch.zeros(3)})
    with pytest.raises(KeyError, match="mine"), written:
        raise KeyError("mine")
    assert slot.state == "free"
    with pytest.raises(UsageError, match="given back"):
        written["w"]
    written.drop()
    with pytest.raises(UsageError, match="given back"):
        written.__enter__()
    arena.close()


def test_a_part_is_written_in_place() -> None:
    whole = ints(4, 3)
    manifest = Feed({"w": Shard(whole[2:], (2, 0), (4, 3)), "x": Shard(whole[:0], (0, 0), (4, 3))}, mode="parts").plan()
    assert manifest is not None
    slot = Arena(1).acquire(0, manifest)
    assert slot is not None
    with WritableSlot(slot, manifest, lambda: None) as written:
        assert written["w"].shape == (2, 3)
        assert written["x"].numel() == 0
        written["w"].copy_(whole[2:])
        assert torch.equal(slot.data.view(torch.int32), whole[2:].flatten())


# ---------------------------------------------------------------- how far it is


@settings(max_examples=30)
@generated(st.lists(st.integers(0, 5 * MIB), max_size=30), st.randoms(use_true_random=False))
def test_only_what_is_there_without_a_hole_is_told(sizes: list[int], random: Random) -> None:
    told: list[int] = []
    ends = list(itertools.accumulate(sizes))
    runs = list(zip([0, *ends], ends, strict=False))
    random.shuffle(runs)
    total = sum(sizes)
    prefix, there = Prefix(total, told.append), set[tuple[int, int]]()
    for run in runs:
        prefix.filled(*run)
        there.add(run)
        missing = min((start for start, end in runs if start < end and (start, end) not in there), default=total)
        assert max(told, default=0) <= missing
        assert missing - max(told, default=0) < PROGRESS_NBYTES or missing == total
    prefix.finish()
    assert told == sorted(set(told))
    assert told[-1] == total
    assert len(told) <= total // PROGRESS_NBYTES + 1


@pytest.mark.parametrize("helpers", [0, 2])
def test_what_was_told_is_there(helpers: int) -> None:
    data = torch.zeros(5 * PROGRESS_NBYTES + 77, dtype=torch.uint8)
    told: list[int] = []

    def look(nbytes: int) -> None:
        assert data[:nbytes].all()
        told.append(nbytes)

    ones = torch.ones_like(data)
    bounds = range(0, data.numel(), STEP_NBYTES)
    with Copier(data, helpers=helpers, progress=look) as copier:
        for start, end in ((start, min(start + STEP_NBYTES, data.numel())) for start in bounds):
            copier.put(data[start:end], ones[start:end], start, end)
        copier.finish()
    assert told == sorted(set(told))
    assert told[-1] == data.numel()
    assert len(told) <= 6
    assert len(told) > 1 or helpers, "a helper that is late with the first step keeps all others back"
    assert copier.digest.result(WAIT_S) == digest_of(data)


def test_progress_that_fails_fails_the_copy() -> None:
    data = torch.zeros(2 * PROGRESS_NBYTES, dtype=torch.uint8)

    def fail(nbytes: int) -> None:
        raise KeyError(nbytes)

    with Copier(data, helpers=0, progress=fail) as copier, pytest.raises(KeyError):
        copier.filled(0, PROGRESS_NBYTES)
    assert copier.digest.cancelled()


def test_a_packer_tells_how_far_it_is_and_whether_it_copies_at_once() -> None:
    packer, told = Packer(), list[int]()
    weights = {"a": ints(PROGRESS_NBYTES // 4), "b": ints(3)}
    manifest = Feed(weights).plan()
    assert manifest is not None
    for given, known in ((weights, True), (weights, True), (iter(weights.items()), False), ({}, True)):
        feed = Feed(given)
        planned = packer.plan(feed) or manifest
        assert packer.copies_at_once(feed, planned) is known
        slot = Arena(1).acquire(1, planned)
        assert slot is not None
        told.clear()
        packing = packer.pack(feed, planned, slot, told.append)
        if packing.copies is not None:  # on a machine with a GPU, which makes the copies of a walk
            packing.copies.copied.result(WAIT_S)
        assert not packer.copies_at_once(feed, planned)
        assert told == sorted(set(told))
        assert told[-1] == (PROGRESS_NBYTES + 12 if given else 0), "how often is up to the copying threads"


def test_the_end_is_not_told_of_a_publish_that_fails() -> None:
    given = {"a": torch.zeros(3), "b": torch.zeros(0)}
    manifest = Feed(given).plan()
    assert manifest is not None
    slot = Arena(1).acquire(1, manifest)
    assert slot is not None
    told: list[int] = []
    with pytest.raises(ManifestMismatch, match="tensor 'b' was not published"):
        Packer().pack(Feed(iter([("a", given["a"])])), manifest, slot, told.append)
    assert told == []
