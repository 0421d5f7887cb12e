"""Orders, events and logs over HTTP, asked over ASGI with no socket: each endpoint,
each answer, who may ask.

Covers: control/commands.py, control/orders_api.py.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from replicas import errors
from replicas.control import orders_api as desk
from replicas.control.access import ByToken
from replicas.control.app import control_routes
from replicas.control.commands import ORDERS, RUN_HEADER, TOKEN_HEADER, Answer, Problem
from replicas.control.log_files import FolderReader, LogReader, Selection
from replicas.messages.version_orders import VersionOrder
from replicas.supervisor.agent.checks import Finding
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import RankEnd, Reloaded, ReloadRefused, ReplicaExited, Scaled, decode
from replicas.telemetry.events import Record as EventRecord
from replicas.trust.tokens import Tokens
from tests.unit.control.test_control_app import Fake

pytestmark = pytest.mark.anyio

TOKEN = {"Authorization": "Bearer secret"}
TOKENS = Tokens("member", "secret")


class Run(Fake):
    """Takes down what it is told to do. ``error``: what each order ends with; ``gate``:
    what each one waits for."""

    def __init__(self, logs: Path = Path("/nonexistent")) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.logs = logs
        self.refused: list[str] = []

    def read_logs(self, selection: Selection) -> LogReader:
        return FolderReader(self.logs, selection)

    async def _take(self, *order: Any) -> None:
        self.asked.append(order)
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def scale(self, group: str, replicas: int) -> None:
        await self._take("scale", group, replicas)

    async def restart(self, target: str, *, rolling: bool = False) -> None:
        await self._take("restart", target, rolling)

    async def drain(self, target: str | None = None, *, hurry: bool = False) -> None:
        await self._take("drain", target, hurry)

    async def detach(self) -> None:
        await self._take("detach")

    async def drain_node(self, node: str, *, undo: bool = False) -> None:
        await self._take("drain_node", node, undo)

    async def reset_failed(self, target: str | None = None) -> tuple[str, ...]:
        await self._take("reset-failed", target)
        return ("a/1", "a/2")

    async def reload(self) -> Reloaded:
        await self._take("reload")
        return Reloaded(changed=("a",))

    async def stacks(self, target: str | None = None) -> dict[str, str]:
        await self._take("stacks", target)
        return {"a/0/0": "Thread 0x1"}

    async def doctor(self, node: str | None = None) -> tuple[Finding, ...]:
        await self._take("doctor", node)
        return (Finding("disk", "note", "full", node="n1"),)

    async def tokens(
        self, role: str | None = None, *, rotate: bool = False, revoke_old: bool = False, force: bool = False
    ) -> dict[str, dict[str, Any]]:
        await self._take("tokens", role, rotate, revoke_old, force)
        return {"member": {"token": "other", "old_is_valid": False}}

    last_event = 3

    async def events(self, after: int | None = None) -> AsyncIterator[EventRecord]:
        for seq in range((3 if after is None else after) + 1, 4):
            yield EventRecord(seq, 100.0 + seq, Scaled(group="a", before=seq, after=seq + 1))

    def app(self) -> Starlette:
        access = ByToken(lambda: TOKENS, self.refused.append)
        return Starlette(routes=control_routes(self, access=access))


async def ask(run: Run, path: str, body: object = None, *, method: str = "POST", **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=run.app())
    content = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    async with httpx.AsyncClient(transport=transport, base_url="http://control", trust_env=False) as client:
        return await client.request(method, path, content=content, **{"headers": TOKEN, **options})


def scope(path: str) -> dict[str, Any]:
    """A request with the token, for calling the app by hand."""
    headers = [(b"authorization", b"Bearer secret")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}


@pytest.mark.parametrize("path", ORDERS)
def test_each_order_has_the_parameters_of_its_command(path: str) -> None:
    if issubclass(ORDERS[path], get_args(VersionOrder)):
        assert inspect.iscoroutinefunction(Supervisor.steer), "which takes them as they are"
        return
    fields = {*ORDERS[path].__struct_fields__}
    for name in ("drain", "drain_node") if path == "/drain" else (path[1:].replace("-", "_"),):
        method = getattr(Supervisor, name)
        assert inspect.iscoroutinefunction(method)
        taken = {*inspect.signature(method).parameters} & fields
        assert taken == fields or path == "/drain"
        fields -= taken
    assert not fields


def answer(response: httpx.Response) -> Answer:
    return msgspec.json.decode(response.content, type=Answer)


@pytest.mark.parametrize(
    ("path", "body", "order", "result"),
    [
        ("/scale", {"group": "a", "replicas": 0}, ("scale", "a", 0), None),
        ("/restart", {"target": "a/1"}, ("restart", "a/1", False), None),
        ("/restart", {"target": "a", "rolling": True}, ("restart", "a", True), None),
        ("/drain", {"target": "a", "hurry": True}, ("drain", "a", True), None),
        ("/drain", None, ("drain", None, False), None),
        ("/detach", None, ("detach",), None),
        ("/reset-failed", None, ("reset-failed", None), ["a/1", "a/2"]),
        ("/reset-failed", {"target": "a"}, ("reset-failed", "a"), ["a/1", "a/2"]),
        ("/reload", {}, ("reload",), {"type": "Reloaded", "changed": ["a"], "added": [], "removed": []}),
        ("/stacks", {"target": "a/0"}, ("stacks", "a/0"), {"a/0/0": "Thread 0x1"}),
        (
            "/doctor",
            {"node": "n1"},
            ("doctor", "n1"),
            [{"about": "disk", "state": "note", "text": "full", "remedy": "", "node": "n1"}],
        ),
        (
            "/tokens",
            {"role": "member", "rotate": True},
            ("tokens", "member", True, False, False),
            {"member": {"token": "other", "old_is_valid": False}},
        ),
    ],
)
async def test_each_order_is_carried_out(path: str, body: object, order: tuple[Any, ...], result: object) -> None:
    run = Run()
    response = await ask(run, path, body)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert answer(response) == Answer(done=True, result=result)
    assert run.asked == [order]


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize(
    ("headers", "words", "refused"),
    [
        ({}, "an order needs an operator's token", []),
        ({"Authorization": "Bearer secre"}, "wrong token", ["token"]),
        ({"Authorization": "Bearer member"}, "a member's token does not permit orders", []),
    ],
)
async def test_no_order_without_the_token(path: str, headers: dict[str, str], words: str, refused: list[str]) -> None:
    run = Run()
    response = await ask(run, path, b"not even JSON", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    problem = answer(response).error
    assert problem is not None
    assert words in problem.message
    assert run.asked == []
    assert run.refused == refused


@pytest.mark.parametrize("path", ORDERS)
async def test_an_order_is_posted(path: str) -> None:
    response = await ask(Run(), path, method="GET")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/scale", b"{", "/scale does not take this body"),
        ("/scale", {"group": "a"}, "missing required field `replicas`"),
        ("/scale", {"group": "a", "replicas": "3"}, "Expected `int`, got `str`"),
        ("/restart", {"target": "a", "roling": True}, "unknown field `roling`"),
        ("/restart", {"target": ""}, "length >= 1"),
        ("/reload", {"config": "x.toml"}, "unknown field `config`"),
        ("/drain", [], "Expected `object`"),
    ],
)
async def test_a_bad_body_is_explained_and_does_nothing(path: str, body: object, words: str) -> None:
    run = Run()
    response = await ask(run, path, body)
    problem = answer(response).error
    assert response.status_code == 400
    assert problem is not None
    assert words in problem.message
    assert problem.hint.startswith("fields: ")
    assert run.asked == []


async def test_a_body_has_a_limit() -> None:
    response = await ask(Run(), "/scale", b" " * (desk.BODY_NBYTES + 1))
    assert response.status_code == 413


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "BODY_TIMEOUT_S", 0.01)
    run = Run()

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    sent: list[Any] = []

    async def take(message: Any) -> None:
        sent.append(message)

    await run.app()(scope("/drain"), never, take)
    assert sent[0]["status"] == 408
    assert run.asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError('no group "x"', hint="groups: a"), 409),
        (errors.BadConfig(["a.b: wrong", "c: wrong"], source="x.toml"), 422),
        (errors.WorldError("replica a/0 failed"), 503),
        (errors.InternalError("ours"), 500),
    ],
)
async def test_what_ends_an_order_comes_back_as_it_was(error: errors.ReplicasError, code: int) -> None:
    run = Run()
    run.error = error
    response = await ask(run, "/restart", {"target": "x"})
    problem = answer(response).error
    assert response.status_code == code
    assert problem is not None
    again = problem.exception()
    assert (type(again), str(again)) == (type(error), str(error))


async def test_a_bug_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.error = ZeroDivisionError("of ours")
    response = await ask(run, "/reload")
    assert response.status_code == 500
    assert answer(response).error == Problem(kind="InternalError", message="ZeroDivisionError: of ours")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "QUICK_S", 0.005)
    monkeypatch.setattr(desk, "BEAT_S", 0.005)


@pytest.mark.usefixtures("impatient")
async def test_an_order_that_takes_long_is_answered_with_beats() -> None:
    run = Run()
    run.gate.clear()
    run.error = errors.WorldError("replica a/0 failed")
    requests = iter([{"type": "http.request", "body": b'{"target":"a"}'}])
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        request = next(requests, None)
        if request is None:
            await asyncio.Event().wait()
        return request or {}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return
        parts.append(message["body"])
        if len(parts) == 3:
            run.gate.set()

    await run.app()(scope("/restart"), receive, send)
    assert parts[:3] == [b"\n"] * 3
    problem = msgspec.json.decode(b"".join(parts), type=Answer).error
    assert problem is not None
    assert problem.message == "replica a/0 failed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/restart?wait=0", "/drain"])
async def test_an_order_that_is_not_waited_for(path: str) -> None:
    run = Run()
    run.gate.clear()
    response = await ask(run, path, {"target": "a"} if path != "/drain" else None)
    assert (response.status_code, answer(response)) == (202, Answer(done=False))
    run.gate.set()
    await asyncio.sleep(0)
    assert len(run.asked) == 1


# ------------------------------------------------------------ streams


async def read(run: Run, path: str, **options: Any) -> httpx.Response:
    return await ask(run, path, method="GET", **options)


@pytest.mark.parametrize(
    ("path", "headers", "numbers"),
    [
        ("/events?after=1&follow=0", {}, [2, 3]),
        ("/events?after=0&follow=0", {}, [1, 2, 3]),
        ("/events?after=3&follow=0", {}, []),
        ("/events?follow=0", {}, []),
        ("/events?after=1", {}, [2, 3]),
        ("/events?after=0", {"Last-Event-ID": "2"}, [3]),
    ],
)
async def test_events_are_server_sent_to_everyone(path: str, headers: dict[str, str], numbers: list[int]) -> None:
    response = await read(Run(), path, headers=headers)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.content.splitlines()
    records = [decode(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [record.seq for record in records] == numbers
    assert [line for line in lines if line.startswith(b"id: ")] == [b"id: %d" % number for number in numbers]
    assert lines.count(b"event: Scaled") == len(numbers)


@pytest.mark.parametrize(("headers", "lines"), [({}, ()), (TOKEN, ("secret",))])
async def test_what_a_program_printed_is_not_for_everyone(
    headers: dict[str, str], lines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = RankEnd(rank=0, code=1, text="boom", lines=("secret",), error="secret" * bool(lines))
    end = ReplicaExited(
        group="a",
        replica=0,
        generation=1,
        outcome="failed",
        reason=f"rank 0 exited with code 1: {rank.text}",
        ranks=(rank,),
    )

    async def events(*_: object) -> AsyncIterator[EventRecord]:
        yield EventRecord(1, 0.0, end)

    monkeypatch.setattr(Run, "events", events)
    response = await read(Run(), "/events?after=0&follow=0", headers=headers)
    (line,) = (line for line in response.content.splitlines() if line.startswith(b"data: "))
    told = decode(line[6:]).event
    assert isinstance(told, ReplicaExited)
    known = bool(headers)
    assert told.ranks == (RankEnd(rank=0, code=1, text="boom" * known, lines=lines, error="secret" * known),)
    assert told.reason == ("rank 0 exited with code 1: boom" if known else "rank 0 exited with code 1")


@pytest.mark.parametrize("path", ["/status", "/readyz?verbose"])
async def test_pages_show_what_a_program_printed_with_the_token_only(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    (group,) = Fake.status(run).groups
    failed = msgspec.structs.replace(
        group.replicas[0], state="failed", reason="rank 0 exited with code 3: key=xyz; all restarts are used"
    )
    groups = (msgspec.structs.replace(group, replicas=(failed,)),)
    monkeypatch.setattr(run, "status", lambda: msgspec.structs.replace(Fake.status(run), groups=groups))
    assert "rank 0 exited with code 3: key=xyz" in (await read(run, path, headers=TOKEN)).text
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        text = (await read(run, path, headers=headers)).text
        assert "rank 0 exited with code 3" in text
        assert "xyz" not in text


@pytest.mark.parametrize("path", ["/status", "/events?after=0&follow=0"])
async def test_a_public_page_tells_why_a_token_is_refused(path: str) -> None:
    for shown, why in (("secret", None), ("member", None), ("wrong", "wrong token")):
        run = Run()
        response = await read(run, path, headers={"Authorization": f"Bearer {shown}"})
        assert (response.status_code, response.headers.get(TOKEN_HEADER)) == (200, why)
        assert run.refused == (["token"] if why else [])
    assert TOKEN_HEADER not in (await read(Run(), path, headers={})).headers


async def test_a_refused_config_is_not_quoted_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def events(*_: object) -> AsyncIterator[EventRecord]:
        yield EventRecord(1, 0.0, ReloadRefused(problems=('groups.a.cwd: folder "/xyz" does not exist',)))

    monkeypatch.setattr(Run, "events", events)
    assert "/xyz" in (await read(Run(), "/events?after=0&follow=0", headers=TOKEN)).text
    text = (await read(Run(), "/events?after=0&follow=0", headers={})).text
    assert '"problems":["groups.a.cwd"]' in text


@pytest.mark.parametrize(("meant", "code"), [("grpo", 200), ("other", 409)])
async def test_an_order_for_another_run(meant: str, code: int) -> None:
    run = Run()
    response = await ask(run, "/scale", {"group": "a", "replicas": 1}, headers={**TOKEN, RUN_HEADER: meant})
    assert response.status_code == code
    problem = answer(response).error
    assert (problem is None) == (code == 200) == bool(run.asked)
    if problem is not None:
        assert str(problem.exception()).startswith('run "other" has ended: run "grpo" is at its address now')


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 30])
async def test_an_event_number_that_is_none(after: str) -> None:
    response = await read(Run(), f"/events?after={after}")
    assert response.status_code == 400


@pytest.fixture
def logged(tmp_path: Path) -> Run:
    for name in ("a/0/gen-1/rank-0", "a/0/gen-2/rank-0", "a/0/gen-2/rank-1", "b/0/gen-1/rank-0"):
        path = tmp_path / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"one of {name}\ntwo\n")
    return Run(tmp_path)


async def test_logs_as_text_and_as_json(logged: Run) -> None:
    text = await read(logged, "/logs?target=a&lines=1")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert text.text == "a/0/0| two\na/0/1| two\n"
    assert (await read(logged, "/logs?target=a/0/1")).text == "one of a/0/gen-2/rank-1\ntwo\n"
    assert (await read(logged, "/logs?target=b/0")).text == "one of b/0/gen-1/rank-0\ntwo\n"
    json = await read(logged, "/logs?target=a/0&rank=0&generation=1&json=1")
    assert [msgspec.json.decode(line) for line in json.content.splitlines()] == [
        {"replica": "a/0", "generation": 1, "rank": 0, "text": text} for text in ("one of a/0/gen-1/rank-0", "two")
    ]


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ("target=c", 404, "there is no log of c"),
        ("rank=x", 400, "Expected `int | null`"),
        ("ranks=1", 400, "unknown parameter 'ranks'"),
    ],
)
async def test_logs_that_cannot_be_had(logged: Run, query: str, code: int, words: str) -> None:
    response = await read(logged, f"/logs?{query}")
    problem = answer(response).error
    assert response.status_code == code
    assert problem is not None
    assert words in problem.message


async def test_logs_need_the_token(logged: Run) -> None:
    response = await read(logged, "/logs", headers={})
    assert response.status_code == 401


async def test_the_index_and_unknown_pages_name_all() -> None:
    index = await read(Run(), "/")
    unknown = await read(Run(), "/nothing")
    for path in (*ORDERS, "/events", "/logs"):
        assert path in index.text
        assert path in unknown.json()["endpoints"]


# ------------------------------------------------------------ tokens that end


class Unending(Run):
    """Its events and logs go on for ever; each order waits for its gate."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self.given = Tokens("member", "secret")
        self.given.rotate("operator", "newer")

    async def events(self, after: int | None = None) -> AsyncIterator[EventRecord]:
        yield EventRecord(1, 100.0, Scaled(group="a", before=1, after=2))
        await asyncio.Event().wait()

    def app(self) -> Starlette:
        access = ByToken(lambda: self.given, self.refused.append)
        return Starlette(routes=control_routes(self, access=access))


