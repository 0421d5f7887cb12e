"""`python -m replicas.integrations.sglang`: what it makes of its options, and the gate
of the server that it starts.

Covers: integrations/sglang/serve.py, integrations/sglang/server.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.routing import Route

from replicas.integrations import sglang
from replicas.integrations.gate import GATE, HEADER, GatePage
from replicas.integrations.sglang.server import SglangGate


@pytest.mark.parametrize("arguments", [[], ["serve"], ["follow"], ["load", "x"], ["serve", "--tp", "2", "x"]])
def test_a_command_without_sense_is_told_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sglang.main(arguments) == 2
    assert "serve MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ssl-certfile", "--ssl_keyfile=x", "--enable-http2", "--grpc-mode", "--use-ray"])
def test_a_door_without_a_gate_is_refused_with_a_remedy(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sglang.main(["serve", "model", option]) == 1
    assert "put a proxy with TLS in front" in capsys.readouterr().err


def test_an_administrators_key_is_refused_as_the_gate_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert sglang.main(["serve", "model", "--admin-api-key", "a"]) == 1
    assert "the gate keeps the control routes" in capsys.readouterr().err


def test_an_unknown_option_of_follow_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sglang.main(["follow", "http://127.0.0.1:1", "--tp", "2"])
    assert "unknown options: --tp 2" in capsys.readouterr().err


def routes(*marked: tuple[str, str]) -> list[Any]:
    """As SGLang's own application has them: an endpoint is marked by its level."""
    found: list[Any] = [Route("/generate", _endpoint), SimpleNamespace(path="/mounted")]
    for path, level in marked:
        endpoint = SimpleNamespace(_auth_level=SimpleNamespace(value=level))
        found.append(SimpleNamespace(path=path, endpoint=endpoint))
    return found


async def _endpoint() -> None: ...


LEVELS = [("/update_weights_from_disk", "admin_optional"), ("/flush_cache", "admin_force"), ("/v1/loads", "normal")]


def test_the_follower_alone_controls_and_reads_what_an_administrator_may(monkeypatch: pytest.MonkeyPatch) -> None:
    page = GatePage.create()
    monkeypatch.setenv(GATE, page.path)
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = SglangGate(app, routes(*LEVELS, ("/abort_request", "admin_optional")))

    async def status(path: str, method: str = "POST", secret: str = "") -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await anyio.sleep_forever()

        headers = [(HEADER.encode(), secret.encode())] if secret else []
        scope = {"type": "http", "path": path, "method": method, "headers": headers, "query_string": b""}
        await gate(scope, receive, send)
        return int(sent[0]["status"])

    async def ask() -> None:
        assert await status("/model_info", "GET") == 200
        assert await status("/ready", "GET") == 503
        assert await status("/generate") == 503
        assert await status("/generate", secret=page.secret) == 200  # the follower's first request
        page.open(3)
        assert await status("/generate") == 200
        assert await status("/abort_request") == 200
        for method in ("GET", "POST"):
            assert await status("/flush_cache", method) == 403
            assert await status("/flush_cache", method, page.secret) == 200

    anyio.run(ask)
    page.close()
    assert asked.count("/flush_cache") == 2


def test_a_release_that_marks_no_control_routes_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    page = GatePage.create()
    monkeypatch.setenv(GATE, page.path)
    with pytest.raises(RuntimeError, match="marks its control routes in another way"):
        SglangGate(_endpoint, routes(("/flush_cache", "admin_optional")))
    page.close()
