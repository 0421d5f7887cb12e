"""Operations between real peers that die, freeze, or lose their sidecar or their
coordinator in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
import trio

from replicas import errors
from replicas.channel import Channel, Pending, Receipt
from replicas.coordinator import Coordinator
from replicas.core.operations.operation import Operation
from replicas.linux import helper_process
from tests.support.channels import ChannelWorld, channel_world
from tests.support.machine.proxy import Proxy
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

PEERS = {"peers": ["peer"]}
BIG = 4_000_000

PEER = """
import json, os, signal, sys
import torch, replicas
from replicas.linux import helper_process
helper_process.SILENCE_S = 600.0  # the test alone decides what becomes of a stopped sidecar
endpoint, token, replica = sys.argv[1:]
channel = replicas.join("policy", endpoint=endpoint, token=token, group="peer", replica=int(replica), rank=0, world_size=1)
print("joined", flush=True)
for line in sys.stdin:
    ask, answer = json.loads(line), {}
    if ask["do"] == "stop sidecars":
        for lane in channel._lanes._lanes.values():
            os.kill(lane.sidecar.pid, signal.SIGSTOP)
    elif ask["do"] == "post":
        tensor = torch.full((ask["numel"],), float(ask["value"]))
        pending = channel.all_reduce(tensor, "mean")
    elif ask["do"] == "wait":
        try:
            receipt = pending.wait(60)
            answer = {"value": tensor[0].item(), "members": [member.name for member in receipt.members]}
        except replicas.errors.ReplicasError as error:
            answer = {"error": type(error).__name__, "text": str(error), "value": tensor[0].item()}
    print(json.dumps(answer), flush=True)
"""


class Peer:
    """A peer in a process of its own, which does what it is asked."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def ask(self, do: str, **more: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self.line())
        return answer

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode().strip()


@contextlib.asynccontextmanager
async def peer(world: ChannelWorld, replica: int) -> AsyncIterator[Peer]:
    arguments = (world.endpoint, world.coordinator.token, str(replica))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, *arguments, stdin=PIPE, stdout=PIPE)
    try:
        found = Peer(process)
        assert await found.line() == "joined"
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(20):
            await process.communicate()  # to the end of the pipe: its helper has it open for a moment longer


def running(coordinator: Coordinator) -> tuple[Operation, ...]:
    return coordinator.engine.channels["policy"].operations.running


async def under_way(coordinator: Coordinator) -> Operation:
    """The operation that runs, as soon as its members have been told to go."""
    await wait_until(
        lambda: any(operation.state == "running" for operation in running(coordinator)), "an operation runs"
    )
    return next(operation for operation in running(coordinator) if operation.state == "running")


def sidecar_pids(channel: Channel) -> list[int]:
    return [lane.sidecar.pid for lane in channel._lanes._lanes.values() if lane.sidecar is not None]


def post(
    channels: Sequence[Channel], values: Sequence[float], numel: int
) -> tuple[list[torch.Tensor], list[Pending[Receipt]]]:
    tensors = [torch.full((numel,), value) for value in values]
    pairs = zip(channels, tensors, strict=True)
    return tensors, [channel.all_reduce(tensor, "mean", deadline=60) for channel, tensor in pairs]


async def outcomes(pendings: Sequence[Pending[Receipt]]) -> list[Receipt]:
    return await asyncio.wait_for(asyncio.gather(*pendings), 60)


async def one_good_operation(channels: Sequence[Channel], victim: Peer | None = None) -> None:
    """Forms the lane, and shows that all is well."""
    if victim is not None:
        await victim.ask("post", value=3, numel=4)
    count = len(channels) + (victim is not None)
    _, pendings = post(channels, [3.0] * len(channels), 4)
    for receipt in await outcomes(pendings):
        assert len(receipt.members) == count
    if victim is not None:
        assert (await victim.ask("wait"))["value"] == 3.0


# ---------------------------------------------------------------- peers


async def test_a_peer_killed_in_the_middle_costs_the_survivors_nothing() -> None:
    async with channel_world(PEERS, peer=3) as world, peer(world, 2) as victim:
        channels = [await world.join("peer", index) for index in range(2)]
        await one_good_operation(channels, victim)
        await victim.ask("stop sidecars")
        await victim.ask("post", value=100, numel=BIG)
        tensors, pendings = post(channels, [1.0, 2.0], BIG)
        await under_way(world.coordinator)
        victim.process.send_signal(signal.SIGKILL)
        receipts = await outcomes(pendings)
        assert all(tensor.eq(1.5).all() for tensor in tensors)
        for receipt in receipts:
            assert [member.name for member in receipt.members] == ["peer/0/0", "peer/1/0"]
            assert receipt.reasons == {"peer/2/0": "its process ended"}
            assert receipt.nbytes == BIG * 4
            assert receipt.phases["retry"] > 0
        await one_good_operation(channels)


