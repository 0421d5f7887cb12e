"""The rank's side of :mod:`bench.support`: commands in, replies out, and the end of
standard input is the end.

``python -m bench.rank MODULE`` listens to the driver before it imports
``bench.MODULE``, which takes torch and seconds. That module has ``handlers(driver)``: a
function for each command, by name, that returns the reply.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

__all__ = ["Driver", "Handler", "serve"]

Handler = Callable[..., dict[str, Any]]


class Driver:
    """Who gives the commands. Its pipe is taken off descriptor 1, so that nothing else
    is written there."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._working = threading.Event()
        self._working.set()
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, **reply: Any) -> None:
        """Send a reply (also one that is not the last of its command)."""
        try:
            self._out.write(json.dumps(reply) + "\n")
        except BrokenPipeError:
            os._exit(1)  # the driver is gone

    def next(self) -> dict[str, Any] | None:
        """The next command; None: there will be no more."""
        self._working.clear()
        line = self._lines.get()
        self._working.set()
        if not line:
            return None
        command: dict[str, Any] = json.loads(line)
        return command

    def waiting(self) -> bool:
        """Whether there is a next command already (or the end)."""
        return not self._lines.empty()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        if self._working.is_set():
            os._exit(1)  # the driver is gone, and this process may be stuck in native code
        self._lines.put("")


def serve(driver: Driver, handlers: Mapping[str, Handler]) -> None:
    """Do what the driver asks, one command after another, until there are no more."""
    while (command := driver.next()) is not None:
        handler = handlers[command.pop("do")]
        try:
            reply = handler(**command)
        except Exception:  # noqa: BLE001  # the driver is told, and decides
            reply = {"error": traceback.format_exc()}
        driver.say(**reply)


def main() -> None:
    driver = Driver()
    handlers: Mapping[str, Handler] = importlib.import_module(f"bench.{sys.argv[1]}").handlers(driver)
    serve(driver, handlers)


if __name__ == "__main__":
    main()
