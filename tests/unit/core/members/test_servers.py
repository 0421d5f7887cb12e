"""One server has one follower on a channel.

Covers: core/members/servers.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replicas.config.structs import ChannelRole
from replicas.core.members.servers import server_of
from replicas.errors import Preflight
from replicas.messages.identity import ProcessIdentity
from tests.support.channel_world import World, channel_config

URL = "http://10.0.0.1:8000"
LOCAL = "http://127.0.0.1:8000"


def following(world: World, name: str, url: str = URL, machine: str = "boot", **more: Any) -> Any:
    number = len(world.members) + 100
    return world.join(name, info={"url": url}, process=ProcessIdentity(number, 1, machine, 1), **more)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (URL, URL, True),
        (URL, "http://10.0.0.1:8000/", True),
        (URL, " HTTP://10.0.0.1:8000", True),
        (URL, "http://10.0.0.1:8001", False),
        (URL, "http://10.0.0.2:8000", False),
        (URL, "http://10.0.0.1:8000/b", False),
        ("http://host/a", "http://HOST:80/a/", True),
        ("http://host.", "http://host:80", True),
        ("https://host", "https://host:443", True),
        ("https://host", "http://host", False),
        ("grpc://host", "http://host", False),
        ("http://[2001:db8::1]:80", "http://[2001:DB8::1]", True),
        (LOCAL, "http://localhost:8000/", True),
        (LOCAL, "http://[::1]:8000", True),
        (LOCAL, "http://0.0.0.0:8000", True),
        (LOCAL, "http://127.0.0.2:8000", False),
    ],
)
def test_spellings_of_one_server(one: str, other: str, same: bool) -> None:
    world = World(channel_config())
    first, second = (following(world, f"watcher/{i}/0", url, observe=True).hello for i, url in enumerate((one, other)))
    assert (server_of(first) == server_of(second)) is same


@pytest.mark.parametrize("url", ["", "unix:/run/a", "127.0.0.1:8000", "http://host:x", "http://[", "http:///a"])
def test_a_text_without_a_host_is_of_no_server(url: str) -> None:
    assert server_of(following(World(channel_config()), "rollout/0/0", url).hello) is None


@pytest.mark.parametrize(
    ("url", "same"), [(URL, True), (LOCAL, False), ("http://localhost", False), ("http://127.0.0.2", False)]
)
def test_a_loopback_address_is_of_its_machine(url: str, same: bool) -> None:
    hello = following(World(channel_config()), "rollout/0/0", url).hello
    process = hello.process
    for changes in ({"boot_id": "another"}, {"pid_namespace": 2}):
        elsewhere = msgspec.structs.replace(hello, process=msgspec.structs.replace(process, **changes))
        assert (server_of(elsewhere) == server_of(hello)) is same


def test_the_second_follower_is_refused_by_name() -> None:
    world = World(channel_config())
    following(world, "rollout/0/0")
    with pytest.raises(Preflight) as caught:
        following(world, "rollout/1/0", f"{URL}/")
    assert caught.value.message == (
        f"rollout/1/0 would load versions into {URL}/, and rollout/0/0 loads them into the same server, {URL}"
    )
    assert caught.value.members == ("rollout/1/0", "rollout/0/0")
    assert "end rollout/0/0 first" in caught.value.hint
    assert len(world.state.roster) == 1
    following(world, "rollout/1/0", "http://10.0.0.1:8001")


def test_an_address_without_a_server_or_of_another_role_is_free() -> None:
    world = World(channel_config())
    for index in (0, 1):
        following(world, f"rollout/{index}/0", "")
        world.join(f"rollout/{index + 2}/0")
    following(world, "rollout/4/0")
    following(world, "trainer/0/0")
    following(world, "watcher/0/0", observe=True)
    assert len(world.state.roster) == 7


def test_ranks_and_later_lives_of_one_replica_share_their_server() -> None:
    world = World(channel_config(targets=(ChannelRole("rollout", "leader"),)))
    for generation in (1, 2):
        for rank in (0, 1):
            following(world, f"rollout/0/{rank}", world_size=2, generation=generation)
    for name in ("rollout/0/0", "rollout/0/1"):
        with pytest.raises(Preflight, match="rollout/0/"):
            following(world, "rollout/1/0")
        world.lose(next(sim for sim in list(world.members.values()) if sim.member.name == name))
    following(world, "rollout/1/0")


@pytest.mark.parametrize("reason", ["exited", "left", "lease"])
def test_the_end_of_a_follower_frees_its_server(reason: str) -> None:
    world = World(channel_config())
    world.lose(following(world, "rollout/0/0"), reason)
    following(world, "rollout/1/0")


def test_a_follower_whose_connection_is_gone_loses_its_server() -> None:
    """A follower that was killed on another machine, long before its lease ends."""
    world = World(channel_config())
    old = following(world, "rollout/0/0")
    world.state.roster.disconnected(old.member, world.now)
    new = following(world, "rollout/1/0")
    assert [state.member for state in world.state.roster] == [new.member]
    world.state.roster.disconnected(new.member, world.now)
    world.state.roster.connected(new.member, world.now)
    with pytest.raises(Preflight):
        following(world, "rollout/0/0")


def test_followers_come_back_to_another_coordinator() -> None:
    world = World(channel_config())
    sims = [following(world, f"rollout/{index}/0", f"http://10.0.0.{index}:80") for index in range(3)]
    world.restart()
    world.rejoin(sims[0])
    with pytest.raises(Preflight):
        following(world, "rollout/3/0", "http://10.0.0.0")
    for sim in sims[1:]:
        world.rejoin(sim)
    with pytest.raises(Preflight):
        following(world, "rollout/3/0", "http://10.0.0.2")
