"""Log handlers as programs may have them: they raise anything, and take their time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rogue_handlers"]

KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, RuntimeError)


class _Rogue(logging.Handler):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._choose = random.Random(seed)

    def handle(self, record: logging.LogRecord) -> bool:
        drawn = self._choose.random()
        if drawn < 0.3:
            raise self._choose.choice(KINDS)("of a log handler")
        if drawn < 0.6:
            time.sleep(0.1)
        return True


@contextmanager
def rogue_handlers(seed: int = 0) -> Iterator[None]:
    """Within the block this library logs everything to such handlers, and only them."""
    logger, handler = logging.getLogger("replicas"), _Rogue(seed)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
