"""Names that share memory, at either end: each gets its tensor, or nothing is written.

Covers: weights/loading.py, weights/overlaps.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from replicas import errors
from replicas.channel import Update
from replicas.testing import FakeRun
from replicas.weights.copies import streaming
from replicas.weights.copies.tensors import bits
from replicas.weights.loading import load_image, views
from tests.support.channel.pairs import Pair
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator

CALL_S = 20.0
Tensors = dict[str, torch.Tensor]
Load = Callable[[Update, Any], None]


class Ends:
    """A trainer and a rollout, and what the one publishes and the other gets."""

    def __init__(self, run: FakeRun) -> None:
        self.trainer, self.rollout = run.join("trainer"), run.join("rollout")

    def next(self, weights: object) -> Update:
        self.trainer.publish(weights, new_manifest=True, deadline=CALL_S).wait(CALL_S)
        return self.rollout.receive(deadline=CALL_S).wait(CALL_S)


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with FakeRun() as run:
        yield Ends(run)


def whole(update: Update, model: Any) -> None:
    update.load_into(model)


def step_by_step(update: Update, model: Any) -> None:
    """As on a machine without the library in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "available", False)
        update.load_into(model)


def on_a_device(update: Update, model: Any) -> None:
    """CPU tensors count as those of a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAS_ACCELERATOR", NAME)
        patch.setattr("replicas.weights.copies.accelerator._chosen", (os.getpid(), NAME, FakeAccelerator()))
        load_image(model, update._slot_or_raise().buffer.readable(), update.manifest)


WAYS: Mapping[str, Load] = {one.__name__: one for one in (whole, step_by_step, on_a_device)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def file_of(update: Update) -> Tensors:
    """All names of ``path``, as ``replicas.aliases`` in its header says."""
    with safe_open(update.path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        aliases = json.loads(file.metadata().get("replicas.aliases", "{}"))
    return found | {alias: found[name] for alias, name in aliases.items()}


# ---------------------------------------------------------------- what users do

E, H = torch.arange(12.0).view(4, 3), torch.arange(12.0, 24.0).view(4, 3)


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", list(permutations("abc")))
def test_each_name_of_a_tied_tensor_is_loaded(ends: Ends, way: str, order: tuple[str, ...]) -> None:
    model = {name: torch.zeros(4, 3) for name in "cab"} | {"d": torch.zeros(2)}
    with ends.next(dict.fromkeys(order, E) | {"d": torch.ones(2)}) as update:
        WAYS[way](update, model)
    assert [model[name].tolist() for name in "abc"] == [E.tolist()] * 3
    assert model["d"].tolist() == [1, 1]


def test_a_module_without_the_tie_gets_both(ends: Ends) -> None:
    source, target = Model(tied=True), Model(tied=False)
    with ends.next(source) as update:
        update.load_into(target)
    assert torch.equal(target.head.weight, source.embed.weight)
    assert torch.equal(target.embed.weight, source.embed.weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", [E.clone(), H])
def test_a_tied_model_takes_two_tensors_that_are_alike_and_no_others(ends: Ends, way: str, head: torch.Tensor) -> None:
    target = Model(tied=True)
    before = target.embed.weight.detach().clone()
    with ends.next({"embed.weight": E, "head.weight": head}) as update:
        if head is H:
            text = r"'embed.weight' and 'head.weight' share memory in the model, and their values in the version differ"
            with pytest.raises(errors.ManifestMismatch, match=text):
                WAYS[way](update, target)
        else:
            WAYS[way](update, target)
    assert torch.equal(target.embed.weight, before if head is H else E)


def test_of_three_names_that_are_tied_the_one_that_differs_is_named(ends: Ends) -> None:
    tied = torch.zeros(4, 3)
    with ends.next({"a": E, "b": E, "c": H}) as update, pytest.raises(errors.ManifestMismatch, match="'a' and 'c'"):
        update.load_into({"a": tied, "b": tied, "c": tied})
    assert not tied.any()


def test_bits_are_compared_and_not_numbers(ends: Ends) -> None:
    tied, nan = torch.zeros(2), torch.tensor([float("nan"), 0.0])
    with ends.next({"a": nan, "b": nan.clone()}) as update:
        update.load_into({"a": tied, "b": tied})
    assert same(tied, nan)
    with (
        ends.next({"a": nan, "b": torch.tensor([float("nan"), -0.0])}) as update,
        pytest.raises(errors.ManifestMismatch),
    ):
        update.load_into({"a": tied, "b": tied})


def test_ties_come_and_go_from_version_to_version(ends: Ends) -> None:
    tied, apart = Model(tied=True), {"embed.weight": torch.zeros(4, 3), "head.weight": torch.zeros(4, 3)}
    for step, is_tied in enumerate([True, False, True, True, False], 1):
        source = Model(tied=is_tied)
        with ends.next(source) as update:
            assert len(update.manifest.aliases) == is_tied
            update.load_into(apart, changed_only=update.base > 0)
            if is_tied:
                update.load_into(tied)
        for name, value in source.state_dict().items():
            assert torch.equal(apart[name], value), step
            assert not is_tied or torch.equal(tied.state_dict()[name], value)


def test_changes_go_to_each_name_and_must_agree() -> None:
    pair = Pair(a=("bfloat16", (64,)), b=("bfloat16", (64,)))
    pair.new["b"].copy_(pair.new["a"])
    views(pair.old.tensor(), pair.manifest)["b"].copy_(pair.new["b"])
    tied = pair.model["a"]
    pair.new["a"][3], pair.new["b"][3] = 7, 7
    pair.load({"a": tied, "b": tied})
    assert same(tied, pair.new["a"])
    pair.new["b"][5] = 8
    with pytest.raises(errors.ManifestMismatch, match="'a' and 'b' share memory"):
        pair.load({"a": tied, "b": tied})
    assert same(tied, pair.new["a"])


def test_the_transposed_of_a_square_is_what_it_is_where_it_is_published(ends: Ends) -> None:
    square = torch.zeros(3, 3)
    model, value = {"a": square, "b": square.t()}, torch.arange(9.0).view(3, 3)
    with ends.next({"a": value, "b": value.t()}) as update:
        assert update.manifest.aliases == ()
        update.load_into(model)
    assert torch.equal(square, value)
    with ends.next({"a": value, "b": value}) as update, pytest.raises(errors.ManifestMismatch, match="'a' and 'b'"):
        update.load_into(model)
    assert torch.equal(square, value)


# ---------------------------------------------------------------- a cast's range


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_values_become_no_infinities(ends: Ends, way: str, dtype: torch.dtype) -> None:
    model = {"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(3, dtype=torch.float16)}
    fits = torch.tensor([float("inf"), float("nan"), -65504], dtype=torch.float32).to(dtype)
    if dtype is torch.bfloat16:
        fits[2] = -65280  # the next one is beyond
    with ends.next({"a": fits, "b": fits.clone()}) as update:
        WAYS[way](update, model)
    assert same(model["b"], fits.to(torch.float16))
    beyond = torch.full((3,), -70000.0, dtype=dtype)
    with (
        ends.next({"a": torch.zeros(3, dtype=dtype), "b": beyond}) as update,
        pytest.raises(errors.ManifestMismatch, match="'b' has values beyond the range of float16"),
    ):
        WAYS[way](update, model)
    assert same(model["a"], fits.to(torch.float16))


# ---------------------------------------------------------------- any graph of aliases

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8]
FLOATS = DTYPES[:2]
SHAPES = [(4, 4), (2, 4), (4,)]
BLOCK_NBYTES = 256


class Place(NamedTuple):
    """A tensor in one of the blocks of memory of an end: ``stride`` is of its last axis
    in elements; transposed: of the first.
    """

    block: int
    offset_nbytes: int
    stride: int
    transposed: bool

    def view(self, blocks: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        memory = blocks[self.block][self.offset_nbytes :].view(dtype)
        order = shape[::-1] if self.transposed else shape
        strides = [self.stride] if len(order) == 1 else [self.stride * order[1], self.stride]
        return memory.as_strided(shape, strides[::-1] if self.transposed else strides, memory.storage_offset())


PLACES = st.builds(
    Place, st.integers(0, 2), st.sampled_from([0, 0, 0, 32, 64]), st.sampled_from([1, 1, 2]), st.booleans()
)
CONTENTS = st.sampled_from([b"\x3c", b"\x3c", b"\x41", bytes(range(0, 112, 3))])
"""Of a block, again and again; no bytes of a NaN or of an infinity."""


class Graph(NamedTuple):
    """Names in memory at both ends."""

    published: Tensors
    model: Tensors
    memory: list[torch.Tensor]
    publisher: list[torch.Tensor]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    contents = [(draw(CONTENTS) * BLOCK_NBYTES)[:BLOCK_NBYTES] for _ in range(3)]
    publisher = [torch.tensor(list(content), dtype=torch.uint8) for content in contents]
    memory = [torch.zeros(BLOCK_NBYTES, dtype=torch.uint8) for _ in range(3)]
    published, model = Tensors(), Tensors()
    few = draw(st.lists(PLACES, min_size=1, max_size=3))  # so that names come together
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    for name in draw(st.permutations("abcde"))[: draw(st.integers(2, 5))]:
        if draw(st.integers(0, 3)) == 0:
            shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        ours = draw(st.sampled_from(FLOATS)) if dtype in FLOATS and draw(st.integers(0, 4)) == 0 else dtype
        published[name] = draw(st.sampled_from(few)).view(publisher, dtype, shape)
        model[name] = draw(st.sampled_from(few)).view(memory, ours, shape)
    return Graph(published, {name: model[name] for name in draw(st.permutations(list(model)))}, memory, publisher)


def agrees(graph: Graph) -> bool:
    """Whether each name can have its value: whatever comes last leaves the others."""
    before = [block.clone() for block in graph.memory]
    for name, tensor in graph.model.items():
        tensor.copy_(graph.published[name])
    found = is_loaded(graph)
    for block, was in zip(graph.memory, before, strict=True):
        block.copy_(was)
    return found


def is_loaded(graph: Graph) -> bool:
    return all(same(tensor, graph.published[name].to(tensor.dtype)) for name, tensor in graph.model.items())


def check(graph: Graph, load: Callable[[], object]) -> None:
    """All names are loaded if they agree, else refused, and then nothing is written."""
    if agrees(graph):
        load()
        assert is_loaded(graph)
        return
    before = [block.clone() for block in graph.memory]
    with pytest.raises(errors.ManifestMismatch, match="share memory in the model"):
        load()
    assert all(map(torch.equal, graph.memory, before))


@pytest.mark.slow
@settings(max_examples=100)
@given(graph=graphs(), changed=st.lists(st.integers(0, 3 * BLOCK_NBYTES - 1), max_size=3))
def test_any_graph_of_aliases_at_both_ends(ends: Ends, graph: Graph, changed: list[int]) -> None:
    with ends.next(graph.published) as update:
        for read in (update.tensors(), file_of(update)):
            assert read.keys() == graph.published.keys()
            assert all(same(read[name], value) for name, value in graph.published.items())
        for load in WAYS.values():
            for block in graph.memory:
                block.zero_()
            check(graph, lambda load=load: load(update, graph.model))  # type: ignore[misc]  # it is called at once
    if not is_loaded(graph):
        return
    for place in changed:
        graph.publisher[place // BLOCK_NBYTES][place % BLOCK_NBYTES] ^= 1
    with ends.next(graph.published) as update:
        check(graph, lambda: update.load_into(graph.model, changed_only=True))
