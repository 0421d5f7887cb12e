"""Packing weights into slots, and loading them again. CPU tensors in one process;
DTensors are in tests/integration.

Covers: weights/loading.py, weights/packing.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from torch import nn

from replicas.core.base.dtypes import ITEM_NBYTES, item_nbytes
from replicas.core.base.manifest import Manifest, PartManifest, TensorSpec
from replicas.core.versions.manifests import merge_parts
from replicas.errors import ManifestMismatch, UsageError
from replicas.weights.copies.copying import copy_pairs
from replicas.weights.copies.tensors import bits, torch_dtype
from replicas.weights.feed import Feed, Mode, Shard
from replicas.weights.loading import Model, load_image, piece_pairs, views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.packing import Packer, stage
from tests.support.channel.packing import load_tensors, pack

DTYPES = [name for name in ITEM_NBYTES if hasattr(torch, name)]


def random_tensor(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, seen as ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * item_nbytes(dtype)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(torch_dtype(dtype)).view(shape)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    raw = [bits(tensor.contiguous()).contiguous().flatten().view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*raw)


def packed(weights: object, *, dtype: torch.dtype | None = None) -> Slot:
    feed = Feed(weights, dtype=dtype)
    manifest = feed.plan()
    arena = Arena(1, name="test")
    if manifest is None:
        staged = stage(feed)
        slot = arena.acquire(1, staged.manifest)
        assert slot is not None
        staged.write(slot.data)
    else:
        slot = arena.acquire(1, manifest)
        assert slot is not None
        Packer().pack(feed, manifest, slot)
    assert feed.finished
    return slot


def unpacked(slot: Slot) -> dict[str, torch.Tensor]:
    assert slot.manifest is not None
    return views(slot.buffer.private(), slot.manifest)


def load_packed(model: Model, slot: Slot) -> None:
    assert slot.image is not None
    load_image(model, slot.buffer.tensor(), slot.image)


def every_kind() -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for number, dtype in enumerate(DTYPES):
        found[f"{dtype}.matrix"] = random_tensor(dtype, 3, 5, seed=number)
        found[f"{dtype}.scalar"] = random_tensor(dtype, seed=number)
        found[f"{dtype}.empty"] = random_tensor(dtype, 0, 4)
        found[f"{dtype}.transposed"] = random_tensor(dtype, 4, 2, seed=number).t()
        found[f"{dtype}.strided"] = random_tensor(dtype, 9, seed=number)[1::2]
        found[f"{dtype}.none"] = None
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("form", ["mapping", "generator", "pairs"])
def test_every_dtype_and_shape_comes_through_bit_by_bit(form: str) -> None:
    given = every_kind()
    forms: dict[str, object] = {"mapping": given, "generator": iter(given.items()), "pairs": list(given.items())}
    slot = packed(forms[form])
    found = unpacked(slot)
    assert list(found) == [name for name, value in given.items() if value is not None]
    assert all(same(found[name], value) for name, value in given.items() if value is not None)


def test_every_dtype_and_shape_that_safetensors_has_is_in_the_file() -> None:
    lacking = "complex128", "complex32", "float4_e2m1fn_x2.scalar"
    kinds = every_kind().items()
    given = {name: value for name, value in kinds if value is not None and not name.startswith(lacking)}
    slot = packed(given)
    from_file = load_file(slot.buffer.path)
    assert from_file.keys() == given.keys()
    assert all(same(value, given[name]) for name, value in from_file.items())


def test_the_image_is_what_safetensors_loads() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    slot = packed(model)
    loaded = load(slot.buffer.tensor().numpy().tobytes())
    assert loaded.keys() == model.state_dict().keys()
    assert all(same(loaded[name], value) for name, value in model.state_dict().items())


def test_conjugate_and_negative_views_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    found = unpacked(packed({"conj": value.conj(), "imag": value.conj().imag}))
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["imag"].tolist() == [-2.0, 4.0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("form", ["module", "state_dict", "detached"])
def test_tied_storage_is_written_once(form: str) -> None:
    model = Tied()
    forms: dict[str, object] = {
        "module": model,
        "state_dict": model.state_dict(),
        "detached": {name: value.detach() for name, value in model.state_dict().items()},
    }
    slot = packed(forms[form])
    assert slot.manifest is not None
    assert slot.manifest.aliases == (("head.weight", "embed.weight"),)
    assert list(unpacked(slot)) == ["scale", "embed.weight", "norm.weight", "norm.bias"]


def test_equal_memory_in_a_stream_is_no_tie() -> None:
    reused = torch.zeros(3)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            reused.fill_(number)
            yield f"x{number}", reused

    found = unpacked(packed(stream()))
    assert [value.tolist() for value in found.values()] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_only_plain_floating_tensors_are_cast() -> None:
    given = {"f": torch.tensor([1.5]), "q": torch.ones(2).to(torch.float8_e4m3fn), "i": torch.ones(2, dtype=torch.int8)}
    slot = packed(given, dtype=torch.bfloat16)
    assert {name: value.dtype for name, value in unpacked(slot).items()} == {
        "f": torch.bfloat16,
        "q": torch.float8_e4m3fn,
        "i": torch.int8,
    }
    with pytest.raises(UsageError, match=r"publish cannot cast to torch\.int8"):
        Feed(given, dtype=torch.int8)


def test_wrappers_leave_no_prefix() -> None:
    class Compiled(nn.Module):
        """As torch.compile wraps a model: the real one takes seconds to load."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    known = Feed(Compiled(Tied())).plan()
    assert known is not None
    assert [spec.name for spec in known.tensors] == ["scale", "embed.weight", "norm.weight", "norm.bias"]


