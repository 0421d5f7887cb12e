"""The coordinator from outside: who is let in, what garbage does, and sessions that
break and come back.

Covers: coordinator/coordinator.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

import replicas
from replicas import errors
from replicas import messages as wire
from replicas.coordinator import Coordinator, GroupShape
from replicas.coordinator.server import REFUSED_MAX
from replicas.core.base.effects import MemberLost
from replicas.core.base.ledger import Decision
from replicas.core.base.manifest import PartManifest, TensorSpec
from replicas.core.versions.fetching import pieces
from replicas.linux.processes import command_line
from replicas.messages.identity import ProcessIdentity
from tests.support.channel.members import Client

pytestmark = pytest.mark.anyio

CHANNELS = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    shapes = {"rollout": GroupShape(replicas=2, heartbeat_timeout_s=2.0)}
    async with Coordinator(CHANNELS, groups=shapes) as running:
        yield running


async def refusal(client: Client) -> wire.WireError:
    answer = await client.join()
    assert isinstance(answer, wire.Refused)
    return answer.error


async def test_a_wrong_token_is_turned_away_before_anything_is_read(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await Client(coordinator).open(token="wrong")
    assert caught.value.response.status_code == 401
    assert caught.value.response.body == b'{"error":"wrong token"}'
    assert coordinator.engine.refusals == {"token": 1}


async def test_join_says_what_is_wrong_with_the_token(coordinator: Coordinator) -> None:
    def join() -> None:
        replicas.join(
            "policy", endpoint=coordinator.endpoint, token="wrong", group="rollout", replica=0, rank=0, world_size=1
        )

    with pytest.raises(errors.UsageError, match="token") as caught:
        await asyncio.to_thread(join)
    assert coordinator.endpoint in str(caught.value)


async def test_joining_an_unknown_channel(coordinator: Coordinator) -> None:
    def join() -> None:
        replicas.join(
            "polcy",
            endpoint=coordinator.endpoint,
            token=coordinator.token,
            group="rollout",
            replica=0,
            rank=0,
            world_size=1,
        )

    with pytest.raises(errors.UnknownChannel) as caught:
        await asyncio.to_thread(join)
    assert str(caught.value) == 'there is no channel "polcy" in run "embedded"; did you mean "policy"?'


async def test_what_a_hello_can_be_refused_for(coordinator: Coordinator) -> None:
    wrong_run = await refusal(Client(coordinator, run="other"))
    assert wrong_run.message == 'this program belongs to run "other", and the coordinator serves run "embedded"'
    protocol = await refusal(Client(coordinator, protocol=99))
    assert protocol.message == f"this program speaks protocol 99 of replicas, the coordinator protocol {wire.PROTOCOL}"
    group = await refusal(Client(coordinator, group="router"))
    assert (group.kind, group.message) == ("UnknownChannel", 'group "router" has no part in channel "policy"')
    rank = await refusal(Client(coordinator, rank=3, world_size=2))
    assert rank.message == "rollout/0/3: rank 3 is not in a world of 2"


async def test_garbage_on_the_control_port_harms_nobody(coordinator: Coordinator) -> None:
    member = Client(coordinator)
    assert isinstance(await member.join(), wire.Welcome)
    host, port = coordinator.endpoint.split(":")
    for garbage in (b"\x00\xff" * 5000, b"GET / HTTP/1.1\r\nHost: \x00\r\n\r\n", b"POST /session HTTP/9.9\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        writer.close()
    await member.say(wire.Heartbeat(), seq=0)
    await member.until(wire.Ack)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc1 not msgpack", 1007),
        (b"\x93\x01\x00\x81\xa4type\xaaDoesNotExist", 1007),
        (wire.encode(wire.MemberFrame(7, 0, wire.ReceiveAsk(1, 0))), 1008),
        ("text", 1007),
    ],
    ids=["bytes", "unknown type", "out of order", "text"],
)
async def test_a_malformed_message_ends_the_connection_and_not_the_member(
    coordinator: Coordinator, frame: bytes | str, code: int
) -> None:
    bystander = Client(coordinator, replica=1, incarnation="two")
    await bystander.join()
    member = Client(coordinator)
    welcome = await member.join()
    assert isinstance(welcome, wire.Welcome)
    await member.socket.send(frame)
    with pytest.raises(ConnectionClosed) as caught:
        await member.until(type(None))
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == code
    assert sum(coordinator.engine.refusals.values()) == 1
    again = Client(coordinator, resume_term=welcome.term, received=member.received)
    resumed = await again.join()
    assert isinstance(resumed, wire.Welcome)
    await bystander.say(wire.Heartbeat(), seq=0)
    await bystander.until(wire.Ack)


async def test_a_message_that_is_malformed_each_time_ends_the_member(coordinator: Coordinator) -> None:
    """It would send it for ever: it is told why, and is no member any more."""
    member = Client(coordinator)
    answer = await member.join()
    for _ in range(10):
        assert isinstance(answer, wire.Welcome)
        await member.socket.send(b"\x93\x01\x00\x82\xa4type\xa8Progress\xa4step\xca\x3f\xc0\x00\x00")
        try:
            answer = await member.until(wire.Refused)
            break
        except ConnectionClosed:
            pass
        member = Client(coordinator, resume_term=answer.term, received=member.received)
        answer = await member.join()
    assert isinstance(answer, wire.Refused)
    assert (answer.error.kind, "malformed" in coordinator.engine.refusals) == ("UsageError", True)
    assert "Expected `int`, got `float`" in answer.error.message
    assert coordinator.engine.refusals["malformed"] == REFUSED_MAX


async def test_a_bad_message_of_a_rank_costs_the_others_nothing(coordinator: Coordinator) -> None:
    """The rank itself is told; on the way there its session sends it a few times, not
    some hundred times a second."""
    bad = await asyncio.to_thread(joined, coordinator, "rollout", 1)
    try:
        bad._hub.call(bad._hub.send, wire.Progress(1.5))  # type: ignore[arg-type]  # that is the point
        with pytest.raises(errors.UsageError, match="Expected `int`, got `float`"):
            await asyncio.wait_for(bad.receive(), 20)
        assert coordinator.engine.refusals == {"malformed": REFUSED_MAX}
    finally:
        await asyncio.to_thread(bad.close)


def joined(coordinator: Coordinator, group: str, replica: int) -> replicas.Channel:
    return replicas.join(
        "policy",
        endpoint=coordinator.endpoint,
        token=coordinator.token,
        group=group,
        replica=replica,
        rank=0,
        world_size=1,
    )


async def test_a_member_whose_message_takes_long_is_alive_and_hears_so(coordinator: Coordinator) -> None:
    """Over a slow link the bytes count, not the messages."""
    member = Client(coordinator)
    assert isinstance(await member.join(), wire.Welcome)
    body = wire.encode(wire.MemberFrame(1, 0, wire.Bye("x" * 4000)))
    data = Frame(Opcode.BINARY, body).serialize(mask=True)
    acks, began = 0, asyncio.get_running_loop().time()

    async def count() -> None:
        nonlocal acks
        while isinstance(await member.next(), wire.Ack | wire.View | wire.Locate):
            acks += 1

    counting = asyncio.create_task(count())
    for at in range(0, len(data) - 100, 100):  # for twice its lease
        member.socket.transport.write(data[at : at + 100])
        await asyncio.sleep(0.1)
    assert asyncio.get_running_loop().time() - began > 3.5
    (channel,) = coordinator.channel_statuses()
    assert [one.name for one in channel.members] == ["rollout/0/0"]
    assert acks >= 2
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    await member.socket.close()


async def test_a_first_message_that_is_no_hello(coordinator: Coordinator) -> None:
    client = Client(coordinator)
    await client.open()
    await client.say(wire.ReceiveAsk(1, 0))
    answer = await client.next()
    assert isinstance(answer, wire.Refused)
    assert answer.error.message == "the first message must be Hello, it was ReceiveAsk"


async def test_a_broken_connection_is_resumed_without_losing_or_repeating_a_message(coordinator: Coordinator) -> None:
    trainer = Client(coordinator, group="trainer", incarnation="t")
    welcome = await trainer.join()
    assert isinstance(welcome, wire.Welcome)
    await trainer.say(wire.PublishBegin(1, None, 30.0))
    admitted = await trainer.until(wire.PublishAdmitted)
    assert admitted.version == 1
    await trainer.socket.close()
    # It comes back without having seen the last answers, and sends its own last message
    # again.
    back = Client(coordinator, group="trainer", incarnation="t", resume_term=welcome.term, received=0)
    again = await back.join()
    assert isinstance(again, wire.Welcome)
    assert (again.term, again.received) == (welcome.term, 1)
    assert (await back.until(wire.PublishAdmitted)).version == 1
    await back.say(wire.PublishBegin(1, None, 30.0), seq=1)
    back.sent = 1
    await back.say(wire.PublishBegin(2, None, 30.0))
    assert (await back.until(wire.PublishAdmitted)).publish == 2


async def test_a_member_that_is_silent_for_its_lease_is_fenced(coordinator: Coordinator) -> None:
    member, other = Client(coordinator), Client(coordinator, replica=1, incarnation="two")
    welcome = await member.join()
    assert isinstance(welcome, wire.Welcome)
    await other.join()

    async def live() -> None:
        """If nobody at all were heard, the coordinator would take it for its own
        fault."""
        while True:
            await other.say(wire.Heartbeat(), seq=0)
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(live())
    refused = await member.until(wire.Refused)
    beating.cancel()
    assert refused.error.kind == "Fenced"
    assert refused.error.message == "rollout/0/0 was declared lost (no heartbeat came within heartbeat_timeout)"
    late = await refusal(Client(coordinator, resume_term=welcome.term))
    assert late.message == "rollout/0/0 was declared lost while it was disconnected"


async def test_a_second_join_of_one_rank_fences_the_first(coordinator: Coordinator) -> None:
    first = Client(coordinator, process=Client.process(2))
    await first.join()
    second = Client(coordinator, incarnation="two")
    assert isinstance(await second.join(), wire.Welcome)
    refused = await first.until(wire.Refused)
    assert refused.error.message == "another process joined as rollout/0/0"
    assert isinstance(await Client(coordinator, incarnation="three").join(), wire.Welcome)
    refused = await second.until(wire.Refused)
    assert refused.error.message == "this process joined again as rollout/0/0"
    assert "close it first" in (refused.error.hint or "")


async def test_a_rank_that_was_replaced_between_two_connections_is_told_so(coordinator: Coordinator) -> None:
    first = Client(coordinator, process=Client.process(2))
    welcome = await first.join()
    assert isinstance(welcome, wire.Welcome)
    await first.socket.close()
    assert isinstance(await Client(coordinator, incarnation="two").join(), wire.Welcome)
    late = await refusal(Client(coordinator, process=Client.process(2), resume_term=welcome.term))
    assert late.message == "another process joined as rollout/0/0 while this one was disconnected"


async def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, holder = taken.getsockname()[1], f"process {os.getpid()} ({command_line(os.getpid())})"
        with pytest.raises(errors.WorldError) as control:
            async with Coordinator(CHANNELS, port=port):
                pass
        assert str(control.value) == (
            f"control port: cannot listen on 127.0.0.1:{port} (Address already in use by {holder}) "
            "(choose another address or port for control.listen, or leave it out: then any free port is taken)"
        )
        with pytest.raises(errors.WorldError) as store:
            async with Coordinator(CHANNELS, store_port=port):
                pass
        assert str(store.value) == (
            f"rendezvous store: cannot listen on 127.0.0.1:{port}: Address already in use by {holder} "
            "(choose another [store] port, or 0 to let the kernel choose)"
        )


@pytest.mark.parametrize("which", ["port", "store_port"])
async def test_one_that_did_not_start_lets_go_of_its_decisions(tmp_path: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {which: taken.getsockname()[1]}
        with pytest.raises(errors.WorldError, match="Address already in use"):
            async with Coordinator(CHANNELS, state_dir=tmp_path, **ports):
                pass
    async with Coordinator(CHANNELS, state_dir=tmp_path):
        pass


async def test_versions_do_not_go_back_after_a_crash(tmp_path: Path) -> None:
    """The decision log gives the floor; a clean end removes it."""
    log = tmp_path / "decisions.jsonl"
    log.write_text(
        '{"kind":"commit","channel":"policy","version":7,"digest":"d","epoch":3,"term":1}\n{"kind":"commit","chan'
    )
    async with Coordinator(CHANNELS, state_dir=tmp_path) as running:
        trainer = Client(running, group="trainer")
        welcome = await trainer.join()
        assert isinstance(welcome, wire.Welcome)
        assert welcome.term > 1
        await trainer.say(wire.PublishBegin(1, None, 30.0))
        assert (await trainer.until(wire.PublishAdmitted)).version == 8
        await trainer.say(wire.PublishBegin(2, 5, 30.0))
        end = await trainer.until(wire.PublishEnd)
        assert end.error.message == "version 5 is not newer than version 8 of channel 'policy'"
    assert not log.exists()


async def test_two_coordinators_cannot_have_one_state_folder(tmp_path: Path) -> None:
    async with Coordinator(CHANNELS, state_dir=tmp_path):
        with pytest.raises(errors.WorldError, match=r"decisions\.jsonl"):
            Coordinator(CHANNELS, state_dir=tmp_path)
    async with Coordinator(CHANNELS, state_dir=tmp_path):
        assert (tmp_path / "decisions.jsonl").exists()


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """A process of this machine, for a member to be."""
    child = subprocess.Popen(["sleep", "60"])
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    yield child, ProcessIdentity(child.pid, started, boot_id, Path("/proc/self/ns/pid").stat().st_ino)
    child.kill()
    child.wait(10)


async def test_a_process_that_ends_is_lost_even_if_its_socket_stays_open(
    coordinator: Coordinator, process: tuple[subprocess.Popen[bytes], ProcessIdentity]
) -> None:
    child, identity = process
    member = Client(coordinator, process=identity)
    await member.join()
    child.kill()
    refused = await member.until(wire.Refused)
    assert refused.error.message == "rollout/0/0 was declared lost (its process ended)"


async def test_the_last_words_of_a_process_are_heard(
    coordinator: Coordinator, process: tuple[subprocess.Popen[bytes], ProcessIdentity]
) -> None:
    child, identity = process
    lost: asyncio.Queue[str] = asyncio.Queue()
    coordinator.subscribe(lambda event: lost.put_nowait(event.reason) if isinstance(event, MemberLost) else None)
    member = Client(coordinator, process=identity)
    await member.join()
    child.kill()
    child.wait(10)
    await member.say(wire.Bye())
    async with asyncio.timeout(5):
        assert await lost.get() == "left"


async def test_sessions_do_not_wait_for_acknowledgements(coordinator: Coordinator) -> None:
    """A commit and a grant leave at once: the server's side of a session has
    TCP_NODELAY."""
    member = Client(coordinator)
    await member.join()
    port = int(coordinator.endpoint.split(":")[1])
    ours = member.socket.transport.get_extra_info("sockname")
    sockets = [socket.socket(fileno=os.dup(int(fd.name))) for fd in fds() if "socket:" in str(fd.readlink())]
    try:
        server = next(s for s in sockets if inet(s) and s.getsockname()[1] == port and peer(s) == ours)
        assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        for duplicate in sockets:
            duplicate.close()


def fds() -> list[Path]:
    return [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()]


def inet(of: socket.socket) -> bool:
    return of.family == socket.AF_INET


def peer(of: socket.socket) -> Any:
    try:
        return of.getpeername()
    except OSError:
        return None


async def test_nobody_hears_of_a_commit_that_is_not_on_disk(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk holds the commit back, and nothing else; when it takes the decision,
    the commit goes out."""
    refused = asyncio.Event()

    def full(decision: Decision) -> None:
        refused.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coordinator.engine.decisions, "append", full)
    manifest = PartManifest(tensors=(TensorSpec("weight", "float32", (4,)),), aliases=(), pieces=None)
    trainer = Client(coordinator, group="trainer", incarnation="t")
    await trainer.join()
    await trainer.say(wire.PublishBegin(1, None, 30.0))
    await trainer.say(wire.Packed(1, manifest.hash, "cpu", 0.0, 0.0, "digest"))
    (piece,) = pieces(await trainer.until(wire.ManifestAsk), manifest.encode())
    await trainer.say(piece)
    async with asyncio.timeout(5):
        await refused.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await trainer.until(wire.Commit)
    monkeypatch.undo()
    assert (await trainer.until(wire.Commit)).version == 1
    assert (await trainer.until(wire.PublishEnd)).receipt is not None
