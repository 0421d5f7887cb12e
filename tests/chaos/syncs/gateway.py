"""The way of all sessions: one proxy for each replica, in a thread of its own, with
what can be done to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.machine.proxy import Proxy

__all__ = ["Gateway"]

T = TypeVar("T")


class Gateway:
    """Proxies by ``group-replica``; the coordinator's address is asked for with each
    connection."""

    def __init__(self, names: Sequence[str], target: Callable[[], str]) -> None:
        self.proxies = {name: Proxy(target) for name in names}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        for proxy in self.proxies.values():
            await self._stack.enter_async_context(proxy)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def do(self, name: str, act: Callable[[Proxy], object]) -> None:
        """Something with a replica's proxy, in the thread that may."""

        async def acted() -> None:
            act(self.proxies[name])

        self._run(acted())
