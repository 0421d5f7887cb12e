"""Guard: set up a rank's process (death signal, log, cgroup), then exec its program.

It runs as a plain file (``python -I -S guard.py``), so it imports only the standard
library. The environment variable ``REPLICAS_GUARD``, which it removes, locates its
orders: the pid of its parent (if its parent is another process now, the parent has
died, and the guard exits), and the parent's descriptor of a file. The kernel limits a
variable to 128 KiB, too little for the orders. Every start waits for the guard, so it
loads as little as possible: the orders are not JSON, whose module loads longer than all
others together, but words, each after its length (:func:`pack`):

1. pid of the shim
2. the shim's descriptors of two pipes to the log pump for each local rank: they become
   stdout and stderr, after the rank as a first line in both; empty for no pipes
3. path of a control group to enter first; empty for no group
4. the working folder
5. and all further words: the command to exec

The parent-death signal SIGKILL survives the exec: a rank cannot outlive its launcher.
The guard writes its errors to the rank's log and exits with the shell's codes: 126
(cannot be run), 127 (not found).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False  # typing loads slowly
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

GUARD = "REPLICAS_GUARD"
"""Internal: location of the orders of a rank's guard. The program does not see it."""
RANK_MARK = b"\0replicas rank "
"""Prefix of the first line in a worker's pipe, before its rank in decimal."""
_PR_SET_PDEATHSIG = 1


def pack(words: Iterable[str]) -> bytes:
    """Encode words as bytes, each after its length, for :func:`unpack`."""
    encoded = [os.fsencode(word) for word in words]
    return b"".join(b"%d:%b" % (len(word), word) for word in encoded)


def unpack(text: bytes) -> list[bytes]:
    """Return the words in packed text, as bytes: a child's locale may differ."""
    words: list[bytes] = []
    at = 0
    while at < len(text):
        colon = text.index(b":", at)
        at = colon + 1 + int(text[at:colon])
        words.append(text[colon + 1 : at])
    return words


def _orders(parent: int, file: int) -> list[bytes]:
    """Read this guard's orders, a file that its parent has open; return their words.

    Exit with 126 if the file cannot be read.

    :param parent: pid of the parent.
    :param file: the parent's descriptor of the file.
    """
    failure = "cannot read its orders"
    orders = _do(failure, os.open, f"/proc/{parent}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    text = b""
    while part := _do(failure, os.pread, orders, 1 << 20, len(text)):
        text += part
    os.close(orders)
    return unpack(text)


def _open_log(shim: int, pipes: list[bytes]) -> None:
    """Make pipes of the shim stdout and stderr, and /dev/null stdin; exit on error.

    Write the rank as the first line into both pipes.

    :param shim: pid of the shim, which has the pipes open.
    :param pipes: descriptors of the shim, as text: stdout and stderr of each local
        rank.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    mark = RANK_MARK + os.environ["RANK"].encode() + b"\n"
    first = 2 * int(os.environ["LOCAL_RANK"])
    for stream, pipe in enumerate(pipes[first : first + 2], start=1):
        log = _do("cannot reach the log", os.open, f"/proc/{shim}/fd/{int(pipe)}", os.O_WRONLY | os.O_CLOEXEC)
        os.write(log, mark)
        os.dup2(log, stream)
        os.close(log)


def _enter(cgroup: bytes) -> None:
    """Move this process into the control group at this path, or exit with 126."""
    failure = f"cannot enter the control group {os.fsdecode(cgroup)}"
    group = _do(failure, os.open, cgroup + b"/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    _do(failure, os.write, group, b"0")
    os.close(group)


def _do(failure: str, call: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of ``call``; on an OSError, exit with 126.

    :param failure: the message to print before the error.
    """
    try:
        return call(*arguments)
    except OSError as error:
        _fail(f"{failure}: {error.strerror}", 126)


def _fail(message: str, code: int) -> NoReturn:
    """Write the message to stderr, the rank's log, and exit with ``code``."""
    os.write(2, os.fsencode(f"replicas: {message}\n"))
    os._exit(code)


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent; exit if that is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _fail(f"cannot set the parent-death signal: {os.strerror(ctypes.get_errno())}", 126)
    if os.getppid() != parent:
        _fail(f"parent process {parent} is gone", 126)


def set_up(words: list[bytes]) -> None:
    """Give this process its log, control group and working folder, as ordered.

    Exit with 126 if a step fails.

    :param words: the orders: pid of the shim, its pipes, control group, folder (pipes
        and group may be empty); the command after them is not used.
    """
    shim, pipes, cgroup, cwd = words[:4]
    if pipes:
        _open_log(int(shim), pipes.split())
    if cgroup:
        _enter(cgroup)
    _do(f"cannot change into the folder {os.fsdecode(cwd)}", os.chdir, cwd)


def execute(cwd: bytes, *command: bytes) -> NoReturn:
    """Exec the user's program; exit with 127 if it is not found, else with 126.

    :param cwd: the present folder, for the message.
    """
    name = os.fsdecode(command[0])
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would inherit that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        _fail(f"command not found: {name!r} (cwd {os.fsdecode(cwd)})", 127)
    except OSError as error:
        _fail(f"cannot run {name!r}: {error.strerror}", 126)


def main() -> NoReturn:
    """Set up this process as its parent has ordered, and exec the user's program."""
    parent, file = map(int, os.environ.pop(GUARD).split())
    die_with(parent)
    orders = _orders(parent, file)
    set_up(orders)
    execute(*orders[3:])


if __name__ == "__main__":
    sys.exit(main())
