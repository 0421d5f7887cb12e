"""How a sidecar comes to the store over a long way.

Covers: sidecar/building.py.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from replicas.sidecar import building

ROUND_TRIPS_S = 1.3
"""What a connection takes on a link of 300 ms each way, with the store's own first
words."""


def test_a_store_that_is_far_away_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def store(host: str, port: int, size: object, master: bool, timeout: timedelta, **_: object) -> str:
        tried.append(timeout.total_seconds())
        if tried[-1] < ROUND_TRIPS_S:
            raise RuntimeError("The client socket has timed out")
        return f"{host}:{port}"

    monkeypatch.setattr(building, "_c10d", SimpleNamespace(TCPStore=store))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    assert building.connect_store("far", 1, time.monotonic() + 30.0) == "far:1"
    assert tried[0] == building.STORE_CONNECT.first_s, "one that is near answers at once, or is another one by now"
    assert tried == sorted(tried)
