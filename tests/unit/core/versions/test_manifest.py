"""Manifests: images, parts, and one manifest made of many parts.

Covers: core/base/dtypes.py, core/base/manifest.py, core/versions/manifests.py.
"""

from __future__ import annotations

import itertools
import json
from math import prod

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.core.base.dtypes import ITEM_NBYTES, item_nbytes
from replicas.core.base.manifest import ALIGNMENT_NBYTES, Manifest, PartManifest, Piece, TensorSpec, packed_offsets
from replicas.core.versions.manifests import difference, merge_parts
from replicas.errors import ManifestMismatch

WEIGHT = TensorSpec("weight", "float32", (4, 6))
BIAS = TensorSpec("bias", "bfloat16", (4,))


def part(tensors: tuple[TensorSpec, ...], *boxes: tuple[int, tuple[int, ...], tuple[int, ...]]) -> PartManifest:
    offsets = packed_offsets([(tensors[n].dtype, prod(shape) * item_nbytes(tensors[n].dtype)) for n, _, shape in boxes])
    return PartManifest(tensors, (), tuple(Piece(*box, offset) for box, offset in zip(boxes, offsets, strict=True)))


def test_tensors_lie_by_falling_item_size_without_holes() -> None:
    specs = (
        TensorSpec("a", "bool", (3,)),
        TensorSpec("b", "float64", (2,)),
        TensorSpec("c", "bfloat16", (5,)),
        TensorSpec("d", "complex128", ()),
        TensorSpec("e", "float32", (0, 7)),
    )
    manifest = Manifest(specs)
    assert manifest.offsets == (42, 16, 32, 0, 32)
    assert manifest.data_nbytes == 45
    assert manifest.image_nbytes == manifest.data_offset + 45
    assert all(
        offset % spec.nbytes == 0 for offset, spec in zip(manifest.offsets, specs, strict=True) if not spec.shape
    )
    assert manifest.regions == PartManifest(specs).regions == ((0, 32, 8), (32, 42, 2), (42, 45, 1))
    assert Manifest(()).regions == ()
    assert part(specs, (0, (1,), (2,)), (2, (0,), (3,))).regions == ((0, 6, 2), (6, 8, 1))


def test_the_header_is_padded_to_a_page_and_says_where_everything_lies() -> None:
    halves = TensorSpec("scale", "float8_e8m0fnu", (3,)), TensorSpec("fp4", "float4_e2m1fn_x2", (2, 2))
    manifest = Manifest((BIAS, WEIGHT, *halves), (("tied", "weight"),))
    header = manifest.header
    assert len(header) % ALIGNMENT_NBYTES == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt", "replicas.aliases": '{"tied":"weight"}'},
        "weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
        "bias": {"dtype": "BF16", "shape": [4], "data_offsets": [96, 104]},
        "scale": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [104, 107]},
        "fp4": {"dtype": "F4", "shape": [2, 4], "data_offsets": [107, 111]},
    }


def test_a_manifest_survives_the_wire_and_has_a_stable_hash() -> None:
    manifest = merge_parts(
        [part((WEIGHT,), (0, (0, 0), (4, 3))), part((WEIGHT, BIAS), (0, (0, 3), (4, 3)), (1, (0,), (4,)))]
    )
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.hash == manifest.hash
    assert again.hash != Manifest(manifest.tensors).hash  # the same weights in other parts


def test_names_of_aliases_are_in_the_index() -> None:
    assert Manifest((WEIGHT, BIAS), (("head", "weight"),)).index == {"weight": 0, "bias": 1, "head": 0}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        msgspec.msgpack.encode({"tensors": 3}),
        msgspec.msgpack.encode({"tensors": [["a", "float32", [-1]]]}),
        msgspec.msgpack.encode({"tensors": [["a", "float99", [1]]]}),
        msgspec.msgpack.encode({"tensors": [["a", "float32", [1 << 62]]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [1]], ["a", "int8", [1]]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [1]]], "aliases": [["b", "c"]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [4]]], "pieces": [[0, [2], [3], 0]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [4]]], "pieces": [[1, [0], [4], 0]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [4]]], "pieces": [[0, [0], [4], 1]]}),
        msgspec.msgpack.encode({"tensors": [["a", "int8", [4]]], "pieces": [[0, [0, 0], [4, 1], 0]]}),
    ],
)
def test_bad_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestMismatch):
        PartManifest.decode(data)


