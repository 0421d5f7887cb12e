"""Authorize orders and logs: the own user on the Unix socket, the token over TCP."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request

from replicas.coordinator.connection_guard import welcome

__all__ = ["Access", "ByToken", "everyone"]


class Access(Protocol):
    def __call__(self, request: Request, /) -> str:
        """Why this request is limited to the public pages; empty: it is not."""


def everyone(_: Request) -> str:
    """Grants access, for a transport that admits only the owner, as the Unix socket."""
    return ""


class ByToken:
    """``Authorization: Bearer TOKEN``.

    :param token: called at each request, as the token may not be known yet.
    :param refused: called with ``"token"`` for each wrong token.
    """

    def __init__(self, token: Callable[[], str], refused: Callable[[str], None]) -> None:
        self._token = token
        self._refused = refused

    def __call__(self, request: Request) -> str:
        given = request.headers.get("authorization")
        if given is None:
            return "this needs the run's token, as `Authorization: Bearer TOKEN`, or the run's Unix socket"
        if hmac.compare_digest(given.encode(), f"Bearer {self._token()}".encode()):
            welcome(request.scope)
            return ""
        self._refused("token")
        return "wrong token"
