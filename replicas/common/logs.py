"""Loggers of this library, on which no log handler can end or hold up a thread of ours.

Theory of operation
===================

Handlers, filters, formatters and record factories belong to the user's program. They
may raise anything (``SystemExit`` too), take any time, or wait for the very thread that
logs. The session thread, a coordinator's event loop and the threads that copy must live
on. So a :class:`Log` only makes a plain record, and a thread of its own gives it to the
logger of that name: there the level counts as it was at the call, and filters, handlers
and the text of the arguments run. What is raised there is shown on standard error.

Records come a moment after what they tell, in order. A program that ends by itself
waits up to :data:`LAST_WORDS_S` for them. Beyond 1000 that wait for a slow handler they
are dropped, and the next one tells how many.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

from replicas.common.aside import Aside

LAST_WORDS_S = 2.0
_WHEN = ("created", "msecs", "relativeCreated", "process", "processName", "thread", "threadName", "taskName")


class Log(logging.Logger):
    """Takes records for the logger called ``name``. Its methods never raise or wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # of the base class
        own = self._own
        # Not own.isEnabledFor(), which may be the user's and takes logging's lock:
        # dictConfig() holds it while it constructs handlers of the user's.
        if level < self.level or own.disabled or own.manager.disable >= level:
            return False
        return level >= logging.Logger.getEffectiveLevel(own)

    def makeRecord(  # of the base class
        self,
        name: str,
        level: int,
        fn: str,
        lno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        extra: object = None,
        sinfo: str | None = None,
    ) -> logging.LogRecord:
        return logging.LogRecord(name, level, fn, lno, msg, args, exc_info, func, sinfo)

    def handle(self, record: logging.LogRecord) -> None:
        _records.put(record)


def flush(timeout_s: float = LAST_WORDS_S) -> bool:
    """Wait until all records so far were handled; False: not within ``timeout_s``."""
    return _records.flush(timeout_s)


def end_process(code: int) -> NoReturn:
    """End this process at once, but for its last records."""
    try:
        flush()
    finally:
        os._exit(code)


def _missing(count: int) -> None:
    text = "%d records before this one were dropped: a handler of this program is too slow"
    _pass_on(logging.LogRecord("replicas", logging.WARNING, __file__, 0, text, (count,), None))


def _pass_on(record: logging.LogRecord) -> None:
    """On the thread of the handlers."""
    try:
        own = logging.getLogger(record.name)
        made = own.makeRecord(  # by the program's factory
            record.name,
            record.levelno,
            record.pathname,
            record.lineno,
            str(record.msg),
            record.args or (),
            record.exc_info,
            record.funcName,
            sinfo=record.stack_info,
        )
        made.__dict__.update((name, getattr(record, name)) for name in _WHEN if hasattr(record, name))
        own.handle(made)
    except BaseException:  # noqa: BLE001  # of a handler of the program's: nothing of ours may end by it
        with contextlib.suppress(BaseException):  # standard error may be the program's, too
            print(f"replicas: a handler of the logger {record.name} failed:", file=sys.stderr)
            traceback.print_exc()


_records: Aside[logging.LogRecord] = Aside("replicas-logs", _pass_on, _missing)


def _after_fork_in_child() -> None:
    global _records
    _records = Aside("replicas-logs", _pass_on, _missing)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(flush)
