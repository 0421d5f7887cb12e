"""Writers of an archive in processes of their own, which start in some milliseconds.

A nursery is a process that has imported all that a writer needs, and forks one for each
that is asked for; it can be killed at any moment. A writer obeys commands, one at a
time: write a version until the storage takes it, or tell what was raised.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replicas import errors
from replicas.archive import ArchiveKey, Facts, Rules, Writer
from replicas.archive import store as storing
from tests.support.archives import CHANNEL, changed, version

__all__ = ["Child", "Command", "Life", "Nursery", "nursery", "words_of"]

SOME = 4  # each so many contents all words change


class Life(msgspec.Struct, frozen=True):
    """What a writer is started with."""

    port: int
    url: str
    key: str
    environment: dict[str, str]
    rules: Rules
    call_s: float
    parts: bool


class Command(msgspec.Struct, frozen=True):
    """Write version ``number``, of content ``content``.

    ``tries``: how often while the storage fails. ``labels``: by their names.
    """

    number: int
    content: int
    seed: int
    count: int
    tries: int = 1
    labels: dict[str, int] = {}


def words_of(seed: int, content: int, count: int) -> npt.NDArray[np.uint16]:
    """The words of a content: near those of the one before, as in training."""
    first = content - content % SOME
    words = np.random.default_rng([seed, first]).integers(0x3A00, 0x3F80, count, dtype=np.uint16)
    for number in range(first, content):
        words = changed(words, seed + number)
    return words


class Child:
    """The test's end of a writer.

    :ivar began: it has read ``latest``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._replies, self._commands = connection.makefile("r"), connection.makefile("w")
        self._socket = connection
        self.pid = int(self._replies.readline())
        self.dead = self.began = False

    def tell(self, command: Command) -> None:
        print(msgspec.json.encode(command).decode(), file=self._commands, flush=True)

    def result(self, timeout_s: float) -> dict[str, Any]:
        """What came of the next command: ``error`` and ``text``, or ``version``."""
        self._socket.settimeout(timeout_s)
        found: dict[str, Any] = json.loads(self._replies.readline())
        self.began = found["began"]
        return found

    def kill(self) -> None:
        """With SIGKILL; return when it is dead."""
        if not self.dead:
            self.dead = True
            os.kill(self.pid, signal.SIGKILL)
            with suppress(ConnectionResetError):
                while self._replies.readline():
                    pass
            with suppress(BrokenPipeError):
                self._commands.close()
            self._replies.close()
            self._socket.close()


class Nursery:
    """The process that forks writers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self._children: list[Child] = []

    def start(
        self, url: str, key: Path, environment: dict[str, str], rules: Rules, call_s: float, *, parts: bool = False
    ) -> Child:
        """Start a writer. ``parts``: objects of 6 MiB and more are sent in parts."""
        assert self._process.stdin is not None
        life = Life(self._listener.getsockname()[1], url, str(key), environment, rules, call_s, parts)
        self._process.stdin.write(msgspec.json.encode(life).decode() + "\n")
        self._process.stdin.flush()
        self._children.append(Child(self._listener.accept()[0]))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.kill()
        self._listener.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def nursery() -> Iterator[Nursery]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.archives.nursery"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment) as process:
        found = Nursery(process)
        try:
            yield found
        finally:
            found.close()


def _live(life: Life) -> None:
    """Be a writer."""
    os.environ.update(life.environment)
    storing.CALL_S = life.call_s
    if life.parts:
        storing._SINGLE_NBYTES, storing._PART_NBYTES = 6 << 20, 5 << 20
    writer: Writer | None = None
    with socket.create_connection(("127.0.0.1", life.port)) as connection:
        commands, replies = connection.makefile("r"), connection.makefile("w")
        print(os.getpid(), file=replies, flush=True)
        for line in commands:
            command, began = msgspec.json.decode(line, type=Command), time.monotonic()
            found: dict[str, Any] = {}
            words = words_of(command.seed, command.content, command.count)
            what = version(command.number, words, meta={"step": command.content})
            for _ in range(command.tries):
                last = time.monotonic()
                try:
                    if writer is None:
                        key = ArchiveKey.of_file(Path(life.key))
                        writer = Writer(life.url, CHANNEL, run="grpo", key=key, rules=life.rules)
                    found = {"version": writer.write(what, Facts(labels=command.labels)).version}
                    break
                except errors.ArchiveError as error:
                    found = {"error": type(error).__name__, "text": str(error)}
                    time.sleep(0.02)
                except Exception as error:  # noqa: BLE001  # the test decides what may be raised
                    found = {"error": type(error).__name__, "text": str(error)}
                    break
                finally:
                    found["slowest_s"] = max(found.get("slowest_s", 0.0), time.monotonic() - last)
            found |= {"took_s": time.monotonic() - began, "began": writer is not None}
            print(json.dumps(found), file=replies, flush=True)


def _main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        life = msgspec.json.decode(line, type=Life)
        if not os.fork():
            _live(life)
            os._exit(0)


if __name__ == "__main__":
    _main()
