"""A TCP proxy whose connections a test can cut, freeze, slow down, close by half or
spoil."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Proxy"]


class Proxy:
    """Forwards from a port of its own to ``target`` (``host:port``, or what gives it
    for each new connection)."""

    def __init__(self, target: str | Callable[[], str]) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._ended: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.delay_s = 0.0
        """How long each piece is held back, in order; by it nothing is lost."""
        self.nbytes_per_s = 0.0
        """How fast each direction of each connection is; 0: without a limit."""
        self.connections = 0
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every connection, as a network that goes away does: without a word to
        either side."""
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Hold back every byte, until :meth:`thaw`."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def half_close(self, *, inwards: bool) -> None:
        """End one direction of each connection: that to the target (``inwards``), or
        that to whoever connected.

        What still comes for that direction is lost.
        """
        for there, back in self._pairs:
            end = there if inwards else back
            if not end.transport.is_closing() and end not in self._ended:
                self._ended.add(end)
                end.write_eof()

    def spoil(self, data: bytes, *, inwards: bool) -> None:
        """Slip bytes into one direction of each connection."""
        for there, back in self._pairs:
            end = there if inwards else back
            if not end.transport.is_closing() and end not in self._ended:
                end.write(data)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        target = self._target if isinstance(self._target, str) else self._target()
        host, _, port = target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError):
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        pair = (back, writer)
        self._pairs.append(pair)
        tasks = [asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))]
        self._tasks |= set(tasks)
        await asyncio.wait(tasks)
        self._tasks -= set(tasks)
        self._writers -= {writer, back}
        self._ended -= {writer, back}
        self._pairs.remove(pair)
        for end in (writer, back):
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096 if self.nbytes_per_s else 65536):
                if self.nbytes_per_s:
                    await asyncio.sleep(len(data) / self.nbytes_per_s)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if writer not in self._ended:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
