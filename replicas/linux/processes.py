"""Linux process tools: what ``/proc`` says of processes, and signals by pidfd. Standard
library only.

A process is signalled only through a pidfd, and only after it was seen, with the pidfd
already open, to be what the caller means: below a given process
(:func:`signal_descendants`), started with a given environment variable
(:func:`signal_marked`), or a member of a control group of ours
(:mod:`replicas.linux.cgroups`). A pid that was reused in between is therefore never
hit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from replicas.common.foreign import one_line

__all__ = [
    "MARK",
    "SHIM",
    "START_TIME",
    "Child",
    "catches",
    "children",
    "command_line",
    "descendants",
    "has_zombie",
    "is_below",
    "is_resource_tracker",
    "is_stopped",
    "marked",
    "own_children",
    "parents",
    "processes",
    "python_module",
    "send_signal",
    "signal_descendants",
    "signal_each",
    "signal_marked",
    "signal_name",
    "signal_own",
    "start_time",
    "stat_fields",
]

MARK = "REPLICAS_SHIM"
"""Nonce of the shim under which a process was started. Children inherit it, and a sweep
finds by it what a dead generation left behind."""

SHIM = "replicas.supervisor.shim.shim"
"""Module of the shim, as it stands in the command line of one."""

START_TIME = 19
"""Where in :func:`stat_fields` the clock ticks from boot to the start of the process
are."""
_DEAD = ("Z", "X", "x")


class Child:
    """A direct child that its starter's own loop reaps. ``code``: its exit code, None
    while it lives."""

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


def python_module(module: str, *arguments: str) -> list[str]:
    """Command line that runs ``module`` in this interpreter, without the working folder
    on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9; the number for a signal without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def stat_fields(pid: int | str) -> list[str]:
    """What ``/proc/PID/stat`` says of a process (``"self"``: of this one), from the
    state letter on.

    :raises ProcessLookupError: it was reaped, or ``/proc`` hides it.
    :raises PermissionError: it is another user's, and ``/proc`` hides those
        (``hidepid``).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return text[text.rindex(b")") + 2 :].decode().split()


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and start time (clock ticks since boot) of a process.

    None: it was reaped, or is another user's and ``/proc`` hides those (``hidepid``).
    """
    try:
        fields = stat_fields(pid)
    except (PermissionError, ProcessLookupError):
        return None
    state = fields[0]
    if state in _DEAD and int(fields[17]) > 1:
        state = "S"  # its first thread has ended, others run on
    return state, int(fields[1]), int(fields[START_TIME])


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None if it is gone or a
    zombie."""
    found = _stat(pid)
    return None if found is None or found[0] in _DEAD else found[2]


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped it."""
    found = _stat(pid)
    return found is not None and found[0] == "T"


def has_zombie(pid: int) -> bool:
    """Whether a child of it is dead and was not waited for."""
    stats = (_stat(child) for child in processes())
    return any(found is not None and found[1] == pid and found[0] in _DEAD for found in stats)


def processes() -> Iterator[int]:
    """Ids of all processes that are seen from here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def command_line(pid: int, limit: int = 120) -> str:
    """Its command line as one line of printable characters; of a process that has lost
    its memory (it is dying) the name in brackets, as ``ps`` shows it; empty: it is
    gone.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes() or b"[%b]" % Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return ""
    text = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return one_line(text, limit)


def is_resource_tracker(pid: int) -> bool:
    """Whether it is the process that unlinks the named shared memory and semaphores of
    a Python program when that is dead (of :mod:`multiprocessing.resource_tracker`): of
    use for who is ended last, never for who is ended.
    """
    try:
        return b"from multiprocessing.resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it is gone


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, at any depth, without zombies. A snapshot: it
    may be stale at once."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid in processes():
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


def parents(pid: int) -> list[int]:
    """Its parent, the parent of that, and so on."""
    found: list[int] = []
    while (stat := _stat(pid)) is not None and stat[1] > 0:
        pid = stat[1]
        found.append(pid)
    return found


def children(parent: int) -> list[int]:
    """Its living children."""
    found = ((pid, _stat(pid)) for pid in processes())
    return [pid for pid, stat in found if stat is not None and stat[1] == parent and stat[0] not in _DEAD]


def own_children() -> list[int]:
    """The children of this process, which has but one thread; zombies included."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return children(os.getpid())


def is_below(pid: int, root: int) -> bool:
    """Whether ``root`` is its parent, or its parent's, and so on."""
    while pid > 1:
        found = _stat(pid)
        if found is None:
            return False
        pid = found[1]
        if pid == root:
            return True
    return False


def catches(pid: int, signum: int) -> bool:
    """Whether it has a handler of its own for the signal; False if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith(b"SigCgt:")), b"0")
    return bool(int(mask, 16) >> (signum - 1) & 1)


def _has_mark(pid: int, entries: frozenset[bytes]) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return not entries.isdisjoint(environment.split(b"\0"))


def _entries(nonces: str | Iterable[str]) -> frozenset[bytes]:
    return frozenset(f"{MARK}={nonce}".encode() for nonce in ([nonces] if isinstance(nonces, str) else nonces))


def send_signal(pidfd: int, signum: int) -> bool:
    """Signal the process of a pidfd; False if it is gone, or has become another user's
    (``sudo``)."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except (PermissionError, ProcessLookupError):
        return False
    return True


def signal_each(pids: Iterable[int], signum: int, still: Callable[[int], bool]) -> list[int]:
    """Signal each of these processes of which ``still`` says, with its pidfd open, that
    it is the one that is meant.

    :return: those that were signalled: not those that are gone, or have become another
        user's.
    """
    signalled = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            continue  # it ended meanwhile (a thread's id gives EINVAL)
        try:
            if still(pid) and send_signal(pidfd, signum):
                signalled.append(pid)
        finally:
            os.close(pidfd)
    return signalled


def signal_descendants(root: int, signum: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Signal every living process below ``root`` but those in ``but``.

    :return: those that were signalled; none: none was left in this snapshot.
    """
    pids = [pid for pid in descendants(root) if pid not in but]
    return signal_each(pids, signum, lambda pid: is_below(pid, root))


def signal_own(signum: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Signal every living process below this one, which has but one thread, and those
    children that ``/proc`` hides.

    With ``hidepid`` a child that cannot be dumped is hidden (``ssh-agent``), but the
    kernel names it as a child.

    :return: those that were signalled.
    """
    pids = dict.fromkeys((*descendants(os.getpid()), *own_children()))
    chosen = [pid for pid in pids if pid not in but]
    return signal_each(chosen, signum, lambda pid: is_below(pid, os.getpid()) or pid in own_children())


def marked(nonces: str | Iterable[str]) -> list[int]:
    """Living processes, but this one, that were started with ``REPLICAS_SHIM=`` one of
    these nonces in their environment."""
    entries = _entries(nonces)
    me = os.getpid()
    return [pid for pid in processes() if pid != me and _has_mark(pid, entries) and start_time(pid) is not None]


def signal_marked(nonces: str | Iterable[str], signum: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Signal every process that was started under the shim with this nonce, or one of
    these; returns those."""
    entries = _entries(nonces)
    return signal_each([pid for pid in marked(nonces) if pid not in but], signum, lambda pid: _has_mark(pid, entries))
