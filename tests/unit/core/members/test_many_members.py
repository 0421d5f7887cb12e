"""What the coordinator does not do for each of many members: walk, tell, encode or wake
all the others.

Covers: core/members/holders.py, core/members/roster.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from bench.scale_model import Rates, chain_s, leaders_of, messages_of, messages_to_commit, model
from replicas import messages as wire
from replicas.coordinator.sessions import Encoded, MemberSession
from replicas.core.base.manifest import Manifest, PartManifest
from replicas.core.channel_state import ChannelState
from replicas.core.members.member_state import Held, MemberState
from replicas.core.members.roster import GroupShape, Roster
from replicas.core.versions import manifests
from replicas.core.versions.manifests import merge_parts
from replicas.messages.identity import Member
from tests.support.channel.members import Client
from tests.support.channel.rosters import check_roster
from tests.support.channel.scripted import ScriptedWorld
from tests.support.channel_world import SimMember, World, channel_config

# ------------------------------------------------------------ indices


def test_what_comes_and_goes_is_reported() -> None:
    held = Held({1: "a"})
    seen: list[tuple[int, bool]] = []
    held.on_change = lambda version, there: seen.append((version, there))
    held[1] = "b"  # another digest is no change
    held[2] = "c"
    assert held.setdefault(3, "") == ""
    assert held.setdefault(3, "x") == ""
    assert held.pop(9, None) is None
    assert held.pop(2) == "c"
    held.update({4: "d"})
    assert held.popitem() == (1, "b")
    del held[3]
    held.clear()
    assert not held
    assert seen == [(2, True), (3, True), (2, False), (4, True), (1, False), (3, False), (4, False)]


def joined(
    roster: Roster, replica: int, *, group: str = "rollout", now: float = 0.0, observe: bool = False
) -> MemberState:
    hello = msgspec.structs.replace(
        Client.hello_of(group), replica=replica, incarnation=f"n{replica}", observe=observe, torch_version="2.13.0"
    )
    state, _ = roster.add(hello, "127.0.0.1", now)
    roster.insert(state)
    state.host = 1
    return state


def test_indices_follow_whatever_happens() -> None:
    roster = Roster(channel_config(), {})
    states = [joined(roster, replica) for replica in range(4)]
    joined(roster, 0, group="trainer")
    joined(roster, 9, observe=True)
    check_roster(roster)
    roster.admit(0.0)
    assert len(roster.live) == 5
    check_roster(roster)
    states[0].held[3] = "digest"
    states[1].held[3] = "digest"
    check_roster(roster)
    assert roster.holders.lacking(3) == states[2:]
    roster.leave_behind(states[2], "late", missed=3)
    check_roster(roster)
    roster.remove(states[1].member)
    states[1].held[4] = "it is no member any more"
    check_roster(roster)
    states[2].held[3] = "digest"
    roster.admit(1.0)
    assert states[2].live
    check_roster(roster)
    assert roster.holders.of(4) == []


def test_a_newcomer_is_compared_with_one_of_each_kind() -> None:
    roster = Roster(channel_config(), {})
    for replica in range(50):
        joined(roster, replica)
    hello = msgspec.structs.replace(Client.hello_of("rollout"), replica=50, torch_version="2.13.0")
    assert len(roster.others(hello)) == 1
    again = msgspec.structs.replace(hello, replica=0, incarnation="later")
    assert roster.others(again)[0].replica != 0, "not with what it replaces"


def session_of(group: str) -> MemberSession:
    channel = ChannelState(channel_config(), {}, run="outer", term=1, store=lambda: ("127.0.0.1", 1))
    return MemberSession(Member(group, 0, 0, "x"), channel)


# ------------------------------------------------------------ heartbeats


def test_heartbeats_become_rarer_with_the_members_and_patience_with_them() -> None:
    roster = Roster(channel_config(), {})
    first = joined(roster, 0)
    assert (first.settings.heartbeat_interval_s, roster.take_interval_to_send(0.0)) == (1.0, 1.0)
    assert (roster.is_suspect(first, 3.5), roster.is_suspect(first, 3.6)) == (False, True)
    others = [joined(roster, replica) for replica in range(1, 700)]
    assert others[-1].settings.heartbeat_interval_s == 3.0
    assert roster.take_interval_to_send(100.0) == 3.0
    assert (roster.is_suspect(first, 9.5), roster.is_suspect(first, 9.6)) == (False, True)
    for state in others:
        roster.remove(state.member)
    assert roster.take_interval_to_send(200.0) == 1.0
    roster.update_patience(205.0)
    assert not roster.is_suspect(first, 9.5), "it may not have heard yet that it is to hurry"
    roster.update_patience(206.1)
    assert roster.is_suspect(first, 3.6)


def test_several_heartbeats_fit_into_a_lease() -> None:
    roster = Roster(channel_config(), {"rollout": GroupShape(heartbeat_timeout_s=8.0)})
    for replica in range(700):
        joined(roster, replica)
    assert roster.heartbeat_interval_s == 2.0
    assert roster.welcome_settings(next(iter(roster))).heartbeat_interval_s == 2.0


# ------------------------------------------------------------ views


def views(sim: SimMember) -> list[wire.View]:
    return [message for message in sim.seen if isinstance(message, wire.View)]


def as_told(sim: SimMember) -> set[Member]:
    """Who is there, by what this member has been told, one after another."""
    members: set[Member] = set()
    epoch = 0
    for view in views(sim):
        assert view.since in (0, epoch)
        members = (members - set(view.left)) | set(view.members) if view.since else set(view.members)
        epoch = view.epoch
    return members


def test_a_large_channel_is_told_who_came_and_who_went() -> None:
    world = World()
    sims = [world.join(f"rollout/{number}/0") for number in range(40)]
    world.run()
    late = world.join("rollout/40/0")
    world.lose(sims[3])
    world.run()
    assert [len(view.members) + len(view.left) for view in views(sims[0])[-2:]] == [1, 1]
    assert views(late)[0].since == 0
    everybody = {sim.member for sim in world.members.values()}
    assert all(as_told(sim) == everybody for sim in world.members.values())


def test_a_small_channel_is_told_all() -> None:
    world = World()
    sims = [world.join(f"rollout/{number}/0") for number in range(5)]
    world.run()
    assert all(view.since == 0 for view in views(sims[0]))


def test_members_that_come_in_crowds_do_not_make_a_view_each() -> None:
    world = World()
    crowd = [world.join(f"rollout/{number}/0") for number in range(300)]
    world.run()
    sent = sum(len(views(sim)) for sim in crowd)
    assert sent < 3_000, "300 views of 150 members on the average would be 45,000"
    world.now += 1.0
    world.state.tick(world.now)
    world._collect()
    world.run()
    everybody = {sim.member for sim in crowd}
    assert all(as_told(sim) == everybody for sim in crowd)


@pytest.mark.anyio
async def test_a_member_puts_the_differences_together() -> None:
    world = ScriptedWorld("target", 2)
    a, b, c = (Member("rollout", number, 0, "x") for number in range(3))
    world.tell(wire.View(4, (a, b)), wire.View(6, (c,), since=4, left=(a,)))
    assert (world.hub.epoch, world.hub.members) == (6, (b, c))
    await world.end()


# ------------------------------------------------------------ rounds


def test_only_rounds_in_which_something_has_changed_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    targets = [world.join(f"rollout/{number}/0") for number in range(20)]
    world.run()
    looked: Counter[str] = Counter()
    advance = world.state.load_rounds.advance

    def counted(view: object, latest: int, out: object) -> None:
        looked["advance"] += 1
        advance(view, latest, out)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(world.state.load_rounds, "advance", counted)
    for version in (1, 2):
        for target in targets:
            target.ask()
        trainer.pack(trainer.publish())
        world.run()
        assert {max(target.granted) for target in targets} == {version}
    assert looked["advance"] < 20 * 2 * 5, "a few times for each replica and version, however many messages there are"
    check_roster(world.state.roster)


# ------------------------------------------------------------ sessions


class Wire:
    """A connection that takes what it is told to take."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.writes: list[list[wire.ServerFrame]] = []
        self.on_writable: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[], None] = lambda: None

    def rtt_s(self) -> float:
        return 0.0

    def takes_more(self) -> bool:
        return self.room > 0

    def write(self, messages: Sequence[bytes]) -> None:
        self.room -= 1
        self.writes.append([wire.decode_server_frame(message) for message in messages])


