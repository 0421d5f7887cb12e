"""The routes of the page, asked over ASGI with no socket.

Covers: control/page_routes.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from replicas.control.access import ByToken
from replicas.control.app import control_routes
from replicas.page import live
from replicas.page.assets import POLICY
from replicas.page.live import VIEWERS, Places
from replicas.page.past import Past
from replicas.status import RunStatus
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import Record, ReplicaExited, RunStarted
from replicas.telemetry.metrics import Metrics
from replicas.trust.tokens import Tokens

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "accept-encoding": "gzip"}
SECRET = "rank 0 exited with code 1: password=hunter2"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Run:
    """A run whose replica has said something secret at its end."""

    def __init__(self) -> None:
        self.log, self.past = EventLog(None), Past()
        exited = ReplicaExited(group="a", replica=0, generation=1, outcome="failed", reason=SECRET)
        for event in (RunStarted(run="grpo", pid=1, version="1"), exited):
            self.past.feed(self.log.emit(event))

    def status(self) -> RunStatus:
        return self.past.status(self.past.at)

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        return self.log.follow(after)

    @property
    def last_event(self) -> int:
        return self.log.seq

    def scrape(self, accept: str, client: str = "") -> tuple[bytes, str]:
        return Metrics(self.status).render(accept)


async def ask(path: str, method: str = "GET", **headers: str) -> httpx.Response:
    app = Starlette(routes=control_routes(cast("Any", Run())))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://control") as client:
        return await client.request(method, path, headers=headers)


async def test_a_browser_gets_the_page_under_its_policy_and_others_the_text() -> None:
    page = await ask("/", **BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<title>replicas</title>" in page.text
    for path, accept in (("/", "*/*"), ("/index", BROWSER["accept"])):
        assert (await ask(path, accept=accept)).text.startswith("replicas 1, run grpo")


@pytest.mark.parametrize(
    ("name", "kind"), [("page.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")]
)
async def test_its_files(name: str, kind: str) -> None:
    found = await ask(f"/page/{name}", **BROWSER)
    assert found.headers["content-type"].startswith(kind)
    assert found.headers["content-encoding"] == "gzip"
    plain = await ask(f"/page/{name}", **{"accept-encoding": "identity"})
    assert plain.text == found.text
    again = await ask(f"/page/{name}", **{"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/main.js", "/page/..%2fassets.py", "/page/", "/page/index.html/x"])
async def test_no_other_file_is_there(path: str) -> None:
    assert (await ask(path)).status_code == 404


async def test_the_document_has_no_output_of_a_program_whoever_asks() -> None:
    found = await ask("/page/document", Authorization="Bearer anything")
    assert found.headers["cache-control"] == "no-store"
    assert "hunter2" not in found.text
    document = json.loads(found.text)
    assert document["replicas"]["a/0"]["last_exit"] == "rank 0 exited with code 1"
    assert [one["text"] for one in document["marks"].values() if one["kind"] == "exit"] == [
        "generation 1 failed: rank 0 exited with code 1"
    ]


async def test_one_viewer_too_many_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "full", lambda *_: True)
    found = await ask("/page/changes?after=x")
    assert (found.status_code, found.headers["retry-after"]) == (503, "10")
    assert f"this page has {VIEWERS} viewers already" in found.text


async def test_a_viewer_that_loses_its_place_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "VIEWERS", 2)
    app = Starlette(routes=control_routes(cast("Any", Run()), access=ByToken(Tokens, lambda _: None)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://control") as client:
        number = (await client.get("/page/document")).json()["number"]

    class Viewer:
        def __init__(self, address: str) -> None:
            self.sent: list[Any] = []
            self.began = asyncio.Event()
            scope = {"type": "http", "method": "GET", "path": "/page/changes", "headers": []}
            where = {
                "query_string": f"after={number}".encode(),
                "client": (address, 1),
                "asgi": {"spec_version": "2.4"},
            }
            never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(app({**scope, **where}, lambda: never, self.send))

        async def send(self, message: Any) -> None:
            self.sent.append(message)
            self.began.set()

    viewers = [Viewer("a"), Viewer("a"), Viewer("b"), Viewer("b")]
    try:
        for one in viewers:
            await asyncio.wait_for(one.began.wait(), 10)
        assert [one.sent[0]["status"] for one in viewers] == [200, 200, 200, 503]
        await asyncio.wait_for(viewers[0].task, 10)
        assert all(message.get("more_body", True) for message in viewers[0].sent), "a whole answer"
        assert [one.task.done() for one in viewers[1:3]] == [False, False]
    finally:
        for one in viewers:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in viewers), return_exceptions=True)


async def test_head_asks_for_no_stream() -> None:
    assert (await ask("/page/changes", "HEAD")).headers["content-type"].startswith("text/event-stream")
