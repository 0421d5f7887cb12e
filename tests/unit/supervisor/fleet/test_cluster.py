"""Histories of fleets over several nodes, in virtual time: nodes that come, go, freeze,
are cut off and come back.

Covers: supervisor/fleet/admission.py, supervisor/fleet/cluster.py,
supervisor/fleet/nodes.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec
import pytest

from replicas.config.structs import ClusterConfig, HealthConfig, PlacementConfig, ResourcesConfig
from replicas.control.exit_codes import USAGE
from replicas.coordinator import Readiness
from replicas.core.lives.lease_times import BEAT_S, lost_after_s
from replicas.errors import UsageError, WorldError
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.nodes import ANSWER_S
from replicas.supervisor.state.run_state import ShimRecord
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import ExitReport
from replicas.telemetry.events import HeldUp, NodeChanged
from tests.support.agents import LEASE_S, FakeAgent, Field, _Link, adopting, field
from tests.support.fleets import Life, config_of, group_of
from tests.support.virtual import history, virtually

SPREAD = PlacementConfig(spread=True)


def changes(made: Field, node: str) -> list[str]:
    return [one.after for _, one in made.events if isinstance(one, NodeChanged) and one.node == node]


@history
async def test_replicas_wait_for_a_node_and_start_when_it_comes() -> None:
    async with field(group_of("a", replicas=2, placement=PlacementConfig(labels={"pool": "x"}))) as made:
        await asyncio.sleep(5)
        assert made.states() == {"a/0": "pending", "a/1": "pending"}
        assert made.fleet.groups["a"].status(0.0).replicas[0].reason == "waits for a node: no agent has joined"
        made.join("n1")
        await asyncio.sleep(2)
        assert made.fleet.groups["a"].status(0.0).replicas[0].reason == "waits for a node with pool=x"
        made.join("n2", labels={"pool": "x"})
        await asyncio.sleep(2)
        assert set(made.states().values()) == {"ready"}
        assert made.where("a/0") == made.where("a/1") == "n2"


@history
async def test_the_replicas_of_a_lost_node_start_elsewhere_when_the_lease_is_over() -> None:
    async with field(group_of("a", replicas=4, placement=SPREAD, restart={"max_restarts": 0})) as made:
        one, _ = made.join("n1"), made.join("n2")
        await asyncio.sleep(3)
        there = [name for name in made.states() if made.where(name) == "n1"]
        assert len(there) == 2
        one.cut = True
        cut_at = made.now
        await asyncio.sleep(LEASE_S)
        silent = {name for name, state in made.states().items() if state == "silent"}
        assert silent == set(there), "it may come back"
        await asyncio.sleep(lost_after_s(LEASE_S) - LEASE_S + 3)
        assert {made.where(name) for name in made.states()} == {"n2"}
        starts = [at for at, state in made.moves(there[0]) if state == "starting"]
        heard_at = cut_at - BEAT_S
        assert lost_after_s(LEASE_S) <= starts[-1] - heard_at <= lost_after_s(LEASE_S) + 2
        group = made.fleet.groups["a"].status(0.0)
        assert group.restarts == {"node": 2}
        assert group.restart_budget_remaining_ratio == 1.0
        assert changes(made, "n1") == ["up", "away", "lost"]
        one.heal()  # it comes back, with nothing
        one.hang_up()
        await asyncio.sleep(3)
        assert changes(made, "n1")[-1] == "up"
        assert {made.where(name) for name in made.states()} == {"n2"}


@pytest.mark.parametrize("seconds", [1.0, 4.0, 7.0])
@pytest.mark.parametrize("closed", [True, False])
def test_a_short_absence_changes_nothing(seconds: float, closed: bool) -> None:
    async def story() -> None:
        async with field(group_of("a")) as made:
            one = made.join("n1")
            made.join("n2")
            await asyncio.sleep(3)
            shims = list(one.shims)
            one.cut = True
            if closed:
                one.hang_up()
            await asyncio.sleep(seconds)
            one.heal()
            await asyncio.sleep(5)
            assert made.states() == {"a/0": "ready"}
            assert list(one.shims) == shims
            assert made.fleet.groups["a"].status(0.0).restarts == {}

    virtually(story())


def told_by_coordinator(made: Field) -> None:
    for replica in made.fleet.groups["a"].replicas.values():
        replica.member_lost(0, "lease")


def seen_by_supervisor(made: Field) -> None:
    """Its look at the members may be the first to find their heartbeats too old."""
    old = Readiness(ready=True, heartbeat_age_s=4.1)
    made.context.on_channel = lambda group: True  # type: ignore[method-assign]
    made.readiness = lambda *_: old  # type: ignore[method-assign]
    for replica in made.fleet.groups["a"].replicas.values():
        replica.check(asyncio.get_running_loop().time())
    made.context.on_channel = lambda group: False  # type: ignore[method-assign]


@pytest.mark.parametrize("notice", [told_by_coordinator, seen_by_supervisor])
@pytest.mark.parametrize("lost", [True, False])
def test_members_that_are_silent_with_their_node_spend_no_budget(
    *, lost: bool, notice: Callable[[Field], None]
) -> None:
    """A rank that is silent alone does."""

    async def story() -> None:
        health = HealthConfig(heartbeat_timeout_s=4.0)
        async with field(group_of("a", replicas=2, restart={"max_restarts": 1}, health=health)) as made:
            one, _ = made.join("n1"), made.join("n2")
            await asyncio.sleep(3)
            assert {made.where(name) for name in made.states()} == {"n1"}
            one.cut = True
            await asyncio.sleep(4)
            notice(made)
            await asyncio.sleep(lost_after_s(LEASE_S) if lost else 2)
            one.heal()
            await asyncio.sleep(30)
            assert set(made.states().values()) == {"ready"}
            group = made.fleet.groups["a"].status(0.0)
            assert group.restarts == {"node": 2}
            assert group.restart_budget_remaining_ratio == 1.0
            made.fleet.groups["a"].replicas[0].member_lost(0, "lease")
            await asyncio.sleep(30)
            assert made.fleet.groups["a"].status(0.0).restarts == {"node": 2, "heartbeat_timeout": 1}

    virtually(story())


@history
async def test_members_of_a_replica_that_has_ended_are_judged_no_more() -> None:
    """Their leases end later than their node's agent is known to have died."""
    async with field(group_of("a", restart={"max_restarts": 1})) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        one.kill()
        one.start_again()
        await asyncio.sleep(1.5)
        told_by_coordinator(made)
        await asyncio.sleep(20)
        assert made.states() == {"a/0": "ready"}
        assert made.fleet.groups["a"].status(0.0).restarts == {"node": 1}


