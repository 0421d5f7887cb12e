"""Calls of the kernel that a container's or systemd's filter denies.

``python -m tests.support.machine.seccomp CALLS PROGRAM ...`` runs a program without
them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

__all__ = ["deny"]

_NUMBERS = {
    "x86_64": {"process_vm_readv": 310, "memfd_create": 319},
    "aarch64": {"process_vm_readv": 270, "memfd_create": 279},
}
_EVERYWHERE = {"pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


def deny(*calls: str, errno: int = 1) -> None:
    """Have the kernel refuse these calls to this process and all that it starts.

    For good; ``errno``: with what.
    """
    numbers = {**_EVERYWHERE, **_NUMBERS[platform.machine()]}
    lines = [(_LOAD, 0, 0, 0)]  # the number of the call
    for call in calls:
        lines += [(_JUMP_IF_EQUAL, 0, 1, numbers[call]), (_RETURN, 0, 0, _ERRNO | errno)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))):
        if libc.prctl(*(ctypes.c_ulong(one) for one in arguments), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    deny(*sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
