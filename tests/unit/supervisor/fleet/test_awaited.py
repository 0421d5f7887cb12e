"""Histories of a supervisor that starts where what may still run cannot be seen: no two
generations of a replica are ever alive at once, and no number is used twice.

Covers: supervisor/agent/machine.py, supervisor/fleet/awaited.py,
supervisor/wire/part_state.py.
"""

from __future__ import annotations

import asyncio
import re

from replicas.config.structs import PlacementConfig, ResourcesConfig
from replicas.coordinator import Readiness
from replicas.core.lives.lease_times import lost_after_s
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.wire.part_state import ExitReport
from tests.support.agents import LEASE_S, OUTLIVES_S, FakeAgent, Field, adopting, field
from tests.support.fleets import Life, group_of
from tests.support.virtual import history


def generations(made: Field) -> dict[str, int]:
    return {replica.name: replica.life.generation for replica in made.fleet.all()}


def leased(made: Field) -> list[str]:
    return sorted(lease.node for lease in made.leases.written)


def reasons(made: Field) -> dict[str, str]:
    return {one.name: one.reason for one in made.fleet.groups["a"].status(0.0).replicas}


@history
async def test_under_a_lost_state_nothing_starts_before_every_lease_is_over() -> None:
    async with field(
        group_of("a", replicas=2, placement=PlacementConfig(spread=True)), lives={"a": [Life(stop_s=3.0)]}
    ) as made:
        made.join("n1")
        far = made.join("n2")
        await asyncio.sleep(5)
        assert {made.where("a/0"), made.where("a/1")} == {"n1", "n2"}
        far.cut = True
        await made.replace_supervisor(lost=True)
        await asyncio.sleep(5)
        assert made.states() == {"a/0": "pending", "a/1": "pending"}
        assert set(reasons(made).values()) == {"waits up to 10 s for old processes on node n2 to end"}
        await asyncio.sleep(lost_after_s(LEASE_S) - 6)
        assert made.states() == {"a/0": "pending", "a/1": "pending"}
        await asyncio.sleep(3)
        assert made.states() == {"a/0": "ready", "a/1": "ready"}
        assert (made.where("a/0"), made.where("a/1")) == ("n1", "n1")
        assert "no longer waiting for processes of earlier supervisors: their time (lease) is over" in made.said


@history
async def test_a_node_says_what_it_runs_and_no_number_is_used_again() -> None:
    """Its replicas, which nobody knows, end first: one dies slowly."""
    async with field(group_of("a", replicas=2), lives={"a/0": [Life(stop_s=None), Life()]}) as made:
        node = made.join("n1")
        await asyncio.sleep(5)
        made.fleet.groups["a"].replicas[1].restart()
        await asyncio.sleep(10)
        assert generations(made) == {"a/0": 1, "a/1": 2}
        for shim in node.shims.values():
            shim.dies_s = 6.0
        await made.replace_supervisor(lost=True)
        await asyncio.sleep(4)
        assert set(reasons(made).values()) == {"waits for an earlier generation to end on node n1"}
        await asyncio.sleep(6)
        assert made.states() == {"a/0": "ready", "a/1": "ready"}
        assert generations(made) == {"a/0": 2, "a/1": 3}


@history
async def test_a_node_with_what_nobody_knows_takes_no_other_replica() -> None:
    """The GPUs of that are not known to be taken."""
    async with field(group_of("a", resources=ResourcesConfig(gpus=1))) as made:
        node = made.join("n1", gpus=1)
        await asyncio.sleep(5)
        (shim,) = node.shims.values()
        shim.dies_s = 1000.0
        await made.replace_supervisor(group_of("b", resources=ResourcesConfig(gpus=1)), lost=True)
        await asyncio.sleep(20)
        assert made.states() == {"b/0": "pending"}
        shim.end(ExitReport("stopped"))
        await asyncio.sleep(2)
        assert made.states() == {"b/0": "ready"}


def own_node(made: Field, scope: str) -> FakeAgent:
    made.own_scope = scope
    made.resources.offer("local", Machine(cpus=1), {})
    agent = made.agents[scope] = FakeAgent(made, "local", local=True, scope=scope)
    return agent


@history
async def test_a_supervisor_in_another_namespace_waits_for_what_it_cannot_see() -> None:
    async with field(group_of("a", replicas=2)) as made:
        old = own_node(made, "first")
        await asyncio.sleep(5)
        before, budget = generations(made), made.fleet.groups["a"].rules.remaining(0.0)
        old.cut = True  # the supervisor is killed, and the agent goes on for the time of adoption
        made.own_scope = "second"
        await made.replace_supervisor()
        new = own_node(made, "second")
        await asyncio.sleep(lost_after_s(OUTLIVES_S) - 2)
        assert [name for name in ("a/0", "a/1") if made.where(name)] == ["a/0", "a/1"], "the old ones, and no others"
        assert not new.shims
        assert made.states() == {"a/0": "draining", "a/1": "draining"}
        assert set(reasons(made).values()) == {
            "the agent of node local died; waits up to 2 s for its processes on node local to end"
        }
        told = [text for text in made.said if "wait up to" in text]
        assert len(told) == 1, "each wait once, and for all that wait for the same"
        assert re.fullmatch(r"a/0, a/1: wait up to \d+ s for its processes on node local to end", told[0])
        for shim in old.shims.values():
            shim.end(ExitReport("stopped"))
        await asyncio.sleep(8)
        assert made.states() == {"a/0": "ready", "a/1": "ready"}

        assert generations(made) == {name: number + 1 for name, number in before.items()}
        assert made.fleet.groups["a"].rules.remaining(0.0) == budget, "none of it is spent"


