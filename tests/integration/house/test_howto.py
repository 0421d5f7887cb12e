"""The code of the how-to pages does what they say, on the channels of a FakeRun."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import replicas
from replicas.engine import Engine, PauseMode
from replicas.testing import FakeRun
from tests.support.house.pages import blocks
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked
from tests.support.waits import eventually


def code(page: str, **given: Any) -> Any:
    """What the python of a page defines, where these names are known."""
    found = dict(given)
    for block in blocks((ROOT / "docs" / "howto" / page).read_text()):
        if block.language == "python":
            exec(compile(block.text, page, "exec"), found)
    return types.SimpleNamespace(**found)


class Model(torch.nn.Linear):
    """A model whose weight is the number of its training steps."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        torch.nn.init.zeros_(self.weight)


def train_step(model: Model, *_: Any) -> float:
    with torch.no_grad():
        model.weight += 1
    return 0.5


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    with FakeRun() as run:
        for name, value in run.environ("trainer").items():
            monkeypatch.setenv(name, value)
        yield run


NOT_YET_S = 0.3
"""A wait that is right to go on never ends within this, however slow the machine is."""


class Follower:
    """A rollout's channel. The trainer takes a step only when the rollout must wait."""

    def __init__(self, run: FakeRun, max_lag: int) -> None:
        self._trainer, self._rollout = run.join("trainer"), run.join("rollout")
        self._max_lag = max_lag
        self.step = -1
        self.lags: list[int] = []
        """Of each batch, how many steps older its weights are than the batch."""
        self._publish()

    def _publish(self) -> None:
        self.step += 1
        weight = torch.full((1, 2), float(self.step))
        self._trainer.publish({"weight": weight}, meta={"step": self.step}).wait()

    def receive(self, **bound: Any) -> replicas.Pending[replicas.Update]:
        pending = self._rollout.receive(**bound)
        if len(self.lags) > self.step + self._max_lag:
            with pytest.raises(TimeoutError):
                pending.wait(NOT_YET_S)
            self._publish()
        pending.wait(20)  # where it need not wait, the trainer stands
        return pending

    def generate(self, model: Model) -> None:
        self.lags.append(len(self.lags) - int(model.weight[0, 0].item()))


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 3])
def test_a_rollout_within_a_bound(run: FakeRun, max_lag: int) -> None:
    channel = Follower(run, max_lag)
    code("staleness.md").sample_within(channel, Model(), channel.generate, batches=max_lag + 4, max_lag=max_lag)
    assert channel.lags == [*range(max_lag), *[max_lag] * 4]
    assert channel.step == 3


class Leader:
    """A trainer's channel. The rollout loads a version only when the trainer waits."""

    def __init__(self, run: FakeRun) -> None:
        self._trainer, self._rollout = run.join("trainer"), run.join("rollout")
        self._model = Model()
        self.waited: list[int] = []
        """Steps before which the trainer had to wait."""
        self.lags: list[int] = []
        self.publish = self._trainer.publish

    def loaded(self, version: int, **limits: Any) -> replicas.Pending[int]:
        pending = self._trainer.loaded(version, **limits)
        if self._rollout.version < version:
            with pytest.raises(TimeoutError):
                pending.wait(NOT_YET_S)
            self.waited.append(len(self.lags))
            with self._rollout.receive().wait(20) as update:
                update.load_into(self._model)
        return pending

    def train_step(self, model: Model) -> None:
        served = -1 if not self._rollout.version else int(self._model.weight[0, 0].item())
        self.lags.append(len(self.lags) - served)
        train_step(model)


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "waited"), [(0, [0, 1, 2, 3, 4, 5]), (2, [2, 5])])
def test_a_trainer_within_a_bound(run: FakeRun, max_lag: int, waited: list[int]) -> None:
    channel = Leader(run)
    code("staleness.md").train_within(channel, Model(), channel.train_step, steps=6, max_lag=max_lag)
    assert channel.waited == waited
    assert max(channel.lags[max_lag:]) == max_lag
    assert run.status().committed_version == 7  # the weights before the first step, and after each


