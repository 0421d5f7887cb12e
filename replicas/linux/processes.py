"""Linux processes: read them from ``/proc``, signal them by pidfd, set up one's own.

Standard library only. A process is signalled only through a pidfd, and only after a
check, with the pidfd already open, that it is the intended one: a descendant of this
process (:func:`signal_own`), started with a given environment variable
(:func:`signal_marked`), or in a control group of ours (:mod:`replicas.linux.cgroups`).
So a pid that was reused in between is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from replicas.common.foreign import one_line
from replicas.linux.files import kernel_lines

MARK = "REPLICAS_SHIM"
"""Internal: a random number of the shim under which a process was started.

Children inherit it; sweeps find the processes of a dead generation by it. A rank proves
with it to the coordinator that the supervisor has started it, so it is a secret.
"""
NO_MARK = "REPLICAS_NONE"
"""Internal: room in the environment of a process for the value of ``REPLICAS_SHIM``.

A sidecar gets its rank's mark after the fork (:func:`set_mark`).
"""
ROOM_FOR_MARK = {NO_MARK: "0" * 32}  # as long as a nonce
"""The variables that a process must start with for :func:`set_mark`."""
SHIM = "replicas.supervisor.shim.shim"
"""Module of the shim, as it appears in a shim's command line."""
LAUNCHER = "replicas.supervisor.shim.launcher"
"""Module of torchrun's launcher."""
START_TIME = 19
"""Index in :func:`stat_fields` of the start time, in clock ticks from boot."""
_DEAD = ("Z", "X", "x")
_GONE = (FileNotFoundError, PermissionError, ProcessLookupError)
"""Errors of files in ``/proc/PID``: the process is gone, or is another user's."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A child forked by this process, with what :class:`Child` needs of a Popen."""

    def __init__(self, pid: int) -> None:
        """Keep the pid of a running child, which :meth:`wait` or the starter reaps."""
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Block until the child ends, reap it, and return its exit code.

        It is ``-N`` after signal N. :attr:`returncode` is not set.
        """
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Child:
    """A direct child process, reaped by its starter's loop.

    ``code`` is its exit code, None while it lives.
    """

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedProcess) -> None:
        """Take over a started process; open its pidfd, which :meth:`ended` closes."""
        self.popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.code: int | None = None

    def ended(self, code: int) -> None:
        """Record the exit code, which the caller has reaped, and close the pidfd."""
        self.code = code
        self.popen.returncode = code  # reaped by us, not by Popen
        os.close(self.pidfd)

    def signal(self, signum: int) -> None:
        """Send ``signum`` by the pidfd; do nothing once the child was reaped."""
        if self.code is None:
            send_signal(self.pidfd, signum)


def signal_name(signum: int) -> str:
    """Return a signal's name, such as ``SIGKILL``, or ``signal N`` without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state letter on.

    :raises ProcessLookupError: the process was reaped, or ``/proc`` hides it.
    :raises PermissionError: ``/proc`` hides other users' processes (``hidepid``).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return text[text.rindex(b")") + 2 :].decode().split()  # the name, in parentheses, may have any characters


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return a process's state letter, parent's pid and start time.

    Return None if it is gone or hidden. The time is in clock ticks since the boot.
    """
    try:
        fields = stat_fields(pid)
    except (PermissionError, ProcessLookupError):
        return None
    state = fields[0]
    if state in _DEAD and int(fields[17]) > 1:
        state = "S"  # its first thread has ended, others still run
    return state, int(fields[1]), int(fields[START_TIME])


def start_time(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since the boot, or None.

    None stands for a process that is gone, a zombie, or hidden by ``/proc``.
    """
    found = _stat(pid)
    return None if found is None or found[0] in _DEAD else found[2]


