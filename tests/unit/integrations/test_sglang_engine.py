"""SGLang's verbs against a look-alike of its control routes: the order of the calls,
what is not followed, and what a failed load leaves.

Covers: integrations/sglang/engine.py.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas import Channel, Update, engine, errors
from replicas.integrations.engine_server import Answer, RequestRefused
from replicas.integrations.sglang.engine import SglangEngine
from replicas.testing import FakeRun, engine_suite

WEIGHTS = {"model.embed.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
SETTINGS: dict[str, Any] = {
    "version": "0.5.23",
    "device": "cpu",
    "tokenizer_worker_num": 1,
    "nnodes": 1,
    "disaggregation_mode": "null",
    "speculative_draft_model_path": None,
    "weight_cache_mode": "off",
    "hicache_storage_backend": None,
}
FIELDS = {
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    "/flush_cache": set[str](),
    "/hicache/storage-backend/clear": set[str](),
    "/update_weights_from_disk": {
        *("model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache"),
        *("keep_pause", "recapture_cuda_graph", "token_step", "flush_cache", "manifest"),
    },
    "/weights_checker": {"action", "allow_quant_error", "skip_tensor_list", "selector"},
    "/get_weights_by_name": {"name", "truncate_size"},
    "/generate": {"input_ids", "sampling_params", "return_logprob"},
}


class FakeSglang:
    """A look-alike of SGLang's control routes, in memory: what a released server does
    where the verbs depend on it. It stands for the ``server`` of an engine of HTTP
    routes, takes wrong shapes, and refuses fields that the released requests lack.

    :param model: the folder with which it has been started.
    :ivar calls: paths that were posted to, in their order, with the pause's mode.
    :ivar fails: so many loads fail from now on.
    """

    url = "http://127.0.0.1:30000"
    api = "/model_info"
    local_port = None

    def __init__(self, model: Path, **settings: Any) -> None:
        self.settings = {**SETTINGS, "model_path": str(model), **settings}
        self.model = {"weight_version": "default"}
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.in_flight: list[str] = []
        self.prefixes = self.external = 1
        self.paused = ""
        self.cached: float | None = None
        self.fails = 0
        self.broken = ""

    def answers(self, path: str) -> bool:
        return self.ask(path) == "good"

    def ask(self, path: str) -> Answer:
        return "dead" if self.broken else "good" if path in ("/model_info", "/server_info") else "none"

    def break_health_requests(self) -> None:
        pass

    def give_up(self, reason: str) -> None:
        self.broken = self.broken or reason

    def call(self, method: str, path: str, body: Any = None, *, query: Any = None, timeout_s: float = 60.0) -> Any:
        if self.broken:
            raise errors.SyncError(self.broken, phase="load", hint="")
        if method == "GET":
            return {"/model_info": self.model, "/server_info": self.settings}[path]
        assert set(body or {}) <= FIELDS[path], body
        self.calls.append(f"{path} {body['mode']}" if path == "/pause_generation" else path)
        found = getattr(self, "_" + path.strip("/").replace("/", "_").replace("-", "_"))(**(body or {}))
        if isinstance(found, dict) and found.get("success") is False:
            raise RequestRefused(f"400 {found['message']}", phase="load", hint="")
        return found

    def answer(self) -> float | None:
        """The value of all weights, by the prefix cache if it has one; None: it is
        paused."""
        if self.broken:
            raise ConnectionRefusedError
        if self.paused:
            return None
        if not self.prefixes or self.cached is None:
            (self.cached,) = {value for tensor in self.weights.values() for value in tensor.flatten().tolist()}
            self.prefixes = 1
        return self.cached

    def _pause_generation(self, mode: str = "abort") -> None:
        assert mode in ("abort", "retract", "in_place")
        self.paused = mode
        if mode == "abort":
            self.in_flight.clear()

    def _continue_generation(self) -> None:
        self.paused = ""

    def _flush_cache(self) -> dict[str, Any]:
        if self.in_flight and self.paused != "retract":
            return {"success": False, "message": "requests are running"}
        self.prefixes = 0
        return {"success": True}

    def _hicache_storage_backend_clear(self) -> None:
        self.external = 0

    def _update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        flush_cache: bool = True,
    ) -> dict[str, Any]:
        if abort_all_requests or not self.paused:  # its lock waits for the requests
            self.in_flight.clear()
        if self.fails:
            self.fails -= 1
            return {"success": False, "message": "it fails"}
        assert load_format == "safetensors"
        assert (Path(model_path) / "config.json").exists()
        loaded = load_file(Path(model_path) / "model.safetensors")
        self.weights |= {name: tensor.clone() for name, tensor in loaded.items()}
        self.model["weight_version"] = weight_version or self.model["weight_version"]
        return self._flush_cache() if flush_cache else {"success": True}

    def _weights_checker(self, action: str, selector: str) -> dict[str, Any]:
        def told(tensor: torch.Tensor) -> str:
            return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

        checksums = {name: told(one) for name, one in self.weights.items()}
        split = [{"role": "target", "tp_size": 1, "pp_size": 1}]
        return {"success": True, "ranks": [{"checksums": checksums, "parallelism_info": split}]}

    def _generate(self, **_: Any) -> dict[str, Any]:
        return {"text": "x"}


LOAD, RESUME = "/update_weights_from_disk", "/continue_generation"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return tmp_path


def engine_of(server: FakeSglang, **more: Any) -> SglangEngine:
    engine = SglangEngine(server.url, scratch=Path(server.settings["model_path"]), **more)
    engine.server = server  # type: ignore[assignment]  # a look-alike
    engine.read_identity()
    return engine


def published(run: FakeRun, factor: float = 2.0) -> Update:
    trainer, server = run.join("trainer"), run.join("rollout")
    trainer.publish({name: tensor * factor for name, tensor in WEIGHTS.items()}).wait()
    return server.receive().wait()


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("keep", ["/pause_generation retract", LOAD, RESUME]),
        ("abort", ["/pause_generation abort", LOAD, RESUME]),
        ("wait", [LOAD, RESUME]),
    ],
)
def test_a_version_is_loaded_as_the_mode_says(
    model: Path, run: FakeRun, mode: engine.PauseMode, calls: list[str]
) -> None:
    server = FakeSglang(model)
    server.in_flight = ["a request"]
    verbs = engine_of(server)
    with published(run) as update:
        verbs.pause(mode, 5)
        verbs.load(update, 5)
        verbs.reset_caches(5)
        verbs.resume(5)
        assert server.calls == calls
        assert (verbs.version(), server.prefixes, server.paused) == (update.version, 0, "")
        assert torch.equal(server.weights["model.norm.weight"], torch.full((2,), 2.0))
        assert verbs.checksum(update, 5) == ""
    assert server.in_flight == (["a request"] if mode == "keep" else [])


def test_a_load_that_fails_leaves_the_server_paused_in_each_mode(model: Path, run: FakeRun) -> None:
    server = FakeSglang(model)
    verbs = engine_of(server)
    with published(run) as update:
        server.fails = 1
        verbs.pause("wait", 5)
        with pytest.raises(RequestRefused, match="it fails"):
            verbs.load(update, 5)
        assert server.paused == "retract"
        verbs.load(update, 5)
        verbs.reset_caches(5)
        verbs.resume(5)
    assert (server.paused, server.prefixes) == ("", 0)


def test_an_external_store_of_old_weights_is_cleared_in_the_pause(model: Path, run: FakeRun) -> None:
    server = FakeSglang(model, hicache_storage_backend="file")
    verbs = engine_of(server)
    with published(run) as update:
        with pytest.raises(errors.UsageError, match="external store"):
            verbs.pause("wait", 5)
        verbs.pause("keep", 5)
        verbs.load(update, 5)
        verbs.reset_caches(5)
    assert server.external == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"version": "0.5.9"}, "0.5.23 or newer"),
        ({"tokenizer_worker_num": 2}, "a label and a lock of its own"),
        ({"nnodes": 2}, "other machines"),
        ({"speculative_draft_model_path": "draft"}, "no draft model"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"disaggregation_mode": "prefill"}, "prefill servers"),
    ],
)
def test_a_server_whose_memories_cannot_be_cleared_is_refused(model: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.UsageError) as refused:
        engine_of(FakeSglang(model, **settings))
    assert why in f"{refused.value} {refused.value.hint}"


def test_kept_outputs_of_encoders_are_refused_where_nobody_turns_them_off(model: Path) -> None:
    server = FakeSglang(model)
    server.model |= {"has_image_understanding": "yes"}
    with pytest.raises(errors.UsageError, match="outputs of encoders"):
        engine_of(server)
    engine_of(server, encodes_anew=True)


@pytest.mark.slow
def test_a_follower_refuses_what_does_not_fit_before_it_pauses_the_server(model: Path, run: FakeRun) -> None:
    server = FakeSglang(model)
    verbs = SglangEngine(server.url)
    verbs.server = server  # type: ignore[assignment]  # a look-alike
    trainer, stop = run.join("trainer"), threading.Event()
    identity: dict[str, Any] = {"endpoint": run.endpoint, "token": run.token, "group": "rollout", "replica": 0}

    def follow() -> None:
        engine.follow(verbs, "policy", verify_load="always", min_serving=0, stop=stop, **identity)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        served(trainer, WEIGHTS)
        calls = list(server.calls)
        bad = trainer.publish({**WEIGHTS, "model.norm.weight": torch.ones(3)}, new_manifest=True).wait()
        with pytest.raises(errors.SyncError, match=r"model\.norm\.weight has float32\[3\], the model float32\[2\]"):
            trainer.loaded(bad.version, deadline=10).wait()
        assert server.calls == calls
        served(trainer, {name: tensor * 2 for name, tensor in WEIGHTS.items()})
    finally:
        stop.set()
        thread.join(10)
    assert torch.equal(server.weights["model.norm.weight"], torch.full((2,), 2.0))
    assert not thread.is_alive()


def served(trainer: Channel, weights: dict[str, torch.Tensor]) -> None:
    """Publish, and wait until the server has it."""
    trainer.loaded(trainer.publish(weights, new_manifest=True).wait().version, deadline=10).wait()


@pytest.mark.slow
@pytest.mark.parametrize("scene", engine_suite.SCENES)
def test_it_survives_what_each_engine_has_to(model: Path, scene: str) -> None:
    server = FakeSglang(model)

    def connect() -> SglangEngine:
        verbs = SglangEngine(server.url, scratch=model)
        verbs.server = server  # type: ignore[assignment]  # a look-alike
        return verbs

    trial = engine_suite.Trial(
        connect=connect,
        weights=lambda value: {name: torch.full_like(tensor, value) for name, tensor in WEIGHTS.items()},
        answer=server.answer,
        kill=lambda: server.give_up("it was killed"),
    )
    engine_suite.play(scene, trial)
