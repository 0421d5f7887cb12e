"""A request gets the version that it demands, or a refusal that says what is served.

Covers: engine/demands.py.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest

from replicas.engine.demands import CutOff, Send, demand_of
from replicas.integrations.gate import Gate, GatePage, Receive, Scope

pytestmark = pytest.mark.anyio


@pytest.fixture
def page() -> Iterator[GatePage]:
    page = GatePage.create()
    page.open(7)
    page.set_labels({"current": 7, "best": 5})
    yield page
    page.close()


class Said:
    """What a client gets: status, version and body; ``whole``: with its end."""

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.whole = 0, dict[str, str](), b"", False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.whole = not message.get("more_body")

    @property
    def version(self) -> str:
        return self.headers.get("x-replicas-version", "")

    @property
    def why(self) -> str:
        text: str = json.loads(self.body)["error"]["message"]
        return text


async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"text"})


async def asked(page: GatePage, demand: str | None = None, app: Any = plain) -> Said:
    said, headers = Said(), [] if demand is None else [(b"x-replicas-version", demand.encode("latin-1"))]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b""}

    await Gate(app, (), page)(scope, receive, said.send)
    return said


async def test_each_answer_names_the_version_that_is_served(page: GatePage) -> None:
    said = await asked(page)
    assert (said.status, said.version, said.body) == (200, "7", b"text")


@pytest.mark.parametrize("demand", ["7", ">=7", ">= 3", "current", " 7 "])
async def test_what_can_be_answered_is(page: GatePage, demand: str) -> None:
    said = await asked(page, demand)
    assert (said.status, said.version) == (200, "7")


@pytest.mark.parametrize("demand", ["6", ">=8", "best", "9007199254740991"])
async def test_what_cannot_is_refused_with_what_is_served(page: GatePage, demand: str) -> None:
    said = await asked(page, demand)
    assert (said.status, said.version) == (409, "7")
    assert f"this server answers with version 7, and {demand} is demanded" in said.why


@pytest.mark.parametrize(
    "demand", ["", "x", "-1", "0", "07", "7-8", "<8", ">=", "7; drop", "\xff", "\u0667"[:0] + "candidate"]
)
async def test_what_is_no_demand_is_refused_with_what_is_one(page: GatePage, demand: str) -> None:
    said = await asked(page, demand)
    assert said.status == 400
    assert "a number, >= and a number, or a label (best, current)" in said.why


async def test_during_a_load_both_versions_are_possible(page: GatePage) -> None:
    page.load(8)
    assert (await asked(page)).version == "7-8"
    assert (await asked(page, ">=7")).status == 200
    for demand in ("7", "8", ">=8"):
        said = await asked(page, demand)
        assert (said.status, said.headers["retry-after"]) == (503, "1"), demand
    assert (await asked(page, "6")).status == 409
    page.open(8)
    assert (await asked(page, "8")).version == "8"


@pytest.mark.parametrize(("demand", "status", "version"), [(None, 200, "7-8"), (">=7", 200, "7-8"), ("7", 409, "7-8")])
async def test_a_load_before_the_answer_begins(page: GatePage, demand: str | None, status: int, version: str) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        page.load(8)
        page.open(8)
        await plain(scope, receive, send)

    said = await asked(page, demand, slow)
    assert (said.status, said.version) == (status, version) if status == 200 else said.status in (409, 503)


async def test_a_load_in_the_middle_cuts_an_answer_of_another_version_off(page: GatePage) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"seven ", "more_body": True})
        page.load(8)
        await send({"type": "http.response.body", "body": b"eight", "more_body": False})

    assert (await asked(page, ">=7", stream)).body == b"seven eight"
    page.open(7)
    said = Said()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"x-replicas-version", b"7")]}
    with pytest.raises(CutOff):
        await Gate(stream, (), page)(scope, asyncio.Event().wait, said.send)  # type: ignore[arg-type]  # never called
    assert (said.body, said.whole) == (b"seven ", False)


async def test_a_failure_of_the_server_stays_one(page: GatePage) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asked(page, "7", broken)


async def test_a_shut_gate_answers_no_demand(page: GatePage) -> None:
    page.shut()
    assert (await asked(page, "7")).status == 503


def test_the_labels_are_what_was_set_also_when_there_are_too_many(page: GatePage) -> None:
    server_side = GatePage.attach(page.path)
    assert server_side.labels == {"current": 7, "best": 5}
    page.set_labels({f"{'label' * 20}-{number}": number for number in range(100)})
    assert 10 < len(server_side.labels) < 100
    page.set_labels({})
    assert server_side.labels == {}


class DyingMemory(mmap.mmap):
    """The page's memory for a follower that is killed after ``allowed`` more writes."""

    allowed = 10**6

    def __setitem__(self, at: Any, data: Any) -> None:
        if self.allowed == 0:
            raise ProcessLookupError
        self.allowed -= 1
        super().__setitem__(at, data)


@pytest.mark.parametrize("before", [0, 1, 255, 256])
@pytest.mark.parametrize("allowed", [0, 1])
def test_a_follower_that_dies_while_it_writes_labels_leaves_the_old_ones(before: int, allowed: int) -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, mmap.PAGESIZE)
    memory = DyingMemory(fd, mmap.PAGESIZE)
    page = GatePage(memory, fd)
    server_side = GatePage.attach(page.path)
    for number in range(before):
        page.set_labels({"current": number + 1})
    memory.allowed = allowed
    with pytest.raises(ProcessLookupError):
        page.set_labels({"current": 1000, "best": 999})
    assert server_side.labels == ({"current": before} if before else {})
    memory.allowed = 2
    page.set_labels({"current": 1000})
    assert server_side.labels == {"current": 1000}
    server_side.close()
    page.close()
    server_side.close()


def test_a_label_is_the_version_that_it_pointed_to_when_the_request_came() -> None:
    demand = demand_of("current", {"current": 7})
    assert demand.admits(7)
    assert not demand.admits(8)
