"""A run that waits says for what, once, in its log.

Covers: supervisor/fleet/causes.py, coordinator/channel_status.py.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from replicas.coordinator.channel_status import channel_status, channel_waits
from replicas.core.versions.recovery import RECOVERY_S
from replicas.status import WAIT_S
from replicas.supervisor.fleet.causes import WaitReports
from tests.support.channel_world import World, channel_config
from tests.support.fleets import Life, fleet, group_of
from tests.support.virtual import history


def test_a_wait_is_told_once_though_its_time_passes() -> None:
    reports, said = WaitReports(), list[tuple[float, str]]()
    for tenth in range(100):
        now = tenth / 10
        said += [(now, text) for text in reports.due({"a/0": f"{60 - now:.0f} s for the lease of node n1"}, now)]
    ((at, text),) = said
    assert at > WAIT_S
    assert text == "a/0: waits 58 s for the lease of node n1"


def test_a_short_wait_is_not_told_and_another_one_is() -> None:
    reports = WaitReports()
    found = [
        reports.due({"a/0": what}, now) for now, what in ((0.0, "for b"), (1.9, "for b"), (3.0, ""), (4.0, "for b"))
    ]
    assert found == [[], [], [], []]
    assert reports.due({"a/0": "for b"}, 6.1) == ["a/0: waits for b"]
    assert reports.due({"a/0": "for c"}, 9.0) == []
    assert reports.due({"a/0": "for c"}, 12.0) == ["a/0: waits for c"]


def test_all_that_wait_for_the_same_have_one_line() -> None:
    reports, waits = WaitReports(), {f"a/{index}": "for a GPU" for index in range(5)} | {"b/0": "for a"}
    assert reports.due(waits, 0.0) == []
    assert reports.due(waits, 3.0) == ["a/0, a/1, a/2 and 2 more: wait for a GPU", "b/0: waits for a"]
    assert reports.due(waits | {"a/5": "for a GPU"}, 4.0) == []


def test_a_publish_says_for_which_member_and_for_how_long() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.mute = True
    world.run()
    trainer.pack(trainer.publish(deadline_s=60.0))
    world.run()
    world.advance(5.0)
    assert channel_waits([world.state], world.now) == {"version 1 of policy": "for rollout/0/0, 55 s at most"}


@pytest.mark.parametrize(("slots", "found"), [(2, "rollout/0/0 to release version 1"), (3, "trainer/0/0")])
def test_a_publish_without_a_free_slot_says_who_has_its_memory(slots: int, found: str) -> None:
    """Not the source, which can do nothing about it; with a third slot it is the one
    that is slow."""
    world = World(channel_config(slots=slots), machine="a")
    trainer, target = (world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0"))
    target.loads = False
    for _ in range(2):
        target.ask()
        world.run()
        trainer.pack(trainer.publish())
        world.run()
    assert target.held == {1, 2}
    trainer.publish(deadline_s=60.0)
    world.run()
    world.advance(5.0)
    assert channel_waits([world.state], world.now) == {"version 3 of policy": f"for {found}, 55 s at most"}


def test_a_channel_says_that_it_waits_for_members_of_the_former_coordinator() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    world.run()
    trainer.pack(trainer.publish())
    world.run()
    world.restart()
    world.state.recovery.expect([trainer.member, target.member])
    world.rejoin(trainer)
    world.advance(1.0)
    text = "for 1 of 2 members to reconnect after the coordinator's restart"
    assert channel_waits([world.state], world.now)["channel policy"].startswith(f"{text}, ")
    status = channel_status(world.state, world.now)
    assert status.waits == text
    assert status.left_s is not None
    assert 0 < status.left_s < RECOVERY_S
    world.advance(2 * RECOVERY_S)
    assert channel_waits([world.state], world.now) == {}
    assert (channel_status(world.state, world.now).waits, channel_status(world.state, world.now).left_s) == ("", None)


@history
async def test_a_start_that_waits_for_another_group_is_in_the_log() -> None:
    lives = {"a/0": [Life(start_s=10.0)]}
    async with fleet(group_of("a"), group_of("b", depends_on=("a",)), lives=lives) as (_, yard):
        await asyncio.sleep(8)
        assert [text for text in yard.said if "wait" in text] == ["b/0: waits for a"]


@history
async def test_an_end_says_when_it_kills() -> None:
    lives = {"a/0": [Life(stop_s=5.0)]}
    async with fleet(group_of("a", stop_timeout_s=10.0), lives=lives) as (made, yard):
        await asyncio.sleep(3)
        replica = made.groups["a"].replicas[0]
        replica.stop()
        await asyncio.sleep(1)
        assert replica.status(asyncio.get_running_loop().time()).left_s == pytest.approx(9.0, abs=0.1)
        await asyncio.sleep(3)
        ends = [text for text in yard.said if "SIGKILL" in text]
        assert len(ends) == 1
        assert re.fullmatch(
            "a/0: waits for the old processes to end; any left at [0-9]{2}:[0-9]{2}:[0-9]{2} get SIGKILL", ends[0]
        )


@history
async def test_a_backoff_and_a_start_have_an_end() -> None:
    lives = {"a/0": [Life(start_s=1.0, ends_s=2.0, code=1), Life(start_s=10.0)]}
    async with fleet(group_of("a", restart={"initial_delay_s": 20.0}), lives=lives) as (made, _):
        replica = made.groups["a"].replicas[0]

        def left_s() -> float:
            found = replica.status(asyncio.get_running_loop().time()).left_s
            assert found is not None
            return found

        await asyncio.sleep(0.5)
        assert left_s() <= replica.group.health.start_timeout_s
        await asyncio.sleep(3.5)
        assert replica.life.state == "backoff"
        first = left_s()
        await asyncio.sleep(2)
        assert left_s() == pytest.approx(first - 2, abs=0.1)