WELCOME = wire.Welcome(1, wire.ChannelSettings("target", 5.0, 2, "leader", "leader", 1.0), 0, 1, "127.0.0.1", 0)


@pytest.mark.anyio
async def test_what_is_sent_in_one_turn_is_written_at_once() -> None:
    session, connection = session_of("rollout"), Wire(room=100)
    session.attach(connection, 0, WELCOME)
    session.send(wire.Commit(1, "d"))
    session.send(wire.Ack())
    session.send(wire.Assigned(1))
    assert connection.writes == []
    await asyncio.sleep(0)
    [frames] = connection.writes
    assert [(frame.seq, type(frame.body)) for frame in frames] == [
        (0, wire.Welcome),
        (1, wire.Commit),
        (2, wire.Assigned),
    ]
    session.send(wire.Ack())
    session.send(wire.Ack())
    await asyncio.sleep(0)
    assert [[type(frame.body) for frame in write] for write in connection.writes[1:]] == [[wire.Ack]]


@pytest.mark.anyio
async def test_what_a_slow_connection_does_not_take_waits() -> None:
    session, connection = session_of("rollout"), Wire(room=1)
    session.attach(connection, 0, WELCOME)
    await asyncio.sleep(0)
    session.send(wire.Commit(1, "d"))
    await asyncio.sleep(0)
    assert len(connection.writes) == 1
    written = asyncio.create_task(session.written(connection))
    await asyncio.sleep(0)
    assert not written.done()
    connection.room = 1
    connection.on_writable()
    await asyncio.wait_for(written, 10)
    assert connection.writes[-1][0].body == wire.Commit(1, "d")