@history
async def test_nobody_says_of_a_silent_node_that_its_processes_do_not_die() -> None:
    """Its lease is waited for, and nothing is known of them meanwhile."""
    async with field(group_of("a", stop_timeout_s=1.0)) as made:
        made.context.config = adopting(made.config, 3 * LEASE_S)
        one = made.join("n1")
        await asyncio.sleep(3)
        one.cut = True
        await asyncio.sleep(4)
        told_by_coordinator(made)
        await asyncio.sleep(lost_after_s(3 * LEASE_S))
        assert changes(made, "n1")[-1] == "lost"
        assert not [event for _, event in made.events if isinstance(event, HeldUp)]
        one.heal()
        await asyncio.sleep(5)


@history
async def test_last_words_of_a_dead_node_do_not_make_its_ranks_pay() -> None:
    """A link that is back delivers what a dead agent had sent, and its end."""
    async with field(group_of("a", restart={"max_restarts": 1})) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        one.cut = True
        await asyncio.sleep(3.2)
        one.heal()  # beats that were under way arrive
        one.kill()
        await asyncio.sleep(0.3)
        told_by_coordinator(made)
        await asyncio.sleep(5)
        one.start_again()
        await asyncio.sleep(30)
        assert made.states() == {"a/0": "ready"}
        assert made.fleet.groups["a"].status(0.0).restarts == {"node": 1}


@pytest.mark.parametrize("replaced", [False, True])
def test_an_agent_of_the_same_name_elsewhere_waits_for_the_lease_of_the_first(*, replaced: bool) -> None:
    """It cannot end what the first one, which is cut off, still runs."""
    history(functools.partial(waits_for_the_first, replaced=replaced))()


async def waits_for_the_first(*, replaced: bool) -> None:
    async with field(group_of("a", restart={"max_restarts": 1})) as made:
        one = made.agents["cut off"] = made.join("n1", scope="here")
        await asyncio.sleep(3)
        one.cut = True
        await asyncio.sleep(5)
        one.hang_up()
        made.join("n1", scope="there")
        await asyncio.sleep(0.5)
        if replaced:
            await made.replace_supervisor()
        await asyncio.sleep(3)
        assert made.where("a/0") == "n1"
        assert len([shim for shim in one.shims.values() if shim.alive]) == 1
        await asyncio.sleep(lost_after_s(LEASE_S) + (3 if replaced else 3 - 9))
        assert made.states() == {"a/0": "ready"}
        assert [shim.alive for shim in made.agents["n1"].shims.values()] == [True]
        assert made.fleet.groups["a"].status(0.0).restarts == {"node": 1}


