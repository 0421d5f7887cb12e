"""A function in a process of its own that stops after each of its system calls.

By ptrace(2), which a process may do to its own children: no rights are needed. The
caller must have one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import traceback
from collections.abc import Callable

__all__ = ["can_trace", "trace"]

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_TRACESYSGOOD, _EXITKILL = 1, 0x100000
_AT_CALL = signal.SIGTRAP | 0x80
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _ptrace(request: int, pid: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def trace(run: Callable[[], None], look: Callable[[int], int]) -> int:
    """Run ``run`` in a child; return what waitpid(2) says of its end.

    :param look: called before each of its system calls with their number so far, when
        the calls before have been done; returns a signal to send, or 0. SIGKILL: the
        call that was about to begin is not done.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _ptrace(_TRACEME)
            os.kill(os.getpid(), signal.SIGSTOP)
            run()
            code = 0
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    try:
        if os.WIFSTOPPED(status):
            _ptrace(_SETOPTIONS, pid, _TRACESYSGOOD | _EXITKILL)
        stops = deliver = 0
        while os.WIFSTOPPED(status):
            with contextlib.suppress(ProcessLookupError):  # it was killed
                _ptrace(_SYSCALL, pid, deliver)
            _, status = os.waitpid(pid, 0)
            deliver = 0
            if not os.WIFSTOPPED(status):
                break
            if os.WSTOPSIG(status) != _AT_CALL:
                deliver = os.WSTOPSIG(status)
                continue
            stops += 1
            if stops % 2 and (number := look(stops // 2)):
                os.kill(pid, number)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return status


def can_trace() -> bool:
    """False: this machine forbids it."""
    looks: list[int] = []
    return trace(lambda: None, lambda number: looks.append(number) or 0) == 0 and bool(looks)  # type: ignore[func-returns-value]  # is None
