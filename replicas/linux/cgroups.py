"""Control groups (cgroup v2): confine all processes of a replica, whatever they do.

Standard library only. A process can leave its parent, its session, its process group
and its environment, but not its control group. If it may create groups below its own,
the supervisor creates one for the run and in it one for each node of each generation::

    <mount><group of the supervisor>
        /replicas-<run>-<pid>-<start time>-<pid namespace>
            /<group>.<replica>.<generation>
                /<node>

Only the shim's children enter a node's group (the program's guard enters before it
execs the program), never the shim. So the shim's last sweep is ``cgroup.kill``: one
write, which no fork bomb outruns. When the shim is dead, the agent writes it. The
process that notices the end of a group's processes removes the group; if all were
killed together, the next supervisor does, at its start and end: the group's name shows
whether its supervisor is alive.

Where groups cannot be created (no cgroup v2, read-only in a container, another user's),
processes are found by descent and by the mark in their environment, and limits of
memory and processes cannot be enforced. Limits need the controllers ``memory`` and
``pids`` in the supervisor's own group. The kernel lets it delegate them only while no
process is directly in that group: the supervisor then moves itself into ``supervisor``
below it, as systemd's delegation intends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from pathlib import Path

from replicas.common.foreign import visible
from replicas.linux.files import kernel_lines
from replicas.linux.processes import namespace, signal_each, start_time

LIMITS = {"memory": "memory_nbytes", "pids": "max_processes"}
"""Controllers, and the limit that each enforces."""
_LEAF = "supervisor"
_OCTAL = re.compile(r"\\([0-7]{3})")
_left: dict[Path, Path] = {}
"""Original group of this process, by the leaf group it moved to.