@history
async def test_an_agent_that_gets_no_other_lease_is_not_waited_for() -> None:
    """Such as that of this machine, when adoption was removed from the config."""
    async with field(group_of("a")) as made:
        own_node(made, "here")
        await asyncio.sleep(5)
        made.context.config = adopting(made.config, 0.0)
        await made.replace_supervisor(lost=True)
        made.resources.offer("local", Machine(cpus=1), {})
        await asyncio.sleep(OUTLIVES_S / 2)
        assert made.states() == {"a/0": "ready"}
        assert [(lease.node, lease.unseen) for lease in made.leases.written] == [("local", False)]


@history
async def test_an_agent_of_another_namespace_does_not_take_the_own_node() -> None:
    async with field(group_of("a")) as made:
        old = own_node(made, "first")
        await asyncio.sleep(5)
        made.own_scope = "second"
        await made.replace_supervisor()
        await asyncio.sleep(2)
        assert old.refused == "a newer agent of this machine has replaced this one"
        own_node(made, "second")
        await asyncio.sleep(1)
        for shim in old.shims.values():
            shim.end(ExitReport("stopped"))
        await asyncio.sleep(40)
        assert made.states() == {"a/0": "ready"}


@history
async def test_an_agent_is_not_taken_while_its_lease_cannot_be_written_down() -> None:
    async with field(group_of("a")) as made:
        made.leases.problem = "No space left on device"
        node = made.join("n1")
        await asyncio.sleep(3)
        assert node.refused == "the supervisor cannot write to disk that this joined (No space left on device)"
        assert made.states() == {"a/0": "pending"}
        assert leased(made) == []
        made.leases.problem = ""
        await asyncio.sleep(5)
        assert made.states() == {"a/0": "ready"}
        assert leased(made) == ["n1"]


@history
async def test_leases_that_are_over_are_forgotten() -> None:
    async with field(group_of("a")) as made:
        one: FakeAgent = made.join("n1")
        made.join("n2")
        await asyncio.sleep(5)
        one.kill()
        one.start_again()
        await asyncio.sleep(5)
        assert sorted(lease.incarnation for lease in made.leases.written) == ["n1.n1.11", "n2.n2.1"]
        one.cut = True
        await asyncio.sleep(lost_after_s(LEASE_S) + 3)
        assert leased(made) == ["n2"]
        one.heal()
        await made.replace_supervisor()
        await asyncio.sleep(5)
        assert leased(made) == ["n1", "n2"]


@history
async def test_a_drained_node_that_leaves_is_not_called_lost() -> None:
    async with field(group_of("a")) as made:
        node = made.join("n1")
        made.join("n2")
        await asyncio.sleep(5)
        await made.nodes().drain("n1")
        await asyncio.sleep(2)
        assert node.over
        assert "node n1: drained: its agent has left" in made.said
        assert not any("lost" in line for line in made.said)


@history
async def test_a_replica_on_a_node_that_is_away_is_not_said_to_be_ready() -> None:
    """Nor is one whose rank is silent. Both go on, and are ready when heard."""
    async with field(group_of("a", replicas=2)) as made:
        made.on_channel.add("a")
        made.views |= dict.fromkeys(("a/0", "a/1"), Readiness(True))
        node = made.join("n1")
        await asyncio.sleep(5)
        group = made.fleet.groups["a"]

        def good() -> bool:
            return group.good

        assert good()
        node.cut = True
        await asyncio.sleep(6)
        assert {one.state for one in group.status(0.0).replicas} == {"silent"}
        assert set(reasons(made).values()) == {"no message from the agent of node n1"}
        assert not good()
        node.heal()
        await asyncio.sleep(2)
        assert good()
        made.views["a/0"] = Readiness(True, heartbeat_age_s=6.0, silent=(0, 2))
        await asyncio.sleep(1)
        assert reasons(made) == {"a/0": "no heartbeat from rank 0, 2 (limit: 30 s)", "a/1": ""}
        assert 6.0 <= group.replicas[0].status(asyncio.get_running_loop().time()).state_age_s <= 7.0
        assert not good()
        made.views["a/0"] = Readiness(True, heartbeat_age_s=1.0)
        await asyncio.sleep(1)
        assert good()
        assert generations(made) == {"a/0": 1, "a/1": 1}
        told = [event for _, event in made.events if isinstance(event, Transition) and event.replica == 0]
        assert [event.after for event in told[2:]] == ["silent", "ready", "silent", "ready"], "once for each silence"
        assert (told[4].silent_s, told[5].reason) == (6.0, "heard after 7.0 s")
        assert "a/0: silent: no heartbeat from rank 0, 2 (limit: 30 s)" in made.said
        assert "a/0: ready again (heard after 7.0 s)" in made.said


@history
async def test_a_token_does_not_end_while_a_node_may_know_no_other() -> None:
    """One that was away when the token was replaced is told when it is back."""
    async with field(group_of("a")) as made:
        node = made.join("n1")
        await asyncio.sleep(3)
        assert made.cluster.unreached() == ()
        node.cut = True
        await asyncio.sleep(2.5)
        assert made.cluster.unreached() == ("n1",), "before it is called away"
        node.hang_up()
        made.operator_token = "second"
        made.cluster.send_tokens()
        await asyncio.sleep(2)
        assert made.cluster.unreached() == ("n1",)
        node.heal()
        await asyncio.sleep(2)
        assert made.cluster.unreached() == ()
        assert node.token == "second"
        node.cut = True
        await asyncio.sleep(20)
        assert made.cluster.unreached() == (), "nothing runs on a node that is lost"