def pid_of(pidfd: int) -> int:
    """Return the pid of the process of a pidfd, in this pid namespace.

    Return 0 or less if the process is gone, or is in another pid namespace.

    :raises OSError: the pidfd is closed.
    """
    found = kernel_lines(Path(f"/proc/self/fdinfo/{pidfd}"))
    return next((int(line.split()[1]) for line in found if line.startswith("Pid:")), 0)


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped, as by SIGSTOP.

    Return False if it runs or is gone.
    """
    found = _stat(pid)
    return found is not None and found[0] == "T"


def has_zombie(pid: int) -> bool:
    """Return True if the process has a dead child that it has not reaped (a zombie)."""
    stats = (_stat(child) for child in processes())
    return any(found is not None and found[1] == pid and found[0] in _DEAD for found in stats)


def processes() -> Iterator[int]:
    """Yield the pids of all processes that ``/proc`` shows."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def descriptors(pid: int) -> list[str]:
    """Return the targets of a process's open descriptors: ``socket:[123]``, a path.

    Empty for a process of another user, or one that is gone.
    """
    targets: list[str] = []
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # closed meanwhile
                    targets.append(os.readlink(entry.path))  # noqa: PTH115  # hundreds of them
    except _GONE:
        return targets
    return targets


def _read(pid: int, name: str, errors: type[OSError] | tuple[type[OSError], ...] = _GONE) -> bytes:
    """Return the content of ``/proc/PID/NAME``, or ``b""`` after one of ``errors``."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except errors:
        return b""


def process_name(pid: int) -> str:
    """Return the name of a process, as ``ps`` shows it; "" if the process is gone.

    It may have any characters.
    """
    return _read(pid, "comm", OSError).decode(errors="replace").strip()


def command_line(pid: int, limit: int = 120) -> str:
    """Return a process's command line as one line of at most ``limit`` characters.

    They are printable. For a dying process, return its name in brackets, as ``ps``
    does; "" if it is gone.
    """
    text = _read(pid, "cmdline", OSError).replace(b"\0", b" ").decode(errors="replace").strip()
    if not text and (name := process_name(pid)):
        text = f"[{name}]"
    return one_line(text, limit)


def is_resource_tracker(pid: int) -> bool:
    """Return True if the process is a resource tracker of Python's multiprocessing.

    It unlinks a dead program's shared memory. The answer may decide the order of kills,
    never whether to kill.
    """
    return b"from multiprocessing.resource_tracker import main" in _read(pid, "cmdline", OSError)


def descendants(root: int) -> list[int]:
    """Return the pids of the living descendants of process ``root``, without zombies.

    One look at ``/proc``: processes that are started meanwhile may be missing.
    """
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
    """Return the pids of a process's ancestors, its parent first.

    Empty if the process is gone.
    """
    found: list[int] = []
    while (stat := _stat(pid)) is not None and stat[1] > 0:
        pid = stat[1]
        found.append(pid)
    return found


def children(parent: int) -> list[int]:
    """Return the pids of a process's living direct children, without zombies."""
    found = ((pid, _stat(pid)) for pid in processes())
    return [pid for pid, stat in found if stat is not None and stat[1] == parent and stat[0] not in _DEAD]


def own_children() -> list[int]:
    """Return the pids of this process's direct children, zombies included.

    This process must have one thread only.
    """
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return children(os.getpid())


def is_below(pid: int, root: int) -> bool:
    """Return True if process ``root`` is an ancestor of process ``pid``."""
    return root in parents(pid)


def catches(pid: int, signum: int) -> bool:
    """Return True if the process has a handler for the signal.

    Return False if it is gone, or is another user's.
    """
    status = _read(pid, "status").splitlines()
    mask = next((line.split()[1] for line in status if line.startswith(b"SigCgt:")), b"0")
    return bool(int(mask, 16) >> (signum - 1) & 1)