@pytest.mark.anyio
async def test_a_new_connection_gets_what_was_not_acknowledged() -> None:
    session, first, second = session_of("rollout"), Wire(room=9), Wire(room=9)
    session.attach(first, 0, WELCOME)
    for version in (1, 2):
        session.send(wire.Commit(version, "d"))
    await asyncio.sleep(0)
    session.attach(second, 1, WELCOME)
    session.detach(first)  # too late to matter
    await asyncio.sleep(0)
    assert [(frame.seq, type(frame.body)) for frame in second.writes[0]] == [(0, wire.Welcome), (2, wire.Commit)]


def test_what_is_sent_to_many_is_encoded_once() -> None:
    encoded = Encoded()
    commit = wire.Commit(1, "d")
    body = encoded.of(commit)
    assert encoded.of(commit) is body
    assert encoded.of(wire.Commit(2, "d")) != body
    frame = wire.decode_server_frame(wire.encode_frame(7, 3, body))
    assert frame == wire.ServerFrame(7, 3, commit)
    assert wire.encode_frame(7, 3, body) == wire.encode(frame)


# ------------------------------------------------------------ manifests


def test_the_same_manifest_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joins: list[int] = []

    def merged(parts: Sequence[PartManifest]) -> Manifest:
        joins.append(len(parts))
        return merge_parts(parts)

    monkeypatch.setattr(manifests, "merge_parts", merged)
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    for _ in range(3):
        trainer.pack(trainer.publish())
        world.run()
    assert target.commits == [1, 2, 3]
    assert joins == [1]


# ----------------------------------------------------------- the model of the benchmark


def test_the_model_counts_the_messages_of_a_real_publish() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="apart")
    targets = [world.join(f"rollout/{number}/0", machine=f"host{number // 8}") for number in range(20)]
    world.run()
    for target in targets:
        target.ask()
    trainer.pack(trainer.publish())
    world.run()  # carries the manifest
    for target in targets:
        target.ask()
    world.run()
    told = sum(len(sim.seen) for sim in world.members.values())
    received = 0
    receive = world.state.receive

    def counted(member: Member, message: wire.FromMember, now: float) -> None:
        nonlocal received
        received += not isinstance(message, wire.ManifestPiece)
        receive(member, message, now)

    world.state.receive = counted  # type: ignore[method-assign]  # to count
    trainer.pack(trainer.publish())
    world.run()
    heard = sum(len(sim.seen) for sim in world.members.values()) - told
    kept = sum(isinstance(message, wire.Released) for sim in world.members.values() for message in sim.seen)
    later = 2 * len(targets)  # the next ask, and Dropped of the version before: not sent at once by these members
    assert received + later + heard - kept == messages_of(20, leaders_of(20))


def test_the_model_of_a_sync() -> None:
    assert leaders_of(1000) == 125
    assert messages_to_commit(1000, 125) < messages_of(1000, 125)
    assert chain_s(1 << 30, 0, 1e9, 0.0) == 0.0
    alone = chain_s(10**10, 1, 1e9, 0.0)
    assert alone == pytest.approx(10.0, rel=0.01)
    assert chain_s(10**10, 125, 1e9, 0.0) < 1.1 * alone, "a chain hides its length behind the bytes"
    sync = model(10**9, 1000, Rates(message_s=1e-4, memory=1e9, mapping=1e10, link=1e9, step_s=0.0))
    assert sync.pack_s == 1.0
    assert sync.total_s == sync.pack_s + sync.coordinator_s + sync.chain_s + sync.map_s