class Described:
    """Weights that tell their shapes before they are walked."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], described: Any) -> None:
        self._tensors = tensors
        self._described = described
        self.given: list[str] = []

    def metadata(self) -> Any:
        return self._described

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            self.given.append(name)
            yield name, tensor


@dataclass(frozen=True)
class ParamMeta:
    """As vLLM's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ParamRow(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.int64)}


@pytest.mark.parametrize(
    "described",
    [
        {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()},
        {name: tensor.to("meta") for name, tensor in TENSORS.items()},
        [(name, tensor.dtype, list(tensor.shape)) for name, tensor in TENSORS.items()],
        list(TENSORS.items()),
        [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()],
        [ParamRow(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()],
    ],
)
def test_metadata_is_a_plan(described: Any) -> None:
    assert Feed(Described(TENSORS, described), dtype=torch.float16).plan() == PartManifest(
        (TensorSpec("a", "float16", (2, 3)), TensorSpec("b", "int64", ()))
    )
    found = unpacked(packed(Described(TENSORS, described)))
    assert all(same(found[name], value) for name, value in TENSORS.items())


class Resident(Described):
    """Weights whose tensors may all exist whole already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, whole: bool) -> None:
        super().__init__(tensors, list(tensors.items()))
        self._whole = whole

    def resident(self) -> dict[str, torch.Tensor] | None:
        return dict(self._tensors) if self._whole else None


@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_are_all_there_are_not_walked(whole: bool) -> None:
    weights = Resident(TENSORS, whole=whole)
    found = unpacked(packed(weights))
    assert all(same(found[name], value) for name, value in TENSORS.items())
    assert weights.given == ([] if whole else list(TENSORS))


@pytest.mark.parametrize("row", [("a", 3), 3, ParamMeta("a", "float32", (1,)), ParamMeta(3, torch.int8, ())])  # type: ignore[arg-type]  # on purpose
def test_metadata_of_another_form_is_refused(row: object) -> None:
    with pytest.raises(ManifestMismatch, match=r"metadata\(\) gave"):
        Feed(Described(TENSORS, [row])).plan()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": TENSORS["a"]}, "tensor 'b' was not published (1 missing in all)"),
        (TENSORS | {"c": torch.zeros(1)}, "tensor 'c' is not in the channel's manifest"),
        (TENSORS | {"a": torch.zeros(3, 2)}, "tensor 'a' is float32[3, 2], the manifest says float32[2, 3]"),
        (TENSORS | {"b": torch.tensor(1.0)}, "tensor 'b' is float32[], the manifest says int64[]"),
    ],
)
def test_weights_that_do_not_fit_are_walked_to_their_end(given: dict[str, torch.Tensor], message: str) -> None:
    weights = Described(given, dict(TENSORS))
    feed = Feed(weights)
    manifest = feed.plan()
    assert manifest is not None
    with pytest.raises(ManifestMismatch) as caught:
        pack(feed, manifest, torch.zeros(manifest.whole.data_nbytes, dtype=torch.uint8))
    assert caught.value.message == message
    assert weights.given == list(given)
    assert feed.finished
    assert not feed.user_failed


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("x", 3), "publish was given ('x', int)"),
        ((3, torch.zeros(1)), "publish was given (3, Tensor)"),
        ("x", "publish was given str"),
        (("x", torch.zeros(2).to_sparse()), "tensor 'x' has layout torch.sparse_coo"),
        (("x", torch.zeros(2, device="meta")), "tensor 'x' is on the meta device"),
        (("x", torch.zeros(2).to(torch.uint8).view(torch.bits8)), "dtype 'bits8' cannot be published"),
        (("a", torch.zeros(2)), "tensor name 'a' appears twice: float32[2, 3] and float32[2]"),
        (
            ("x", Shard(torch.zeros(2), (0,), (4,))),
            "tensor 'x' is a Shard, but only the leader of this source carries bytes",
        ),
    ],
)
def test_a_value_of_no_use_is_named_after_the_walk(step: Any, message: str) -> None:
    walked: list[int] = []

    def stream() -> Iterator[Any]:
        yield "a", TENSORS["a"]
        yield step
        yield "z", torch.zeros(1)
        walked.append(1)

    with pytest.raises(ManifestMismatch) as caught:
        stage(Feed(stream()))
    assert caught.value.message == message
    assert walked == [1]


def test_the_users_own_exception_goes_through_and_ends_the_walk() -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", TENSORS["a"]
        raise KeyError("mine")

    feed = Feed(stream())
    with pytest.raises(KeyError, match="mine"):
        stage(feed)
    assert feed.finished
    assert feed.user_failed
    feed.drain()


@pytest.mark.parametrize("weights", [3, torch.zeros(3), None])
def test_what_is_no_set_of_weights_is_refused(weights: object) -> None:
    with pytest.raises(UsageError, match="publish cannot take a"):
        stage(Feed(weights))


def test_a_yielded_tensor_may_be_freed_when_the_iterator_goes_on() -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            tensor = torch.full((1000,), float(number))
            yield f"x{number}", tensor
            tensor.fill_(-1)
            del tensor

    found = unpacked(packed(stream()))
    assert [value[0].item() for value in found.values()] == [0.0, 1.0, 2.0, 3.0]


# ---------------------------------------------------------------- parts


def parts_of(weights: object, mode: Mode = "parts") -> tuple[PartManifest, torch.Tensor]:
    staged = stage(Feed(weights, mode=mode))
    data = torch.zeros(staged.manifest.nbytes, dtype=torch.uint8)
    staged.write(data)
    return staged.manifest, data


def assemble(parts: list[tuple[PartManifest, torch.Tensor]]) -> tuple[Manifest, torch.Tensor]:
    """What receivers do, without processes."""
    merged = merge_parts([manifest for manifest, _ in parts])
    merged = Manifest.decode(merged.encode())
    data = torch.full((merged.data_nbytes,), 0xEE, dtype=torch.uint8)
    for pieces, (_, memory) in zip(merged.parts or (), parts, strict=True):
        copy_pairs(piece_pairs(merged, pieces, memory, data))
    return merged, data


def test_shards_of_every_rank_make_the_whole() -> None:
    matrix, bias = torch.arange(24.0).view(4, 6), torch.arange(4, dtype=torch.int8)
    parts = [
        parts_of({"w": Shard(matrix[:, :4], (0, 0), (4, 6)), "b": bias, "only0": torch.tensor(7.0), "only1": None}),
        parts_of({"w": Shard(matrix[:, 4:], (0, 4), (4, 6)), "b": bias, "only0": None, "only1": torch.tensor(8.0)}),
    ]
    manifest, data = assemble(parts)
    found = views(torch.cat([torch.zeros(manifest.data_offset, dtype=torch.uint8), data]), manifest)
    assert torch.equal(found["w"], matrix)
    assert torch.equal(found["b"], bias)
    assert (found["only0"].item(), found["only1"].item()) == (7.0, 8.0)


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [((0,), (4, 6)), ((0, 3), (4, 6)), ((-1, 0), (4, 6)), ((1, 0), (4, 6)), ((0, 0, 0), (4, 6, 1))],
)
def test_a_shard_must_lie_in_its_tensor(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"a Shard of shape \[4, 4\] at offsets"):
        Shard(torch.zeros(4, 4), offsets, shape)


def test_empty_shards_are_no_pieces() -> None:
    manifest, data = parts_of({"w": Shard(torch.zeros(0, 6), (4, 0), (4, 6)), "e": torch.zeros(0)})
    assert manifest.pieces == ()
    assert [spec.name for spec in manifest.tensors] == ["w", "e"]
    assert data.numel() == 0


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_tiling_over_any_ranks_is_put_together_again(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    tensors: dict[str, torch.Tensor] = {}
    held: list[list[tuple[str, Shard]]] = [[] for _ in range(ranks)]
    for number in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from([name for name in DTYPES if name != "complex32"]))
        cuts = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3))
        whole = random_tensor(dtype, *[sum(axis) for axis in cuts], seed=number)
        tensors[f"t{number}"] = whole
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for axis in cuts:
            starts = [sum(axis[:index]) for index in range(len(axis))]
            boxes = [
                ((*offsets, start), (*shape, extent))
                for offsets, shape in boxes
                for start, extent in zip(starts, axis, strict=True)
            ]
        for offsets, shape in boxes:
            local = bits(whole)
            for dim, (offset, extent) in enumerate(zip(offsets, shape, strict=True)):
                local = local.narrow(dim, offset, extent)
            shard = Shard(local.contiguous().view(whole.dtype), offsets, tuple(whole.shape))
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((f"t{number}", shard))
    manifest, image = assemble([parts_of(shards) for shards in held])
    found = views(torch.cat([torch.zeros(manifest.data_offset, dtype=torch.uint8), image]), manifest)
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


# ---------------------------------------------------------------- loading


def test_a_model_gets_the_published_values() -> None:
    source, target = Tied(), Tied()
    slot = packed(source)
    assert slot.manifest is not None
    load_packed(target, slot)
    assert all(same(source.state_dict()[name], value) for name, value in target.state_dict().items())
    assert target.head.weight is target.embed.weight


def test_a_model_without_the_tie_gets_both() -> None:
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(7, 4))
    slot = packed(source)
    assert slot.manifest is not None
    load_packed(target, slot)
    assert torch.equal(target.head.weight, source.embed.weight)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_model_takes_either_name(name: str) -> None:
    target = Tied()
    given = {key: value.clone() for key, value in target.state_dict().items() if not key.endswith("d.weight")}
    load_tensors(target, given | {name: torch.ones(7, 4)})
    assert bool((target.embed.weight == 1).all())


def test_floating_dtypes_are_converted() -> None:
    source = nn.Linear(3, 2)
    target = copy.deepcopy(source).double()
    load_packed(target, packed(source, dtype=torch.bfloat16))
    assert target.weight.dtype == torch.float64
    assert torch.equal(target.weight, source.weight.bfloat16().double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "the weights do not fit the model (not published: 'bias')"),
        ({"extra": torch.zeros(1)}, "the weights do not fit the model (not in the model: 'extra')"),
        ({"bias": torch.zeros(3)}, "tensor 'bias' has shape [3], the model's has [2]"),
        ({"bias": torch.zeros(2, dtype=torch.int64)}, "tensor 'bias' is torch.int64, the model's is torch.float32"),
    ],
)
def test_a_misfit_leaves_the_model_unchanged(change: dict[str, torch.Tensor | None], message: str) -> None:
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    given = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)} | change
    with pytest.raises(ManifestMismatch) as caught:
        load_tensors(model, {name: value for name, value in given.items() if value is not None})
    assert caught.value.message == message
    assert caught.value.hint
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_meta_model_is_refused() -> None:
    with pytest.raises(ManifestMismatch, match="the model's 'weight' is on the meta device"):
        load_tensors(nn.Linear(2, 2, bias=False, device="meta"), {"weight": torch.zeros(2, 2)})


def test_a_slot_that_was_made_in_inference_mode_is_written_in_any() -> None:
    arena, packer = Arena(1, name="modes"), Packer()
    weights = {"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.float64)}
    with torch.inference_mode():
        manifest = packer.plan(feed := Feed(weights))
        assert manifest is not None
        slot = arena.acquire(1, manifest)
        assert slot is not None
        packer.pack(feed, manifest, slot)
        written = [slot.buffer.tensor(), *views(slot.buffer.tensor(), manifest).values()]
    assert not any(tensor.is_inference() for tensor in written)
    arena.free(slot)
    again = arena.acquire(2, manifest)
    assert again is slot
    packer.pack(Feed((name, 2 * tensor) for name, tensor in weights.items()), manifest, slot)
    assert all(tensor.eq(2).all() for tensor in views(slot.buffer.tensor(), manifest).values())
    arena.close()
