"""What counts as the pause of a server for a load."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from replicas.engine import PauseMode, following
from replicas.engine.following import Follower, Plan
from replicas.integrations.engine_server import EngineServer
from replicas.integrations.gate import GatePage
from replicas.integrations.vllm_verbs import VllmEngine

PAUSE_S = 100.0


class Server(EngineServer):
    """It takes 100 s to pause, and 1 s for each other call, of a clock of its own."""

    now = 0.0

    def call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        self.now += PAUSE_S if path == "/pause" else 1.0
        return {"success": True}


@pytest.mark.parametrize(("mode", "paused_s"), [("wait", 6.0), ("keep", PAUSE_S + 6.0), ("abort", PAUSE_S + 6.0)])
def test_the_time_in_which_a_server_ends_its_requests_is_no_pause(
    monkeypatch: pytest.MonkeyPatch, mode: PauseMode, paused_s: float
) -> None:
    engine = VllmEngine("http://127.0.0.1:1")
    monkeypatch.setattr(engine, "version", lambda: None)
    engine.server = server = Server("http://127.0.0.1:1")
    monkeypatch.setattr(following, "time", types.SimpleNamespace(monotonic=lambda: server.now))
    page = GatePage.create()
    page.open(1)  # so it is warm
    follower = Follower(engine, Plan(mode=mode, min_serving=0.5, verify_load="never"), page, threading.Event())
    update: Any = types.SimpleNamespace(version=2, manifest=types.SimpleNamespace(hash="a"))
    follower._load(update)
    assert page.paused_s == paused_s
    assert follower._serves_until == server.now + paused_s
    page.close()
