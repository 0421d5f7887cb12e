"""Run a program that the kernel refuses calls into other processes, as containers do.

``python -m tests.support.machine.denied PROGRAM...``: ``ptrace``, ``process_vm_readv``,
``process_vm_writev`` and ``pidfd_getfd`` fail with EPERM, in its children too."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

__all__ = ["CALLS"]

CALLS = {"x86_64": (101, 310, 311, 438), "aarch64": (117, 270, 271, 438)}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _deny(numbers: tuple[int, ...]) -> None:
    """Berkeley packet filter: the number of the call, compared with each of these."""
    lines = [(_LOAD, 0, 0, 0)]
    lines += [(_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    encoded = b"".join(struct.pack("HBBI", *line) for line in lines)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(lines), encoded)
    for call in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    numbers = CALLS[platform.machine()]
    _deny(numbers)
    assert ctypes.CDLL(None, use_errno=True).syscall(numbers[-1], 0, 0, 0) == -1
    assert ctypes.get_errno() in (0, errno.EPERM)
    os.execvp(sys.argv[1], sys.argv[1:])
