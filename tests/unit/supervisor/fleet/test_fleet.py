"""Histories of whole fleets, in virtual time: who starts when, who ends with whom, and
what is spent.

Covers: supervisor/fleet/fleet.py, supervisor/fleet/group.py.
"""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import msgspec
import pytest

from replicas import errors
from replicas.config.structs import ChannelConfig, ChannelRole, ResourcesConfig
from replicas.control import exit_codes
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.state.run_state import Cause
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import Drained, Draining, FailedReset, HeldUp, ReplicaExited, RestartAsked, Scaled
from tests.support.fleets import DIES, DONE, Life, fleet, group_of
from tests.support.virtual import history, virtually

# ---------------------------------------------------------------- restarts


@history
async def test_delays_double_and_the_run_fails_when_the_budget_is_spent() -> None:
    async with fleet(group_of("a", restart={"max_restarts": 3}), lives={"a": [DIES]}) as (made, yard):
        await asyncio.wait_for(made.over.wait(), 100)
        assert [at for at, state in yard.moves("a/0") if state == "backoff"] == [0.3, 1.6, 3.9]  # 1, 2, 4 s apart
        assert yard.said_of_groups == [
            "group a failed with replica a/0: rank 0 exited with code 1; all restarts are used (3 in 600 s)"
        ]
        assert (made.exit_code, made.groups["a"].restarts_by_reason()) == (1, {"exit": 3})


@history
async def test_a_window_that_slides_gives_restarts_back() -> None:
    lives = [Life(ends_s=6.0, code=1)]
    rules = {"max_restarts": 2, "window_s": 10.0, "initial_delay_s": 0.1}
    async with fleet(group_of("a", restart=rules), lives={"a": lives}) as (made, yard):
        await asyncio.sleep(100)
        assert yard.states() == {"a/0": "ready"}
        assert made.groups["a"].restarts_by_reason()["exit"] >= 14


@history
async def test_policies_decide_what_an_exit_means() -> None:
    groups = (
        group_of("always", restart={"policy": "always"}),
        group_of("never", restart={"policy": "never"}),
        group_of("onfail"),
    )
    async with fleet(*groups, lives={"always": [DONE], "never": [DONE], "onfail": [DONE]}) as (made, yard):
        await asyncio.sleep(2)
        assert yard.states() == {"always/0": "backoff", "never/0": "finished", "onfail/0": "finished"}
        assert not made.over.is_set()


@history
async def test_three_generations_without_a_new_step_are_a_crash_loop() -> None:
    rules = {"max_restarts": 50, "no_progress_cycles": 3}
    async with fleet(group_of("a", restart=rules), lives={"a": [DIES]}, on_channel={"a"}) as (made, yard):
        await made.until(lambda: len(yard.shims["a/0"]) == 2)
        yard.steps["a/0"] = 7  # the second one gets somewhere: counting begins anew
        await asyncio.wait_for(made.over.wait(), 1000)
        assert len(yard.shims["a/0"]) == 5
        assert "3 generations in a row without a new step or version" in yard.said_of_groups[0]
        assert made.groups["a"].restarts_by_reason() == {"exit": 4}


@history
async def test_what_is_on_no_channel_has_no_steps_to_miss() -> None:
    async with fleet(group_of("a", restart={"max_restarts": 6}), lives={"a": [DIES] * 5 + [Life()]}) as (_, yard):
        await asyncio.sleep(100)
        assert yard.states() == {"a/0": "ready"}


