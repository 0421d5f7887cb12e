"""A fake of systemd's end of ``NOTIFY_SOCKET``."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["FakeSystemd", "Message"]

Message = dict[str, str]


class FakeSystemd:
    """Receives notifications at an abstract address. A context manager.

    :ivar address: for ``NOTIFY_SOCKET``.
    """

    def __init__(self) -> None:
        self.address = f"@test-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.address[1:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def messages(self) -> list[Message]:
        """What has arrived."""
        self._socket.setblocking(False)
        found: list[Message] = []
        while True:
            try:
                found.append(_decode(self._socket.recv(65536)))
            except BlockingIOError:
                return found

    def wait(self, what: Callable[[Message], bool], *, timeout_s: float = 30.0) -> list[Message]:
        """The messages up to the first for which ``what`` holds."""
        deadline = time.monotonic() + timeout_s
        found: list[Message] = []
        while not found or not what(found[-1]):
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                found.append(_decode(self._socket.recv(65536)))
            except TimeoutError:
                raise AssertionError(f"not within {timeout_s} s; messages: {found}") from None
        return found


def _decode(data: bytes) -> Message:
    return dict(line.split("=", 1) for line in data.decode().split("\n"))
