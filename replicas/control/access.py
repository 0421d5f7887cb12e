"""Access control: orders and output for operators, reduced pages for all others.

The own user has full access on the Unix socket, an operator's token over TCP. A program
may print a secret, and its last line becomes part of the reason why its replica failed,
which is copied into states, events and members' texts. So no field is trusted: every
text is cut after the exit code or the signal (:func:`without_output`). The store's
address is hidden because the store does not check tokens.

Access lasts as long as the token: streams and long waits are :class:`Lasting`
responses, which end with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import anyio
import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from replicas.common.reason import Reason
from replicas.status import RunStatus
from replicas.telemetry.events import Event, Record, ReloadRefused, ReplicaExited
from replicas.trust.tokens import Tokens

_SHARE = 20
_KEPT_S = 0.5

_KILLED = r"was killed by (?:SIG\w+|signal \d+)"
_ENDED = rf" (?:exited with code \d+|{_KILLED})(?: after its process \d+ \([^)]*\) {_KILLED})?"
_OUTPUT = re.compile(rf"(rank \d+{_ENDED}|torchrun of node \d+(?:{_ENDED})?): .*", re.DOTALL)
"""A cause up to a program's last words (here or in an exit report)."""


class RefusedToken(Reason):
    """Why a token is not valid; not why one is missing or permits too little."""


class Access(Protocol):
    """The access rules of one transport."""

    def __call__(self, headers: Mapping[str, str], /) -> Reason | None:
        """Return why a request with these headers has no full access, as a text for its
        sender, or None if it has."""
        ...

    def watched(self, headers: Mapping[str, str], end: Callable[[], None], /) -> AbstractContextManager[None]:
        """Context manager: call ``end`` on the loop if the access of a request with
        these headers is revoked within the block."""
        ...


class _Everyone:
    """Access rules that admit every request."""

    def __call__(self, _: Mapping[str, str]) -> Reason | None:
        """Return None, as every request has access."""
        return None

    def watched(self, _: Mapping[str, str], __: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager that does nothing, as no access is revoked."""
        return nullcontext()


everyone: Access = _Everyone()
"""Grants access, for a transport that admits only the owner, as the Unix socket."""


class ByToken:
    """Access by ``Authorization: Bearer TOKEN``; reports wrong tokens to ``refused``.

    A member's token is not a wrong one, but permits neither orders nor output.
    """

    def __init__(self, tokens: Callable[[], Tokens], refused: Callable[[str], None]) -> None:
        """Check requests by the valid tokens, for which ``tokens`` is called each time.

        :param refused: called on the loop with "token", for each request with a token
            that is not valid.
        """
        self._tokens = tokens
        self._refused = refused

    def __call__(self, headers: Mapping[str, str]) -> Reason | None:
        """Return why these headers do not give full access, as a text for their sender,
        or None if they have an operator's token. Call ``refused`` for a token that is
        not valid; the text is then a :class:`RefusedToken`."""
        if headers.get("authorization") is None:
            return "an order needs an operator's token, as `Authorization: Bearer TOKEN`, or the run's Unix socket"
        tokens = self._tokens()
        role = tokens.role_of(headers)
        if role is None:
            self._refused("token")
            return RefusedToken(tokens.refusal(headers))
        return None if role == "operator" else "a member's token does not permit orders: show an operator's token"

    def watched(self, headers: Mapping[str, str], end: Callable[[], None]) -> AbstractContextManager[None]:
        """Context manager: call ``end``, on the loop, if the token in the headers is
        revoked within the block."""
        return self._tokens().watched(headers, end)


Right = Callable[[Callable[[], None]], AbstractContextManager[None]]


class Lasting(StreamingResponse):
    """A stream that is cut when its access ends, as when a token is revoked.

    Its reader then sees a broken connection without an end of the response. Access must
    be checked just before making one: a revocation during an ``await`` in between would
    be missed.

    :param held: ``held(end)`` is a context manager that calls ``end`` when the access
        ends.
    """

    def __init__(self, parts: AsyncIterator[bytes], held: Right, **options: Any) -> None:
        """Prepare to stream ``parts``, for as long as the access lasts; send nothing.

        :param held: ``held(end)`` is a context manager, entered for the time of the
            stream; it calls ``end`` when the reader's access ends.
        :param options: further arguments of Starlette's ``StreamingResponse``.
        """
        super().__init__(parts, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; when the access ends, stop at once, without the end of the
        body, so that the reader sees a broken connection. Raise nothing then."""
        with anyio.CancelScope() as whole, self._held(whole.cancel):
            await super().__call__(scope, receive, send)


def without_output(text: str) -> str:
    """Return a text, such as a reason or an error, cut behind the exit code of a
    program: the last output of the program, which follows there, may have secrets."""
    return _OUTPUT.sub(r"\1", text)


def public(value: object) -> Any:
    """Return the value (a struct, too) as builtins, with every text cut before the
    output of a program: readers without a token may see the result."""
    return _cut(msgspec.to_builtins(value, enc_hook=str))


def hiding_store(status: RunStatus) -> RunStatus:
    """Return a copy of the status without the address of the store, which has no
    password."""
    return msgspec.structs.replace(status, store=msgspec.structs.replace(status.store, host="", port=0))


class Cached:
    """A JSON page, cached so that rendering takes at most 5 % of the loop's time.

    It is rendered again when it is :data:`_SHARE` times as old as its rendering took,
    or half a second: a cheap page is always fresh.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        """Keep ``make``, which returns the page's value; :meth:`body` calls it."""
        self._make = make
        self._body = b""
        self._until = 0.0

    def body(self) -> bytes:
        """Return the page as JSON bytes.

        If the cached page is too old, call ``make``, and encode its result, on this
        thread. A page is kept for 20 times as long as that took, at most half a second.
        """
        began = time.monotonic()
        if began >= self._until:
            self._body = msgspec.json.encode(self._make(), enc_hook=str)
            now = time.monotonic()
            self._until = now + min(_KEPT_S, _SHARE * (now - began))
        return self._body


def public_record(record: Record) -> bytes:
    """Return the record of an event as JSON for readers without a token: without fields
    that are output of programs or quote the config."""
    event: Event = record.event
    match event:
        case ReplicaExited():
            ranks = tuple(msgspec.structs.replace(rank, text="", lines=(), error="") for rank in event.ranks)
            event = msgspec.structs.replace(event, ranks=ranks)
        case ReloadRefused():
            event = ReloadRefused(problems=tuple(problem.partition(": ")[0] for problem in event.problems))
    return msgspec.json.encode(public(Record(record.seq, record.at, event)))


def _cut(value: Any) -> Any:
    """Return a copy of ``value`` (builtins) with :func:`without_output` applied to all
    texts within, but not to keys."""
    match value:
        case str():
            return without_output(value) if ": " in value else value
        case dict():
            return {key: _cut(item) for key, item in value.items()}
        case list() | tuple():
            return [_cut(item) for item in value]
    return value
