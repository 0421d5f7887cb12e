"""The pages of the control port, asked over ASGI with no socket.

Covers: control/access.py, control/app.py.
"""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from replicas import errors
from replicas.control.access import ByToken, Cached
from replicas.control.app import control_routes
from replicas.control.commands import ORDERS
from replicas.status import ChannelStatus, GroupStatus, ReplicaState, ReplicaStatus, RunStatus, StoreStatus
from replicas.telemetry.metrics import Metrics
from replicas.trust.tokens import Tokens

pytestmark = pytest.mark.anyio


class Fake:
    """A run with one rollout replica in a given state."""

    def __init__(self, *, state: ReplicaState = "ready", ready: bool = True, alive: bool = True) -> None:
        self.state: ReplicaState = state
        self.ready = ready
        self.alive = alive

    def status(self) -> RunStatus:
        replica = ReplicaStatus(
            name="rollout/0",
            group="rollout",
            replica=0,
            state=self.state,
            generation=2,
            reason="" if self.ready else "has not loaded version 7 of policy",
        )
        return RunStatus(
            run="grpo",
            version="0.1.0",
            endpoint="127.0.0.1:9477",
            pid=1,
            uptime_s=2.0,
            ready=self.ready,
            store=StoreStatus(up=True, host="127.0.0.1", port=29500),
            groups=(GroupStatus(name="rollout", launcher="torchrun", world_size=1, replicas=(replica,)),),
            channels=(ChannelStatus(name="policy", epoch=3, committed_version=7, digest="ab", members=()),),
        )

    def scrape(self, accept: str, client: str = "") -> tuple[bytes, str]:
        return Metrics(self.status).render(accept)

    def live(self) -> bool:
        return self.alive


async def ask(source: Fake, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=Starlette(routes=control_routes(cast("Any", source))))
    async with httpx.AsyncClient(transport=transport, base_url="http://control", trust_env=False) as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize(("alive", "code"), [(True, 200), (False, 503)])
async def test_livez(alive: bool, code: int) -> None:
    response = await ask(Fake(alive=alive, ready=False), "/livez")
    assert response.status_code == code


async def test_readyz() -> None:
    good, bad = await ask(Fake(), "/readyz"), await ask(Fake(ready=False), "/readyz")
    assert (good.status_code, good.text) == (200, "ok\n")
    assert (bad.status_code, bad.text) == (503, "not ready; see /readyz?verbose\n")


@pytest.mark.parametrize("query", ["verbose", "verbose=1", "verbose=true"])
async def test_readyz_verbose_names_each_check(query: str) -> None:
    response = await ask(Fake(state="starting", ready=False), f"/readyz?{query}")
    assert response.status_code == 503
    assert response.text.splitlines() == [
        "[+] store: up at 127.0.0.1:29500",
        "[-] group rollout: 0 of 1 replicas",
        "[-] replica rollout/0: starting, generation 2, has not loaded version 7 of policy",
        "[+] channel policy: epoch 3, version 7, 0 live members",
        "run grpo is not ready",
    ]


async def test_a_finished_replica_is_no_reason_to_be_unready() -> None:
    response = await ask(Fake(state="finished"), "/readyz?verbose")
    assert response.status_code == 200
    assert "[+] replica rollout/0: finished, generation 2" in response.text.splitlines()


async def test_status_is_the_runs_status_as_json() -> None:
    response = await ask(Fake(), "/status")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    assert msgspec.json.decode(response.content, type=RunStatus) == Fake().status()


TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", TEXT),
        ("application/openmetrics-text;version=new", TEXT),
        ("application/openmetrics-text; version=2.0.0", TEXT),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0", TEXT),
        ("application/openmetrics-text;q=x, text/plain;version=1.0.0", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.5", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ('Application/OpenMetrics-Text ; Version="1.0.0"', OPENMETRICS),
        ("application/openmetrics-text;version=2.0.0,application/openmetrics-text;version=1.0.0;q=0.3", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
        (  # of Prometheus 3
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
            "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,"
            "*/*;q=0.2",
            OPENMETRICS,
        ),
    ],
)
@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_metrics_in_the_formats_of_prometheus(accept: str, kind: str, encoding: str) -> None:
    response = await ask(Fake(), "/metrics", accept=accept, **{"accept-encoding": encoding})
    assert response.headers["content-type"] == kind
    assert response.headers.get("content-encoding", "") == encoding
    assert response.content == Fake().scrape(accept)[0], "httpx has unpacked it"
    parse = openmetrics if "openmetrics" in response.headers["content-type"] else text_string_to_metric_families
    assert {family.name for family in parse(response.text)} > {"replicas_store_up", "replicas_restarts"}


@pytest.mark.parametrize("path", ["/", "/index", "/livez", "/readyz", "/metrics", "/status"])
async def test_pages_of_a_supervisor_that_starts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_yet(*_: object) -> None:
        raise errors.UsageError("the supervisor is not running")

    for name in ("status", "scrape", "live"):
        monkeypatch.setattr(Fake, name, not_yet)
    response = await ask(Fake(), path)
    assert response.status_code == 503
    assert "the supervisor is not running" in response.text


@pytest.mark.parametrize("path", ["/", "/index"])
async def test_the_index_lists_the_pages(path: str) -> None:
    response = await ask(Fake(), path)
    assert response.text.splitlines()[0] == "replicas 0.1.0, run grpo"
    assert "/readyz" in response.text


async def test_an_unknown_page_is_answered_with_the_known_ones() -> None:
    response = await ask(Fake(), "/healthz")
    assert response.status_code == 404
    assert json.loads(response.text) == {
        "error": "no such page: /healthz",
        "endpoints": ["/", "/index", "/livez", "/readyz", "/metrics", "/status", "/events", "/logs", *ORDERS],
    }


@pytest.mark.parametrize("path", ["/", "/livez", "/status", "/metrics", "/nothing"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_pages_only_read(path: str, method: str) -> None:
    response = await ask(Fake(), path, method)
    assert response.status_code == 405
    assert response.headers["allow"] in ("GET, HEAD", "HEAD, GET")


async def test_head_is_a_get_without_its_body() -> None:
    response = await ask(Fake(), "/status", "HEAD")
    assert response.status_code == 200


async def strangers_page(source: Fake, path: str) -> httpx.Response:
    app = Starlette(routes=control_routes(cast("Any", source), access=ByToken(Tokens, lambda _: None)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://control") as client:
        return await client.get(path)


@pytest.mark.parametrize("path", ["/status", "/readyz?verbose"])
async def test_strangers_are_not_told_where_the_store_is(path: str) -> None:
    """It knows no token."""
    assert "29500" in (await ask(Fake(), path)).text
    told = (await strangers_page(Fake(), path)).text
    assert "29500" not in told
    assert '"up":true' in told or "store: up\n" in told


def test_a_page_for_everybody_is_made_anew_as_often_as_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = [100.0], [0]

    def make() -> int:
        clock[0] += 0.01
        made[0] += 1
        return made[0]

    monkeypatch.setattr("replicas.control.access.time.monotonic", lambda: clock[0])
    page = Cached(make)
    assert [page.body(), page.body()] == [b"1", b"1"]
    clock[0] += 0.19
    assert page.body() == b"1"
    clock[0] += 0.02
    assert page.body() == b"2"
    monkeypatch.setattr("replicas.control.access._SHARE", 1000)
    clock[0] += 1.0
    page.body()
    clock[0] += 0.6  # it takes long, and is still no older than half a second
    assert page.body() == b"4"
