"""LMDeploy's verbs against a look-alike of its control routes (0.18): it makes the
calls that it is sent, as its released server does.

Covers: integrations/lmdeploy/engine.py, integrations/lmdeploy/serve.py,
integrations/lmdeploy/server.py.
"""

from __future__ import annotations

import base64
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas import engine, errors
from replicas.integrations import lmdeploy
from replicas.integrations.engine_server import Answer
from replicas.integrations.lmdeploy import LmdeployEngine
from replicas.integrations.lmdeploy.server import LmdeployGate
from replicas.testing import FakeRun

WEIGHTS = {
    "model.embed.weight": torch.arange(8, dtype=torch.bfloat16).view(4, 2),
    "model.layers.0.up.weight": torch.arange(3.0),
    "model.layers.10.up.weight": torch.zeros(0, 3),
    "model.layers.1.up.weight": torch.ones((), dtype=torch.float16),
    "model.layers.0.down.weight": torch.ones(2, dtype=torch.int32),
}
FIELDS = {"serialized_named_tensors", "load_format", "finished"}


class FakeLmdeploy:
    """Stands for the ``server`` of an engine of HTTP routes.

    :ivar calls: paths that were posted to, with their query.
    :ivar buckets: names of each request for weights.
    :ivar refuses_to_wake: it answers as if it had woken, and sleeps on.
    """

    url = "http://127.0.0.1:23333"
    api = "/health"
    local_port = None

    def __init__(self, *, asleep: bool = False) -> None:
        self.sleeping = {"weights", "kv_cache"} if asleep else set[str]()
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.buckets: list[list[str]] = []
        self.finished = self.refuses_to_wake = False
        self.in_flight = ["a request"]
        self.broken = ""

    def answers(self, path: str) -> bool:
        return True

    def ask(self, path: str) -> Answer:
        return "good"

    def break_health_requests(self) -> None:
        pass

    def give_up(self, reason: str) -> None:
        self.broken = self.broken or reason

    def call(self, method: str, path: str, body: Any = None, *, query: Any = None, timeout_s: float = 60.0) -> Any:
        if path == "/is_sleeping":
            return {"is_sleeping": bool(self.sleeping)}
        assert method == "POST"
        assert isinstance(body, dict)  # it takes JSON alone
        self.calls.append(" ".join([path, *(query or {}).values()]))
        if path == "/sleep":
            assert query["level"] in ("1", "2")
            self.sleeping = {"weights", "kv_cache"}
            self.in_flight.clear()
        elif path == "/wakeup":
            if not self.refuses_to_wake:
                self.sleeping -= {query["tags"]}
        else:
            self._update(**body)
        return None

    def _update(self, serialized_named_tensors: str, load_format: str | None = None, finished: bool = False) -> None:
        assert self.sleeping == {"kv_cache"}
        made = {}
        for name, (call, arguments) in pickle.loads(base64.b64decode(serialized_named_tensors)):
            arguments = list(arguments)
            arguments[6] = "cpu"  # the number of its own GPU
            made[name] = call(*arguments).clone()
        self.buckets.append(sorted(made))
        self.weights |= made
        self.finished = finished


def engine_of(server: FakeLmdeploy, **more: Any) -> LmdeployEngine:
    verbs = LmdeployEngine(server.url, **more)
    verbs.server = server  # type: ignore[assignment]  # a look-alike
    return verbs


@pytest.mark.parametrize("asleep", [False, True])
def test_a_version_is_loaded_layer_by_layer_out_of_its_memory(run: FakeRun, asleep: bool) -> None:
    server = FakeLmdeploy(asleep=asleep)
    verbs = engine_of(server)
    trainer, target = run.join("trainer"), run.join("rollout")
    tied = WEIGHTS["model.embed.weight"]
    trainer.publish({**WEIGHTS, "lm_head.weight": tied}).wait()
    with target.receive().wait() as update:
        verbs.read_identity()
        verbs.pause("abort", 5)
        verbs.load(update, 5)
        verbs.reset_caches(5)
        verbs.resume(5)
    assert server.calls[: len(server.calls) - len(server.buckets) - 1] == (
        ["/sleep 1"] * (not asleep) + ["/wakeup weights"]
    )
    assert server.calls[-1] == "/wakeup kv_cache"
    assert sorted(map(len, server.buckets)) == [1, 1, 2, 2]
    assert server.finished
    assert server.weights.keys() == {*WEIGHTS, "lm_head.weight"}
    for name, tensor in {**WEIGHTS, "lm_head.weight": tied}.items():
        assert torch.equal(server.weights[name], tensor)
        assert server.weights[name].dtype == tensor.dtype


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_mode_that_it_does_not_have_is_refused(mode: engine.PauseMode) -> None:
    server = FakeLmdeploy()
    with pytest.raises(errors.UsageError, match=f"cannot {mode} requests"):
        engine_of(server).pause(mode, 5)
    assert server.in_flight


def test_a_server_that_sleeps_on_is_an_error() -> None:
    server = FakeLmdeploy()
    verbs = engine_of(server)
    verbs.pause("abort", 5)
    server.refuses_to_wake = True
    with pytest.raises(errors.SyncError, match="still sleeps"):
        verbs.resume(5)


@pytest.mark.slow
def test_a_follower_refuses_what_the_first_version_did_not_have(run: FakeRun, tmp_path: Path) -> None:
    server = FakeLmdeploy()
    verbs = engine_of(server, model=str(tmp_path / "elsewhere"))
    trainer, stop = run.join("trainer"), threading.Event()
    identity: dict[str, Any] = {"endpoint": run.endpoint, "token": run.token, "group": "rollout", "replica": 0}

    def follow() -> None:
        engine.follow(verbs, "policy", mode="abort", min_serving=0, stop=stop, **identity)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        trainer.loaded(trainer.publish(WEIGHTS).wait().version, deadline=10).wait()
        calls = list(server.calls)
        renamed = {name.replace("down", "gate"): tensor for name, tensor in WEIGHTS.items()}
        bad = trainer.publish(renamed, new_manifest=True).wait()
        with pytest.raises(errors.SyncError, match=r"model\.layers\.0\.gate\.weight is not in the model"):
            trainer.loaded(bad.version, deadline=10).wait()
        assert server.calls == calls
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--dp=2", "one server for each copy"),
        ("--ssl", "put a proxy with TLS in front"),
        ("--enable_prefix_caching", "leave it out"),
        ("--api-keys=a", "use --api-key"),
    ],
)
def test_an_option_that_the_gate_does_not_allow_is_refused(
    option: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lmdeploy.main(["serve", "model", option]) == 1
    assert remedy in capsys.readouterr().err


def test_requests_are_only_aborted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lmdeploy.main(["serve", "model", "--pause-mode", "keep"])
    assert "choose from abort" in capsys.readouterr().err.replace("'", "")


def test_a_release_with_its_control_routes_elsewhere_is_not_served() -> None:
    with pytest.raises(RuntimeError, match="has its control routes elsewhere"):
        LmdeployGate(None, [SimpleNamespace(path="/update_weights", endpoint=SimpleNamespace(__module__="x"))])
