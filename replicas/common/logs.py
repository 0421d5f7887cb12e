"""Loggers whose handlers can neither end nor block a thread of this library.

Theory of operation
===================

Handlers, filters, formatters and record factories belong to the user's program. They
may raise any exception (``SystemExit`` too), block, or wait for the very thread that
logs. The session thread, a coordinator's event loop and the threads that copy must run
on. So a :class:`Log` only makes a plain record, and a separate thread gives it to the
logger of that name: filters, handlers and the formatting of arguments run there. The
level is that at the call. Exceptions there are shown on standard error.

Records are handled a moment later, in order. At its normal exit, a program waits up to
:data:`LAST_WORDS_S` for them. If more than 1000 wait for a slow handler, further
records are dropped, and the next one says how many.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

from replicas.common.background_queue import BackgroundQueue

LAST_WORDS_S = 2.0
_WHAT = ("name", "levelno", "pathname", "lineno", "msg", "args", "exc_info", "funcName")
_WHEN = ("created", "msecs", "relativeCreated", "process", "processName", "thread", "threadName", "taskName")


class Log(logging.Logger):
    """A logger that queues its records; a thread passes them to the program's logger.

    That is the logger of the same name. The methods never raise or wait.
    """

    def __init__(self, name: str) -> None:
        """Make a queueing logger for the program's own logger ``name``; register it
        nowhere."""
        super().__init__(name)
        self._own = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # of the base class
        """Return True if the program's logger of this name handles ``level`` now.

        Runs none of the program's code, and waits for no lock of logging's.
        """
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
        """Return a plain record, not one of the program's factory; ignore ``extra``.

        The arguments are those of :meth:`logging.Logger.makeRecord`.
        """
        return logging.LogRecord(name, level, fn, lno, msg, args, exc_info, func, sinfo)

    def handle(self, record: logging.LogRecord) -> None:
        """Queue a record for the thread on which the program's handlers run.

        Drop the record if the queue is full; never wait.
        """
        _records.put(record)


def flush(timeout_s: float = LAST_WORDS_S) -> bool:
    """Block until the program's handlers have handled all queued records.

    Return True if they have; False after ``timeout_s`` seconds, or if no thread can
    start.
    """
    return _records.flush(timeout_s)


def end_process(code: int) -> NoReturn:
    """End this process by ``os._exit(code)``, without Python's teardown.

    First wait for queued log records, 2 s at most.
    """
    try:
        flush()
    finally:
        os._exit(code)


def _missing(count: int) -> None:
    """Log, on the thread for handlers, that ``count`` records were dropped."""
    text = "dropped %d log records before this one: a logging handler of this program is too slow"
    _pass_on(logging.LogRecord("replicas", logging.WARNING, __file__, 0, text, (count,), None))


def _pass_on(record: logging.LogRecord) -> None:
    """Give a record to the program's logger of its name, on the thread for handlers.

    Exceptions of the program's handlers go to standard error, and are not raised.
    """
    try:
        own = logging.getLogger(record.name)
        what = [*(getattr(record, name) for name in _WHAT), None, record.stack_info]
        made = own.makeRecord(*what)  # by the program's factory
        made.__dict__.update((name, getattr(record, name)) for name in _WHEN if hasattr(record, name))
        own.handle(made)
    except BaseException:  # noqa: BLE001  # an error of the program's handler must not end this thread
        with contextlib.suppress(BaseException):  # standard error may be the program's, too
            print(f"replicas: a handler of the logger {record.name} failed:", file=sys.stderr)
            traceback.print_exc()


_records: BackgroundQueue[logging.LogRecord] = BackgroundQueue("replicas-logs", _pass_on, _missing)


def _after_fork_in_child() -> None:
    """Replace the queue by an empty one, as its thread does not exist in a forked
    child. Records that waited are handled in the parent only."""
    global _records
    _records = BackgroundQueue("replicas-logs", _pass_on, _missing)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(flush)
