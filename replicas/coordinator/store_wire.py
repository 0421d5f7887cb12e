"""Messages between the store process and its owner: JSON lines over a socket pair."""

from __future__ import annotations

import msgspec

__all__ = ["Reply", "Request"]


class Request(msgspec.Struct, frozen=True):
    id: int
    op: str
    prefixes: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    id: int
    keys: int = 0
    port: int = 0
    error: str = ""
    hint: str = ""
