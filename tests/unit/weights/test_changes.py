"""What differs between two images: found bit by bit, written alone, and never mixed
with what overwrites the older one.

Covers: weights/changes.py, weights/loading.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from replicas.core.base.dtypes import ITEM_NBYTES
from replicas.core.base.manifest import Manifest
from replicas.errors import ManifestMismatch
from replicas.memory import lines
from replicas.weights import changes, layout, loading
from replicas.weights.changes import SHARE
from replicas.weights.copies import streaming
from replicas.weights.copies.tensors import bits, torch_dtype
from replicas.weights.loading import load_image, views
from tests.support.channel.pairs import Pair
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator

DTYPES = [name for name in ITEM_NBYTES if hasattr(torch, name)]


@pytest.fixture(params=["C", "numpy"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(lines, "_library", None)
        elif lines._library is None:
            pytest.skip("not compiled")
        yield


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_elements_of_each_dtype(dtype: str) -> None:
    pair = Pair(before=("float64", (3,)), w=(dtype, (40, 5)), behind=("uint8", (7,)))
    flat = pair.new["w"].view(-1).view(torch.uint8).view(200, -1)
    for position, byte in ((0, 0), (17, -1), (199, 0)):
        flat[position, byte] ^= 1
    found = pair.found()
    assert found["w"].whole is None
    assert found["w"].positions.dtype is torch.int64
    assert found["w"].positions.tolist() == [0, 17, 199]
    picked = bits(pair.new["w"]).view(-1)[[0, 17, 199]]
    assert torch.equal(bits(found["w"].values), picked)
    assert found["w"].values.dtype == torch_dtype(dtype)
    assert [(len(found[name].positions), found[name].whole) for name in ("before", "behind")] == [(0, None)] * 2


def test_bits_count_and_not_numbers() -> None:
    pair = Pair(w=("float32", (64,)))
    views(pair.old.tensor(), pair.manifest)["w"][:2] = torch.tensor([float("nan"), 0.0])
    pair.new["w"][:2] = torch.tensor([float("nan"), -0.0])
    assert pair.found()["w"].positions.tolist() == [1]


@pytest.mark.parametrize("changed", [0, 64 // SHARE, 64 // SHARE + 1])
def test_a_tensor_comes_whole_when_much_of_it_has_changed(changed: int) -> None:
    pair = Pair(w=("bfloat16", (8, 8)), one=("float32", ()), none=("float32", (0, 3)))
    pair.new["w"].view(-1)[:changed] += 1
    pair.new["one"] += changed
    found = pair.found()
    whole = changed > 64 // SHARE
    assert (found["w"].whole is not None, len(found["w"].positions)) == (whole, 0 if whole else changed)
    assert found["w"].whole is None or same(found["w"].whole, pair.new["w"])
    assert (found["one"].whole is not None) == (changed > 0), "less than one element in eight is none"
    assert found["none"].whole is None
    assert not len(found["none"].positions)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", ["bfloat16", "complex128"])
def test_long_tensors_are_compared_in_runs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_RUN_NBYTES", 4096)
    pair = Pair(w=(dtype, (5000,)))
    where = [0, 255, 256, 2047, 2048, 2049, 4999]
    pair.new["w"][where] += 1
    assert pair.found()["w"].positions.tolist() == where


def test_a_base_that_is_overwritten_gives_no_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may write as soon as it has claimed it."""
    monkeypatch.setattr(layout, "GROUP_NBYTES", 1)  # each tensor is compared by itself
    pair = Pair(a=("float32", (64,)), b=("float32", (64,)), c=("float32", (64,)))
    for name in "abc":
        pair.new[name][5] += 1
    with pair.difference() as difference:
        assert difference.of("a").positions.tolist() == [5]
        assert pair.old.claim() == "claimed", "it holds up nobody"
        assert difference.of("b").whole is not None
        pair.old.tensor().copy_(pair.image)
        pair.old.offer(3)
        assert difference.of("c").whole is not None


def test_what_has_changed_is_all_that_is_written() -> None:
    pair = Pair(w=("bfloat16", (20, 10)), much=("bfloat16", (20,)), kept=("float32", (3,)))
    model = pair.model
    pair.new["w"][3, 4], pair.new["much"][:] = 7, 8
    mine = {name: tensor.clone() for name, tensor in pair.new.items()}
    for name in ("w", "kept"):
        model[name].view(-1)[1] = mine[name].view(-1)[1] = 99  # the user's own
    pair.load(model)
    assert all(same(tensor, mine[name]) for name, tensor in model.items())


@pytest.mark.parametrize("case", ["cast", "strides", "negative", "conjugate", "inference", "module", "a mapping's tie"])
def test_models_of_any_kind(case: str) -> None:
    dtype = "complex64" if case in ("negative", "conjugate") else "float32"
    pair = Pair(w=(dtype, (16, 8)))
    model: Any = pair.model
    match case:
        case "cast":
            model["w"] = model["w"].bfloat16()
        case "strides":
            model["w"] = model["w"].t().contiguous().t()
        case "negative":
            model["w"] = torch._neg_view(model["w"].neg())
        case "conjugate":
            model["w"] = model["w"].conj().resolve_conj().conj()
        case "inference":
            with torch.inference_mode():
                model["w"] = model["w"].clone()
        case "module":
            module = nn.Module()
            module.register_parameter("w", nn.Parameter(model["w"]))
            model = module
        case _:
            model["tied"] = model["w"]
            pair.manifest = Manifest(pair.manifest.tensors, (("tied", "w"),))
    pair.new["w"][2, 3] += 1
    pair.load(model)
    written = model.w.detach() if case == "module" else model["w"]
    assert torch.equal(written.resolve_conj().resolve_neg(), pair.new["w"].to(written.dtype))