def is_marked(pid: int, nonces: str | Collection[str]) -> bool:
    """Return True if a process was started below a shim that has one of these nonces.

    A *shim* is the library's process that starts a replica's ranks on a node; its
    nonce, a random text, is in the environment of all processes below it
    (:data:`MARK`). Return False if the process has ended, or is another user's.
    """
    entries = {f"{MARK}={nonce}".encode() for nonce in ([nonces] if isinstance(nonces, str) else nonces)}
    return not entries.isdisjoint(_read(pid, "environ").split(b"\0"))


def send_signal(pidfd: int, signum: int) -> bool:
    """Send a signal by a pidfd, and return True.

    Return False if the process is gone or became another user's (sudo).
    """
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except (PermissionError, ProcessLookupError):
        return False
    return True


def signal_each(pids: Iterable[int], signum: int, still: Callable[[int], bool]) -> list[int]:
    """Send a signal to each of these processes that is still the intended one.

    Return the pids of the signalled ones; those that are gone or have become another
    user's are left out.

    :param still: called with a pid once its pidfd is open; returns True to signal it.
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


def signal_own(signum: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Send a signal to every living descendant of this single-threaded process.

    Return the pids of the signalled ones. Includes children that ``/proc`` hides: with
    ``hidepid`` a child that cannot be dumped (``ssh-agent``) is hidden, but the kernel
    lists it as a child.

    :param but: pids to leave out.
    """
    pids = dict.fromkeys((*descendants(os.getpid()), *own_children()))
    chosen = [pid for pid in pids if pid not in but]
    return signal_each(chosen, signum, lambda pid: is_below(pid, os.getpid()) or pid in own_children())


def marked(nonces: str | Collection[str]) -> list[int]:
    """Return the pids of other living processes below shims with one of these nonces.

    A *shim* starts a replica's ranks; its nonce, a random text, is in the environment
    of all processes below it (:data:`MARK`).
    """
    me = os.getpid()
    return [pid for pid in processes() if pid != me and is_marked(pid, nonces) and start_time(pid) is not None]


def signal_marked(nonces: str | Collection[str], signum: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Send a signal to each process that :func:`marked` finds for these nonces.

    They are the living processes below the shims that have these nonces. Return the
    pids of the signalled ones.

    :param but: pids to leave out.
    """
    return signal_each([pid for pid in marked(nonces) if pid not in but], signum, lambda pid: is_marked(pid, nonces))


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends.

    It is sent, too, when only the thread of the parent that started this process ends.
    If the parent is gone already, exit here with code 1.

    :param parent: the parent's pid, read before it could end.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it may have ended before the call
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name of the calling thread (of the process, in the main thread).

    ``ps`` and ``/proc/PID/comm`` show it. It is cut to 15 bytes.
    """
    _prctl(_PR_SET_NAME, name.encode()[:15])


def set_mark(nonce: str) -> None:
    """Put the nonce of a shim into this process's environment, as others see it.

    By that variable, :data:`MARK`, a shim finds the processes of its ranks. Others read
    ``/proc/PID/environ``, which the kernel takes from the memory of the environment at
    the start, and ``os.environ`` does not change that. So the process must have been
    started with :data:`ROOM_FOR_MARK`, a variable as long as a mark, which is
    overwritten.

    :raises ValueError: it was started without, or the nonce has another length.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    room, found = ROOM_FOR_MARK[NO_MARK].encode(), libc.getenv(NO_MARK.encode())
    if found is None or ctypes.string_at(found) != room or len(nonce.encode()) != len(room):
        raise ValueError("this process has no room for a mark in its environment, or the mark is of another size")
    entry = f"{MARK}={nonce}".encode()
    ctypes.memmove(found - len(NO_MARK) - 1, entry, len(entry))  # the names MARK and NO_MARK are equally long


def _prctl(option: int, argument: int | bytes) -> None:
    """Call ``prctl(option, argument)`` for this process or thread.

    :raises OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {argument!r}): {os.strerror(code)}")


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine; all containers share it.

    :raises OSError: it cannot be read.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of a kind: ``pid``, ``net``, ..."""
    return Path(f"/proc/self/ns/{kind}").stat().st_ino