@history
async def test_a_supervisor_with_a_shorter_lease_waits_for_that_of_the_one_before() -> None:
    async with field(group_of("a")) as made:
        made.join("n1")
        await asyncio.sleep(1)
        config = adopting(made.config, 0.0)
        made.context.config = msgspec.structs.replace(config, cluster=ClusterConfig(lease_s=2.0))
        again = made.new_cluster()
        again.expect(made.cluster.records(), ())
        began = asyncio.get_running_loop().time()
        while again.status()[0].state != "lost":
            await asyncio.sleep(BEAT_S / 2)
            again.tick()
        assert asyncio.get_running_loop().time() - began == pytest.approx(lost_after_s(LEASE_S), abs=BEAT_S)


@history
async def test_gpus_of_what_is_not_taken_over_are_free_when_it_is_gone() -> None:
    """A group that the next supervisor's config has not, or that others start now."""
    async with field(group_of("a")) as made:
        await made.fleet.drain()
        made.join("n1", gpus=2)
        await asyncio.sleep(2)
        nodes = made.nodes()
        nodes.adopting = True
        records = tuple(
            ShimRecord(nonce=name, group=name, replica=0, generation=1, agent="n1", gpus=(gpu,))
            for name, gpu in (("removed", "0"), ("external", "1"))
        )
        nodes._expected = made.cluster.expect(made.cluster.records(), records)
        handles = [handle for _, handle in nodes._expected]
        config = config_of(group_of("a"), group_of("external", launcher="external"))
        assert nodes.adopted(config) == {}
        assert all(handle.stopping for handle in handles)
        assert made.resources.free_on("n1") == ()
        for handle in handles:
            handle.end(ExitReport("stopped"))
        assert made.resources.free_on("n1") == ("0", "1")


@history
async def test_two_agents_of_one_machine_do_not_offer_a_gpu_twice() -> None:
    async with field(group_of("a", resources=ResourcesConfig(gpus=1))) as made:
        made.join("n1", gpus=2, scope="m")
        await asyncio.sleep(2)
        other, elsewhere = made.join("n2", gpus=1, scope="m"), made.join("n3", gpus=1, scope="another")
        await asyncio.sleep(2)
        assert (other.refused, elsewhere.refused) == (
            "node n1 is on the same machine and offers its GPUs 0 already: "
            "give each agent its own CUDA_VISIBLE_DEVICES",
            "",
        )
        assert [node.name for node in made.cluster.status()] == ["n1", "n3"]


@history
async def test_orders_and_news_that_were_lost_on_the_way_are_repeated() -> None:
    """Those given while nobody knew that the node was cut off."""
    async with field(group_of("a", replicas=1), lives={"a": [Life(ends_s=4.0, code=1), Life()]}) as made:
        one = made.join("n1")
        await asyncio.sleep(2)
        one.cut = True  # it ends meanwhile, and its end is not told
        await asyncio.sleep(6)
        assert made.states() == {"a/0": "silent"}
        one.heal()
        one.hang_up()
        await asyncio.sleep(3)
        assert made.states() == {"a/0": "ready"}
        assert made.fleet.groups["a"].status(0.0).restarts == {"exit": 1}
        one.cut = True
        made.fleet.groups["a"].replicas[0].restart()
        await asyncio.sleep(1)
        one.heal()
        one.hang_up()
        await asyncio.sleep(5)
        assert made.fleet.groups["a"].status(0.0).restarts == {"exit": 1, "requested": 1}
        assert made.states() == {"a/0": "ready"}


@history
async def test_a_killed_agent_s_replicas_start_again_when_nothing_is_left_of_them() -> None:
    async with field(group_of("a", replicas=2)) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        one.kill()
        await asyncio.sleep(1)
        one.start_again()
        await asyncio.sleep(2)
        assert all(state in ("starting", "draining", "ready", "silent") for state in made.states().values())
        await asyncio.sleep(6)
        assert set(made.states().values()) == {"ready"}
        assert made.fleet.groups["a"].status(0.0).restarts == {"node": 2}


