"""What a rank sees when others, or parts of itself, die, hang or go away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from websockets.asyncio.client import connect

from replicas import errors
from replicas.channel import Receipt
from replicas.channel.session import hub as hub_module
from replicas.coordinator import GroupShape
from replicas.memory.beacon import own_process
from replicas.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    MemberFrame,
    Refused,
    View,
    Welcome,
    decode_server_frame,
    encode,
)
from tests.support.channels import ChannelWorld, channel_world, freeze, load, publish
from tests.support.machine.proxy import Proxy
from tests.support.sidecars import kill_next
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(value)), "b": torch.full((3,), float(value))}


async def start(world: ChannelWorld, code: str) -> asyncio.subprocess.Process:
    """A rank in a process of its own: rollout/1/0. Its channel is ``channel``; it
    prints a line when it has joined."""
    prelude = (
        "import os, signal, replicas\n"
        f"channel = replicas.join('policy', endpoint='{world.endpoint}', token='{world.coordinator.token}',\n"
        "                        group='rollout', replica=1, rank=0, world_size=1)\n"
        "print('joined', flush=True)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", prelude + code, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"joined\n"
    return process


async def lives_for(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Return then, or when it ends."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


async def ended(process: asyncio.subprocess.Process) -> int:
    """Its exit code, once its output was read to the end too: the helper that it leaves
    for a moment holds the pipe."""
    async with asyncio.timeout(20):
        await process.communicate()
    assert process.returncode is not None
    return process.returncode


DIE = """
from replicas import messages
hub, moment = channel._hub, messages.MOMENT
send = hub.send
def die(message): os.kill(os.getpid(), signal.SIGKILL)
hub._handlers[moment] = die
hub.send = lambda message: die(message) if isinstance(message, moment) else send(message)
while True:
    with channel.receive().wait(): pass
"""
MOMENTS = [("group", "OperationGo"), ("group", "TransferDone"), ("auto", "TransferOffer"), ("auto", "TransferDone")]


@pytest.mark.parametrize(("transport", "moment"), MOMENTS)
async def test_a_target_killed_in_the_middle_of_a_sync(transport: str, moment: str) -> None:
    async with channel_world({"transport": transport}, rollout=2) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        process = await start(world, DIE.replace("MOMENT", moment))
        receipt = await publish(trainer, weights(1))
        while not receipt.lost:  # a group that forms too slowly is not tried for a while: the version was pulled
            await lives_for(process, 0.2)
            receipt = await publish(trainer, weights(receipt.version + 1))
        assert await ended(process) == -signal.SIGKILL
        assert receipt.lost == ("rollout/1/0",)
        assert [member.name for member in receipt.members] == ["rollout/0/0"]
        version = receipt.version
        assert await load(rollout) == (version, float(version))
        again = await world.join("rollout", 1)
        assert await load(again) == (version, float(version))
        assert not (await publish(trainer, weights(version + 1))).lost


@pytest.mark.parametrize(("transport", "moment"), [MOMENTS[0], MOMENTS[2]])
async def test_a_target_killed_in_the_middle_with_on_lost_raise(transport: str, moment: str) -> None:
    async with channel_world({"on_lost": "raise", "transport": transport}, rollout=2) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        process = await start(world, DIE.replace("MOMENT", moment))
        version = 0
        with pytest.raises(errors.PeersLost, match="rollout/1/0") as caught:
            while True:  # as above
                version = (await publish(trainer, weights(version + 1))).version
                await lives_for(process, 0.2)
        assert await ended(process) == -signal.SIGKILL
        assert caught.value.members == ("rollout/1/0",)
        assert rollout.latest == version
        assert (await publish(trainer, weights(version + 2))).version == version + 2
        assert await load(rollout) == (version + 2, version + 2.0)


@pytest.mark.parametrize("transport", ["auto", "group"])
async def test_a_frozen_target_is_left_behind_and_caught_up(transport: str) -> None:
    code = "import sys\nwhile True:\n    with channel.receive().wait() as update: print(update.version, flush=True)\n"
    async with channel_world({"deadline": "20s", "transport": transport}, rollout=2) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        process = await start(world, code)
        assert process.stdout is not None
        try:
            await publish(trainer, weights(1))
            assert await process.stdout.readline() == b"1\n"
            await freeze(process)
            receipt = await publish(trainer, weights(2))
            assert receipt.seconds < 15
            assert receipt.lost == ("rollout/1/0",)
            assert await load(rollout) == (2, 2.0)
            process.send_signal(signal.SIGCONT)
            assert await asyncio.wait_for(process.stdout.readline(), 20) == b"2\n"
        finally:
            process.kill()
            await ended(process)


SHORT_LEASE = GroupShape(2, heartbeat_timeout_s=8.0)

FENCED = """
from replicas import errors
from pathlib import Path
def memory(): return Path("/proc/self/maps").read_text().count("/memfd:replicas-policy")
with channel.receive().wait() as update:
    tensors = dict(update)
    found = update.version, memory() > 0
