"""torchrun's workers, forked by the shim for a launcher that it has forked, too.

The launcher has threads, those of its TCPStore, so it forks none itself. It sends
``fork`` with a worker's environment over its control socket; the shim answers
``forked``, and sends ``ended`` when it has reaped the worker.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from replicas.supervisor.shim.starting import guard_command
from replicas.supervisor.wire import orders


class ForkedWorkers:
    """For torchrun's launcher: the workers (ranks) that the shim has forked for it.

    :ivar pids: of all. :ivar codes: exit code by pid, of those that have ended.
    """

    def __init__(self, control: socket.socket) -> None:
        """Keep the control socket to the shim, which forks workers; ask for none."""
        self.control = control
        self.pids: set[int] = set()
        self.codes: dict[int, int] = {}

    def fork(self, env: dict[str, str]) -> _Worker:
        """Have the shim fork a worker with this environment. Blocks for milliseconds.

        :raises OSError: the system allows no process.
        """
        orders.send(self.control, {"type": "fork", "env": env})
        while (message := self._receive())["type"] != "forked":
            self._take(message)
        if not message["pid"]:
            raise OSError(message["error"])
        self.pids.add(int(message["pid"]))
        return _Worker(self, int(message["pid"]))

    def look(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` (0: not at all) for a message of the shim; read all.

        Notes in :attr:`codes` which workers have ended.

        :raises SystemExit: the shim has ended.
        """
        while select.select([self.control], [], [], timeout_s)[0]:
            self._take(self._receive())
            timeout_s = 0.0

    def _receive(self) -> orders.Message:
        """Wait for the next message; raise SystemExit if the shim has ended."""
        message = orders.receive(self.control)
        if message is None:
            raise SystemExit("the shim has ended")
        return message

    def _take(self, message: orders.Message) -> None:
        """Note the end of a worker; ignore other messages."""
        if message["type"] == "ended":
            self.codes[int(message["pid"])] = int(message["code"])


class _Worker:
    """A worker that the shim has forked, with the methods of Popen that torch calls."""

    def __init__(self, workers: ForkedWorkers, pid: int) -> None:
        """Keep the pid; the shim sends the exit code to ``workers``."""
        self._workers, self.pid = workers, pid

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        self._workers.look(0.0)
        return self._workers.codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        """Return its exit code; raise TimeoutExpired after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired("a rank", timeout)
            self._workers.look(left_s)
        return code


def fork_workers(control: socket.socket) -> ForkedWorkers | None:
    """Patch torch: in this process, torchrun has the shim fork its workers, for good.

    Workers with a command of another form, as for NUMA, are started by torch.

    :param control: the control socket to the shim.
    :return: the workers, none yet; None if this version of torch starts them in another
        way, and does so.
    """
    handler: Any = SubprocessHandler
    if not callable(popen := getattr(handler, "_popen", None)):
        return None
    workers = ForkedWorkers(control)
    close = handler.close

    def start(handler: Any, args: Sequence[str], env: dict[str, str]) -> Any:
        """Start a worker: by a fork if it has the usual command."""
        return workers.fork(env) if [*args] == guard_command() else popen(handler, args, env)

    def close_if_there(handler: Any, *arguments: Any, **named: Any) -> None:
        """Signal the worker, as torch does; the shim may have reaped it meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            close(handler, *arguments, **named)

    handler._popen = start
    handler.close = close_if_there
    return workers
