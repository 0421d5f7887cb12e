"""Keepers beside the coordinator: processes of ours that send what it keeps to other hosts (:mod:`replicas.core.keepers`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from replicas import keeper

__all__ = ["KeeperChildren"]

log = logging.getLogger("replicas.coordinator")

KILL_TIMEOUT_S = 5.0


class KeeperChildren:
    """One process for each channel, if it needs one. ``job(channel)``: with what it is started."""

    def __init__(self, job: Callable[[str], keeper.Job]) -> None:
        self._job = job
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, channel: str) -> None:
        """Start one for ``channel``; one that was started before is ended first."""
        self._tasks[channel] = asyncio.get_running_loop().create_task(self._run(channel, self._tasks.get(channel)))

    async def _run(self, channel: str, before: asyncio.Task[None] | None) -> None:
        """From the start of the process to its end; cancelling this kills it."""
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *keeper.COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env=keeper.environment(),
                start_new_session=True,
            )
        except OSError as error:
            log.warning("%s: no keeper can be started: %s", channel, error)
            return
        try:
            await process.communicate(msgspec.json.encode(self._job(channel)))
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)

    async def aclose(self) -> None:
        """End them all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
