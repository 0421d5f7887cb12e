"""Show lines of ranks on the supervisor's stderr, never blocking the log pump.

stderr is shared (with the supervisor, the other pumps, perhaps a shell), so its mode is
not changed: a terminal or a pipe is opened again, non-blocking; a socket gets each
message without waiting; a file does not block. Lines are written in blocks of at most
``PIPE_BUF`` bytes, which a pipe accepts whole or not at all, so lines of several pumps
never mix.

When the queue is full, lines are dropped from the screen (they are in the log),
counted, and reported. If stderr is a file, an error drops them immediately, as no event
tells when a full disk has room again. Standard library only.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections import deque

from replicas.common.foreign import readable

_QUEUE_NBYTES = 256 << 10
_BLOCK_NBYTES = select.PIPE_BUF
_SLOW = "the reader of this output is too slow"


class Tee:
    """Shows lines of one replica's ranks on the supervisor's stderr, through a queue.

    Methods raise OSError if the reader of that output is gone.

    :param name: of the replica, which all lines begin with.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        """Open the output again, to write to it without waiting; write nothing.

        :param descriptor: the supervisor's stderr, which stays open.
        :param name: of the replica, which all lines begin with.
        :raises OSError: its reader is gone.
        """
        self._name = name
        self._blocks: deque[bytes] = deque()
        self._queued = 0
        self._dropped = 0
        self._note = (b"", 0)
        self.dropped = 0
        """Number of lines not shown, in all."""
        self.why_dropped = _SLOW
        kind = os.fstat(descriptor).st_mode
        self._regular = stat.S_ISREG(kind)
        self._socket = socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(kind) else None
        if self._socket is not None:
            self._file = self._socket.fileno()
        elif self._regular:
            self._file = descriptor
        else:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._file = os.open(f"/proc/self/fd/{descriptor}", flags)

    def fileno(self) -> int:
        """Return the descriptor to which lines are written, for a selector."""
        return self._file

    @property
    def waiting(self) -> bool:
        """True if lines are queued."""
        return bool(self._blocks)

    def show(self, lines: bytes, rank: str) -> None:
        """Queue complete lines, each after the replica's name and ``rank``, and write.

        Writes what is accepted without waiting. If the queue is full, drop the lines.

        :param rank: the rank whose lines they are, as text.
        :raises OSError: the reader of the output is gone.
        """
        if self._queued >= _QUEUE_NBYTES:
            self._drop(lines.count(b"\n"))
        else:
            self._say_dropped()
            self._queue(readable(lines, f"{self._name}/{rank}| ".encode(), _BLOCK_NBYTES))
        self.write()

    def _drop(self, count: int) -> None:
        """Add ``count`` to the number of lines that were not shown."""
        self._dropped += count
        self.dropped += count

    def _say_dropped(self) -> None:
        """Queue a note about the lines dropped since the last note, if any."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            note = f"{self._name}| ({dropped} lines are shown only in the log: {self.why_dropped})\n"
            self._note = (note.encode(), dropped)
            self._queue([self._note[0]])

    def _queue(self, lines: list[bytes]) -> None:
        """Queue lines in blocks; drop and count those for which there is no room."""
        block = b""
        for number, line in enumerate(lines):
            if self._queued >= _QUEUE_NBYTES:
                self._drop(len(lines) - number)
                break
            if len(block) + len(line) > _BLOCK_NBYTES:
                self._blocks.append(block)
                block = b""
            block += line
            self._queued += len(line)
        if block:
            self._blocks.append(block)

    def write(self) -> None:
        """Write as many queued blocks as are accepted without waiting.

        If the output is a file, an error (such as a full disk) drops the queue instead.

        :raises OSError: the reader of the output is gone.
        """
        while self._blocks:
            block = self._blocks[0]
            try:
                count = self._put(block)
            except BlockingIOError:
                return
            except OSError as error:
                if not self._regular:
                    raise
                self.why_dropped = error.strerror or str(error)
                self._drop_all()
                return
            self._queued -= count
            if count < len(block):  # a terminal or an almost full disk accepted a part
                self._blocks[0] = block[count:]
                if self._regular:
                    continue  # the next write raises the cause
                return
            self._blocks.popleft()
            if not self._blocks:
                self._say_dropped()

    def finish(self, timeout_s: float) -> None:
        """Write queued blocks for up to ``timeout_s`` seconds; drop the rest. Blocks.

        :raises OSError: the reader of the output is gone.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        while self._blocks and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.write()
        self._drop_all()

    def _drop_all(self) -> None:
        """Drop all queued lines, and count them."""
        note, dropped = self._note
        if note in self._blocks:
            self._blocks.remove(note)
            self._dropped += dropped  # the note itself was not shown
        self._drop(sum(block.count(b"\n") for block in self._blocks))
        self._blocks.clear()
        self._queued = 0

    def _put(self, block: bytes) -> int:
        """Write a block without waiting. Return the number of bytes accepted.

        :raises BlockingIOError: nothing is accepted now.
        """
        if self._socket is not None:
            return self._socket.send(block, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return os.write(self._file, block)