def test_a_misfit_is_named_before_anything_is_written() -> None:
    pair = Pair(a=("float32", (64,)), b=("float32", (64,)))
    pair.new["a"][0] += 1
    model = pair.model | {"b": torch.zeros(3)}
    before = model["a"].clone()
    with pytest.raises(ManifestMismatch, match=r"tensor 'b' has shape \[64\], the model's has \[3\]"):
        pair.load(model)
    assert torch.equal(model["a"], before)


def test_tensors_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAS_ACCELERATOR", NAME)
    monkeypatch.setattr("replicas.weights.copies.accelerator._chosen", (os.getpid(), NAME, FakeAccelerator()))
    pair = Pair(w=("bfloat16", (64,)), much=("bfloat16", (64,)))
    model = pair.model
    pair.new["w"][3], pair.new["much"][:] = 5, 6
    pair.load(model)
    assert all(same(tensor, pair.new[name]) for name, tensor in model.items())


def test_small_tensors_are_compared_and_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they took ten times as long as a load of all."""
    pair = Pair(**{f"t{number}": ("bfloat16", (16,)) for number in range(500)})
    for number in range(0, 500, 7):
        pair.new[f"t{number}"][3] += 1
    compared: list[tuple[int, int]] = []
    compare = lines.Lines.compare

    def counted(self: lines.Lines, first: int, last: int, threads: int = 1) -> None:
        compared.append((first, last))
        compare(self, first, last, threads)

    monkeypatch.setattr(lines.Lines, "compare", counted)
    found = pair.found()
    assert [name for name, change in found.items() if len(change.positions)] == [f"t{n}" for n in range(0, 500, 7)]
    assert all(same(change.values, pair.new[name][change.positions]) for name, change in found.items())
    assert len(compared) == 1
    if streaming.available:
        monkeypatch.setattr(loading, "put_elements", None)  # which takes one tensor
        monkeypatch.setattr(loading, "_checked", None)
    model = pair.model
    pair.load(model)
    assert all(same(model[name], value) for name, value in pair.new.items())


@pytest.mark.skipif(not streaming.available, reason="not compiled: torch copies each tensor")
@pytest.mark.parametrize("load", ["whole", "changed"])
def test_one_odd_tensor_leaves_the_others_together(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(**{f"t{number}": ("float32", (16,)) for number in range(20)}, none=("float32", (0, 3)))
    odd = {"t3": torch.zeros(16, dtype=torch.bfloat16), "t4": torch.zeros(16, 2)[:, 0]}
    model = pair.model | {name: to.copy_(pair.model[name]) for name, to in odd.items()}
    for name in ("t2", "t3", "t4"):
        pair.new[name][5] += 1
    checked: list[str] = []
    check = loading._checked

    def counted(name: str, *given: Any) -> Any:
        checked.append(name)
        return check(name, *given)

    monkeypatch.setattr(loading, "_checked", counted)
    pair.load(model) if load == "changed" else load_image(model, pair.image, pair.manifest)
    assert sorted(checked) == ["none", "t3", "t4"]
    assert all(torch.equal(model[name], value.to(model[name].dtype)) for name, value in pair.new.items())


@pytest.mark.skipif(not streaming.available, reason="not compiled: nothing keeps another thread off")
@pytest.mark.parametrize("strides", ["plain", "transposed"])
def test_a_parameter_that_gets_other_memory_meanwhile(strides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(w=("float32", (8, 8)), v=("float32", (8, 8)))
    model = pair.model
    pair.new["w"][2, 3], pair.new["v"][1, 1] = 7, 8
    first, there = model["w"], streaming.still_there

    def moved(*given: Any) -> Any:
        if model["w"].data_ptr() == address:
            copied = first.t().contiguous().t() if strides == "transposed" else first.clone()
            model["w"].set_(copied)  # type: ignore[call-overload]  # torch's stubs lack it
        return there(*given)

    address = first.data_ptr()
    kept = first.detach()  # so that the memory is not used again
    monkeypatch.setattr(streaming, "still_there", moved)
    pair.load(model)
    assert kept[2, 3] != 7
    assert all(same(model[name], value) for name, value in pair.new.items())


_KINDS = ("own", "view", "cast", "strided", "negative")


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_what_has_changed_makes_the_model_that_all_of_it_makes(data: st.DataObject) -> None:
    dtypes = st.sampled_from(["float64", "float32", "bfloat16", "uint8", "complex128"])
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    specs = data.draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12))
    pair = Pair(**{f"t{number}": spec for number, spec in enumerate(specs)})
    models: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, value in pair.model.items():
        kind = data.draw(st.sampled_from(_KINDS))
        for model in models:
            model[name] = _target(kind, value)
    data_start, nbytes = pair.manifest.data_offset, pair.manifest.data_nbytes
    for place in data.draw(st.lists(st.integers(0, max(nbytes, 1) - 1), max_size=20)):
        if nbytes:
            pair.image[data_start + place] ^= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "GROUP_NBYTES", data.draw(st.sampled_from([1, 64, 1 << 20])))
        layout._KNOWN.clear()
        pair.load(models[0])
    load_image(models[1], pair.image, pair.manifest)
    assert all(same(value, models[1][name]) for name, value in models[0].items())


def _target(kind: str, value: torch.Tensor) -> torch.Tensor:
    if kind == "cast" and value.dtype in (torch.float64, torch.float32):
        return value.bfloat16()
    if kind == "negative" and value.dtype.is_floating_point:
        return torch._neg_view(value.neg())
    if kind == "view":
        return torch.zeros(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape).copy_(value)
    if kind == "strided":
        return torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 0].copy_(value)
    return value.clone()