@history
async def test_a_restart_that_somebody_asked_for_spends_nothing() -> None:
    async with fleet(group_of("a", restart={"max_restarts": 0, "policy": "never"}, replicas=2)) as (made, yard):
        await made.wait_ready(made.groups.values())
        for _ in range(4):
            await made.restart("a/0")
            await made.wait_ready(made.groups.values())
        assert made.groups["a"].restarts_by_reason() == {"requested": 4}
        assert made.groups["a"].rules.ages(0.0) == []
        assert len(yard.shims["a/1"]) == 1
        assert RestartAsked(target="a/0") in [event for _, event in yard.events]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_no_budget_is_exceeded(seed: int) -> None:
    """Random lives and requests: no window has more restarts than it may (two
    generations at once would raise)."""
    chance = random.Random(seed)

    def lives() -> list[Life]:
        return [
            Life(
                chance.uniform(0.1, 2.0),
                chance.choice((None, 1.0, 4.0)),
                chance.choice((0, 1)),
                chance.choice((0.1, 3.0, None)),
            )
            for _ in range(40)
        ]

    async def story() -> None:
        rules = {"max_restarts": 4, "window_s": 20.0, "policy": "always", "no_progress_cycles": 0}
        strategy = chance.choice(("replica", "group"))
        group = group_of("a", replicas=3, restart={**rules, "strategy": strategy}, stop_timeout_s=5.0)
        plans = {f"a/{index}": lives() for index in range(4)}
        async with fleet(group, lives=plans, on_channel={"a"}) as (made, yard):
            for _ in range(25):
                await asyncio.sleep(chance.uniform(0.1, 4.0))
                target, number = f"a/{chance.randrange(2)}", chance.randrange(2, 5)
                work = chance.choice((made.restart, made.drain, None, None))
                yard.syncs[target] = chance.choice(("", "busy"))
                if work is not None:
                    yard.spawn(functools.partial(work, target))
                elif chance.random() < 0.5:
                    yard.spawn(functools.partial(made.scale, made.groups["a"], number))
                if made.over.is_set():
                    made.reset_failed()
            spent: list[float] = []
            for at, one in yard.events:
                if isinstance(one, FailedReset):
                    spent = []
                elif isinstance(one, Transition) and one.restart_reason not in (None, "requested", "group"):
                    spent = [before for before in spent if before > at - 20.0] + [at]
                    assert len(spent) <= (4 if strategy == "replica" else 12)

    virtually(story())


# ---------------------------------------------------------------- the whole group


@history
async def test_one_that_fails_takes_its_group_with_it_and_all_come_back_together() -> None:
    group = group_of("a", replicas=3, restart={"strategy": "group", "max_restarts": 1})
    lives = {"a/1": [Life(ends_s=5.0, code=1), Life()], "a/2": [Life(stop_s=4.0), Life()]}
    async with fleet(group, group_of("b"), lives=lives) as (made, yard):
        await asyncio.sleep(30)
        assert set(yard.states().values()) == {"ready"}
        again = {at for at, what in yard.moves() if what.startswith("a/") and what.endswith("starting")}
        assert max(again) - min(again - {0.0}) < 0.3
        assert min(again - {0.0}) >= 5.1 + 4.0, "the slowest to end is waited for"
        assert made.groups["a"].restarts_by_reason() == {"exit": 1, "group": 2}
        assert made.groups["a"].rules.remaining(0.0) == 0, "one incident, one restart"
        assert len(yard.shims["b/0"]) == 1


@history
async def test_those_that_end_at_once_wait_for_the_one_that_failed() -> None:
    group = group_of("a", replicas=3, restart={"strategy": "group", "initial_delay_s": 20.0})
    async with fleet(group, lives={"a/1": [Life(ends_s=5.0, code=1), Life()]}) as (_, yard):
        await asyncio.sleep(60)
        again = [at for at, what in yard.moves() if what.endswith("starting") and at > 1.0]
        assert len(again) == 3
        assert 25.0 <= min(again) <= max(again) <= 25.7


@history
async def test_replicas_that_die_of_the_same_thing_are_one_incident() -> None:
    group = group_of("a", replicas=3, restart={"strategy": "group", "max_restarts": 1})
    async with fleet(group, lives={"a": [Life(ends_s=5.0, code=1), Life()]}) as (made, yard):
        await asyncio.sleep(30)
        assert set(yard.states().values()) == {"ready"}
        assert sum(made.groups["a"].restarts_by_reason().values()) == 3