@history
async def test_a_frozen_agent_s_replicas_end_with_their_lease() -> None:
    async with field(group_of("a", replicas=1)) as made:
        one, _ = made.join("n1"), made.join("n2")
        await asyncio.sleep(3)
        assert made.where("a/0") == "n1"
        one.freeze()
        await asyncio.sleep(lost_after_s(LEASE_S) + 3)
        assert made.where("a/0") == "n2"
        one.thaw()
        one.hang_up()
        await asyncio.sleep(5)
        assert changes(made, "n1")[-1] == "up"
        assert made.where("a/0") == "n2"


@history
async def test_a_drained_node_gives_its_replicas_away() -> None:
    async with field(group_of("a", replicas=2)) as made:
        made.join("n1")
        await asyncio.sleep(3)
        made.join("n2")
        await asyncio.sleep(2)
        await asyncio.wait_for(made.nodes().drain("n1"), 30)
        await asyncio.sleep(2)
        assert {made.where(name) for name in made.states()} == {"n2"}
        assert [node.name for node in made.cluster.status()] == ["n2"]
        assert made.agents["n1"].over == "the node is drained"


@history
async def test_a_drain_that_is_undone_sends_no_agent_away() -> None:
    """Nor later, when the node happens to be empty."""
    lives = {"a/0": [Life(stop_s=0.1)], "a/1": [Life(stop_s=8.0), Life()]}
    async with field(group_of("a", replicas=2), lives=lives) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        made.join("n2")
        await asyncio.sleep(2)
        nodes = made.nodes()
        drained = asyncio.create_task(nodes.drain("n1"))
        await asyncio.sleep(2)
        await nodes.drain("n1", undo=True)
        with pytest.raises(WorldError, match="the drain of node n1 ends"):
            await asyncio.wait_for(drained, 5)
        await asyncio.sleep(60)
        assert made.where("a/1") == "n1"
        await made.fleet.scale(made.fleet.groups["a"], 1)
        await asyncio.sleep(10)
        assert not one.over
        assert changes(made, "n1")[-1] == "up"


@history
async def test_a_drain_ends_with_the_agent_that_it_was_for() -> None:
    """One that is killed before its drain is done is followed by one that stays."""
    async with field(group_of("a"), lives={"a": [Life(stop_s=20.0), Life()]}) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        nodes = made.nodes()
        drained = asyncio.create_task(nodes.drain("n1"))
        await asyncio.sleep(2)
        one.kill()
        one.start_again()
        with pytest.raises(WorldError, match="the agent was replaced"):
            await asyncio.wait_for(drained, 5)
        await asyncio.sleep(30)
        assert not one.over
        assert made.where("a/0") == "n1"


@history
async def test_a_drained_agent_that_was_away_is_let_go_when_it_is_back() -> None:
    async with field(group_of("a")) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        made.join("n2")
        drained = asyncio.create_task(made.nodes().drain("n1"))
        await made.fleet.until(lambda: made.cluster.is_empty("n1"))
        one.cut = True
        one.hang_up()
        await asyncio.wait_for(drained, 5)
        one.heal()
        await asyncio.sleep(3)
        assert one.over == "the node is drained"
        assert [node.name for node in made.cluster.status()] == ["n2"]


@history
async def test_the_next_supervisor_goes_on_with_the_drain_of_a_node() -> None:
    async with field(group_of("a")) as made:
        made.join("n1")
        await asyncio.sleep(1)
        made.cluster.drain("n1")
        again = made.new_cluster()
        again.expect(made.cluster.records(), ())
        assert again.members["n1"].life.duty == "draining"


@history
async def test_gpus_of_a_node_are_given_once() -> None:
    group = group_of("a", replicas=3, resources=ResourcesConfig(gpus=2))
    async with field(group) as made:
        made.join("n1", gpus=4)
        await asyncio.sleep(3)
        assert sorted(made.states().values()) == ["pending", "ready", "ready"]
        made.join("n2", gpus=2)
        await asyncio.sleep(3)
        assert set(made.states().values()) == {"ready"}
        assert {node.name: node.gpus_free for node in made.cluster.status()} == {"n1": 0, "n2": 0}


@history
async def test_a_part_waits_for_a_node_with_as_many_cpus() -> None:
    wide = group_of("a", replicas=2, nproc_per_node=4, resources=ResourcesConfig(cpu_threads=2))
    async with field(wide) as made:
        made.join("n1", cpus=7)
        await asyncio.sleep(3)
        (first, _) = made.fleet.groups["a"].status(0.0).replicas
        assert (first.state, first.reason) == ("pending", "waits for 8 CPUs (at most 7 on a node)")
        made.join("n2", cpus=8)
        await asyncio.sleep(3)
        assert made.where("a/0") == made.where("a/1") == "n2", "they share its CPUs"


