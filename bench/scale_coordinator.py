"""The coordinator of :mod:`bench.bench_scale`, in a process of its own (``python -m
bench.rank scale_coordinator``)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from bench.rank import Driver, Handler
from replicas.coordinator import Coordinator

__all__ = ["handlers"]


def handlers(driver: Driver) -> dict[str, Handler]:
    """Commands for :mod:`bench.rank`."""
    del driver
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> dict[str, Any]:
        coordinator = Coordinator({"policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "100s"}})
        await coordinator.__aenter__()
        return {"endpoint": coordinator.endpoint, "token": coordinator.token, "pid": os.getpid()}

    return {"start": lambda: asyncio.run_coroutine_threadsafe(start(), loop).result(), "usage": _usage}


def _usage() -> dict[str, Any]:
    """CPU time so far in seconds (also as the kernel tells others), and resident
    memory, of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return {
        "cpu_s": time.process_time(),
        "stat_cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
        "rss_nbytes": int(status["VmRSS"].split()[0]) * 1024,
        "at": time.monotonic(),
    }