async def told(run: Unending, path: str, *, revoke_at: str = "") -> tuple[int, bytes]:
    """Status and text of a response, whose end is awaited.

    The token is revoked when the ``"body"`` of the request is asked for, or at the
    first ``"text"`` of the answer.
    """
    page, _, query = path.partition("?")
    requests = iter([b'{"target":"a"}' if page in ORDERS else b""])
    status, text = 0, b""

    async def receive() -> dict[str, Any]:
        body = next(requests, None)
        if body is None:
            await asyncio.Event().wait()
        if revoke_at == "body":
            run.given.revoke_old("operator")
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        nonlocal status, text
        status = message.get("status", status)
        text += message.get("body", b"")
        if revoke_at == "text" and text:
            run.given.revoke_old("operator")

    method = "POST" if page in ORDERS else "GET"
    async with asyncio.timeout(20):
        await run.app()({**scope(page), "method": method, "query_string": query.encode()}, receive, send)
    return status, text


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/events", "/logs?follow=1", "/logs?follow=1&json=1", "/restart"])
async def test_what_lasts_ends_with_its_token(logged: Run, path: str) -> None:
    run = Unending(logged.logs)
    run.gate.clear()
    status, text = await told(run, path, revoke_at="text")
    assert status == 200
    assert b"done" not in text
    assert (run.asked, run.gate.is_set()) == ([("restart", "a", False)] if path == "/restart" else [], False)