pending, watching = channel.receive(), channel.loaded(9)
print(*found, flush=True)
for call in (pending.wait, watching.wait, channel.receive):
    try:
        call()
    except errors.Fenced as error:
        print("fenced", flush=True)
print({value for tensor in tensors.values() for value in tensor.tolist()}, flush=True)
del update, tensors
import gc
gc.collect()
print(memory(), flush=True)
"""


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()


async def lost(world: ChannelWorld, name: str) -> None:
    """Wait until the lease of this member has run out."""
    roster = world.coordinator.engine.channels["policy"].roster
    await wait_until(lambda: roster.holder_of(name) is None, "its lease has run out")


@pytest.mark.parametrize("transport", ["auto", "group"])
async def test_a_member_frozen_beyond_its_lease_is_fenced_and_frees_everything(transport: str) -> None:
    async with channel_world({"transport": transport}, rollout=SHORT_LEASE) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        process = await start(world, FENCED)
        try:
            await publish(trainer, weights(1))
            assert await line(process) == "1 True"
            await freeze(process)
            receipt = await publish(trainer, weights(2))
            assert receipt.lost == ("rollout/1/0",)
            await lost(world, "rollout/1/0")
            again = await world.join("rollout", 1)
            assert await load(again) == (2, 2.0)
            process.send_signal(signal.SIGCONT)
            assert [await line(process) for _ in range(3)] == ["fenced"] * 3
            assert await line(process) == "{1.0}"
            assert await line(process) == "0"
            assert await ended(process) == 0
            assert (await publish(trainer, weights(3))).lost == ()
            assert [await load(target) for target in (rollout, again)] == [(3, 3.0)] * 2
        finally:
            if process.returncode is None:
                process.kill()
                await ended(process)


FROZEN_SOURCE = """
import torch
from replicas import errors
def walk():
    yield "w", torch.ones(1000)
    print("walking", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    yield "b", torch.ones(3)
    print("walked", flush=True)
for given in (walk(), {"w": torch.ones(1000), "b": torch.ones(3)}):
    try:
        channel.publish(given).wait()
    except errors.Fenced:
        print("fenced", flush=True)
"""


@pytest.mark.parametrize("transport", ["auto", "group"])
async def test_a_source_frozen_in_the_middle_of_a_publish_harms_nothing_when_it_wakes(transport: str) -> None:
    config = {"targets": ["taker"], "sources": ["rollout"], "transport": transport}
    async with channel_world(config, rollout=SHORT_LEASE, taker=1) as world:
        target = await world.join("taker")
        first = await world.join("rollout", 0)
        await publish(first, weights(1))
        assert await load(target) == (1, 1.0)
        process = await start(world, FROZEN_SOURCE)
        try:
            assert await line(process) == "walking"
            await lost(world, "rollout/1/0")
            receipt = await publish(first, weights(3))
            assert await load(target) == (receipt.version, 3.0)
            process.send_signal(signal.SIGCONT)
            assert [await line(process) for _ in range(3)] == ["walked", "fenced", "fenced"]
            assert await ended(process) == 0
            again = await publish(first, weights(4))
            assert await load(target) == (again.version, 4.0)
        finally:
            if process.returncode is None:
                process.kill()
                await ended(process)


INTERRUPTED = """
import threading
from replicas import errors
def interrupt_soon(): threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
for _ in range(3):
    interrupt_soon()
    try:
        with channel.receive().wait() as update:
            print("not interrupted", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
with channel.receive().wait() as update:
    print(update.version, flush=True)
"""


async def test_receives_that_were_interrupted_harm_no_later_one() -> None:
    async with channel_world(rollout=2) as world:
        trainer = await world.join("trainer")
        process = await start(world, INTERRUPTED)
        assert [await line(process) for _ in range(3)] == ["interrupted"] * 3
        await publish(trainer, weights(1))
        assert await line(process) == "1"
        assert await ended(process) == 0
        assert not (await publish(trainer, weights(2))).lost


INTERRUPTED_SOURCE = """
import threading, torch
def walk(interrupt):
    yield "w", torch.ones(1000)
    if interrupt:
        signal.raise_signal(signal.SIGINT)
    yield "b", torch.ones(3)
for interrupt in (False, True, False):
    try:
        pending = channel.publish(walk(interrupt))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        pending.wait(60)
        threading.Event().wait(1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(pending.wait(60).version, flush=True)
"""


async def test_publishes_that_were_interrupted_harm_no_later_one() -> None:
    config = {"targets": ["taker"], "sources": ["rollout"]}
    async with channel_world(config, rollout=2, taker=1) as world:
        target = await world.join("taker")
        process = await start(world, INTERRUPTED_SOURCE)
        # the second one is interrupted in its own code, and has no version
        assert [await line(process) for _ in range(6)] == ["interrupted", "1", "interrupted", "1", "interrupted", "3"]
        assert await ended(process) == 0
        assert await load(target) == (3, 1.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("whose", [0, 1])
async def test_a_sidecar_killed_or_frozen_in_the_middle_of_a_sync(whose: int, how: signal.Signals) -> None:
    async with channel_world({"transport": "group", "deadline": "100s"}) as world:
        members = await world.trainer_and_rollouts(1)
        await publish(members[0], weights(1))
        assert len(world.coordinator.engine.channels["policy"].lanes) == 1
        kill_next(members[whose], how)
        receipt = await publish(members[0], weights(2))
        assert receipt.seconds < 30
        assert receipt.version == 2
        assert not receipt.lost
        assert await load(members[1]) == (2, 2.0)


async def test_a_killed_forkserver_is_replaced() -> None:
    async with channel_world({"transport": "group"}) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        await publish(trainer, weights(1))
        kept = trainer._hub.loop._own_forkserver
        assert kept is not None
        os.kill(killed := kept.pid, signal.SIGKILL)
        await wait_until(lambda: kept.pid != killed, "its end")
        receipt = await publish(trainer, weights(2), deadline=40)
        assert receipt.version == 2
        assert await load(rollout) == (2, 2.0)


async def test_sessions_go_on_after_their_connections_were_cut() -> None:
    async with channel_world() as world, Proxy(world.endpoint) as proxy:
        trainer = await world.join("trainer")
        world.endpoint = proxy.endpoint
        rollout = await world.join("rollout")
        stop = asyncio.Event()

        async def cut_again_and_again() -> None:
            while not stop.is_set():
                proxy.cut()
                await asyncio.sleep(0.05)

        cutter = asyncio.create_task(cut_again_and_again())
        async with asyncio.timeout(60):
            for version in itertools.count(1):
                receipt = await publish(trainer, weights(version))
                assert not receipt.lost
                assert await load(rollout) == (version, float(version))
                if version >= 8 and proxy.connections > 3:
                    break
        stop.set()
        await cutter


async def test_a_silent_coordinator_cannot_hang_a_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("session.hub", "versions.publish"):
        monkeypatch.setattr(f"replicas.channel.{module}.GRACE_S", 0.5)
    async with channel_world() as world, Proxy(world.endpoint) as proxy:
        world.endpoint = proxy.endpoint
        trainer = await world.join("trainer")
        await publish(trainer, weights(1))
        proxy.freeze()
        walked = []

        def walk() -> Any:
            yield from weights(2).items()
            walked.append(True)

        with pytest.raises(errors.DeadlineExceeded, match=r"the publish did not end within its 0\.5 s"):
            await publish(trainer, walk(), deadline=0.5)
        assert walked == [True]
        proxy.thaw()
        assert (await publish(trainer, weights(3))).version >= 2


async def test_a_silent_coordinator_after_the_bytes_left_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("session.hub", "versions.publish"):
        monkeypatch.setattr(f"replicas.channel.{module}.GRACE_S", 0.5)
    async with channel_world() as world, Proxy(world.endpoint) as proxy:
        world.endpoint = proxy.endpoint
        trainer = await world.join("trainer")

        await publish(trainer, weights(1))  # the next one is walked into its slot, behind its admission

        def freeze() -> Any:
            yield from weights(2).items()
            proxy.freeze()

        with pytest.raises(errors.OutcomeUnknown, match="the publish of version 2 did not end"):
            await publish(trainer, freeze(), deadline=3.0)
        assert [slot.pins for slot in trainer._hub.arena.slots if slot.version == 2] == [1]
        proxy.thaw()
        receipt = await publish(trainer, weights(3))
        assert receipt.version == 3
        await wait_until(lambda: not any(slot.pins for slot in trainer._hub.arena.slots), "no slot is pinned")


async def test_waits_without_a_deadline_end_when_the_session_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "DOWN_S", 0.3)
    monkeypatch.setattr("replicas.channel.versions.publish.GRACE_S", 0.2)
    async with channel_world() as world, Proxy(world.endpoint) as proxy:
        trainer = await world.join("trainer")
        world.endpoint = proxy.endpoint
        rollout = await world.join("rollout")
        waiting, watching = rollout.receive(), rollout.loaded(5)
        await proxy.__aexit__(None, None, None)
        for pending in (waiting, watching):
            with pytest.raises(errors.Disconnected, match="no session with the coordinator at"):
                await pending
        assert trainer.latest == 0


async def test_a_hello_that_comes_twice_is_welcomed_twice() -> None:
    """The Welcome was lost on its way: the member says Hello again, with the same
    incarnation."""
    process = own_process()
    hello = Hello(PROTOCOL, "", "policy", "rollout", 0, 0, 1, "nonce", 1, process)
    async with channel_world() as world:
        authorization = {"Authorization": f"Bearer {world.coordinator.token}"}
        for _ in range(2):
            websocket = await connect(f"ws://{world.endpoint}/session", additional_headers=authorization, proxy=None)
            await websocket.send(encode(MemberFrame(0, 0, hello)))
            bodies: list[object] = []
            while not bodies or not isinstance(bodies[-1], View):
                data = await asyncio.wait_for(websocket.recv(), 10)
                assert isinstance(data, bytes)
                bodies.append(decode_server_frame(data).body)
            assert isinstance(bodies[0], Welcome)
            await websocket.send(encode(MemberFrame(0, 0, Heartbeat())))
            data = await asyncio.wait_for(websocket.recv(), 10)
            assert isinstance(data, bytes)
            assert not isinstance(decode_server_frame(data).body, Refused)
            websocket.transport.abort()


async def test_a_silent_coordinator_cannot_hang_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.channel.operations.operations.GRACE_S", 0.3)
    async with channel_world({"peers": ["peer"]}, peer=2) as world, Proxy(world.endpoint) as proxy:
        world.endpoint = proxy.endpoint
        peers = [await world.join("peer", index) for index in range(2)]
        tensors = [torch.ones(2), torch.ones(2)]
        proxy.freeze()
        for pending in [peer.all_reduce(tensor, deadline=0.3) for peer, tensor in zip(peers, tensors, strict=True)]:
            with pytest.raises(errors.DeadlineExceeded, match=r"the all_reduce did not end within its 0\.3 s"):
                await pending
        proxy.thaw()
        for _ in range(3):  # the coordinator may still start the old ones, which takes the lane of the new ones down
            pendings = [peer.all_reduce(tensor) for peer, tensor in zip(peers, tensors, strict=True)]
            results = await asyncio.gather(*pendings, return_exceptions=True)
            if all(isinstance(result, Receipt) for result in results):
                break
            assert [tensor.sum() for tensor in tensors] == [2, 2]
        assert [tensor.sum() for tensor in tensors] == [4, 4]


async def test_a_forked_child_keeps_no_connection() -> None:
    code = """
import contextlib, socket
def fds():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
(session,) = (fd for fd in channel._hub.loop.fds if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"))
channel._hub.loop.run(lambda: channel._hub.loop.forkserver(None), 60)
pid = os.fork()
if pid == 0:
    found = fds()
    own = channel._hub.loop._own_forkserver.fds
    ok = len(own) == 2 and all(found[fd] == "/dev/null" for fd in (session, *own))
    ok = ok and not any(v.startswith("anon_inode:[pidfd]") for v in found.values())
    try:
        channel.receive()
    except replicas.errors.UsageError as error:
        ok = ok and "forked" in str(error)
    channel.close()
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with channel.receive().wait(20) as update:
    print(update.version, flush=True)
"""
    async with channel_world(rollout=2) as world:
        trainer = await world.join("trainer")
        process = await start(world, code)
        await publish(trainer, weights(1))
        assert process.stdout is not None
        assert await process.stdout.readline() == b"1\n"
        assert await ended(process) == 0


async def test_a_rank_that_ends_without_close_leaves_at_once() -> None:
    async with channel_world(rollout=2) as world:
        trainer = await world.join("trainer")
        process = await start(world, "channel.receive()\n")
        assert await ended(process) == 0
        await wait_until(lambda: len(trainer.members) == 1, "it has left")


async def test_update_of_a_replica_with_two_ranks_after_one_died() -> None:
    async with channel_world(rollout=GroupShape(1, 2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        await publish(trainer, weights(1))
        assert await load(ranks[0]) == (1, 1.0)
        await asyncio.to_thread(ranks[1].close)
        again = await world.join("rollout", 0, 1, 2)
        assert await load(again) == (1, 1.0)
        await publish(trainer, weights(2))
        assert [await load(rank) for rank in (ranks[0], again)] == [(2, 2.0), (2, 2.0)]


async def test_closing_wakes_every_wait() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        pendings = [rollout.receive(), rollout.committed(), rollout.loaded(3)]
        failures: list[BaseException] = []

        def wait(pending: Any) -> None:
            try:
                pending.wait(20)
            except errors.ReplicasError as error:
                failures.append(error)

        threads = [threading.Thread(target=wait, args=(pending,)) for pending in pendings]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(rollout.close)
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert [type(error) for error in failures] == [errors.Gone] * 3
        assert trainer.latest == 0


LEAVES_AS_IT_IS = """
import sys
import replicas

channel = replicas.join("policy", endpoint=sys.argv[1], token=sys.argv[2], group="rollout", replica=0, rank=0, world_size=1)
pending = channel.receive()
print("joined", flush=True)
print(pending.wait(30).version, flush=True)
"""


async def test_a_program_ends_without_closing_anything() -> None:
    """Python 3.12 and later start no thread any more when they call what was left for
    the exit."""
    async with channel_world({"transport": "group"}, rollout=1) as world:
        trainer = await world.join("trainer")
        where = (world.endpoint, world.coordinator.token)
        command, pipe = [sys.executable, "-c", LEAVES_AS_IT_IS], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, *where, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"joined\n"
            await publish(trainer, weights(1.0))
            said, complaints = await process.communicate()
    waited = "channel policy: waiting for the first version, without a deadline"  # said on a slow machine
    said_else = [line for line in complaints.decode().splitlines() if line != waited]
    assert (process.returncode, said_else) == (0, [])
    assert said.splitlines()[-1] == b"1"  # Gloo may have said something before
