"""Followers of a channel whose targets load a version together, or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from replicas import Update
from replicas.engine import Engine, PauseMode, follow
from replicas.testing import FakeRun
from tests.support.waits import eventually

POLICY = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "adopt_together": True}}
WAIT_S = 20.0


class Noted(Engine):
    """It notes what is done; ``knows``: the tensors of its model."""

    def __init__(self, *knows: str) -> None:
        self.knows = knows
        self.calls: list[str] = []

    def check(self, update: Update, timeout_s: float) -> str:
        more = [spec.name for spec in update.manifest.tensors if spec.name not in self.knows]
        return f"it has no {more[0]}" if more else ""

    def drop(self, update: Update, reason: str, timeout_s: float) -> None:
        self.calls.append(f"drop {update.version}: {reason}")

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.calls.append("pause")

    def load(self, update: Update, timeout_s: float) -> None:
        self.calls.append(f"load {update.version}")

    def reset_caches(self, timeout_s: float) -> None:
        self.calls.append("reset")

    def resume(self, timeout_s: float) -> None:
        self.calls.append("resume")


@pytest.mark.slow
def test_a_version_that_one_server_refuses_pauses_no_server() -> None:
    able, unable = Noted("w", "more"), Noted("w")
    stop = threading.Event()
    with FakeRun(POLICY) as run:

        def bring(engine: Engine, replica: int) -> None:
            where: dict[str, Any] = {
                "endpoint": run.endpoint,
                "token": run.token,
                "group": "rollout",
                "replica": replica,
            }
            follow(engine, "policy", min_serving=0.0, verify_load="never", stop=stop, **where)

        threads = [threading.Thread(target=bring, args=pair) for pair in ((able, 0), (unable, 1))]
        trainer = run.join("trainer")
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: len(trainer.members) == 3, "both have joined")
            one = {"w": torch.ones(2)}
            trainer.publish(one).wait(WAIT_S)
            trainer.loaded(1).wait(WAIT_S)
            trainer.publish({**one, "more": torch.ones(2)}, new_manifest=True).wait(WAIT_S)
            eventually(lambda: len(able.calls) == 5, "the version is dropped")
            trainer.publish(one, new_manifest=True).wait(WAIT_S)
            trainer.loaded(3).wait(WAIT_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    first, third = (["pause", f"load {version}", "reset", "resume"] for version in (1, 3))
    (dropped,) = able.calls[4:-4]
    assert dropped.startswith("drop 2: ")
    assert "it has no more" in dropped
    assert [*able.calls[:4], *able.calls[-4:]] == [*first, *third]
    assert unable.calls == [*first, *third]