@history
async def test_a_finished_replica_runs_again_when_its_group_starts_over() -> None:
    group = group_of("a", replicas=2, restart={"strategy": "group"})
    lives = {"a/0": [Life(ends_s=1.0), Life(ends_s=1.0)], "a/1": [Life(ends_s=3.0, code=1), Life(ends_s=1.0)]}
    async with fleet(group, lives=lives) as (made, yard):
        await asyncio.wait_for(made.over.wait(), 100)
        assert made.exit_code == 0
        assert len(yard.shims["a/0"]) == 2


# ---------------------------------------------------------------- order


@history
async def test_groups_start_when_what_they_need_is_there() -> None:
    groups = (
        group_of("late", depends_on=["early:finished", "server"]),
        group_of("server", depends_on=["early:ready"]),
        group_of("early"),
    )
    lives = {"early": [Life(start_s=2.0, ends_s=10.0)], "server": [Life(start_s=1.0)]}
    async with fleet(*groups, lives=lives, stop_when=("late",)) as (made, yard):
        await asyncio.sleep(1)
        assert made.groups["late"].status(0.0).replicas[0].reason == "waits for early:finished, server"
        await asyncio.sleep(30)
        starts = {what: at for at, what in yard.moves() if what.endswith("starting")}
        assert 2.0 <= starts["server/0 starting"] < 2.6
        assert 12.0 <= starts["late/0 starting"] < 12.6


@history
async def test_one_that_was_stopped_by_hand_is_not_finished() -> None:
    groups = (group_of("a"), group_of("b", depends_on=["a:finished"]))
    async with fleet(*groups, stop_when=("a",)) as (made, yard):
        await made.drain("a")
        await asyncio.sleep(10)
        assert yard.states() == {"a/0": "drained", "b/0": "pending"}
        assert not made.over.is_set()
        await made.restart("a/0")
        await made.wait_ready([made.groups["a"]])
        assert made.groups["a"].restarts_by_reason() == {}, "it did not run: nothing was restarted"