def test_a_trainer_that_resumes(run: FakeRun, tmp_path: Path) -> None:
    target = run.target("rollout")
    page = code("resume.md")

    def session(steps: int) -> Model:
        model = Model()
        page.train(model, torch.optim.SGD(model.parameters()), train_step, steps, tmp_path)
        return model

    session(4)  # its checkpoint is of step 0
    model = session(3)
    assert model.weight[0, 0] == 3
    with run.join("rollout", 1) as late, late.receive(deadline=20).wait() as update:
        assert (update.version, update.meta["step"]) == (4 + 1 + 2, 2)
    assert target.error is None


def test_a_loop_that_logs(run: FakeRun) -> None:
    run.target("rollout")
    logged: list[tuple[int, dict[str, float]]] = []
    with replicas.join("policy") as channel:
        code("wandb.md").train(channel, Model(), train_step, 2, lambda figures, step: logged.append((step, figures)))
    (_, first), (_, second) = logged
    assert (first["loss"], first["replicas/version"], second["replicas/version"]) == (0.5, 1, 2)
    assert {
        "replicas/seconds",
        "replicas/lost",
        "replicas/nbytes",
        "replicas/wire_nbytes",
        "replicas/pack_seconds",
    } <= set(first)


def test_a_run_whose_events_are_logged(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []
    config = {
        "schema_version": 1,
        "run": {"name": "logged", "state_dir": str(tmp_path / "run")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {"one": {"launcher": "exec", "command": ["true"]}},
    }

    async def main() -> int:
        async with asyncio.timeout(60):  # the program ends with the run
            return int(await code("wandb.md").run(config, logged.append))

    assert asyncio.run(main()) == 0
    assert [one["event"] for one in logged][-1] == "RunEnded"
    assert sorted(one["at"] for one in logged) == [one["at"] for one in logged]


def test_a_gpu_loop_runs_without_one(run: FakeRun) -> None:
    target = run.target("rollout")
    model = Model()
    with replicas.join("policy") as channel:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        code("gpus.md").train(channel, model, optimizer, [1.0, 2.0], lambda model, batch: (model.weight * batch).sum())
        channel.loaded(2, deadline=20).wait()
    assert target.weights["weight"].tolist() == model.weight.tolist()


def test_a_trainer_that_publishes_each_step(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    run.target("rollout")
    page = code("fsdp2-to-vllm.md")

    def hf(model: Model) -> Model:
        published.append(model)
        return model

    monkeypatch.setitem(page.publish_each_step.__globals__, "hf", hf)
    page.publish_each_step(Model(), train_step, 3)
    assert len(published) == 1
    assert run.status().committed_version == 3


def test_an_adapter(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(Model):
        adapter_config = '{"r": 8}'

    kinds: list[str] = []
    rollout = run.join("rollout")
    page = code("lora.md")

    def hf(model: Model, adapter: str) -> Model:
        kinds.append(adapter)
        return model

    monkeypatch.setitem(page.publish_adapter.__globals__, "hf", hf)
    page.publish_adapter(Adapter(), train_step, 1)
    with rollout.receive(deadline=20).wait() as update:
        assert (update.meta["adapter"], update.meta["adapter_config"]) == ("math", '{"r": 8}')
    assert kinds == ["only"]


def test_the_tests_on_the_page_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    page = code("testing.md")
    page.test_a_rollout_goes_on_when_the_trainer_dies()
    page.test_a_trainer_goes_on_when_a_rollout_freezes()
    page.test_the_program_joins(monkeypatch)


def test_an_evaluator(run: FakeRun) -> None:
    """The trainer publishes on while an evaluation runs. Its result is of one step."""
    trainer, logged = run.join("trainer"), list[tuple[int, float]]()
    steps = iter(range(100))

    class Enough(Exception):
        pass

    def publish(count: int) -> None:
        for step in itertools.islice(steps, count):
            trainer.publish({"weight": torch.full((1, 2), float(step))}, meta={"step": step}).wait(20)

    def measure(model: Model) -> float:
        publish(6)
        return model.weight[0, 0].item()

    def log(figures: dict[str, float], step: int) -> None:
        logged.append((step, figures["eval"]))
        if len(logged) == 3:
            raise Enough

    publish(1)
    with pytest.raises(Enough):
        code("evaluate.md").evaluate(run.join("rollout"), Model(), measure, every=4, log=log)
    assert logged == [(0, 0.0), (6, 6.0), (12, 12.0)]


class Server(Engine):
    """A server that says which versions it has loaded."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.computes = True

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.computes = False

    def load(self, update: replicas.Update, timeout_s: float) -> None:
        assert not self.computes
        self.versions.append(update.version)

    def reset_caches(self, timeout_s: float) -> None:
        assert not self.computes

    def resume(self, timeout_s: float) -> None:
        self.computes = True


def test_engines_that_come_and_go() -> None:
    follow_beside, servers = code("engines-of-others.md").follow_beside, [Server() for _ in range(3)]
    stops = [threading.Event() for _ in servers]
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["server"]}}) as run, ThreadPoolExecutor() as pool:
        trainer = run.join("trainer")

        def start(number: int) -> Future[None]:
            return pool.submit(follow_beside, servers[number], run.endpoint, run.token, stops[number])

        def loaded(*versions: int) -> None:
            newest = [[server.versions[-1:] for server in servers]]
            wanted = [[version] if version else [] for version in versions]
            eventually(lambda: [server.versions[-1:] for server in servers] == wanted, f"{wanted}, not {newest}")

        try:
            first = start(0)
            start(1)
            eventually(lambda: sum(one.name.startswith("server") for one in run.status().members) == 2, "two servers")
            trainer.publish({"weight": torch.zeros(3)}).wait(20)
            loaded(1, 1, 0)
            start(2)  # it comes late, and gets the newest version without another publish
            loaded(1, 1, 1)
            stops[0].set()
            first.result(20)
            receipt = trainer.publish({"weight": torch.ones(3)}).wait(20)
            assert not receipt.lost
            loaded(1, 2, 2)
            assert all(server.computes for server in servers)
        finally:
            for stop in stops:
                stop.set()


ROLLOUT = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            print("loaded", update.version, flush=True)
"""
TRAINER = """
import replicas, torch
with replicas.join("policy") as channel:
    targets = 0
    while targets < 2:
        receipt = channel.publish({"weight": torch.ones(3)}).wait()
        channel.loaded(receipt.version).wait(60)
        targets = sum(one.group == "rollout" for one in receipt.members)
"""


class Embedded:
    """A run that begins with one rollout, and ends when two have loaded a version."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self._mark = folder, mark
        (folder / "rollout.py").write_text(ROLLOUT)
        (folder / "trainer.py").write_text(TRAINER)
        groups = {
            name: {"launcher": "exec", "command": [str(folder / f"{name}.py")]} for name in ("trainer", "rollout")
        }
        self.config = {
            "schema_version": 1,
            "run": {"name": "embedded", "state_dir": str(folder / "run"), "stop_when": ["trainer"]},
            "control": {"listen": "127.0.0.1:0"},
            "groups": groups,
            "channels": {"policy": {"sources": ["trainer"], "targets": ["rollout"]}},
        }

    def said(self) -> list[str]:
        return sorted(path.read_text() for path in self.folder.rglob("rollout/**/rank-0.log"))

    def is_over(self) -> None:
        eventually(lambda: not processes_marked(self._mark), "the end of its processes", timeout_s=10)


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Embedded(tmp_path, mark)


def test_a_supervisor_in_asyncio(embedded: Embedded) -> None:
    assert asyncio.run(code("embed.md").run(embedded.config)) == 0
    first, second = (set(text.splitlines()) for text in embedded.said())
    assert first & second, "both have loaded the last version"
    embedded.is_over()


def test_a_supervisor_in_anyio(embedded: Embedded) -> None:
    assert code("embed.md").main(embedded.config, 2.0) is None  # with one rollout its trainer waits
    embedded.is_over()


def test_a_supervisor_in_blocking_code(embedded: Embedded) -> None:
    during: list[tuple[int, bool]] = []

    def work() -> None:
        during.append((threading.get_ident(), bool(list(embedded.folder.rglob("endpoint.json")))))

    assert code("embed.md").run_blocking(embedded.config, work) == [1, 1]
    assert during == [(threading.get_ident(), True)]
    embedded.is_over()