async def test_a_token_that_ends_before_the_body_is_there_gives_no_order(logged: Run) -> None:
    run = Unending(logged.logs)
    status, text = await told(run, "/restart", revoke_at="body")
    assert (status, run.asked) == (401, [])
    assert b"old token: it was replaced by a newer one" in text


@pytest.mark.usefixtures("impatient")
async def test_a_token_that_ends_within_the_first_look_gives_no_wait(logged: Run) -> None:
    run = Unending(logged.logs)
    run.gate.clear()
    asyncio.get_running_loop().call_later(0.001, run.given.revoke_old, "operator")
    assert (await told(run, "/restart"))[0] == 401


async def test_a_token_that_ends_while_a_node_is_asked_reads_nothing(
    logged: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, poll = Unending(logged.logs), FolderReader.poll

    async def slow(reader: FolderReader) -> Any:
        run.given.revoke_old("operator")
        return await poll(reader)

    monkeypatch.setattr(FolderReader, "poll", slow)
    assert (await told(run, "/logs"))[0] == 401


@pytest.mark.usefixtures("impatient")
async def test_who_ends_the_own_token_is_told_of_the_new_one(logged: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run, tokens = Unending(logged.logs), Unending.tokens

    async def slow(self: Unending, role: str | None = None, **what: bool) -> Any:
        run.given.revoke_old("operator")
        await asyncio.sleep(4 * desk.QUICK_S)
        return await tokens(self, role, **what)

    monkeypatch.setattr(Unending, "tokens", slow)
    assert answer(await ask(run, "/tokens", {"revoke_old": True})).done
