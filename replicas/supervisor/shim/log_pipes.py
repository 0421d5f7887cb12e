"""The pipes from the ranks of a part to its log pump; the shim writes into them, too.

:class:`LogPipes` holds both ends of every pipe, so the pipes buffer the output while a
pump is replaced. The workers of torchrun inherit no descriptors: their guards open the
pipes in ``/proc/<shim>/fd``. No FIFO is on a disk, so none has to be removed. Standard
library only.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque

from replicas.common.foreign import last_lines
from replicas.supervisor.logs.pump import LogSource
from replicas.supervisor.wire.orders import PartSpec, note

_LAST_LINES = 20
_LINE_NCHARS = 300
_SPEAK_INTERVAL_S = 0.01


class LogPipes:
    """The pipes for a part's logs, by ``rank <LOCAL RANK>`` and ``torchrun``.

    :ivar flush_at: when to write again to a pipe that was full; inf for never.
    """

    def __init__(self, spec: PartSpec) -> None:
        """Make the pipes for stdout and stderr of each local rank, and for torchrun.

        They stay open until :meth:`close`.
        """
        self.sources: dict[str, LogSource] = {}
        self.flush_at = math.inf
        self._words: deque[tuple[str, bytes]] = deque()
        self._closed = False
        for local in range(spec.nproc_per_node if spec.launcher == "torchrun" else 1):
            name = "rank-0" if spec.launcher == "exec" else ""
            self._add(f"rank {local}", name, 2, shown=True)
        if spec.launcher == "torchrun":
            self._add("torchrun", f"torchrun-{spec.node}", 1)

    def _add(self, key: str, name: str, count: int, *, shown: bool = False) -> None:
        """Make ``count`` pipes for one log.

        :param key: ``rank <LOCAL RANK>`` or ``torchrun``, under which the log is found.
        :param name: of its file, or "" if the file is named after a rank learned later.
        :param shown: it is the log of a rank, which the terminal may show.
        """
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(count)]
        readers, writers = zip(*pipes, strict=True)
        self.sources[key] = LogSource(name, readers, writers, shown=shown)

    def of_ranks(self) -> tuple[tuple[int, int], ...]:
        """Return descriptors of each local rank's stdout and stderr, to write to."""
        return tuple((one.writers[0], one.writers[1]) for one in self.sources.values() if one.shown)

    def streams(self, name: str) -> tuple[int, int]:
        """Return descriptors of stdout and stderr, for a process to write to.

        :param name: ``rank 0`` or ``torchrun``.
        """
        writers = self.sources[name].writers
        return writers[0], writers[-1]

    def write_lines(self, rank: int, text: str) -> None:
        """Queue lines for a rank's log, as if they were its own, and write what fits.

        Never waits. If the rank is unknown or the pipes are closed, the text goes to
        the shim's own log.
        """
        key = self._key(f"rank {rank}")
        # The first line in the pipes of torchrun's workers must be their rank.
        if key is None or self._closed or not self.sources[key].title:
            note(text)
            return
        block = b""
        for line in text.rstrip("\n").encode().splitlines(keepends=True):
            if len(block) + len(line) > select.PIPE_BUF:  # larger writes are not atomic
                self._words.append((key, block))
                block = b""
            block += line[: select.PIPE_BUF - 1]
        self._words.append((key, block.rstrip(b"\n") + b"\n"))
        self.flush_lines(time.monotonic())

    def flush_lines(self, now: float) -> None:
        """Write queued blocks of lines; set :attr:`flush_at` if a pipe is full."""
        self.flush_at = math.inf
        while self._words:
            key, block = self._words[0]
            # open it again: O_NONBLOCK on the shared description would reach the ranks
            descriptor = os.open(f"/proc/self/fd/{self.streams(key)[1]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, block)
            except BlockingIOError:
                self.flush_at = now + _SPEAK_INTERVAL_S
                return
            finally:
                os.close(descriptor)
            self._words.popleft()

    def _key(self, name: str) -> str | None:
        """Return the key in ``sources`` of a log, or None if it is unknown.

        :param name: ``rank <RANK>`` (the global rank) or ``torchrun``.
        """
        for key, source in self.sources.items():
            if name == (f"rank {source.rank}" if source.rank >= 0 else key):
                return key
        return None

    @property
    def readers(self) -> list[int]:
        """The read ends of all pipes."""
        return [pipe for source in self.sources.values() for pipe in source.pipes]

    def last_lines(self, name: str) -> tuple[str, ...]:
        """Return up to 20 last lines of the log of ``rank <RANK>`` or ``torchrun``.

        () for an unknown log.
        """
        key = self._key(name)
        return () if key is None else last_lines(self.sources[key].tail(), _LAST_LINES, _LINE_NCHARS)

    def close(self) -> None:
        """Close the write ends, so that the pump ends after the last line.

        Lines that are still queued here are dropped.
        """
        self._closed = True
        self.flush_at = math.inf
        for source in self.sources.values():
            for writer in source.writers:
                os.close(writer)
