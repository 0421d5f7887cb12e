"""Tensors that have no memory, or that refuse: named, on every way in, before the first
byte is written.

Covers: channel/operations/collectives.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replicas.channel.operations.collectives import Collectives
from replicas.channel.operations.results import OperationCall
from replicas.channel.operations.scratch import Scratch, copy_out, segments_of, write_segments
from replicas.core.base.manifest import Manifest, TensorSpec, segment_layout
from replicas.errors import ManifestMismatch, UsageError
from replicas.messages.bounds import shown
from replicas.weights.copies import streaming
from replicas.weights.copies.tensors import check_modes
from replicas.weights.feed import Feed, Shard
from replicas.weights.loading import load_image
from replicas.weights.memory.arena import Arena
from replicas.weights.packing import Packer, stage
from tests.support.channel.packing import load_tensors, pack


class Wrapper(torch.Tensor):
    """As of quantization libraries: it has others inside, and refuses everything."""

    @staticmethod
    def __new__(cls, count: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (count,), dtype=torch.float32)

    def __init__(self, count: int) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own signature misses func
        raise KeyError(f"no {func}")


class Deaf(torch.Tensor):
    """It has memory, and code of its own that raises."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        raise ZeroDivisionError("mine")


def freed(count: int = 4) -> torch.Tensor:
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(4)


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch's
        return cast("torch.Tensor", masked_tensor(torch.ones(4), torch.ones(4, dtype=torch.bool)))


FOREIGN: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "freed": (freed, "its storage was freed"),
    "shrunk": (shrunk, "has 8 bytes of the 16"),
    "fake": (fake, "is a FakeTensor without memory"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "is a functional tensor"),
    "wrapper": (lambda: Wrapper(4), "is a Wrapper without memory"),
    "masked": (masked, "is a MaskedTensor without memory"),
    "meta": (lambda: torch.ones(4, device="meta"), "is on the meta device"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "has layout torch.sparse_coo"),
}
NAMES = list(FOREIGN)