@history
async def test_a_node_that_goes_away_before_a_start_is_no_failure_of_the_replica() -> None:
    group = group_of("a", restart={"max_restarts": 0})
    async with field(group) as made:
        one = made.join("n1")
        await asyncio.sleep(2)
        one.cut = True
        one.hang_up()
        await asyncio.sleep(0.1)
        spec = PartSpec("r", "a", 0, 2, 0, 1, 1, "exec", ("x",), {}, "/", "/", 1.0, "another")
        handle = made.cluster.start_shim(spec, lambda: None)
        assert handle.state.gone
        assert handle.state.report == ExitReport("node", text="node n1 is away: nothing can start there")
        one.heal()


@history
async def test_two_agents_of_one_name() -> None:
    async with field(group_of("a")) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        second = FakeAgent(made, "n1")
        second.incarnation = "other"
        await asyncio.sleep(3)
        assert made.cluster.status()[0].state == "up"
        assert made.states() == {"a/0": "ready"}
        assert len(one.shims) == 1
        second._task.cancel()


@history
async def test_an_agent_of_another_protocol_is_refused() -> None:
    async with field(group_of("a")) as made:
        one = made.join("n1")
        await asyncio.sleep(2)
        answers: list[wire.Order] = []

        class Link(_Link):
            def send(self, data: bytes) -> None:
                answers.append(wire.decode_order(data))

        old = wire.Hello(protocol=99, release="9", node="n2", incarnation="x", pid=1, start_time=1, scope="")
        assert made.cluster.hello(old, Link(one), local=False, seen_at="") is None
        (refused,) = answers
        assert isinstance(refused, wire.Refused)
        assert "speaks protocol 99, the supervisor 2" in refused.message
        assert [node.name for node in made.cluster.status()] == ["n1"]


# ------------------------------------------------------------ nodes that do not come


def waiting_for(made: Field, nodes: int, timeout_s: float = 60.0) -> None:
    """The run waits for so many nodes before its first replica starts."""
    cluster = ClusterConfig(local=False, min_nodes=nodes, join_timeout_s=timeout_s)
    made.context.config = msgspec.structs.replace(made.config, cluster=cluster)
    made.resources.plan(made.config, Machine())


@history
async def test_a_run_whose_nodes_do_not_come_fails_in_time() -> None:
    async with field(group_of("a", replicas=2)) as made:
        waiting_for(made, 3)
        made.resources.expected = ("n1", "n2", "n3")
        made.join("n1")
        await asyncio.sleep(59)
        assert made.states() == {"a/0": "pending", "a/1": "pending"}
        assert not made.fleet.over.is_set()
        await asyncio.sleep(2)
        assert (made.fleet.over.is_set(), made.fleet.exit_code) == (True, USAGE)
        assert made.fleet.ended_by == (
            "1 of 3 nodes (cluster.min_nodes) joined within 60 s, without n2, n3 (see the logs of the other agents; "
            "lower cluster.min_nodes, or raise cluster.join_timeout)"
        )
        assert made.said[-1] == made.fleet.ended_by


@history
async def test_nodes_that_come_in_time_are_not_counted_again() -> None:
    """Nor after one is lost, or the config is read again."""
    async with field(group_of("a", replicas=2, placement=SPREAD)) as made:
        waiting_for(made, 2)
        one = made.join("n1")
        await asyncio.sleep(50)
        made.join("n2")
        await asyncio.sleep(2)
        assert set(made.states().values()) == {"ready"}
        one.kill()
        await asyncio.sleep(lost_after_s(LEASE_S) + 5)
        waiting_for(made, 2)  # a reload
        made.fleet.replica("a", 0).restart()  # type: ignore[union-attr]  # it is there
        await asyncio.sleep(100)
        assert set(made.states().values()) == {"ready"}
        assert made.fleet.exit_code is None


