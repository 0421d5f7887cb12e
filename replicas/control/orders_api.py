"""The HTTP API of orders: ``POST /scale``, ``/restart``, ``/drain``, ``/stacks`` etc.

A body is a small JSON object with the fields of its order
(:mod:`replicas.control.commands`; an empty body is ``{}``), the response an
:class:`~replicas.control.commands.Answer`. Access is checked first, then the run's name
(if the header :data:`RUN_HEADER` gives one: the file with the socket's path may belong
to a dead run), then the body; only then does any work begin.

An order may take as long as a replica needs to finish its sync. An order that is done
within :data:`QUICK_S` is answered with its own status code. A longer one is answered
with code 200 and a newline every :data:`BEAT_S`, which JSON allows before a value: both
sides see that the other is alive without guessing a timeout, and only the body has the
outcome. With ``?wait=0`` the response is 202 instead, and events have the outcome.
Draining the whole run ends the control port too: that order always gets 202.

The work runs in tasks of the routes: it goes on if the caller disconnects or its token
ends; the caller then only misses the outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import quote, unquote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from replicas import errors
from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.control import commands as orders
from replicas.control.access import Access, Lasting, everyone
from replicas.control.commands import ORDERS, RUN_HEADER, Answer, Drain, Order, Problem
from replicas.messages.version_orders import VersionOrder

log = Log("replicas.control")

QUICK_S = 0.25
BEAT_S = 2.0
BODY_NBYTES = 64 * 1024
BODY_TIMEOUT_S = 5.0
NO_STORE = {"Cache-Control": "no-store"}


def json_response(value: object, code: int = 200, **headers: str) -> Response:
    """Return a response with this value as JSON, not to be cached; values without a
    JSON form become text.

    :param code: the HTTP status. :param headers: further ones.
    """
    return json_bytes(msgspec.json.encode(value, enc_hook=str), code, **headers)


def json_bytes(body: bytes, code: int = 200, **headers: str) -> Response:
    """Return a response whose body is this JSON, not to be cached.

    :param code: the HTTP status. :param headers: further ones.
    """
    return Response(body, code, headers={**NO_STORE, **headers}, media_type="application/json")


def refusal(message: str, code: int, *, hint: str = "", **headers: str) -> Response:
    """Return a response that refuses a request: an :class:`Answer` with a UsageError.

    :param message: text of the error. :param code: the HTTP status.
    :param hint: what the caller can do. :param headers: further headers.
    """
    problem = Problem(kind="UsageError", message=message, hint=hint)
    return json_response(Answer(done=False, error=problem), code, **headers)


def unauthorized(why: str) -> Response:
    """Return a 401 response with the text ``why``. It also has the server close the
    connection, since earlier requests on it may have had access."""
    return refusal(why, 401, **{"WWW-Authenticate": "Bearer", "Connection": "close"})


def order_routes(source: object, access: Access, run: Callable[[], str]) -> list[Route]:
    """Return a POST route for each order (:data:`ORDERS`). A route reads the order from
    the request, and starts a task that carries it out; the task goes on if the caller
    disconnects.

    The route answers when the task is done. There are two exceptions, a request with
    ``?wait=0`` and any drain of the whole run: if the task is not done after 0.25 s,
    the answer is 202, without the outcome.

    :param source: the run, which has a method for each order (:data:`ORDERS`).
    :param access: returns why a request may not give orders (401), or None.
    :param run: returns the run's name; an order for another run is refused (409).
    """
    running: set[asyncio.Task[object]] = set()  # the loop itself keeps only weak references

    def over(task: asyncio.Task[object]) -> None:
        """Forget an order's task, which is done.

        Log an error that is not a ReplicasError, as that is a bug. The task's done
        callback.
        """
        running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, errors.ReplicasError):
            log.error("going on after a bug in the order %s; please report this", task.get_name(), exc_info=error)

    def route(path: str, kind: type[Order]) -> Route:
        """Return the route of one order, whose body is of the type ``kind``."""

        async def endpoint(request: Request) -> Response:
            """Read the order, start a task that carries it out, and answer when it is
            done, or (``?wait=0``) shortly after it has begun."""
            order = await _order(request, path, kind, access, run)
            if isinstance(order, Response):
                return order
            task = asyncio.create_task(_carry_out(source, path, order), name=kind.__name__)
            running.add(task)
            task.add_done_callback(over)
            ends_all = isinstance(order, Drain) and order.target is None and order.node is None
            wait = request.query_params.get("wait", "1") != "0" and not ends_all
            # A caller that retires its own token gets the new one.
            guard = everyone if isinstance(order, orders.TokensOrder) else access
            return await _answer(task, request, guard, wait=wait)

        return Route(path, endpoint, methods=["POST"])

    return [route(path, kind) for path, kind in ORDERS.items()]


async def _carry_out(source: object, path: str, order: Order) -> object:
    """Await the run's method for this order (named after ``path``), and return its
    result.

    :param source: has the methods.
    """
    if isinstance(order, VersionOrder):
        return await source.steer(order)  # type: ignore[attr-defined]  # as all methods of orders
    name, given = path[1:].replace("-", "_"), msgspec.structs.asdict(order)
    if isinstance(order, Drain):
        name, fields = ("drain", ("target", "hurry")) if order.node is None else ("drain_node", ("node", "undo"))
        given = {field: given[field] for field in fields}
    return await getattr(source, name)(**given)


async def _order(
    request: Request, path: str, kind: type[Order], access: Access, run: Callable[[], str]
) -> Order | Response:
    """Read the order in a request; return the response if the request is refused.

    :param path: of the route, for messages. :param kind: type of the order.
    :param access: returns why the request's token does not permit this, or None.
    :param run: returns the name of this run; a request for another run is refused.
    """
    if why := access(request.headers):
        return unauthorized(why)
    if problem := _another_run(request, run):
        return json_response(Answer(done=False, error=problem), 409)
    try:
        order = msgspec.json.decode(await _body(request), type=kind)
    except MALFORMED as error:
        fields = ", ".join(kind.__struct_fields__) or "none"
        return refusal(f"{path} does not take this body: {error}", 400, hint=f"fields: {fields}")
    except HTTPException as error:
        return refusal(error.detail, error.status_code)
    why = access(request.headers)  # the token may have ended while the body was read
    return unauthorized(why) if why else order


def _another_run(request: Request, run: Callable[[], str]) -> Problem | None:
    """Return the problem of a request whose header names another run than this, or None
    if it names this one or none.

    :param run: returns this run's name. A ReplicasError that it raises, as while the
        run starts, is the problem that is returned.
    """
    meant = request.headers.get(RUN_HEADER)
    try:
        if meant is None or meant == quote(run(), safe=""):
            return None
        text = f'run "{unquote(meant)[:100]}" has ended: run "{run()}" is at its address now'
        return Problem.of(errors.Disconnected(text))
    except errors.ReplicasError as error:  # the supervisor is still starting
        return Problem.of(error)


async def _body(request: Request) -> bytes:
    """Read the request's body, and return it, or ``{}`` if it is empty. Raise
    HTTPException if it is over 64 KiB, cut off, or not complete within 5 s."""
    body = b""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_NBYTES:
                    raise HTTPException(413, f"the body is larger than {BODY_NBYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"no complete body within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off") from None
    return body or b"{}"


def _outcome(task: asyncio.Task[object]) -> Answer:
    """Return the answer to an order whose task is done: its result, or its error as
    data; a bug becomes an InternalError."""
    error = task.exception()
    if error is None:
        return Answer(done=True, result=task.result())
    if isinstance(error, errors.ReplicasError):
        return Answer(done=False, error=Problem.of(error))
    text = f"{type(error).__name__}: {error}"  # a bug: it is logged, and the caller gets it, too
    return Answer(done=False, error=Problem(kind="InternalError", message=text))


def _code(answer: Answer) -> int:
    """Return the HTTP status of an answer: 200, or that of its kind of error."""
    if answer.error is None:
        return 200
    if answer.error.kind == "BadConfig":
        return 422
    kind = errors.error_class(answer.error.kind)
    if issubclass(kind, errors.UsageError):
        return 409
    return 503 if issubclass(kind, errors.WorldError | errors.Disconnected | errors.SyncError) else 500


async def _answer(task: asyncio.Task[object], request: Request, access: Access, *, wait: bool) -> Response:
    """Wait 0.25 s for the order's task, and return its answer if it has ended. If it
    has not, return 202 or, with ``wait``, a stream that has the answer at its end.

    :param access: checked before the stream begins (401 without access); the stream
        ends when the request's access ends. The task goes on in both cases.
    """
    done, _ = await asyncio.wait({task}, timeout=QUICK_S)
    if done:
        answer = _outcome(task)
        return json_response(answer, _code(answer))
    if not wait:
        return json_response(Answer(done=False), 202)
    if why := access(request.headers):
        return unauthorized(why)
    return Lasting(
        _beats(task), partial(access.watched, request.headers), media_type="application/json", headers=NO_STORE
    )


async def _beats(task: asyncio.Task[object]) -> AsyncIterator[bytes]:
    """Yield a newline every 2 s until the task is done, then its answer as JSON."""
    while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
        yield b"\n"
    yield msgspec.json.encode(_outcome(task), enc_hook=str)
