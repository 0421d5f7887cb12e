"""The code of the how-to pages does what they say, on the channels of a FakeRun."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import replicas
from replicas.archive import ArchiveKey, Version, Writer
from replicas.config.file import parse
from replicas.config.structs import Config
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.core.lives.placement import Offer, Share, place
from replicas.core.members.preflight import sends_by_group
from replicas.engine import Engine, PauseMode
from replicas.supervisor.fleet.cluster import lease_of
from replicas.supervisor.fleet.resources import need_of
from replicas.testing import FakeRun
from tests.support.house.pages import blocks, code
from tests.support.root import ROOT
from tests.support.waits import eventually


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
    eventually(lambda: target.versions[-1:] == [4], "the load of the last version")
    assert target.weights["weight"][0, 0] == 4, "the rollout goes on with what it has"
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


def test_a_gpu_loop_publishes_the_weights_of_each_step(run: FakeRun) -> None:
    """They are those of the step, though the next step begins while they are copied."""
    rollout, model = run.join("rollout"), Model()
    expected: list[list[float]] = []
    received: list[list[float]] = []

    def receive() -> None:
        with rollout.receive(at_least=len(received) + 1, deadline=20).wait() as update:
            received.append(update.tensors()["weight"].flatten().tolist())

    def loss_of(model: Model, batch: float) -> torch.Tensor:
        if len(expected) > 0:
            receive()
        step = 0.1 * batch
        expected.append([value - step for value in (expected[-1] if expected else [0.0, 0.0])])
        return (model.weight * batch).sum()

    with replicas.join("policy") as channel:
        code("gpus.md").train(channel, model, torch.optim.SGD(model.parameters(), lr=0.1), [1.0, 2.0, 4.0], loss_of)
        receive()
    assert received == [pytest.approx(weights) for weights in expected]


def config_on(page: str) -> Config:
    """The config on a page: the last one, if there are several."""
    *_, text = [one.text for one in blocks((ROOT / "docs" / "howto" / page).read_text()) if "[run]" in one.text]
    with tempfile.TemporaryDirectory() as folder:
        for program in re.findall(r'command = \["(\w+\.py)"', text):
            (Path(folder) / program).touch()
        return parse(tomllib.loads(text), base=Path(folder))


def on_nodes(page: str, offers: list[Offer]) -> dict[str, list[str]]:
    """The nodes of the replicas of each group of the config on a page."""
    groups = config_on(page).groups.values()
    found, taken = dict[str, list[str]](), list[Share]()
    for group in groups:
        for _ in range(group.replicas):
            shares = place(need_of(group), offers, taken)
            assert not isinstance(shares, str), shares
            taken += shares
            found.setdefault(group.name, []).extend(one.node for one in shares)
    return found


def test_a_trainer_and_two_servers_on_two_machines() -> None:
    gpus = tuple(map(str, range(8)))
    offers = [Offer(node=pool, labels={"pool": pool}, gpus=gpus) for pool in ("train", "serve")]
    placed = on_nodes("fsdp2-to-vllm.md", offers)
    assert placed == {"trainer": ["train"], "server": ["serve", "serve"]}


def test_rollouts_at_two_sites() -> None:
    offers = [Offer(node=site, labels={"site": site}) for site in ("a", "b")]
    placed = on_nodes("two-data-centres.md", offers)
    assert placed == {"trainer": ["a"], "rollout-a": ["a"] * 4, "rollout-b": ["b"] * 4}
    config = config_on("two-data-centres.md")
    assert not sends_by_group(config.channels["policy"]), "hosts pull, each from one that has the version"
    far = config.groups["rollout-b"]
    assert far.health.heartbeat_timeout_s >= lease_of(config) == 60.0, "the link may be interrupted for as long"


def test_an_evaluation_that_reads_an_archive(tmp_path: Path) -> None:
    key, url = ArchiveKey.of_file(tmp_path / "archive.pem"), f"file://{tmp_path}/archive"
    writer, model = Writer(url, "policy", run="grpo", key=key), torch.nn.Linear(1, 1, bias=False)
    logged: list[tuple[dict[str, float], int]] = []

    def write(step: int) -> None:
        manifest = Manifest((TensorSpec("weight", "float32", (1, 1)),))
        image = memoryview(manifest.header + torch.tensor([float(step)]).numpy().tobytes())
        writer.write(Version(step, image, manifest, meta={"step": step}))

    def log(found: dict[str, float], step: int) -> None:
        logged.append((found, step))
        if step == 3:
            raise KeyboardInterrupt
        write(step + 1)

    write(1)
    with pytest.raises(KeyboardInterrupt):
        code("two-data-centres.md").evaluate(url, key.public, model, lambda model: model.weight.item(), log)
    assert logged == [({"eval": float(step)}, step) for step in (1, 2, 3)]


def test_a_trainer_that_publishes_each_step(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    target = run.target("rollout")
    page = code("fsdp2-to-vllm.md")

    def hf(model: Model) -> Model:
        published.append(model)
        return model

    monkeypatch.setitem(page.publish_each_step.__globals__, "hf", hf)
    page.publish_each_step(Model(), train_step, 3)
    assert len(published) == 1
    assert run.status().committed_version == 3
    eventually(lambda: target.versions[-1:] == [3], "the load of the last version")
    assert target.weights["weight"][0, 0] == 3, "the server has the weights of the last step"
    with run.join("rollout", 1) as late, late.receive(deadline=20).wait() as update:
        assert update.meta["step"] == 2
    assert target.error is None


def test_an_adapter_is_published_at_each_step(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(Model):
        adapter_config = '{"r": 8}'

    kinds: list[str] = []
    received: list[tuple[object, ...]] = []
    rollout, page = run.join("rollout"), code("lora.md")

    def hf(model: Model, adapter: str) -> Model:
        kinds.append(adapter)
        return model

    def receive(step: int) -> None:
        with rollout.receive(at_least=("step", step), deadline=20).wait() as update:
            meta = update.meta
            received.append((update.version, meta["step"], meta["adapter"], meta["adapter_config"], *update.tensors()))

    def step(model: Model) -> None:
        if model.weight[0, 0]:
            receive(len(received))
        train_step(model)

    monkeypatch.setitem(page.publish_adapter.__globals__, "hf", hf)
    page.publish_adapter(Adapter(), step, 3)
    receive(2)
    assert received == [(number + 1, number, "math", '{"r": 8}', "weight") for number in range(3)]
    assert kinds == ["only"]


def test_a_sync_that_waits_ends_by_its_deadline_and_names_who_was_missing() -> None:
    """As the page about stuck syncs promises."""
    policy = {"sources": [{"group": "trainer", "ranks": "all"}], "targets": ["rollout"]}
    with FakeRun({"policy": policy}) as run:
        first, _ = (run.join("trainer", rank=rank, world_size=2) for rank in (0, 1))
        with pytest.raises(replicas.errors.DeadlineExceeded) as caught:
            first.publish({"weight": torch.zeros(3)}, deadline=0.3).wait(20)
        assert "trainer/0/1" in f"{caught.value} {caught.value.members}"
        with pytest.raises(replicas.errors.DeadlineExceeded, match="receive"):
            run.join("rollout").receive(deadline=0.2).wait(20)


@pytest.mark.parametrize("rollouts", [1, 3])
def test_a_host_holds_the_weights_twice(rollouts: int) -> None:
    def held_nbytes() -> int:
        found = {}
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:" in str(path.readlink()):
                    about = path.stat()
                    found[about.st_ino] = about.st_blocks * 512
        return sum(found.values())

    weights = {"weight": torch.ones(8 << 20)}
    nbytes, before = 32 << 20, held_nbytes()
    with FakeRun() as run:
        trainer, members = run.join("trainer"), [run.join("rollout", index) for index in range(rollouts)]
        for _ in range(5):
            trainer.publish(weights).wait(20)
            for member in members:
                with member.receive(deadline=20).wait() as update:
                    assert update.tensors()["weight"][-1] == 1
        assert 2 * nbytes <= held_nbytes() - before < 2.1 * nbytes


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