@history
async def test_the_time_for_nodes_does_not_run_while_nobody_waits_for_them() -> None:
    """Before a replica may start at all, and while the supervisor is paused."""
    async with field(group_of("a", depends_on=["x"]), group_of("x", launcher="external")) as made:
        waiting_for(made, 2)
        await asyncio.sleep(200)
        assert not made.fleet.over.is_set()
        made.joins("x/0", "1")
        await asyncio.sleep(30)
        asyncio.get_running_loop().clock_s += 3600.0  # type: ignore[attr-defined]  # a virtual loop
        await asyncio.sleep(20)
        assert not made.fleet.over.is_set()
        await asyncio.sleep(15)
        assert made.fleet.exit_code == USAGE
        assert "0 of 2 nodes (cluster.min_nodes) joined within 60 s (see" in made.fleet.ended_by


@history
async def test_a_reload_changes_how_many_nodes_are_waited_for() -> None:
    async with field(group_of("a")) as made:
        waiting_for(made, 2)
        made.join("n1")
        await asyncio.sleep(50)
        waiting_for(made, 1)
        await asyncio.sleep(2)
        assert made.states() == {"a/0": "ready"}


# ---------------------------------------------------------------- doctor


async def examined(made: Field, *nodes: str) -> tuple[list[tuple[str, str, str]], float]:
    """Node, state and text of each finding, and for how long they were waited for."""
    began = made.now
    asked = [made.nodes().examine(name) for name in nodes]
    found = [one for each in await asyncio.gather(*asked) for one in each]
    return [(one.node, one.state, one.text) for one in found], made.now - began


@history
async def test_a_doctor_asks_all_nodes_at_once_and_says_which_are_away() -> None:
    async with field(group_of("a")) as made:
        for name in ("n1", "n2", "n3", "n4"):
            made.join(name)
        await asyncio.sleep(3)
        made.agents["n2"].frozen = True
        found, took_s = await examined(made, "n1", "n2")
        assert took_s == ANSWER_S
        assert ("n1", "ok", "none on n1") in found
        assert ("n2", "problem", f"its agent does not answer within {ANSWER_S:.0f} s") in found
        made.agents["n2"].thaw()
        made.agents["n3"].cut = True
        await asyncio.sleep(5)
        found, took_s = await examined(made, "n1", "n3", "n4")
        assert took_s < 1, "nobody waits for a node that is away"
        assert [line for line in found if line[1] == "problem"] == [
            ("n3", "problem", "away: its agent has sent nothing for 5 s")
        ]
        assert [line[0] for line in found if line[2].startswith("none on")] == ["n1", "n4"]
        made.agents["n4"].hang_up()
        made.agents["n4"].cut = True
        found, took_s = await examined(made, "n4")
        assert (len(found), took_s) == (1, 0.0)


@history
async def test_a_doctor_says_to_a_node_what_the_run_asks_of_it() -> None:
    async with field(group_of("a", replicas=2, nproc_per_node=3), group_of("b", replicas=0)) as made:
        made.join("n1")
        made.join("n2")
        await asyncio.sleep(3)
        nodes = made.nodes()
        found = await nodes.examine(None)
        assert {one.node for one in found} == {"n1", "n2"}
        (first,), (second,) = made.agents["n1"].asked, made.agents["n2"].asked
        assert sorted((first.demand.processes, second.demand.processes)) == [0, 2 + 2 * 3]
        assert {first.supervisor, second.supervisor} == {0}
        with pytest.raises(UsageError, match=r'no node "n9" \(its nodes are n1, n2\)'):
            await nodes.examine("n9")


@history
async def test_a_node_that_goes_away_while_it_is_asked_ends_the_question_in_time() -> None:
    async with field(group_of("a")) as made:
        one = made.join("n1")
        await asyncio.sleep(3)
        one.frozen = True
        asking = asyncio.create_task(examined(made, "n1"))
        await asyncio.sleep(0.1)
        one.hang_up()
        one.cut = True
        found, took_s = await asking
        assert took_s <= ANSWER_S
        assert [line[1] for line in found] == ["problem"]


@history
async def test_a_lost_node_is_forgotten_when_it_is_drained() -> None:
    async with field(group_of("a")) as made:
        one, _ = made.join("n1"), made.join("n2")
        await asyncio.sleep(3)
        one.kill()
        await asyncio.sleep(lost_after_s(LEASE_S) + 3)
        assert changes(made, "n1")[-1] == "lost"
        found, _ = await examined(made, "n1")
        assert [line[1] for line in found] == ["problem"]
        await asyncio.wait_for(made.nodes().drain("n1"), 5)
        assert [node.name for node in made.cluster.status()] == ["n2"]
        one.start_again()
        await asyncio.sleep(3)
        assert changes(made, "n1")[-1] == "up"
