"""The gate of an inference server: shut before a version, control by the secret."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from replicas.integrations.gate import HEADER, Gate, GatePage, Receive, Scope, Send

pytestmark = pytest.mark.anyio


@pytest.fixture
def page() -> Iterator[GatePage]:
    page = GatePage.create()
    yield page
    page.close()


async def engine(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def ask(page: GatePage, path: str, method: str = "POST", secret: str = "", **scope: Any) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    server_side = GatePage.attach(page.path)  # what another process would map
    headers = [(HEADER.encode(), secret.encode())] if secret else []
    gate = Gate(engine, {"/pause", "/update_weights", "/is_paused"}, server_side)
    await gate({"type": "http", "path": path, "method": method, "headers": headers, **scope}, receive, send)
    server_side.close()
    return sent[0]["status"], sent[1]["body"]


async def test_a_closed_gate_answers_at_once_and_says_why(page: GatePage) -> None:
    status, body = await ask(page, "/v1/completions")
    assert status == 503
    assert "no version has been loaded" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
async def test_health_and_metrics_are_answered_before_the_first_version(page: GatePage, path: str) -> None:
    assert (await ask(page, path, "GET"))[0] == 200


async def test_an_open_gate_lets_requests_through_and_a_shut_one_does_not(page: GatePage) -> None:
    page.open(7)
    assert await ask(page, "/v1/completions") == (200, b"/v1/completions")
    assert page.version == 7
    page.shut()
    assert (await ask(page, "/v1/completions"))[0] == 503


async def test_a_page_says_whether_it_is_open(page: GatePage) -> None:
    assert (await ask(page, "/readyz", "GET"))[0] == 503
    page.open(7)
    assert await ask(page, "/readyz", "GET") == (200, b'{"version": 7}')


@pytest.mark.parametrize("path", ["/pause", "/pause/", "/update_weights"])
@pytest.mark.parametrize("opened", [True, False])
async def test_control_needs_the_secret_whether_open_or_not(page: GatePage, path: str, opened: bool) -> None:
    if opened:
        page.open(1)
    assert (await ask(page, path))[0] == 403
    assert (await ask(page, path, secret="x" * 32))[0] == 403
    assert (await ask(page, path, secret=page.secret))[0] == 200


async def test_state_of_the_engine_may_be_read_by_anybody(page: GatePage) -> None:
    assert (await ask(page, "/is_paused", "GET"))[0] == 200


async def test_control_below_a_root_path_needs_the_secret(page: GatePage) -> None:
    assert (await ask(page, "/engine/pause", root_path="/engine"))[0] == 403


async def test_a_websocket_before_the_first_version_is_closed(page: GatePage) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    await Gate(engine, (), page)({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert sent[0]["code"] == 1013


def test_the_page_cannot_be_written_by_the_server(page: GatePage) -> None:
    server_side = GatePage.attach(page.path)
    with pytest.raises(TypeError):
        server_side.open(1)
    server_side.close()


def test_each_page_has_a_secret_of_its_own(page: GatePage) -> None:
    other = GatePage.create()
    assert len(page.secret) == 32
    assert page.secret != other.secret
    other.close()
