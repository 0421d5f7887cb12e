"""The gate of an inference server: shut before a version, control by the secret.

Covers: integrations/gate.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from replicas.engine.demands import Send
from replicas.integrations.gate import ALWAYS, HEADER, Gate, GatePage, Receive, Scope

pytestmark = pytest.mark.anyio


@pytest.fixture
def page() -> Iterator[GatePage]:
    page = GatePage.create()
    yield page
    page.close()


async def engine(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


CONTROL = {"/pause", "/update_weights", "/is_paused", "/adapters/"}


async def ask(
    page: GatePage, path: str, method: str = "POST", secret: str = "", app: Any = engine, **scope: Any
) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    server_side = GatePage.attach(page.path)  # what another process would map
    headers = [(HEADER.encode(), secret.encode())] if secret else []
    gate = Gate(app, CONTROL, server_side, always=(*ALWAYS, "/v1/models"))
    await gate(
        {"type": "http", "path": path, "method": method, "headers": headers, "query_string": b"", **scope},
        receive,
        send,
    )
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


@pytest.mark.parametrize("path", ["/pause\n", "/pau\nse", "/v1/completions\n", "/v1/completions\x7f", "/adapters/x\ny"])
async def test_a_path_with_a_control_character_is_refused(page: GatePage, path: str) -> None:
    page.open(1)
    assert (await ask(page, path))[0] == 400


ROUTED = [
    "/pause",
    "/pause/",
    "/pause\n",
    "/pause\n/",
    "//pause",
    "/update_weights",
    "/adapters/x",
    "/adapters/a/b",
    "/x",
]


@pytest.mark.parametrize("root_path", ["", "/", "/pa", "/pause", "/engine", "/engine/"])
@pytest.mark.parametrize("below", ROUTED)
async def test_no_request_reaches_a_control_route_of_starlettes_router(
    page: GatePage, root_path: str, below: str
) -> None:
    """The application, not a rule of ours, says which route a path leads to."""
    reached = []

    async def control(request: Request) -> Response:
        reached.append(request.url.path)
        return Response()

    app = Router([Route(path, control, methods=["POST"]) for path in (*CONTROL, "/adapters/{name}")])
    page.open(1)
    for path in (below, root_path + below, root_path.rstrip("/") + below):
        await ask(page, path, app=app, root_path=root_path)
    assert not reached


@pytest.mark.parametrize("root_path", ["", "/engine"])
async def test_what_is_no_control_route_is_answered_below_a_root_path(page: GatePage, root_path: str) -> None:
    page.open(1)
    for path in ("/pauses", "/adapterss/x", "/v1/models/a b%c"):
        assert (await ask(page, root_path + path, root_path=root_path))[0] == 200


async def test_a_websocket_before_the_first_version_is_closed(page: GatePage) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    await Gate(engine, (), page)({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert sent[0]["code"] == 1013


@pytest.mark.parametrize(
    ("demand", "types"), [("7", ["websocket.accept", "websocket.send"]), ("8", ["websocket.close"])]
)
async def test_a_websocket_names_its_version_as_it_opens(page: GatePage, demand: str, types: list[str]) -> None:
    """A load afterwards does not end it."""
    page.open(7)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def talk(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        page.load(8)
        await send({"type": "websocket.send", "text": "7"})

    headers = [(b"x-replicas-version", demand.encode())]
    await Gate(talk, (), page)({"type": "websocket", "path": "/v1/realtime", "headers": headers}, receive, send)
    assert [message["type"] for message in sent] == types
    assert demand == "8" or (b"x-replicas-version", b"7") in sent[0]["headers"]


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
