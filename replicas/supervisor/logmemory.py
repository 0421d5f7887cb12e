"""The memory that shim and log pump share, so that a pump may be killed at any instruction and no byte is lost or doubled.

Theory of operation
===================

One anonymous mapping for each log, made by the shim before it forks a pump, and mapped by every pump that it forks: how
far the log is (:class:`LogState`), the last bytes that went into it, and a buffer for each of its streams, with what was read
and is not yet in the file. Nothing but the pump writes to it.

``LogState`` lies there twice; a commit writes the one that is not in use and then flips one byte. A byte on its way from
pipe to file is therefore always accounted for by the last commit:

* *From the pipe*: the place that ``n`` bytes will take is zeroed, ``reading = n`` is committed, the bytes are read, and
  ``end += n`` is committed. The pump is the pipe's only reader and asks for no more than there is, so that the kernel gives
  all of it or, to a process that was killed before, nothing: a place that is not zero any more has been read.
* *To the file*: the lines are appended, and then ``size`` and ``begin`` are committed together. A file that is longer than
  ``size`` got lines of which the pump could not tell any more: it is cut back to ``size`` and they are written again.
"""

from __future__ import annotations

import mmap
import os
import struct

__all__ = ["BUFFER_NBYTES", "LONGEST_NBYTES", "LogMemory", "LogState", "StreamState"]

BUFFER_NBYTES = 2 << 20
LONGEST_NBYTES = BUFFER_NBYTES // 2
"""A line is kept whole up to this size."""
TAIL_NBYTES = 8192
_STREAMS = 2
_NUMBERS = 4
_STATE = struct.Struct(f"<{5 + _NUMBERS * _STREAMS}Q")
_SLOTS = (64, 64 + 256)
_TAIL_AT = 1024
_BUFFERS_AT = _TAIL_AT + 8 + TAIL_NBYTES


class StreamState:
    """What is in the buffer lies at ``begin`` to ``end``; ``reading`` more bytes may have come there.

    ``begun``: 1 once something of it was logged, or told whose it is.
    """

    def __init__(self, begin: int, end: int, reading: int, begun: int) -> None:
        self.begin = begin
        self.end = end
        self.reading = reading
        self.begun = begun


class LogState:
    """``size``: of the log file. ``lost_*``: what could not be written. ``rank``: 1 + its rank; 0: not yet known.

    ``moves`` counts the commits.
    """

    def __init__(
        self, size: int, rank: int, lost_lines: int, lost_nbytes: int, moves: int, streams: tuple[StreamState, ...]
    ) -> None:
        self.size = size
        self.rank = rank
        self.lost_lines = lost_lines
        self.lost_nbytes = lost_nbytes
        self.moves = moves
        self.streams = streams


class LogMemory:
    """See the module's header.

    :param streams: how many streams go into the log, 1 or 2.
    """

    def __init__(self, streams: int) -> None:
        self._count = streams
        self._map = mmap.mmap(-1, _BUFFERS_AT + streams * BUFFER_NBYTES)
        self._map.madvise(mmap.MADV_DONTDUMP)

    def load(self) -> LogState:
        """The last commit."""
        size, rank, lost_lines, lost_nbytes, moves, *rest = _STATE.unpack_from(self._map, _SLOTS[self._map[0]])
        streams = tuple(StreamState(*rest[_NUMBERS * index : _NUMBERS * (index + 1)]) for index in range(self._count))
        return LogState(size, rank, lost_lines, lost_nbytes, moves, streams)

    def commit(self, state: LogState) -> None:
        state.moves += 1
        numbers = [number for one in state.streams for number in (one.begin, one.end, one.reading, one.begun)]
        numbers += [0] * (_NUMBERS * _STREAMS - len(numbers))
        other = 1 - self._map[0]
        _STATE.pack_into(
            self._map,
            _SLOTS[other],
            state.size,
            state.rank,
            state.lost_lines,
            state.lost_nbytes,
            state.moves,
            *numbers,
        )
        self._map[0] = other

    # ------------------------------------------------------------ buffers

    def recover(self) -> LogState:
        """The state as another process left it, with what that one had read."""
        state = self.load()
        for index, stream in enumerate(state.streams):
            place = self._at(index) + stream.end
            if stream.reading and any(self._map[place : place + stream.reading]):
                stream.end += stream.reading
            stream.reading = 0
        self.commit(state)
        return state

    def read(self, state: LogState, index: int, descriptor: int, nbytes: int) -> None:
        """Take exactly ``nbytes`` that are there from a pipe."""
        stream = state.streams[index]
        place = self._at(index) + stream.end
        self._map[place : place + nbytes] = bytes(nbytes)
        stream.reading = nbytes
        self.commit(state)
        with memoryview(self._map) as view, view[place : place + nbytes] as window:
            count = os.readv(descriptor, [window])
        stream.reading = 0
        stream.end += count
        self.commit(state)

    def pending(self, state: LogState, index: int) -> bytes:
        """What was read and is not done with."""
        stream = state.streams[index]
        at = self._at(index)
        return self._map[at + stream.begin : at + stream.end]

    def room(self, state: LogState, index: int) -> int:
        """How much may be read now; 0: the buffer holds a line that is too long."""
        stream = state.streams[index]
        length = stream.end - stream.begin
        if stream.begin and length <= stream.begin:
            at = self._at(index)
            self._map[at : at + length] = self._map[at + stream.begin : at + stream.end]
            stream.begin, stream.end = 0, length
            self.commit(state)
        return 0 if length >= LONGEST_NBYTES else BUFFER_NBYTES - stream.end

    def _at(self, index: int) -> int:
        return _BUFFERS_AT + index * BUFFER_NBYTES

    # ------------------------------------------------------------ the end of the log

    def keep(self, lines: bytes) -> None:
        """Note what comes last, whether or not there is room for it in the file."""
        tail = lines[-TAIL_NBYTES:]
        if len(tail) < TAIL_NBYTES:
            tail = (self.tail() + tail)[-TAIL_NBYTES:]
        start = _TAIL_AT + 8
        self._map[start : start + len(tail)] = tail
        struct.pack_into("<Q", self._map, _TAIL_AT, len(tail))

    def tail(self) -> bytes:
        """The last bytes of the log, as many as are kept."""
        (length,) = struct.unpack_from("<Q", self._map, _TAIL_AT)
        start = _TAIL_AT + 8
        return self._map[start : start + length]