def test_one_whole_image_stays_whole() -> None:
    whole = PartManifest((WEIGHT, BIAS), (("tied", "weight"),))
    assert merge_parts([whole]) == Manifest((WEIGHT, BIAS), (("tied", "weight"),))
    assert whole.nbytes == whole.whole.image_nbytes


def test_pieces_of_all_parts_make_one_manifest() -> None:
    first = part((WEIGHT, BIAS), (0, (0, 0), (2, 6)), (1, (0,), (4,)))
    second = part((BIAS, WEIGHT), (0, (0,), (4,)), (1, (2, 0), (2, 6)))
    merged = merge_parts([first, second])
    assert merged.tensors == (WEIGHT, BIAS)
    assert merged.parts == (
        (Piece(0, (0, 0), (2, 6), 0), Piece(1, (0,), (4,), 48)),
        (Piece(0, (2, 0), (2, 6), 0),),  # the replicated bias comes from the lowest part
    )
    assert [merged.part_nbytes(0), merged.part_nbytes(1)] == [56, 48]


def test_a_tensor_that_only_one_rank_has_is_kept() -> None:
    expert = TensorSpec("experts.1", "int8", (2,))
    merged = merge_parts([part((BIAS,), (0, (0,), (4,))), part((expert,), (0, (0,), (2,)))])
    assert [spec.name for spec in merged.tensors] == ["bias", "experts.1"]
    assert merged.parts == ((Piece(0, (0,), (4,), 0),), (Piece(1, (0,), (2,), 0),))


