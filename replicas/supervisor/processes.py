"""Linux process tools: parent-death signals, subreapers, and sweeping a tree by pidfd. Standard library only.

A process is signalled only through a pidfd, and only after it was seen, with the pidfd already open, to be what the
caller means: below a given process (:func:`signal_descendants`), or started with a given environment variable
(:func:`signal_marked`). A pid that was reused in between is therefore never hit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "MARK",
    "Child",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "has_zombie",
    "is_stopped",
    "marked",
    "python_module",
    "send_signal",
    "signal_descendants",
    "signal_marked",
    "signal_name",
    "start_time",
]

MARK = "REPLICAS_SHIM"
"""Environment variable with the nonce of the shim under which a process was started; its children inherit it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DEAD = ("Z", "X", "x")


class Child:
    """A direct child that its starter's own loop reaps. ``code``: its exit code, None while it lives."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.code: int | None = None

    def ended(self, code: int) -> None:
        self.code = code
        self.popen.returncode = code  # it was reaped by us, not by Popen
        os.close(self.pidfd)

    def signal(self, signum: int) -> None:
        if self.code is None:
            send_signal(self.pidfd, signum)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {argument}): {os.strerror(code)}")


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send ``signum`` to this process when its parent's spawning thread ends.

    :raises SystemExit: when the parent, which had pid ``parent``, is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def python_module(module: str, *arguments: str) -> list[str]:
    """Command line that runs ``module`` in this interpreter, without the working folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9; the number for a signal without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and start time (clock ticks since boot) of a process; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None if it is gone or a zombie."""
    found = _stat(pid)
    return None if found is None or found[0] in _DEAD else found[2]


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped it."""
    found = _stat(pid)
    return found is not None and found[0] == "T"


def has_zombie(pid: int) -> bool:
    """Whether a child of it is dead and was not waited for."""
    stats = (_stat(child) for child in _pids())
    return any(found is not None and found[1] == pid and found[0] in _DEAD for found in stats)


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, at any depth, without zombies. A snapshot: it may be stale at once."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid in _pids():
        found = _stat(pid)
        if found is not None:
            children.setdefault(found[1], []).append((pid, found[0]))
    result: list[int] = []
    todo = [root]
    while todo:
        for pid, state in children.get(todo.pop(), []):
            todo.append(pid)
            if state not in _DEAD:
                result.append(pid)
    return result


def _is_below(pid: int, root: int) -> bool:
    while pid > 1:
        found = _stat(pid)
        if found is None:
            return False
        pid = found[1]
        if pid == root:
            return True
    return False


def _has_mark(pid: int, entry: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return entry in environment.split(b"\0")


def send_signal(pidfd: int, signum: int) -> bool:
    """Signal the process of a pidfd; False if it is gone."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def _signal_each(pids: list[int], signum: int, still: Callable[[int], bool]) -> int:
    count = 0
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            continue  # it ended meanwhile (a thread's id gives EINVAL)
        try:
            if still(pid) and send_signal(pidfd, signum):
                count += 1
        finally:
            os.close(pidfd)
    return count


def signal_descendants(root: int, signum: int, *, but: frozenset[int] = frozenset()) -> int:
    """Signal every living process below ``root`` but those in ``but``.

    :return: how many were signalled; 0 means that none was left in this snapshot.
    """
    pids = [pid for pid in descendants(root) if pid not in but]
    return _signal_each(pids, signum, lambda pid: _is_below(pid, root))


def marked(nonce: str) -> list[int]:
    """Living processes, but this one, that were started with ``REPLICAS_SHIM=nonce`` in their environment."""
    entry = f"{MARK}={nonce}".encode()
    me = os.getpid()
    found: list[int] = []
    for pid in _pids():
        if pid != me and _has_mark(pid, entry) and start_time(pid) is not None:
            found.append(pid)
    return found


def signal_marked(nonce: str, signum: int) -> int:
    """Signal every process that was started under the shim with this nonce; returns how many."""
    entry = f"{MARK}={nonce}".encode()
    return _signal_each(marked(nonce), signum, lambda pid: _has_mark(pid, entry))