def pairs(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(3)
    yield "z", tensor


@pytest.mark.parametrize("kind", NAMES)
def test_a_publish_names_it_on_each_way_in(kind: str) -> None:
    make, why = FOREIGN[kind]
    tensor = make()
    planned = Feed({"a": torch.ones(3), "z": torch.ones(4)}).plan()
    assert planned is not None
    data = torch.zeros(planned.nbytes, dtype=torch.uint8)
    ways: list[Callable[[], object]] = [
        lambda: Packer().plan(Feed(dict(pairs(tensor)))),
        lambda: stage(Feed(pairs(tensor))),
        lambda: pack(Feed(pairs(tensor)), planned, data),
        lambda: Feed({"z": Shard(tensor, (0,), (4,))}, mode="parts").plan(),
    ]
    for way in ways:
        with pytest.raises(ManifestMismatch, match=f"tensor 'z' .*{why}"):
            way()


@pytest.mark.parametrize("kind", NAMES)
def test_a_later_publish_names_it(kind: str) -> None:
    make, why = FOREIGN[kind]
    packer, weights = Packer(), {"a": torch.ones(3), "z": torch.ones(4)}
    packer.plan(Feed(weights))
    feed = Feed(weights | {"z": make()})
    with pytest.raises(ManifestMismatch, match=f"tensor 'z' .*{why}"):
        manifest = packer.plan(feed)
        assert manifest is not None
        slot = Arena(1).acquire(1, manifest)
        assert slot is not None
        packer.pack(feed, manifest, slot)


@pytest.mark.parametrize("kind", NAMES)
def test_a_model_stays_as_it_is(kind: str) -> None:
    make, why = FOREIGN[kind]
    model = {"a": torch.zeros(3), "z": make()}
    with pytest.raises(ManifestMismatch, match=f"(the model's|tensor) 'z' .*{why}"):
        load_tensors(model, {"a": torch.ones(3), "z": torch.ones(4)})
    assert model["a"].tolist() == [0, 0, 0]


class Peer(Collectives):
    def _start_operation(self, operation: OperationCall, deadline: float | None) -> Any:
        return operation


@pytest.mark.parametrize("kind", NAMES)
def test_a_collective_names_it(kind: str) -> None:
    make, why = FOREIGN[kind]
    calls: list[Callable[[torch.Tensor], object]] = [
        lambda one: Peer().all_reduce([torch.ones(1), one]),
        lambda one: Peer().broadcast([torch.ones(1), one], src="peer/0"),
        lambda one: Peer().send([torch.ones(1), one], dst="peer/0"),
        lambda one: Peer().recv([torch.ones(1), one], src="peer/0"),
        lambda one: Peer().all_gather(torch.ones(1), [torch.ones(1), one]),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"tensor 1 .*{why}"):
            call(make())


def test_tensors_freed_after_the_call_are_named_before_any_is_written() -> None:
    tensors = (torch.zeros(3), torch.zeros(4))
    segments = segments_of(tensors)
    scratch = Scratch("test")
    buffer = scratch.take_buffer(segment_layout(segments)[1])
    try:
        tensors[1].untyped_storage().resize_(0)
        with pytest.raises(UsageError, match="tensor 1 of the operation has no memory"):
            write_segments(buffer, segments, tensors)
        with pytest.raises(UsageError, match="tensor 1 of the operation has no memory"):
            copy_out("", tensors, (torch.ones(3), torch.ones(4)), buffer, ())
        assert tensors[0].tolist() == [0, 0, 0]
        tensors[1].data = torch.zeros(9)
        with pytest.raises(UsageError, match=r"tensor 1 of the operation has shape \[9\]"):
            copy_out("", tensors, (torch.ones(3), torch.ones(4)), buffer, ())
    finally:
        buffer.close()


@pytest.mark.parametrize("change", ["freed", "swapped", "of another dtype"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_changes_between_the_plan_and_the_copy(
    change: str, dtype: torch.dtype | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish waits for a slot in between. Memory of this size is unmapped when it is
    freed: a late read of it would end the process."""
    monkeypatch.setattr(streaming, "available", compiled and streaming.available)
    weights = {"a": torch.nn.Parameter(torch.ones(1 << 20)), "b": torch.nn.Parameter(torch.ones(7))}
    packer, feed = Packer(), Feed(weights, dtype=dtype)
    manifest = packer.plan(feed)
    assert manifest is not None
    if change == "freed":
        weights["a"].untyped_storage().resize_(0)
    else:
        weights["a"].data = torch.full((1 << 20,), 2.0, dtype=torch.float16 if change != "swapped" else None)
    slot = Arena(1).acquire(1, manifest)
    assert slot is not None
    if change == "swapped":
        packer.pack(feed, manifest, slot).digest.result(60)
        assert slot.data[: manifest.tensors[0].nbytes].view(dtype or torch.float32).eq(2).all()
        return
    with pytest.raises(ManifestMismatch, match=r"tensor 'a' (has no memory|was torch\.float32)"):
        packer.pack(feed, manifest, slot)
    assert feed.finished


def test_code_of_a_tensor_does_not_run() -> None:
    """Its memory is what counts."""
    deaf = torch.full((2,), 3.0).as_subclass(Deaf)
    data = torch.zeros(8, dtype=torch.uint8)
    manifest = Feed({"z": deaf}).plan()
    assert manifest is not None
    pack(Feed({"z": deaf}), manifest, data)
    assert data.view(torch.float32).tolist() == [3, 3]
    pack(Feed(iter([("z", deaf)])), manifest, data)
    load_tensors({"a": torch.zeros(3), "z": deaf}, {"a": torch.ones(3), "z": torch.ones(2)})
    operation = Peer().all_reduce(deaf)
    assert cast("OperationCall", operation).inputs[0].tolist() == [1, 1]


def test_a_lazily_conjugated_target_is_written() -> None:
    model = {"a": torch.zeros(3), "z": torch.zeros(4, dtype=torch.cfloat).conj()}
    given = torch.tensor([1 + 2j, 3, 4j, 5])
    load_tensors(model, {"a": torch.ones(3), "z": given})
    assert torch.equal(model["z"].resolve_conj(), given)


@pytest.mark.parametrize("allowed", [True, False])
def test_in_a_mode_without_real_tensors_nothing_is_published_or_loaded(allowed: bool) -> None:
    model, manifest = {"a": torch.zeros(3)}, Manifest((TensorSpec("a", "float32", (3,)),))
    image = torch.zeros(manifest.image_nbytes, dtype=torch.uint8)
    with FakeTensorMode(allow_non_fake_inputs=allowed):
        with pytest.raises(UsageError, match="FakeTensor"):
            check_modes("publish")
        with pytest.raises(UsageError, match="load_into: torch makes a FakeTensor"):
            load_image(model, image, manifest)


# ---------------------------------------------------------------- shared memory


def test_targets_that_overlap_in_part_get_values_that_agree() -> None:
    memory = torch.zeros(6)
    model = {"a": memory[:4], "b": memory[2:]}
    with pytest.raises(ManifestMismatch, match=r"'a' and 'b' share memory in the model, and their values .* differ"):
        load_tensors(model, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    assert memory.eq(0).all()
    load_tensors(model, {"a": torch.tensor([1.0, 2, 3, 4]), "b": torch.tensor([3.0, 4, 5, 6])})
    assert memory.tolist() == [1, 2, 3, 4, 5, 6]


def test_targets_that_are_interleaved_or_one_the_other_transposed_are_written() -> None:
    memory = torch.zeros(8)
    load_tensors({"a": memory[::2], "b": memory[1::2]}, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    assert memory.tolist() == [1, 2] * 4
    square = torch.zeros(2, 2)
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    load_tensors({"a": square, "b": square.t()}, {"a": given, "b": given.t()})
    assert torch.equal(square, given)


# ---------------------------------------------------------------- metadata()


class Declared:
    """An object whose ``metadata()`` says anything of its one tensor."""

    def __init__(self, *shape: object) -> None:
        self._shape = shape

    def metadata(self) -> dict[str, object]:
        return {"w": (torch.float32, self._shape)}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)


@pytest.mark.parametrize("extent", [-1, 2.7, "2", None, True, 2**70])
def test_an_extent_is_a_whole_number(extent: object) -> None:
    with pytest.raises(ManifestMismatch, match="'w'"):
        Feed(Declared(extent)).plan()
    assert Feed(Declared(torch.tensor(2))).plan() is not None


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: {"a": (1, one)}])
def test_a_freed_tensor_is_not_printed(wrap: Callable[[torch.Tensor], object]) -> None:
    """torch's repr of it ends the process."""
    assert "<" in shown(wrap(freed()))
    assert shown([1, "a"]) == "[1, 'a']"