def test_empty_and_scalar_tensors_merge() -> None:
    empty, scalar = TensorSpec("empty", "float32", (0, 3)), TensorSpec("scalar", "int64", ())
    merged = merge_parts([part((empty, scalar), (1, (), ())), part((empty, scalar), (1, (), ()))])
    assert merged.parts == ((Piece(1, (), (), 0),), ())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [part((WEIGHT,), (0, (0, 0), (2, 6))), part((WEIGHT,), (0, (1, 0), (3, 6)))],
            "tensor 'weight': ranks 0 and 1 both have elements at [1, 0]",
        ),
        (
            [part((WEIGHT,), (0, (0, 0), (2, 6))), part((WEIGHT,), (0, (3, 0), (1, 6)))],
            "tensor 'weight': the ranks have 18 of 24 elements of float32[4, 6]",
        ),
        (
            [part((WEIGHT,), (0, (0, 0), (4, 6))), part((TensorSpec("weight", "float16", (4, 6)),))],
            "tensor 'weight': rank 1 has float16[4, 6], a lower rank has float32[4, 6]",
        ),
        (
            [part((WEIGHT,), (0, (0, 0), (4, 6))), PartManifest((WEIGHT,))],
            "rank 1 publishes a whole image, but other ranks publish parts",
        ),
        (
            [PartManifest((WEIGHT, BIAS), (("x", "weight"),), ()), PartManifest((WEIGHT, BIAS), (("x", "bias"),), ())],
            "tensor 'x': rank 1 ties it to 'bias', a lower rank to 'weight'",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(parts: list[PartManifest], message: str) -> None:
    with pytest.raises(ManifestMismatch) as caught:
        merge_parts(parts)
    assert caught.value.message == message


def test_differences_are_told_one_by_one() -> None:
    old = Manifest((WEIGHT, BIAS), (("tied", "weight"),))
    assert difference(old, old) == ""
    assert difference(old, Manifest((BIAS, WEIGHT), (("tied", "weight"),))) == ""
    new = PartManifest(
        (TensorSpec("weight", "float32", (4, 7)), TensorSpec("c", "int8", ()), TensorSpec("d", "int8", ()))
    )
    assert difference(old, new) == (
        "'weight' was float32[4, 6], is float32[4, 7]; 'c' (int8[]) is new; 'd' (int8[]) is new; and 2 more"
    )


@st.composite
def grids(draw: st.DrawFn) -> tuple[TensorSpec, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor, and boxes that tile it."""
    cuts = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    shape = tuple(sum(axis) for axis in cuts)
    starts = [list(itertools.accumulate([0, *axis[:-1]])) for axis in cuts]
    boxes = [
        (
            tuple(first[n] for first, n in zip(starts, cell, strict=True)),
            tuple(axis[n] for axis, n in zip(cuts, cell, strict=True)),
        )
        for cell in itertools.product(*[range(len(axis)) for axis in cuts])
    ]
    return TensorSpec("x", draw(st.sampled_from(sorted(ITEM_NBYTES))), shape), boxes


@settings(max_examples=15, deadline=None)
@given(grids(), st.integers(1, 4), st.data())
def test_every_element_comes_from_exactly_one_part(
    grid: tuple[TensorSpec, list[tuple[tuple[int, ...], tuple[int, ...]]]], ranks: int, data: st.DataObject
) -> None:
    spec, boxes = grid
    owners = [data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks)) for _ in boxes]
    parts = [
        part((spec,), *[(0, *box) for box, ranks_with_it in zip(boxes, owners, strict=True) if rank in ranks_with_it])
        for rank in range(ranks)
    ]
    merged = merge_parts(parts)
    assert merged.parts is not None
    found = sorted((piece.offsets, piece.shape, rank) for rank, pieces in enumerate(merged.parts) for piece in pieces)
    assert found == sorted((*box, min(ranks_with_it)) for box, ranks_with_it in zip(boxes, owners, strict=True))


@settings(max_examples=15, deadline=None)
@given(grids(), st.data())
def test_a_missing_or_an_overlapping_box_is_found(
    grid: tuple[TensorSpec, list[tuple[tuple[int, ...], tuple[int, ...]]]], data: st.DataObject
) -> None:
    spec, boxes = grid
    everything = part((spec,), *[(0, *box) for box in boxes])
    hole = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(ManifestMismatch, match="tensor 'x': the ranks have"):
        merge_parts([part((spec,), *[(0, *box) for n, box in enumerate(boxes) if n != hole])])
    if len(boxes) > 1:
        whole = part((spec,), (0, (0,) * len(spec.shape), spec.shape))
        with pytest.raises(ManifestMismatch, match="tensor 'x': ranks 0 and 1 both have elements"):
            merge_parts([everything, whole])


@pytest.mark.parametrize(
    ("tensors", "aliases", "text"),
    [
        ((TensorSpec("\ud800", "int8", ()),), (), "cannot be sent"),
        ((TensorSpec("a", "int8", (-1,)),), (), "negative extent"),
        ((TensorSpec("a", "int8", (1 << 56,)),), (), "add up to"),
        ((TensorSpec("a", "int8", ()),) * 2, (), "'a' appears twice"),
        ((TensorSpec("__metadata__", "int8", ()),), (), "reserved by safetensors"),
        ((WEIGHT,), (("weight", "weight"),), "'weight' appears twice"),
        ((WEIGHT,), (("tied", "weight"), ("tied", "weight")), "'tied' appears twice"),
        ((WEIGHT,), (("__metadata__", "weight"),), "reserved by safetensors"),
        ((WEIGHT,), (("tied", "nothing"),), "unknown tensor 'nothing'"),
    ],
)
def test_tensors_that_cannot_be_named_or_placed_are_refused(
    tensors: tuple[TensorSpec, ...], aliases: tuple[tuple[str, str], ...], text: str
) -> None:
    with pytest.raises(ManifestMismatch, match=text):
        PartManifest(tensors, aliases).validate()


def test_more_tensors_than_fit_into_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.core.base.manifest.MANIFEST_TENSORS", 2)
    PartManifest((WEIGHT,), (("tied", "weight"),)).validate()
    with pytest.raises(ManifestMismatch, match="3 tensors: at most 2"):
        PartManifest((WEIGHT, BIAS), (("tied", "weight"),)).validate()


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece(1, (0, 0), (4, 6), 0), "tensor number 1 of 1"),
        (Piece(0, (0, 0), (5, 6), 0), "does not lie in"),
        (Piece(0, (0, 0), (4, 6), 2), "cannot lie at byte 2"),
    ],
)
def test_pieces_that_lie_nowhere_are_refused(piece: Piece, text: str) -> None:
    with pytest.raises(ManifestMismatch, match=text):
        PartManifest((WEIGHT,), (), (piece,)).validate()


def test_a_tensor_without_dimensions_lies_with_one_rank() -> None:
    scalar = TensorSpec("scale", "float32", ())
    piece = Piece(0, (), (), 0)
    assert merge_parts([part((scalar,), (0, (), ()))] * 2).parts == ((piece,), ())
    with pytest.raises(ManifestMismatch, match=r"tensor 'scale': ranks 0 and 1 both have elements at \[\]"):
        Manifest.decode(Manifest((scalar,), (), ((piece,), (piece,))).encode())