@history
async def test_the_run_ends_in_reverse_order() -> None:
    groups = (group_of("a"), group_of("b", depends_on=["a"]), group_of("c", depends_on=["b"]))
    async with fleet(*groups, lives={"b": [Life(stop_s=3.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.drain()
        ends = [what for _, what in yard.moves() if what.endswith("drained")]
        assert ends == ["c/0 drained", "b/0 drained", "a/0 drained"]
        kinds = [event for _, event in yard.events if isinstance(event, Draining | Drained)]
        assert [type(event) for event in kinds] == [Draining, Drained]


# ---------------------------------------------------------------- drain


@history
async def test_a_replica_may_finish_its_sync_before_it_is_told_to_stop() -> None:
    async with fleet(group_of("a", drain_timeout_s=60.0), on_channel={"a"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/0"] = "version 3 of policy is being transferred"
        asked = yard.now
        ending = asyncio.create_task(made.drain())
        await asyncio.sleep(20)
        assert yard.draining == ["a/0"]
        assert yard.told_at("a/0") == []
        status = made.groups["a"].status(0.0).replicas[0]
        assert (status.state, status.reason) == (
            "draining",
            "the run ends; present work: version 3 of policy is being transferred",
        )
        del yard.syncs["a/0"]
        made.groups["a"].replicas[0].on_sync_over()
        await ending
        ((told, timeout_s),) = yard.told_at("a/0")
        assert told - asked == pytest.approx(20.0)
        assert timeout_s == 10.0


@history
async def test_a_sync_without_end_is_cut_off_and_one_that_ignores_sigterm_is_killed() -> None:
    group = group_of("a", drain_timeout_s=30.0, stop_timeout_s=7.0)
    async with fleet(group, on_channel={"a"}, lives={"a": [Life(stop_s=None)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/0"] = "it loads version 2 of policy"
        began = yard.now
        await made.drain()
        ((told, timeout_s),) = yard.told_at("a/0")
        assert 30.0 <= told - began <= 30.3
        assert timeout_s == 7.0
        assert 37.0 <= yard.now - began <= 38.0


@history
async def test_a_second_signal_hurries() -> None:
    async with fleet(group_of("a"), group_of("b", depends_on=["a"]), on_channel={"a", "b"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs |= {"a/0": "busy", "b/0": "busy"}
        first = asyncio.create_task(made.drain())
        await asyncio.sleep(5)
        began = yard.now
        await made.drain(hurry=True)
        await first
        assert yard.now - began < 1.0
        assert [yard.told_at(name)[-1][1] for name in ("a/0", "b/0")] == [0.0, 0.0]


@history
async def test_a_sick_replica_is_not_drained() -> None:
    async with fleet(group_of("a"), on_channel={"a"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/0"] = "busy"
        made.groups["a"].replicas[0].member_lost(0, "lease")
        assert yard.draining == []
        assert len(yard.told_at("a/0")) == 1


# -------------------------------------------------------- scale, rolling restart, reset


@history
async def test_scaling_down_drains_the_highest_and_the_index_goes_on_where_it_was() -> None:
    async with fleet(group_of("a", replicas=3), on_channel={"a"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/2"] = "busy"
        scaling = asyncio.create_task(made.scale(made.groups["a"], 2))
        await asyncio.sleep(5)
        assert yard.states()["a/2"] == "draining"
        assert yard.shapes["a"].replicas == 2
        again = asyncio.create_task(made.scale(made.groups["a"], 3))  # while it still drains
        del yard.syncs["a/2"]
        await asyncio.gather(scaling, again)
        await made.wait_ready(made.groups.values())
        assert made.groups["a"].replicas[2].life.generation == 2
        assert [event for _, event in yard.events if isinstance(event, Scaled)] == [
            Scaled(group="a", before=3, after=2),
            Scaled(group="a", before=2, after=3),
        ]


@pytest.mark.parametrize(("most", "away"), [(1, 1), (2, 2), (9, 5)])
def test_a_rolling_restart_keeps_the_others_ready(most: int, away: int) -> None:
    async def story() -> None:
        group = group_of("a", replicas=5, max_unavailable=most)
        async with fleet(group, lives={"a": [Life(start_s=2.0)]}) as (made, yard):
            await made.wait_ready(made.groups.values())
            before, worst, now_away = len(yard.events), 0, set[int]()
            await made.restart("a", rolling=True)
            for _, event in yard.events[before:]:
                if isinstance(event, Transition):
                    (now_away.discard if event.after == "ready" else now_away.add)(event.replica)
                    worst = max(worst, len(now_away))
            assert worst == away
            assert {one.life.generation for one in made.all()} == {2}

    virtually(story())


@history
async def test_a_reload_leaves_those_alone_that_were_stopped_by_hand() -> None:
    async with fleet(group_of("a", replicas=3)) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.drain("a/1")
        chosen = [one for one in made.all() if not one.halted]
        await asyncio.wait_for(made.roll(made.groups["a"], chosen, Cause("reload", "its config has changed")), 60)
        assert yard.states() == {"a/0": "ready", "a/1": "drained", "a/2": "ready"}
        assert made.groups["a"].restarts_by_reason() == {"reload": 2}


@history
async def test_a_rolling_restart_stops_where_a_replica_fails() -> None:
    group = group_of("a", replicas=3, restart={"max_restarts": 0})
    async with fleet(group, lives={"a/0": [Life(), DIES]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        with pytest.raises(errors.WorldError, match=r"a/0 failed \(rank 0 exited with code 1"):
            await made.restart("a", rolling=True)
        assert len(yard.shims["a/1"]) == 1


@history
async def test_reset_failed_starts_again_with_a_full_budget() -> None:
    async with fleet(group_of("a", restart={"max_restarts": 1}), lives={"a": [DIES, DIES, Life()]}) as (made, yard):
        await asyncio.wait_for(made.over.wait(), 100)
        assert made.reset_failed("a") == ("a/0",)
        assert (made.exit_code, made.over.is_set()) == (None, False)
        await made.wait_ready(made.groups.values())
        assert made.groups["a"].rules.remaining(0.0) == 1
        assert made.reset_failed() == ()
        resets = [event for _, event in yard.events if isinstance(event, FailedReset)]
        assert resets == [FailedReset(replicas=("a/0",), groups=("a",))], "the second time there is nothing to forget"


@history
async def test_reset_failed_forgets_what_was_spent_and_says_so() -> None:
    groups = (group_of("a", restart={"max_restarts": 4}), group_of("b"))
    async with fleet(*groups, lives={"a": [DIES, Life()]}) as (made, yard):
        await made.until(lambda: len(yard.shims["a/0"]) == 2)
        await made.wait_ready(made.groups.values())
        assert made.reset_failed() == ()
        resets = [event for _, event in yard.events if isinstance(event, FailedReset)]
        assert resets == [FailedReset(replicas=(), groups=("a",))]
        assert yard.said_of_groups == ["by order (reset-failed): restart budget of group a is full again"]
        assert made.groups["a"].rules.remaining(0.0) == 4


@history
async def test_waiting_is_cut_short_by_a_reset() -> None:
    rules = {"initial_delay_s": 50.0}
    async with fleet(group_of("a", restart=rules), lives={"a": [DIES, Life()]}) as (made, yard):
        await made.until(lambda: yard.states() == {"a/0": "backoff"})
        assert made.reset_failed("a/0") == ("a/0",)
        await made.wait_ready(made.groups.values())
        assert yard.now < 2.0


@history
async def test_what_there_is_not_is_named() -> None:
    async with fleet(group_of("a", replicas=2)) as (made, _):
        for target, text in (
            ("b", 'no group "b"; known: "a"'),
            ("a/7", 'no replica "a/7"'),
            ("a/x", 'no replica "a/x"'),
        ):
            with pytest.raises(errors.UsageError, match=text):
                await made.drain(target)
        await made.drain()
        with pytest.raises(errors.UsageError, match="the run is being drained"):
            await made.restart("a")


# ------------------------------------------------------------ the death of a supervisor


@history
async def test_what_a_dead_supervisor_had_spent_is_spent() -> None:
    group = group_of("a", restart={"max_restarts": 2, "no_progress_cycles": 0}, replicas=2)
    async with fleet(group, lives={"a/0": [DIES, DIES, Life()]}) as (made, yard):
        await made.scale(made.groups["a"], 3)
        await asyncio.sleep(20)
        saved = made.saved(wall=0.0)
    assert (saved["a"].size, saved["a"].configured, len(saved["a"].spent)) == (3, 2, 2)
    async with fleet(group, lives={"a/0": [DIES]}, saved=saved) as (made, yard):
        await asyncio.wait_for(made.over.wait(), 10)
        assert sorted(yard.states()) == ["a/0", "a/1", "a/2"]
        assert made.groups["a"].replicas[0].life.generation == 4
        assert "all restarts are used (2 in" in yard.said_of_groups[0]
        assert made.groups["a"].restarts_by_reason() == {"exit": 2}


@history
async def test_it_is_on_record_as_spent_before_the_next_generation_starts() -> None:
    async with fleet(group_of("a"), lives={"a": [DIES, Life()]}) as (made, yard):
        seen: list[int] = []
        start = yard.context.start_shim

        def spy(*arguments: Any) -> Any:
            seen.append(len(yard.saved["a"].spent))
            return start(*arguments)

        yard.context.start_shim = spy
        await made.until(lambda: len(yard.shims["a/0"]) == 2)
        assert seen[-1] == 1


@history
async def test_a_roll_passes_over_those_that_are_scaled_away() -> None:
    async with fleet(group_of("a", replicas=3), lives={"a": [Life(start_s=5.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        rolling = asyncio.create_task(
            made.roll(made.groups["a"], made.all(), Cause("reload", "its config has changed"))
        )
        await asyncio.sleep(1)
        await made.scale(made.groups["a"], 1)
        await asyncio.wait_for(rolling, 100)
        assert made.groups["a"].restarts_by_reason() == {"reload": 1}
        assert len(yard.shims["a/2"]) == 1


# ---------------------------------------------------------------- what a failure ends


NEVER = {"max_restarts": 0}


@pytest.mark.slow
@history
async def test_a_replica_that_failed_for_good_ends_nothing_else() -> None:
    rollout = group_of("rollout", replicas=2, restart={"no_progress_cycles": 3}, on_failure="replica")
    lives = {"rollout/0": [DIES]}
    async with fleet(group_of("trainer"), rollout, lives=lives, on_channel={"rollout"}) as (made, yard):
        group = made.groups["rollout"]
        await made.until(lambda: len(yard.shims["rollout/0"]) == 3)
        warned = group.status(0.0)
        assert [one.cycles for one in warned.replicas] == [2, 0], "it shows before it ends anything"
        assert (warned.no_progress_cycles, round(warned.no_progress_remaining_ratio, 2)) == (3, 0.33)
        assert warned.restart_budget_remaining_ratio == 0.6
        await asyncio.sleep(1000)
        assert yard.states() == {"trainer/0": "ready", "rollout/0": "failed", "rollout/1": "ready"}
        assert "3 generations in a row without a new step" in group.status(0.0).replicas[0].reason
        assert not made.over.is_set()
        with pytest.raises(errors.WorldError, match="replica rollout/0 failed: "):
            await made.wait_ready([group])
        yard.lives["rollout/0"].append(Life())
        yard.lives["rollout/0"][:3] = [Life()] * 3
        assert made.reset_failed("rollout") == ("rollout/0",)
        await made.until(lambda: set(yard.states().values()) == {"ready"})


@pytest.mark.parametrize("well", ["progressed", "lived long"])
def test_a_replica_that_is_well_again_shows_no_failures(well: str) -> None:
    """The next failure would be the first in a row; before it is well, the third."""

    async def story() -> None:
        group = group_of("a", restart={"no_progress_cycles": 3, "window_s": 600.0})
        async with fleet(group, lives={"a": [DIES, DIES, Life()]}, on_channel={"a"}) as (made, yard):
            await made.until(lambda: len(yard.shims["a/0"]) == 3)
            assert made.groups["a"].status(0.0).replicas[0].cycles == 2
            if well == "progressed":
                yard.steps["a/0"] = 1
            else:
                await asyncio.sleep(601)
            shown = made.groups["a"].status(0.0)
            assert (shown.replicas[0].cycles, shown.no_progress_remaining_ratio) == (0, 1.0)

    virtually(story())


@history
async def test_a_group_is_ready_with_min_ready_and_the_run_ends_below_it() -> None:
    rollout = group_of("rollout", replicas=3, restart=NEVER, on_failure="replica", min_ready=2)
    groups = (group_of("trainer"), rollout, group_of("late", depends_on=["rollout"]))
    lives = {"rollout/0": [Life(ends_s=5.0, code=1)], "rollout/1": [Life(ends_s=60.0, code=1)]}
    async with fleet(*groups, lives=lives) as (made, yard):
        await asyncio.sleep(30)
        assert yard.states()["rollout/0"] == "failed"
        assert made.groups["rollout"].good
        assert yard.states()["late/0"] == "ready"
        await made.wait_ready(made.groups.values())
        assert not made.over.is_set()
        await asyncio.wait_for(made.over.wait(), 60)
        assert made.exit_code == 1
        assert made.ended_by == (
            "group rollout failed (1 of 3 replicas are left) with replica rollout/0: "
            "rank 0 exited with code 1; all restarts are used (0 in 600 s)"
        )


@pytest.mark.parametrize(
    ("rules", "ends"),
    [({}, True), ({"min_ready": 0}, False), ({"on_failure": "group"}, False), ({"targets": ()}, False)],
)
def test_a_run_does_not_go_on_publishing_to_nobody(rules: dict[str, Any], ends: bool) -> None:
    async def story() -> None:
        given = {"on_failure": "replica", **rules}
        targets = given.pop("targets", (ChannelRole("rollout", "all"),))
        rollout = group_of("rollout", replicas=2, restart=NEVER, **given)
        lives = {"rollout/0": [DIES], "rollout/1": [Life(ends_s=60.0, code=1)]}
        async with fleet(group_of("trainer"), rollout, lives=lives) as (made, yard):
            policy = ChannelConfig(name="policy", sources=(ChannelRole("trainer", "all"),), targets=targets)
            yard.context.config = msgspec.structs.replace(yard.config, channels={"policy": policy})
            await asyncio.sleep(40)
            assert not made.over.is_set(), "one is left"
            await asyncio.sleep(40)
            assert made.exit_code == (1 if ends else None)
            assert made.ended_by.startswith(
                "group rollout failed (0 of 2 replicas are left) with replica " if ends else ""
            )
            assert yard.states()["trainer/0"] == "ready"

    virtually(story())


@history
async def test_a_replica_that_will_come_back_does_not_count_as_lost() -> None:
    rules = {"max_restarts": 9, "initial_delay_s": 50.0}
    group = group_of("a", replicas=2, restart=rules, on_failure="replica", min_ready=2)
    async with fleet(group, lives={"a": [Life(ends_s=5.0, code=1), Life()]}) as (made, yard):
        await asyncio.sleep(20)
        assert set(yard.states().values()) == {"backoff"}
        assert not made.groups["a"].good
        assert not made.over.is_set()
        await made.wait_ready(made.groups.values())


@history
async def test_a_replica_takes_its_group_with_it_and_the_run_goes_on() -> None:
    groups = (group_of("trainer"), group_of("a", replicas=3, restart=NEVER, on_failure="group"))
    lives = {"a/1": [Life(ends_s=5.0, code=1), Life()], "a/2": [Life(ends_s=1.0)]}
    async with fleet(*groups, lives=lives) as (made, yard):
        await asyncio.sleep(60)
        assert yard.states() == {"trainer/0": "ready", "a/0": "failed", "a/1": "failed", "a/2": "finished"}
        reasons = [one.reason for one in made.groups["a"].status(0.0).replicas]
        assert reasons[0].startswith("its group failed, with a/1 (rank 0 exited with code 1")
        assert yard.told_at("a/0") == [(yard.told_at("a/0")[0][0], 10.0)], "it has its time to end"
        assert not made.over.is_set()
        assert made.reset_failed("a") == ("a/0", "a/1")
        await made.until(lambda: [yard.states()[name] for name in ("a/0", "a/1")] == ["ready", "ready"])
        assert len(yard.shims["trainer/0"]) == 1


@pytest.mark.parametrize(("min_ready", "code"), [(None, 1), (1, 0), (0, 0)])
def test_a_run_that_waits_for_a_group_ends_when_nobody_of_it_is_left(min_ready: int | None, code: int) -> None:
    async def story() -> None:
        group = group_of("a", replicas=2, restart=NEVER, on_failure="replica", min_ready=min_ready)
        async with fleet(group, group_of("b"), lives={"a/0": [DIES], "a/1": [DONE]}, stop_when=("a",)) as (made, _):
            await asyncio.wait_for(made.over.wait(), 60)
            assert made.exit_code == code
            assert made.ended_by.startswith("group a failed" if code else "done: a finished")

    virtually(story())


@history
async def test_one_that_an_operator_drained_has_not_failed() -> None:
    group = group_of("a", replicas=2, on_failure="replica", min_ready=2)
    async with fleet(group, stop_when=("a",)) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.drain("a/1")
        await asyncio.sleep(100)
        assert yard.states() == {"a/0": "ready", "a/1": "drained"}
        assert not made.groups["a"].good
        assert not made.over.is_set()


# --------------------------------------------------------------- what takes long to die


SLOW = Life(ends_s=5.0, code=1, dies_s=200.0)


@history
async def test_a_process_that_takes_long_to_die_is_waited_for_and_ends_nothing_else() -> None:
    groups = (group_of("trainer"), group_of("rollout", replicas=2, restart={"max_restarts": 1}))
    async with fleet(*groups, lives={"rollout/0": [SLOW, Life()]}) as (made, yard):
        await asyncio.sleep(150)
        assert yard.states() == {"trainer/0": "ready", "rollout/0": "draining", "rollout/1": "ready"}
        assert not made.over.is_set()
        reason = made.groups["rollout"].status(0.0).replicas[0].reason
        assert reason.startswith("rank 0 exited with code 1; held up by process 7 (python slow.py): not dead ")
        (held,) = [one for _, one in yard.events if isinstance(one, HeldUp)]
        assert (held.group, held.replica, held.generation, held.pid) == ("rollout", 0, 1, 7)
        await asyncio.sleep(100)
        assert set(yard.states().values()) == {"ready"}
        assert made.groups["rollout"].restarts_by_reason() == {"exit": 1}
        assert [len(yard.shims[name]) for name in ("trainer/0", "rollout/0", "rollout/1")] == [1, 2, 1]


@history
async def test_one_that_is_done_is_done_when_its_last_process_is_gone() -> None:
    async with fleet(group_of("a"), lives={"a": [Life(ends_s=1.0, dies_s=50.0)]}) as (made, yard):
        await asyncio.sleep(40)
        assert (yard.states(), made.over.is_set()) == ({"a/0": "draining"}, False)
        await asyncio.wait_for(made.over.wait(), 20)
        assert (yard.states(), made.exit_code) == ({"a/0": "finished"}, 0)


def code_of(fleet: Fleet) -> int:
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._preempted, supervisor._fleet = False, fleet
    return supervisor.exit_code


@history
async def test_the_end_of_the_run_leaves_behind_what_does_not_die() -> None:
    async with fleet(group_of("a"), lives={"a": [Life(dies_s=1e6)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        await asyncio.wait_for(made.drain(), 40)
        assert yard.states() == {"a/0": "failed"}
        assert "processes left behind at the end of the run; held up by process 7" in made.all()[0].life.reason
        told = [one for _, one in yard.events if isinstance(one, HeldUp)]
        assert [one.gave_up for one in told] == [False, True]
        assert made.words_of_end == "killed, as they had not ended in time: a/0"
        assert code_of(made) == exit_codes.CUT


@history
async def test_who_is_killed_at_the_end_of_the_run_is_told_by_its_code_unless_it_is_hurried() -> None:
    for hurry in (False, True):
        lives = {"a/0": [Life(stop_s=None)], "a/1": [Life(stop_s=9.0)]}
        async with fleet(group_of("a", replicas=2, stop_timeout_s=10.0), lives=lives) as (made, yard):
            await made.wait_ready(made.groups.values())
            await made.restart("a/0")
            await made.wait_ready(made.groups.values())
            assert code_of(made) == exit_codes.DONE
            (exited,) = [one for _, one in yard.events if isinstance(one, ReplicaExited)]
            assert exited.reason == "restart requested: killed 10 s after SIGTERM"
            await made.drain(hurry=hurry)
            assert made.cut == ([] if hurry else ["a/0"])
            assert code_of(made) == (exit_codes.DONE if hurry else exit_codes.CUT)
            words = "" if hurry else ": killed 10 s after SIGTERM"
            assert made.all()[0].life.reason == f"stopped{words}"


@history
async def test_gpus_of_processes_that_do_not_go_away_are_not_free() -> None:
    group = group_of("a", replicas=2, resources=ResourcesConfig(gpus=1), stop_timeout_s=1.0)
    async with fleet(group, lives={"a/1": [Life(dies_s=50.0)]}) as (made, yard):
        yard.resources.plan(yard.config, Machine(gpus=("0", "1")))
        await made.wait_ready(made.groups.values())
        drain = asyncio.create_task(made.drain("a"))
        await asyncio.sleep(40)
        assert yard.states() == {"a/0": "drained", "a/1": "draining"}
        assert yard.resources.shares("a", 0) == ()
        assert [share.gpus for share in yard.resources.shares("a", 1)] == [("1",)]
        await drain
        assert yard.resources.shares("a", 1) == ()
