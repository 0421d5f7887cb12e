"""Transfers through chains of sidecars: who is in a route gets the bytes, who is not
does nothing, and nobody hangs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.core.versions.manifests import merge_parts
from replicas.linux.helper_process import SILENCE_S
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.sidecar.wire import TransferResult, TransferSpec
from replicas.weights.copies.digest import digest_of
from replicas.weights.feed import Feed, Shard
from replicas.weights.loading import views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from replicas.weights.packing import stage
from tests.support.sidecars import Lane, lane, shared_forkserver
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 8.0
MIB = 1 << 20
Routes = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with shared_forkserver() as name:
        yield name


def slot_for(manifest: Any) -> Slot:
    slot = Arena(1, name="test").acquire(1, manifest)
    assert slot is not None
    return slot


def image_of(nbytes: int) -> tuple[Manifest, Slot]:
    """A slot with random bytes."""
    manifest = Manifest((TensorSpec("x", "uint8", (nbytes,)),))
    slot = slot_for(manifest)
    slot.data.random_(1, 256)
    return manifest, slot


def move(
    made: Lane,
    manifest: Manifest,
    routes: Routes,
    buffers: dict[int, Buffer],
    *,
    digest: str = "",
    mode: Literal["image", "parts"] = "image",
    timeout_s: float = TIMEOUT_S,
) -> dict[int, asyncio.Future[TransferResult]]:
    """Begin it on the members that have a buffer; the owners send."""
    owners = [route[0] if route else -1 for route in routes]
    return {
        rank: asyncio.ensure_future(
            made.sidecars[rank].transfer(
                TransferSpec(
                    1,
                    "send" if rank in owners else "receive",
                    mode,
                    manifest.encode(),
                    routes,
                    owners.index(rank) if rank in owners else None,
                    timeout_s,
                    digest if rank in owners else "",
                ),
                buffer,
            )
        )
        for rank, buffer in buffers.items()
    }


async def all_of(moves: dict[int, asyncio.Future[TransferResult]]) -> dict[int, TransferResult]:
    return dict(zip(moves, await asyncio.gather(*moves.values()), strict=True))


# ---------------------------------------------------------------- images


async def test_an_image_goes_through_a_chain_and_past_those_who_are_not_in_it(server: str) -> None:
    manifest, source = image_of(9 * MIB + 3)
    async with lane(4, server) as four:
        for route in ((2, 0, 3), (2, 3, 0, 1), (2, 1), (2,)):
            slots = {rank: source if rank == route[0] else slot_for(manifest) for rank in route}
            results = await all_of(move(four, manifest, (route,), {rank: slot.buffer for rank, slot in slots.items()}))
            assert {result.image_digest for result in results.values()} == {digest_of(source.data)}
            assert all(torch.equal(slot.buffer.tensor(), source.buffer.tensor()) for slot in slots.values())
            assert all(result.part_digests == {} for result in results.values())


async def test_a_sender_who_knows_the_digest_reads_nothing(server: str) -> None:
    manifest, source = image_of(MIB)
    target = slot_for(manifest)
    async with lane(2, server) as two:
        buffers = {0: source.buffer, 1: target.buffer}
        results = await all_of(move(two, manifest, ((0, 1),), buffers, digest="as the publisher says"))
    assert results[0].image_digest == "as the publisher says"
    assert results[1].image_digest == digest_of(source.data)


async def test_memory_that_can_only_be_read_is_good_enough_to_send(server: str) -> None:
    manifest, source = image_of(5 * MIB)
    given = Buffer.adopt(os.open(source.buffer.path, os.O_RDONLY | os.O_CLOEXEC))
    targets = {rank: slot_for(manifest) for rank in (1, 2)}
    async with lane(3, server) as three:
        for _ in range(2):
            buffers = {0: given} | {rank: slot.buffer for rank, slot in targets.items()}
            results = await all_of(move(three, manifest, ((0, 1, 2),), buffers))
            assert {result.image_digest for result in results.values()} == {digest_of(source.data)}
            source.data[-1] += 1


# --------------------------------------------------- images that are still being packed


def stream(
    made: Lane,
    manifest: Manifest,
    route: tuple[int, ...],
    buffers: dict[int, Buffer],
    timeout_s: float,
    number: int = 1,
) -> dict[int, asyncio.Future[TransferResult]]:
    """Begin an image whose sender is told what it may send."""
    encoded = manifest.encode()
    return {
        rank: asyncio.ensure_future(
            made.sidecars[rank].transfer(
                TransferSpec(number, "send", "image", encoded, (route,), None, timeout_s, streaming=True)
                if rank == route[0]
                else TransferSpec(number, "receive", "image", encoded, (route,), None, timeout_s),
                buffer,
            )
        )
        for rank, buffer in buffers.items()
    }


@pytest.mark.parametrize("route", [(0, 1), (1, 0, 2)])
async def test_an_image_is_sent_while_it_is_packed(server: str, route: tuple[int, ...]) -> None:
    nbytes = 20 * MIB + 5
    manifest, source = image_of(nbytes)
    wanted = source.data.clone()
    targets = {rank: slot_for(manifest) for rank in route[1:]}
    buffers = {route[0]: source.buffer} | {rank: slot.buffer for rank, slot in targets.items()}
    async with lane(len(route), server) as made:
        sender = made.sidecars[route[0]]
        for number in (1, 2):
            source.data.zero_()
            for slot in targets.values():
                slot.data.zero_()
            moves = stream(made, manifest, route, buffers, TIMEOUT_S, number)
            sender.progress(number - 1, nbytes)  # of one that is over
            sender.progress(number, 0)
            for start, end in ((0, 3 * MIB), (3 * MIB, 9 * MIB), (9 * MIB, nbytes)):
                source.data[start:end] = wanted[start:end]
                sender.progress(number, end)
                done = end // (8 * MIB) * (8 * MIB) if end < nbytes else nbytes
                await wait_until(
                    lambda done=done: all(torch.equal(slot.data[:done], wanted[:done]) for slot in targets.values()),  # type: ignore[misc]  # it infers no default
                    f"{done} bytes at the targets",
                )
                assert end == nbytes or not any(move.done() for move in moves.values())
            results = await all_of(moves)
            assert results.pop(route[0]).image_digest == ""
            assert {result.image_digest for result in results.values()} == {digest_of(wanted)}


async def test_progress_may_come_before_the_transfer_and_out_of_order(server: str) -> None:
    manifest, source = image_of(9 * MIB)
    target = slot_for(manifest)
    async with lane(2, server) as two:
        for number in range(2, 5):
            source.data.random_(1, 256)
            two.sidecars[0].progress(number, 9 * MIB)
            two.sidecars[0].progress(number, 8 * MIB)
            two.sidecars[0].progress(number + 1, 0)
            results = await all_of(
                stream(two, manifest, (0, 1), {0: source.buffer, 1: target.buffer}, TIMEOUT_S, number)
            )
            assert results[1].image_digest == digest_of(source.data)
    for sidecar in two.sidecars:
        sidecar.progress(9, 9 * MIB)  # whether it lives or not
    assert await two.sidecars[0].wait_dead()
    two.sidecars[0].progress(9, 9 * MIB)


async def test_an_image_that_is_never_packed_fails_in_time(server: str) -> None:
    manifest, source = image_of(9 * MIB)
    target = slot_for(manifest)
    async with lane(2, server) as two:
        moves = stream(two, manifest, (0, 1), {0: source.buffer, 1: target.buffer}, SHORT_TIMEOUT_S / 4)
        two.sidecars[0].progress(1, 8 * MIB)
        results = await asyncio.gather(*moves.values(), return_exceptions=True)
        assert isinstance(results[0], (SidecarFailed, SidecarDied))
        assert "packed up to byte 8388608, not 9437184" in str(results[0])
        assert isinstance(results[1], (SidecarFailed, SidecarDied))


async def test_a_sender_that_waits_for_its_rank_gives_signs_of_life(server: str) -> None:
    manifest, source = image_of(MIB)
    target = slot_for(manifest)
    async with lane(2, server) as two:
        moves = stream(two, manifest, (0, 1), {0: source.buffer, 1: target.buffer}, TIMEOUT_S)
        await asyncio.wait(moves.values(), timeout=SILENCE_S + 1.0)
        assert not any(move.done() for move in moves.values())
        assert all(sidecar.usable for sidecar in two.sidecars)
        two.sidecars[0].progress(1, MIB)
        assert (await all_of(moves))[1].image_digest == digest_of(source.data)


async def test_only_the_sender_of_an_image_can_be_streaming(server: str) -> None:
    manifest, source = image_of(MIB)
    async with lane(2, server) as two:
        spec = TransferSpec(1, "receive", "image", manifest.encode(), ((0, 1),), None, TIMEOUT_S, streaming=True)
        with pytest.raises(SidecarFailed, match="only the sender of an image can be streaming"):
            await two.sidecars[1].transfer(spec, source.buffer)
        assert two.sidecars[1].usable


# ---------------------------------------------------------------- parts


def three_parts(rows: int) -> tuple[Manifest, list[Slot], torch.Tensor]:
    """A tensor of 4 KiB rows, cut by columns (of which no piece is a run of the image)
    and a tall one, cut by rows."""
    wide = torch.randint(-9, 9, (rows, 1 << 9), dtype=torch.int64)
    tall = torch.arange(3 * rows << 9).view(3 * rows, 1 << 9)
    staged = [
        stage(
            Feed(
                {
                    "wide": Shard(wide[:, first:last], (0, first), tuple(wide.shape)),
                    "tall": Shard(tall[number * rows : (number + 1) * rows], (number * rows, 0), tuple(tall.shape)),
                    f"only {number}": torch.full((3,), float(number)),
                    **{f"only {other}": None for other in range(3) if other != number},
                },
                mode="parts",
            )
        )
        for number, (first, last) in enumerate(((0, 100), (100, 101), (101, 512)))
    ]
    slots = [slot_for(part.manifest) for part in staged]
    for part, slot in zip(staged, slots, strict=True):
        part.write(slot.data)
    return merge_parts([part.manifest for part in staged]), slots, wide


def check_image(slot: Slot, manifest: Manifest, wide: torch.Tensor) -> None:
    found = views(slot.buffer.tensor(), manifest)
    assert torch.equal(found["wide"], wide)
    assert torch.equal(found["tall"].flatten(), torch.arange(found["tall"].numel()))
    assert [found[f"only {number}"].tolist() for number in range(3)] == [[float(number)] * 3 for number in range(3)]


async def test_parts_take_routes_of_their_own(server: str) -> None:
    """Whatever the routes are: every receiver that is in all of them has the image, and
    nobody waits for ever."""
    manifest, sources, wide = three_parts(700)
    generator = random.Random(7)
    async with lane(6, server) as six:
        for _ in range(4):
            chains = [generator.sample((3, 4, 5), 3) for _ in range(3)]
            routes: Routes = tuple((owner, *chain) for owner, chain in enumerate(chains))
            targets = {rank: slot_for(manifest) for rank in (3, 4, 5)}
            slots = dict(enumerate(sources)) | targets
            buffers = {rank: slot.buffer for rank, slot in slots.items()}
            results = await all_of(move(six, manifest, routes, buffers, mode="parts"))
            parts = {owner: results[owner].part_digests[owner] for owner in range(3)}
            for rank, slot in targets.items():
                check_image(slot, manifest, wide)
                assert results[rank].image_digest == digest_of(slot.data)
                assert results[rank].part_digests == parts
            assert all(results[owner].image_digest == "" for owner in range(3))


async def test_a_receiver_that_has_a_part_gets_the_others(server: str) -> None:
    manifest, sources, wide = three_parts(300)
    first, second = slot_for(manifest), slot_for(manifest)
    async with lane(5, server) as five:
        buffers = {**{number: slot.buffer for number, slot in enumerate(sources)}, 3: first.buffer}
        await all_of(move(five, manifest, ((0, 3), (1, 3), (2, 3)), buffers, mode="parts"))
        check_image(first, manifest, wide)
        passed_on = slot_for(manifest)
        results = await all_of(move(five, manifest, ((3, 1),), {3: first.buffer, 1: passed_on.buffer}))
        assert results[1].image_digest == digest_of(passed_on.data) == digest_of(first.data)
        second.data.copy_(first.data)
        tall = manifest.offsets[manifest.index["tall"]]
        second.data[tall : tall + 10] = 77  # of part 0, which comes; the rest is in place
        routes: Routes = ((0, 3, 4), (1, 3), ())
        buffers = {0: sources[0].buffer, 1: sources[1].buffer, 3: first.buffer, 4: second.buffer}
        results = await all_of(move(five, manifest, routes, buffers, mode="parts"))
    check_image(second, manifest, wide)
    assert results[4].part_digests == results[0].part_digests
    assert results[3].image_digest == results[4].image_digest == digest_of(first.data)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_member_of_a_chain_that_dies_in_mid_bucket_ends_it_for_all(server: str, victim: int) -> None:
    """Gloo does not tell a member whose send is half done: its own deadline does (or
    the coordinator, which is not here)."""
    manifest, source = image_of(96 * MIB)
    slots = [source, *(slot_for(manifest) for _ in range(3))]
    buffers = {rank: slot.buffer for rank, slot in enumerate(slots)}
    async with lane(4, server) as four:
        last = four.sidecars[3]
        os.kill(last.pid, signal.SIGSTOP)  # so that the others cannot finish, and wait for each other
        started = time.monotonic()
        moves = move(four, manifest, ((0, 1, 2, 3),), buffers, timeout_s=SHORT_TIMEOUT_S)
        await wait_until(lambda: int(slots[1].data[0]), "the first byte has come", timeout_s=SHORT_TIMEOUT_S)
        os.kill(four.sidecars[victim].pid, signal.SIGKILL)
        os.kill(last.pid, signal.SIGCONT)
        found = await asyncio.gather(*moves.values(), return_exceptions=True)
        assert time.monotonic() - started < 2 * SHORT_TIMEOUT_S
        assert all(isinstance(error, (SidecarFailed, SidecarDied)) for error in found), found
        assert all([await sidecar.wait_dead() for sidecar in four.sidecars])


@pytest.mark.parametrize("routes", [((0, 2),), ((0, 1), (1, 0)), ((0, 0),)])
async def test_routes_that_do_not_fit_are_refused_and_harm_nothing(server: str, routes: Routes) -> None:
    manifest, source = image_of(MIB)
    async with lane(2, server) as two:
        with pytest.raises(SidecarFailed, match="fit") as caught:
            await all_of(move(two, manifest, routes, {0: source.buffer}))
        assert not caught.value.over
        await two.run("barrier", [[], []])
