"""The bundles of a run on Ray, with a stand-in for Ray: those that a drain or a reload
takes away are replaced, and what Ray says is told. (tests/engines has a real one.)

Covers: cli/ray_command.py, integrations/ray_run.py.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replicas import errors
from replicas.config.file import parse
from replicas.config.structs import Config
from replicas.telemetry.events import Record, Reloaded, Scaled

pytestmark = pytest.mark.anyio


class RayError(Exception):
    pass


class AuthenticationError(RayError):
    pass


class Ray:
    """Bundles that were asked for and not given back, and the agents in them."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[list[dict[str, float]], list[dict[str, str]] | None]] = {}
        self.agents: dict[str, asyncio.Future[int]] = {}
        """By the name of the bundle: what ends its agent, with a code or an error."""
        self.killed = 0
        self._numbers = itertools.count()
        self.init: Callable[..., None] = lambda **_: None

    def reserve(self, bundles: list[dict[str, float]], bundle_label_selector: Any = None, **_: Any) -> int:
        number = next(self._numbers)
        self.places[number] = (bundles, bundle_label_selector)
        return number

    def remove(self, place: int) -> None:
        del self.places[place]

    def actor(self) -> Any:
        def serve(join: str, name: str, *_: Any) -> asyncio.Future[int]:
            made = self.agents[name] = asyncio.get_running_loop().create_future()
            return made

        return SimpleNamespace(serve=SimpleNamespace(remote=serve))

    def kill(self, _: Any) -> None:
        self.killed += 1

    def modules(self) -> dict[str, ModuleType]:
        remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.actor))
        exceptions = SimpleNamespace(RayError=RayError, AuthenticationError=AuthenticationError)
        return {
            "ray": module(
                remote=lambda _: remote, kill=self.kill, exceptions=exceptions, init=lambda **k: self.init(**k)
            ),
            "ray.util": module(),
            "ray.util.placement_group": module(placement_group=self.reserve, remove_placement_group=self.remove),
            "ray.util.scheduling_strategies": module(PlacementGroupSchedulingStrategy=lambda *_, **__: None),
        }