async def test_a_frozen_peer_is_left_behind_and_learns_of_it_when_it_wakes() -> None:
    async with channel_world(PEERS, peer=3) as world, peer(world, 2) as victim:
        channels = [await world.join("peer", index) for index in range(2)]
        await one_good_operation(channels, victim)
        await victim.ask("stop sidecars")
        await victim.ask("post", value=100, numel=1000)
        tensors, pendings = post(channels, [1.0, 2.0], 1000)
        await under_way(world.coordinator)
        victim.process.send_signal(signal.SIGSTOP)
        receipts = await outcomes(pendings)
        assert all(tensor.eq(1.5).all() for tensor in tensors)
        assert receipts[0].reasons["peer/2/0"].startswith("silent for ")
        await one_good_operation(channels)
        victim.process.send_signal(signal.SIGCONT)
        answer = await victim.ask("wait")
        assert (answer["error"], answer["value"]) == ("Gone", 100.0)
        assert "the others ended the all_reduce without peer/2/0" in answer["text"]
        roster = world.coordinator.engine.channels["policy"].roster
        await wait_until(lambda: len(roster.live) == 3, "it is one of them again")
        await victim.ask("post", value=3, numel=4)
        answer = await victim.ask("wait")
        assert answer["error"] == "Gone"
        assert "the others continued without peer/2/0 (all_reduce; silent for " in answer["text"]
        await one_good_operation(channels, victim)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sidecar_killed_or_frozen_in_the_middle_is_replaced(how: signal.Signals) -> None:
    async with channel_world(PEERS, peer=2) as world:
        channels = [await world.join("peer", index) for index in range(2)]
        await one_good_operation(channels)
        (pid,) = sidecar_pids(channels[1])
        os.kill(pid, signal.SIGSTOP)
        tensors, pendings = post(channels, [1.0, 2.0], BIG)
        await under_way(world.coordinator)
        if how == signal.SIGKILL:
            os.kill(pid, signal.SIGKILL)
        receipts = await outcomes(pendings)
        assert all(tensor.eq(1.5).all() for tensor in tensors)
        assert receipts[0].lost == ()
        assert receipts[0].phases["retry"] > 0
        assert pid not in sidecar_pids(channels[1])


# ---------------------------------------------------------------- the coordinator


async def test_an_outcome_that_a_lost_coordinator_left_unknown_is_settled_by_the_next_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One peer hears of the success, then the coordinator is gone before it could tell
    the other."""
    monkeypatch.setattr(helper_process, "SILENCE_S", 600.0)
    where: list[str] = []
    async with (
        contextlib.AsyncExitStack() as stack,
        Proxy(lambda: where[-1]) as to_one,
        Proxy(lambda: where[-1]) as to_two,
    ):
        first = await stack.enter_async_context(Coordinator({"policy": PEERS}, groups={"peer": 2}))
        where.append(first.endpoint)
        world = ChannelWorld(first, "policy")
        try:
            channels = []
            for index, proxy in enumerate((to_one, to_two)):
                world.endpoint = proxy.endpoint
                channels.append(await world.join("peer", index))
            await one_good_operation(channels)
            (pid,) = sidecar_pids(channels[0])
            os.kill(pid, signal.SIGSTOP)
            tensors, pendings = post(channels, [1.0, 2.0], 1000)
            operation = await under_way(first)
            jobs = [next(iter(channel._operations._jobs.values())) for channel in channels]
            await wait_until(lambda: all(job.attempt is not None for job in jobs), "both were told to go")
            to_one.freeze()
            os.kill(pid, signal.SIGCONT)
            await wait_until(lambda: operation.done == {channels[1].member}, "one has said done")
            to_two.freeze()
            to_one.thaw()
            await outcomes(pendings[:1])
            assert tensors[0].eq(1.5).all()

            await stack.aclose()
            async with Coordinator({"policy": PEERS}, groups={"peer": 2}, token=first.token) as second:
                where.append(second.endpoint)
                for proxy in (to_one, to_two):
                    proxy.cut()
                    proxy.thaw()
                with pytest.raises(errors.OutcomeUnknown, match="all_reduce"):
                    await asyncio.wait_for(pendings[1], 60)
                assert tensors[1].eq(2.0).all()

                terms = [second.engine.decisions.term] * 2
                await wait_until(lambda: [c._hub.session.term for c in channels] == terms, "both are back")
                following, waiting = post(channels, [5.0, 7.0], 10)
                with pytest.raises(errors.Gone, match="has succeeded on the other peers"):
                    await asyncio.wait_for(waiting[1], 60)
                assert not waiting[0].done(), "the other one waits for its next call"
                assert tensors[1].eq(2.0).all(), "nothing is written behind the caller's back"
                receipt = pendings[1].wait(0)
                assert [member.name for member in receipt.members] == ["peer/0/0", "peer/1/0"]
                assert tensors[1].eq(1.5).all()
                await outcomes([waiting[0], channels[1].all_reduce(following[1], "mean")])
                assert all(tensor.eq(6.0).all() for tensor in following)
                await world.aclose()
        finally:
            await world.aclose()


# ------------------------------------------------------------- waits that are abandoned


async def test_waits_that_are_abandoned_harm_no_later_operation() -> None:
    async def cancelled(pending: Pending[Receipt]) -> None:
        task = asyncio.ensure_future(pending)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def in_trio(pending: Pending[Receipt]) -> None:
        async def wait() -> None:
            with trio.move_on_after(0.01) as scope:
                await pending
            assert scope.cancelled_caught

        trio.run(wait)

    async def timed_out(pending: Pending[Receipt]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(pending.wait, 0.01)

    async with channel_world(PEERS, peer=2) as world:
        channels = [await world.join("peer", index) for index in range(2)]
        for number, abandon in enumerate((cancelled, timed_out, in_trio, None), start=1):
            early = torch.full((100,), float(number))
            pending = channels[0].all_reduce(early)
            if abandon is in_trio:
                await asyncio.to_thread(in_trio, pending)
            elif abandon is not None:
                result = abandon(pending)
                assert result is not None
                await result
            assert not pending.done()
            late = torch.full((100,), 10.0 * number)
            await channels[1].all_reduce(late)
            following = [torch.full((7,), float(index)) for index in range(2)]
            await outcomes([channel.all_reduce(t) for channel, t in zip(channels, following, strict=True)])
            assert all(tensor.eq(1.0).all() for tensor in following)
            assert pending.done()
            assert early.eq(11.0 * number).all()
            assert late.eq(11.0 * number).all()
