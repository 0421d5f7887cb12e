"""The unacknowledged messages of a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class Outbox:
    """Keeps messages to a coordinator, numbered from 1, until they are acknowledged."""

    def __init__(self) -> None:
        """Start empty; the first message gets number 1."""
        self._queue: deque[tuple[int, bytes]] = deque()
        self._numbered = self._sent = 0
        self.acked = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def all_sent(self) -> bool:
        """True if no message is unsent (sent ones may be unacknowledged)."""
        return self._sent == self._numbered

    def append(self, body: bytes) -> None:
        """Give an encoded message the next number, and add it as unsent."""
        self._numbered += 1
        self._queue.append((self._numbered, body))

    def unsent(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, body) of each unsent message, which counts as sent from then
        on."""
        for number, body in list(self._queue):  # acks may shorten the queue between two yields
            if number > self._sent:
                self._sent = number
                yield number, body

    def drop_acked(self, acked: int) -> None:
        """Drop the messages with numbers up to ``acked``: the coordinator has them.

        A lower number than before changes nothing.
        """
        self.acked = max(self.acked, acked)
        while self._queue and self._queue[0][0] <= acked:
            self._queue.popleft()

    def rewind(self) -> None:
        """Mark all unacknowledged messages as unsent, to send them again."""
        self._sent = self._queue[0][0] - 1 if self._queue else self._numbered