def module(**names: Any) -> ModuleType:
    made = ModuleType("stand_in")
    for name, value in names.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def ray_run(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, made in ray.modules().items():
        monkeypatch.setitem(sys.modules, name, made)
    module = importlib.import_module("replicas.integrations.ray_run")
    monkeypatch.setattr(module, "invitation", lambda _: "token@host:1")
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    yield module
    del sys.modules["replicas.integrations.ray_run"]


class Supervisor:
    """``size``: of its only group; ``nodes``: of agents that have joined."""

    def __init__(self, config: Config) -> None:
        self.config, self.size = config, 2
        self.last_event = 0
        self.fleet = SimpleNamespace(draining=False, over=asyncio.Event())
        self.nodes: dict[str, tuple[str, ...]] = {}
        self.drained: list[str] = []
        self.said: list[str] = []
        self._records: asyncio.Queue[Record] = asyncio.Queue()

    def status(self) -> Any:
        nodes = [SimpleNamespace(name=name, state="up", replicas=of) for name, of in self.nodes.items()]
        return SimpleNamespace(groups=[SimpleNamespace(name="a", size=self.size)], nodes=nodes)

    def say(self, text: str) -> None:
        self.said.append(text)

    async def drain_node(self, node: str) -> None:
        self.drained.append(node)

    def tell(self, event: Any) -> None:
        self._records.put_nowait(Record(seq=1, at=0.0, event=event))

    async def events(self, _: int) -> Any:
        while True:
            yield await self._records.get()


MOVED = Scaled(group="a", before=2, after=2)
"""Any event upon which bundles are looked at."""


def config(**placement: str) -> Config:
    group = {"launcher": "exec", "command": ["/bin/sleep", "1"], "replicas": 2, "placement": {"labels": placement}}
    return parse({"schema_version": 1, "run": {"name": "grpo"}, "groups": {"a": group}})


class RayWorld:
    def __init__(self, ray: Ray, ray_run: Any) -> None:
        self.ray, self._adapted = ray, ray_run.adapt_config
        self.supervisor = Supervisor(self._adapted(config(pool="x"), "10.0.0.1"))
        self.bundles = ray_run._Bundles(self.supervisor)
        self.bundles.request_bundles()

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def joined(self) -> None:
        """The agents are nodes with a replica on each, and the replicas start."""
        await self.settled()
        self.supervisor.nodes = {f"{name}-1234abcd": (f"a/{index}",) for index, name in enumerate(self.ray.agents)}
        self.supervisor.tell(MOVED)
        await self.settled()

    async def end(self, name: str, code: int | Exception = 0) -> None:
        agent = self.ray.agents.pop(name)
        self.supervisor.nodes.pop(f"{name}-1234abcd", None)
        agent.set_exception(code) if isinstance(code, Exception) else agent.set_result(code)
        await self.settled()

    def reload(self, **placement: str) -> None:
        self.supervisor.config = self._adapted(config(**placement), "10.0.0.1")
        self.supervisor.tell(Reloaded(changed=("a",), added=(), removed=()))


@pytest.fixture
async def world(ray: Ray, ray_run: Any) -> Any:
    made = RayWorld(ray, ray_run)
    yield made
    for task in made.bundles._tasks:
        task.cancel()


async def test_a_bundle_whose_node_was_drained_is_replaced(world: RayWorld) -> None:
    await world.joined()
    assert [*world.ray.agents] == ["a-0", "a-1"]
    await world.end("a-0")
    assert [*world.ray.agents] == ["a-1", "a-2"]
    assert [bundles for bundles, _ in world.ray.places.values()] == [[{"CPU": 1.0}] * 2, [{"CPU": 1.0}]]
    await world.end("a-1")
    assert [*world.ray.agents] == ["a-2", "a-3"]
    assert len(world.ray.places) == 2, "the first placement group has gone with its last bundle"


@pytest.mark.parametrize("ending", ["draining", "over", "smaller"])
async def test_a_bundle_that_nobody_wants_any_more_is_not(ending: str, world: RayWorld) -> None:
    await world.joined()
    if ending == "draining":
        world.supervisor.fleet.draining = True
    elif ending == "over":
        world.supervisor.fleet.over.set()
    else:
        world.supervisor.size = 1
    await world.end("a-0")
    assert [*world.ray.agents] == ["a-1"]


async def test_a_reload_that_asks_for_other_bundles_replaces_them_all(world: RayWorld) -> None:
    await world.joined()
    world.reload(pool="x")
    await world.settled()
    assert world.supervisor.drained == []
    world.reload(pool="y")
    await world.settled()
    assert world.supervisor.drained == ["a-0-1234abcd", "a-1-1234abcd"]
    assert [*world.ray.agents] == ["a-0", "a-1", "a-2", "a-3"]
    assert [labels for _, labels in world.ray.places.values()] == [[{"pool": "x"}] * 2, [{"pool": "y"}] * 2]
    world.supervisor.tell(MOVED)
    await world.end("a-0")
    await world.end("a-1", RayError("its node has died"))
    assert [*world.ray.agents] == ["a-2", "a-3"]
    assert [labels for _, labels in world.ray.places.values()] == [[{"pool": "y"}] * 2]
    assert len(world.supervisor.drained) == 2


async def test_bundles_that_wait_for_their_place_end_at_once(world: RayWorld) -> None:
    await world.settled()
    world.reload(pool="y")
    await world.settled()
    assert world.supervisor.drained == []
    assert world.ray.killed == 2
    assert [labels for _, labels in world.ray.places.values()] == [[{"pool": "y"}] * 2]


async def test_an_agent_that_is_lost_without_a_word_comes_back(world: RayWorld) -> None:
    await world.joined()
    await world.end("a-0", RayError(""))
    await world.settled()
    assert [*world.ray.agents] == ["a-1", "a-0"]
    assert world.supervisor.said == ["restarting the agent in bundle a-0, which is lost: RayError"]
    await world.end("a-0", RayError("The actor died.\n\tclass_name: Agent"))
    assert world.supervisor.said[-1] == "restarting the agent in bundle a-0, which is lost: The actor died."


def test_a_cluster_that_cannot_be_used_is_no_bug(ray: Ray, ray_run: Any) -> None:
    def mismatch(**_: Any) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9\nThis process with:\n    Ray: 2.10"
        )

    def none(**_: Any) -> None:
        raise ConnectionError

    ray.init = mismatch
    with pytest.raises(errors.UsageError, match=r"Ray: 2\.9 .* Ray: 2\.10"):
        ray_run.run(config())
    ray.init = none
    with pytest.raises(errors.UsageError, match=r"ray start --head.*RAY_AUTH_MODE=token"):
        ray_run.run(config())


def test_a_cluster_that_asks_for_a_token_is_no_bug(ray: Ray, ray_run: Any) -> None:
    def refuse(**_: Any) -> None:
        raise AuthenticationError("no token was found.\nSee the documentation")

    ray.init = refuse
    with pytest.raises(errors.UsageError, match=r"refuses this program: no token was found.*RAY_AUTH_MODE=token"):
        ray_run.run(config())
