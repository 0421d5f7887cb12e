"""The store knows no users. Who writes into it from outside fails a process group at
worst, and leaves nobody out.

Covers: sidecar/signed_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from replicas import errors
from replicas.coordinator import Coordinator
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed
from tests.support.channels import channel_world
from tests.support.sidecars import lane, shared_forkserver
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

SECRET = b"of the lane's members"
_c10d: Any = dist  # torch's annotations leave most of it out


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with shared_forkserver() as name:
        yield name


def client(port: int) -> Any:
    return _c10d.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=2), wait_for_workers=False)


def garbage(store: Any, key: str) -> None:
    store.set(key, b"\x93nobody's card")


def delete(store: Any, key: str) -> None:
    store.delete_key(key)


def copy_of_another(store: Any, key: str) -> None:
    """What a member has written, in another's place."""
    store.set(key, store.get(key.replace("card/1", "card/0")))


@pytest.mark.parametrize("harm", [garbage, delete, copy_of_another])
async def test_a_group_whose_card_was_changed(server: str, harm: Callable[[Any, str], None]) -> None:
    """Who wrote it and who reads it find out, and name nobody."""
    async with lane(3, server, build=False) as three:
        stranger = client(three.store.port)
        specs = [three.spec("harmed", rank, secret=SECRET, timeout_s=60.0) for rank in range(3)]
        first = [asyncio.create_task(three.sidecars[rank].build(specs[rank])) for rank in (0, 1)]
        for rank in (0, 1):
            await wait_until(partial(stranger.check, [f"harmed/card/{rank}"]), "a card")
        harm(stranger, "harmed/card/1")
        with pytest.raises(
            SidecarFailed, match="a process other than a member writes into the rendezvous store"
        ) as found:
            async with asyncio.timeout(20):
                await first[1]
        assert (found.value.kind, found.value.members, found.value.over) == ("StoreTampered", (), True)
        last = asyncio.create_task(three.sidecars[2].build(specs[2]))
        if harm is not delete:  # then there is nothing to read
            with pytest.raises(SidecarFailed, match='the value of "card/1" was not written by a member'):
                await last
        for task in (first[0], last):
            task.cancel()
        await asyncio.gather(first[0], last, return_exceptions=True)


async def test_members_with_another_secret_do_not_meet(server: str) -> None:
    async with lane(2, server, build=False) as two:
        specs = [two.spec("apart", rank, secret=bytes([rank]) * 32) for rank in range(2)]
        builds = [sidecar.build(spec) for sidecar, spec in zip(two.sidecars, specs, strict=True)]
        found = await asyncio.gather(*builds, return_exceptions=True)
        assert {getattr(error, "kind", error) for error in found} <= {"StoreTampered", ""}
        assert any(getattr(error, "kind", error) == "StoreTampered" for error in found)


# ---------------------------------------------------------------- a whole world


class Vandal:
    """Changes whatever stands in the store of a coordinator, wherever that is, as fast
    as it can."""

    def __init__(self, coordinator: Coordinator, harm: Callable[[Any, str], None], *, once: bool = False) -> None:
        self._coordinator = coordinator
        self._harm = harm
        self._first = coordinator.store_address if once else None
        self._over = threading.Event()
        self.harmed = 0

    def run(self) -> None:
        while not self._over.is_set():
            address = self._coordinator.store_address
            if self._first is not None and address != self._first:
                return
            with contextlib.suppress(RuntimeError, OSError):  # that store was replaced
                self._harm_all(address)

    def _harm_all(self, address: tuple[str, int]) -> None:
        store = client(address[1])
        while not self._over.is_set() and self._coordinator.store_address == address:
            for key in store.list_keys():
                self._harm(store, key)
                self.harmed += 1
            time.sleep(0.0005)  # leaves the interpreter to the others

    def stop(self) -> None:
        self._over.set()


@contextmanager
def at_work(vandal: Vandal) -> Iterator[Vandal]:
    thread = threading.Thread(target=vandal.run, daemon=True)
    thread.start()
    try:
        yield vandal
    finally:
        vandal.stop()
        thread.join(10)
        assert not thread.is_alive()


PEERS = {"peers": ["peer"], "deadline": "40s"}


@pytest.mark.parametrize("once", [True, False], ids=["of one store", "of every store"])
@pytest.mark.parametrize("harm", [garbage, delete])
async def test_no_member_is_left_out(harm: Callable[[Any, str], None], once: bool) -> None:
    async with channel_world(PEERS, peer=3) as world:
        peers = [await world.join("peer", index) for index in range(3)]

        async def sum_of_all(deadline_s: float) -> list[object]:
            tensors = [torch.ones(2) for _ in peers]
            pending = [peer.all_reduce(tensors[i], deadline=deadline_s) for i, peer in enumerate(peers)]
            found = await asyncio.gather(*pending, return_exceptions=True)
            good = all(tensor.eq(3).all() for tensor in tensors)
            return [good, *(error for error in found if isinstance(error, BaseException))]

        with at_work(Vandal(world.coordinator, harm, once=once)) as vandal:
            replaced, until = 0, time.monotonic() + 60.0
            while not replaced and time.monotonic() < until:  # it has to come between two writes of a member
                good, *failures = await sum_of_all(40.0 if once else 5.0)
                assert good is not bool(failures)
                allowed = () if once else (errors.DeadlineExceeded, errors.StoreTampered)
                assert all(isinstance(error, allowed) for error in failures), failures
                replaced = world.coordinator.sidecar_replacements().get("store", 0)
                for peer in peers:  # another group for the next one
                    for formed in list(peer._lanes._lanes.values()):
                        if formed.sidecar is not None:
                            with contextlib.suppress(ProcessLookupError):  # it has failed with its store
                                os.kill(formed.sidecar.pid, signal.SIGKILL)
            assert replaced
            assert vandal.harmed
        assert await sum_of_all(40.0) == [True]
        assert [len(peer.members) for peer in peers] == [3, 3, 3]