A later run in this process starts from the original.
"""


def find_own(process: Path = Path("/proc/self")) -> Path:
    """Return the folder of a process's cgroup if this process may make groups in it.

    :param process: its folder in ``/proc``; default: this process.
    :raises OSError: it may not, or there is no cgroup v2.
    """
    folder = own_group(process)
    if not (os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)):
        raise OSError(errno.EACCES, f"no permission to make control groups in {folder}")
    return folder


def own_group(process: Path = Path("/proc/self")) -> Path:
    """Return the folder, below a mount of cgroup v2, of the group that a process is in.

    :param process: its folder in ``/proc``; default: this process.
    :raises OSError: there is none, or it is not visible; the text has the reason.
    """
    own = next((line[3:] for line in kernel_lines(process / "cgroup") if line.startswith("0::")), None)
    if own is None:
        raise OSError(errno.ENOENT, "this kernel has no cgroup v2")
    for line in kernel_lines(process / "mountinfo"):
        fields = line.split(" ")
        if "-" not in fields or fields[fields.index("-") + 1] != "cgroup2":  # "-" ends the optional fields
            continue
        root, mount = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[index]) for index in (3, 4))
        if root != "/" and own != root and not own.startswith(f"{root}/"):  # this mount shows another part of the tree
            continue
        below = own if root == "/" else own[len(root) :]
        folder = Path(f"{mount}/{below}")
        # skip a mount that does not show our group
        if ".." in Path(below).parts or not (folder / "cgroup.procs").exists():
            continue
        if not str(folder).isprintable():  # messages and states contain it
            raise OSError(errno.EILSEQ, f"the path of this process's group is not plain text: {visible(str(folder))}")
        return folder
    raise OSError(errno.ENOENT, "cgroup v2 is not mounted, or this process's group is not visible")


def members(group: Path) -> list[int]:
    """Return the pids of the processes in a control group and in groups below it.

    Empty if the group is gone.
    """
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError):  # ENODEV: it is being removed
            found += [int(line) for line in (Path(folder) / "cgroup.procs").read_bytes().split()]
    return found


def enter(group: Path, pid: int) -> None:
    """Move process ``pid`` into a control group; its later children start there, too.

    :raises OSError: the group is gone, or the kernel refuses.
    """
    _write(group / "cgroup.procs", str(pid))


def kill(group: Path) -> None:
    """Send SIGKILL to every process in a control group and below it; do not wait.

    Where ``cgroup.kill`` cannot be written, the processes are signalled one by one.
    """
    if not (pids := members(group)):
        return
    try:
        _write(group / "cgroup.kill", "1")
    except OSError:  # a kernel before 5.14, no right to write it, or the group is gone
        signal_each(pids, signal.SIGKILL, lambda pid: pid in members(group))


def remove(group: Path) -> bool:
    """Remove a control group and those below it, which must be empty of processes.

    Return True if all are gone, and False if a process is in one of them: that group
    and those above it stay, and others may have been removed.

    :raises OSError: they cannot be removed for another reason.
    """
    folders = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise
    return True


def leave(group: Path, *, run: bool = False) -> None:
    """Remove a node's control group of a generation (one start of a replica).

    Also remove the group of the generation, if it is empty then. Errors are ignored: a
    group that is in use stays, and whoever leaves it last calls this again. Groups that
    ranks created in the node's group (podman) are removed with it.

    :param group: path ``RUN/GENERATION/NODE``. :param run: remove the run's group, too.
    """
    with contextlib.suppress(OSError):  # a process is in it, or groups of another user
        remove(group)
    for folder in (group, group.parent, group.parent.parent)[: 3 if run else 2]:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return  # still in use: its last user removes it


class RunCgroups:
    """The control groups of one run: made in the constructor, removed by :meth:`close`.

    :ivar path: path of the run's group; None if it cannot be made.
    :ivar limits: controllers that the groups have.
    :ivar refused: why the groups, or their limits, cannot be made; empty if they can.
    """

    def __init__(self, run: str, root: Path | None = None, *, limited: bool) -> None:
        """Create the run's group; on an error set :attr:`refused` and raise nothing.

        :param run: name of the run.
        :param root: the group in which they are made; default: this process's own.
        :param limited: True if :meth:`add` will set limits; the groups then get the
            controllers, if the kernel allows.
        """
        self.path: Path | None = None
        self.limits: frozenset[str] = frozenset()
        self.refused = ""
        try:
            self._make(run, root or find_own(), limited=limited)
        except OSError as error:
            self.path, self.refused = None, error.strerror or str(error)
            return
        if limited and (missing := ", ".join(sorted(LIMITS.keys() - self.limits))):
            self.refused = f"{missing} cannot be delegated by the control group of this process"

    def _make(self, run: str, own: Path, *, limited: bool) -> None:
        """Create the run's group with its controllers, and remove groups of dead runs.

        :param run: name of the run. :param own: folder of the group to make it in.
        :param limited: let the groups have limits of memory and processes. For that,
            this process may have to move to a group below ``own``.
        :raises OSError: the group cannot be made.
        """
        own = _left.get(own, own)
        self.limits = _delegate_controllers(own) if limited else frozenset()
        _remove_those_of_the_dead(own)
        self.path = own / f"replicas-{run}-{os.getpid()}-{start_time(os.getpid())}-{namespace('pid')}"
        self.path.mkdir(exist_ok=True)  # an embedder may end a run and start it again
        if self.limits:
            _write(self.path / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(self.limits)))

    def add(
        self, name: str, node: int = 0, *, memory_nbytes: int | None = None, max_processes: int | None = None
    ) -> Path:
        """Create and return a node's group for one generation (one start) of a replica.

        :param name: of the generation, as ``GROUP.REPLICA.GENERATION``.
        :param node: the node's number within the generation.
        :param memory_nbytes: limit of the whole generation, for all its nodes' groups
            together; None: no limit. :param max_processes: likewise, counting threads.
        :raises OSError: the group exists, or it or a limit cannot be made. The group of
            the generation is then removed, unless a process is in it.
        """
        if self.path is None:
            raise OSError(f"limits of memory and processes need control groups: {self.refused}")
        generation = self.path / name
        generation.mkdir(parents=True, exist_ok=True)
        try:
            if memory_nbytes is not None:
                self._limit(generation, "memory", "memory.max", memory_nbytes)
                # else the kernel swaps above the limit, or kills one process only
                for file, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                    with contextlib.suppress(FileNotFoundError):  # not every kernel has it
                        _write(generation / file, value)
            if max_processes is not None:
                self._limit(generation, "pids", "pids.max", max_processes)
            group = generation / str(node)
            group.mkdir()
        except OSError:
            remove(generation)
            raise
        return group

    def _limit(self, group: Path, controller: str, file: str, value: int) -> None:
        """Write ``value`` as a limit of a group, into its ``file``.

        :param controller: the controller that enforces it, ``memory`` or ``pids``.
        :raises OSError: the run's groups do not have that controller.
        """
        if controller not in self.limits:
            raise OSError(errno.EOPNOTSUPP, f"the controller {controller} of cgroup v2 cannot be used in {self.path}")
        _write(group / file, str(value))

    def close(self) -> bool:
        """Remove the run's control group, and those of dead runs beside it.

        Kills nothing. Return True if the group is gone, or was never made. Return False
        if processes are still in it: it then stays, and a later call may remove it.

        :raises OSError: it cannot be removed for another reason.
        """
        if self.path is None:
            return True
        removed = remove(self.path)
        _remove_those_of_the_dead(self.path.parent)
        return removed


def _remove_those_of_the_dead(own: Path) -> None:
    """Remove the control groups in the folder ``own`` whose run has a dead supervisor.

    Only those of this pid namespace: containers may share groups, but not pids. Kills
    nothing: groups that still have processes, or cannot be removed, stay.
    """
    for other in own.glob(f"replicas-*-*-*-{namespace('pid')}"):
        pid, start = other.name.split("-")[-3:-1]
        if pid.isdigit() and start.isdigit() and start_time(int(pid)) != int(start):
            with contextlib.suppress(OSError):  # another user's
                remove(other)


def prepare(*, limited: bool) -> Path:
    """Return the folder of the control group in which a run's groups will be made.

    Makes none of them. To be called before this process forks.

    :param limited: delegate the controllers of limits. This process may move to a group
        below it for that, because a group that delegates may have no process in it.
    :raises OSError: this process cannot make control groups.
    """
    own = find_own()
    own = _left.get(own, own)
    if limited:
        _delegate_controllers(own)
    return own


def _delegate_controllers(own: Path) -> frozenset[str]:
    """Let groups below the folder ``own`` have limits of memory and processes.

    Return the controllers for which that works, none if the kernel refuses. May move
    this process into a group below ``own``.
    """
    there = set((own / "cgroup.controllers").read_text().split())
    control = own / "cgroup.subtree_control"
    wanted = there & set(LIMITS)
    if wanted - set(control.read_text().split()):
        words = " ".join(f"+{name}" for name in sorted(wanted))
        try:
            _write(control, words)
        except OSError as error:
            if error.errno != errno.EBUSY:  # EBUSY: a process is directly in it
                return frozenset()
            leaf = own / _LEAF
            leaf.mkdir(exist_ok=True)
            enter(leaf, os.getpid())
            _left[leaf] = own
            with contextlib.suppress(OSError):  # it has other processes, too; do not move those
                _write(control, words)
    return frozenset(wanted & set(control.read_text().split()))


def _write(path: Path, value: str) -> None:
    """Write a value to an existing file of the kernel, such as ``cgroup.procs``.

    :raises OSError: there is no such file, or the kernel refuses the value.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
