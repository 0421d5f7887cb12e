"""What a version is cut into on its way: nothing is lost, all members agree, and the
image is settled from its start.

Covers: sidecar/buckets.py, sidecar/transfer.py.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.core.base.manifest import Manifest, Piece, TensorSpec
from replicas.sidecar import buckets as cutting
from replicas.sidecar.buckets import MAX_BUCKET_NBYTES, Bucket, bucket_limit, image_run, make_plan
from replicas.sidecar.transfer import check_routes, scatter
from replicas.sidecar.wire import TransferSpec

KIB = 1 << 10
MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "members", "limit"),
    [
        (256 * MIB, 1, MAX_BUCKET_NBYTES),
        (256 * MIB, 2, MAX_BUCKET_NBYTES),  # nobody passes anything on
        (256 * MIB, 3, 4 * MIB),
        (64 * MIB, 4, 2 * MIB),
        (256 * MIB, 100, 512 * KIB),
        (0, 3, 512 * KIB),
    ],
)
def test_buckets_are_small_where_they_are_passed_on(nbytes: int, members: int, limit: int) -> None:
    assert bucket_limit(nbytes, members) == limit


def test_an_image_is_cut_from_start_to_end() -> None:
    manifest = Manifest((TensorSpec("x", "uint8", (20 * MIB + 5,)),))
    plan = make_plan(manifest, ((1, 0),), 0, by_part=False)
    assert [(bucket.owner, bucket.start) for bucket in plan.buckets] == [(1, 0), (1, 8 * MIB), (1, 16 * MIB)]
    assert sum(bucket.nbytes for bucket in plan.buckets) == manifest.data_nbytes
    assert plan.settled == (0, 8 * MIB, 16 * MIB, 20 * MIB + 5)
    assert make_plan(manifest, ((1, 0),), 1, by_part=False) == plan


def test_whoever_is_in_no_route_has_everything() -> None:
    manifest = Manifest((TensorSpec("x", "uint8", (100,)),))
    plan = make_plan(manifest, ((1, 0),), 2, by_part=False)
    assert (plan.buckets, plan.settled) == ((), (100,))


def halves(rows: int, columns: int) -> Manifest:
    """Two tensors, each with one half of its rows in each of two parts."""
    specs = (TensorSpec("a", "float32", (rows, columns)), TensorSpec("b", "float32", (rows, columns)))
    half = rows // 2
    nbytes = half * columns * 4
    parts = tuple(
        tuple(Piece(tensor, (first, 0), (half, columns), tensor * nbytes) for tensor in range(2)) for first in (0, half)
    )
    manifest = Manifest(specs, (), parts)
    manifest.validate()
    return manifest


def test_parts_are_mixed_so_that_the_image_fills_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_BUCKET_NBYTES", 64)
    plan = make_plan(halves(8, 4), ((0, 2), (1, 2)), 2, by_part=True)
    assert [bucket.part for bucket in plan.buckets] == [0, 1, 0, 1]
    assert plan.settled == (0, 64, 128, 192, 256)
    alone = make_plan(halves(8, 4), ((0, 2), (1, 3)), 2, by_part=True)
    assert [bucket.part for bucket in alone.buckets] == [0, 0]
    assert alone.settled == (0, 128, 256)  # the bytes of part 1 are in place already


@pytest.mark.parametrize(
    ("pieces", "start"),
    [
        ([((0, 0), (2, 4))], 0),
        ([((1, 0), (2, 4))], 4),
        ([((2, 1), (1, 3))], 9),
        ([((0, 0), (2, 2))], None),  # half a row of each of two
        ([((0, 0), (1, 4)), ((1, 0), (1, 4))], 0),
        ([((0, 0), (1, 4)), ((2, 0), (1, 4))], None),  # they lie apart in the image
        ([((1, 0), (1, 4)), ((0, 0), (1, 4))], None),  # and here in another order
    ],
)
def test_where_a_bucket_is_one_run_of_the_image(pieces: list[tuple[tuple[int, ...], ...]], start: int | None) -> None:
    manifest = Manifest((TensorSpec("x", "int8", (4, 4)),))
    found: list[Piece] = []
    end = 0
    for offsets, shape in pieces:
        found.append(Piece(0, offsets, shape, 30 + end))
        end += prod(shape)
    assert image_run(manifest, Bucket(0, 30, end, tuple(found))) == start


def fill(image: torch.Tensor, manifest: Manifest, piece: Piece) -> None:
    """One more in each byte of the piece's box."""
    nbytes = prod(piece.shape) * (4 if manifest.tensors[piece.tensor].dtype == "int32" else 1)
    before = image.clone()
    scatter(torch.ones(nbytes, dtype=torch.uint8), Bucket(0, piece.source_offset, nbytes, (piece,)), image, manifest)
    assert not before[image != before].any(), "each byte comes once"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_settled_does_not_change_any_more(data: st.DataObject) -> None:
    """Any cut of any tensors over any parts, in any order within each; some parts are
    in place from the start."""
    count = data.draw(st.integers(1, 3))
    specs: list[TensorSpec] = []
    boxes: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    for number in range(data.draw(st.integers(1, 3))):
        cuts = [data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) for _ in range(2)]
        specs.append(
            TensorSpec(f"t{number}", data.draw(st.sampled_from(["int8", "int32"])), (sum(cuts[0]), sum(cuts[1])))
        )
        for row, height in enumerate(cuts[0]):
            for column, width in enumerate(cuts[1]):
                boxes.append((number, (sum(cuts[0][:row]), sum(cuts[1][:column])), (height, width)))
    held: list[list[Piece]] = [[] for _ in range(count)]
    ends = [0] * count
    for number, offsets, shape in data.draw(st.permutations(boxes)):
        part = data.draw(st.integers(0, count - 1))
        held[part].append(Piece(number, offsets, shape, ends[part]))
        ends[part] += prod(shape) * (4 if specs[number].dtype == "int32" else 1)
        ends[part] += -ends[part] % 4
    manifest = Manifest(tuple(specs), (), tuple(tuple(pieces) for pieces in held))
    manifest.validate()
    here = data.draw(st.sets(st.integers(0, count - 1)))
    routes = [(part,) if part in here else (part, count) for part in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MAX_BUCKET_NBYTES", data.draw(st.integers(1, 40)))
        plan = make_plan(manifest, routes, count, by_part=True)

    image = torch.zeros(manifest.data_nbytes, dtype=torch.uint8)
    assert manifest.parts is not None
    for piece in (piece for part in here for piece in manifest.parts[part]):
        fill(image, manifest, piece)
    assert plan.settled[0] == manifest.data_nbytes or bool((image[: plan.settled[0]] != 0).all())
    for number, bucket in enumerate(plan.buckets):
        before = image[: plan.settled[number]].clone()
        for piece in bucket.pieces:
            fill(image, manifest, piece)
        assert torch.equal(before, image[: before.numel()]), "settled, and changed"
        assert bool((image[: plan.settled[number + 1]] != 0).all()), "settled, and not there"
    assert plan.settled[-1] == manifest.data_nbytes
    assert bool((image != 0).all())


def spec_of(routes: tuple[tuple[int, ...], ...]) -> TransferSpec:
    return TransferSpec(1, "receive", "image", b"", routes, None, 1.0)


@pytest.mark.parametrize("route", [(1, 0, 2), (2, 0), ()])
def test_a_route_may_leave_members_out(route: tuple[int, ...]) -> None:
    check_routes(spec_of((route,)), Manifest((TensorSpec("x", "uint8", (4,)),)), 3)


@pytest.mark.parametrize("routes", [(), ((0,), (1,)), ((3,),), ((0, 1), (1, 0)), ((0, 3),), ((0, 1, 0),), ((-1, 0),)])
def test_routes_that_cannot_be_are_refused(routes: tuple[tuple[int, ...], ...]) -> None:
    manifest = Manifest((TensorSpec("x", "uint8", (4,)),))
    with pytest.raises(ValueError, match="fit"):
        check_routes(spec_of(routes), manifest, 3)
