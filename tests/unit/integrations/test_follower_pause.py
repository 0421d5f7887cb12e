"""What counts as the pause of a server for a load."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from replicas.integrations import engine_health, follower
from replicas.integrations.engine_health import EngineHealth
from replicas.integrations.engine_server import EngineServer
from replicas.integrations.follower import Following, PauseMode, Weights
from replicas.integrations.gate import GatePage

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
    server = Server("http://127.0.0.1:1")
    clock = types.SimpleNamespace(monotonic=lambda: server.now)
    for module in (follower, engine_health):
        monkeypatch.setattr(module, "time", clock)
    page = GatePage.create()
    page.open(1)  # so it is warm
    following = Following(channel="policy", url=server.url, mode=mode, gate=page, min_serving=0.5)
    health = EngineHealth(server, lambda: "", {}, while_loading=(), limit_s=1.0)
    weights = Weights(server, following, health, threading.Event())
    weights._load(2)
    assert page.paused_s == paused_s
    assert weights._serves_until == server.now + paused_s
    page.close()
