"""One host of a run over several, and what is kept running on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import struct
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

from replicas.linux import cgroups
from replicas.linux.cgroups import find_own
from replicas.linux.processes import MARK
from tests.support.machine.networks import Machine
from tests.support.runs import ROOT
from tests.support.waits import eventually

__all__ = ["GPUS", "LABELS", "NAMES", "Host", "mark_of"]

CLOCKS = Path(__file__).parents[1] / "clocks"
_HOLD = "echo; cat; exit"
NAMES = ("A", "B", "C", "D")
GPUS = (1, 4, 3, 3)
"""Of each host, by name only: a replica has one, which nobody else may have then. All
find room when one host is lost."""
LABELS = ({"train": "yes"}, {"train": "yes", "serve": "yes"}, {"serve": "yes"}, {"serve": "yes"})
"""Of each host: the trainer runs on A or B, rollouts on all others than A."""


class Host:
    """One host, and what is kept running on it: an agent, or the supervisor.

    ``disk``: what it keeps, False: just a folder. ``off_until``: its processes are not
    started before.
    """

    def __init__(self, index: int, machine: Machine, folder: Path, *, disk: bool) -> None:
        self.index, self.name, self.machine = index, NAMES[index], machine
        self.state_dir, self.has_disk = folder / f"disk-{self.name}" / "state", disk
        self.off_until = 0.0
        self.popen: subprocess.Popen[bytes] | None = None
        self.codes: list[int] = []
        """How the supervisors, or agents, on it ended."""
        self._boot_id, self._clock = folder / f"boot-{self.name}", folder / f"clock-{self.name}"
        self._log = folder / "out" / f"host-{self.name}.log"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self._spaces: list[tuple[subprocess.Popen[bytes], Machine]] = []
        """Pid namespaces in which a supervisor was started, the newest last."""
        self._names: dict[int, str] = {}
        self.cgroup = find_own() / f"chaos-{secrets.token_hex(6)}"
        self.boot()
        self._late_s = 3_600 * 24 * 7 * (index + 1)
        """By how much its monotonic clock is ahead."""

    def set_up(self) -> None:
        self.cgroup.mkdir()
        for words in (
            ("mount", "--bind", str(self._boot_id), "/proc/sys/kernel/random/boot_id"),
            ("mount", "-t", "tmpfs", "tmpfs", "/dev/shm"),
        ):
            subprocess.run(self.machine.command(*words), check=True, capture_output=True, timeout=20)

    def boot(self) -> None:
        """It is another boot of it from now on, without the control groups of the last:
        nobody would take away those that were made in a pid namespace that is gone."""
        self.leave_spaces()
        for group in (one for one in self.cgroup.glob("*") if one.is_dir()):
            eventually(partial(cgroups.remove, group), f"the end of {group}")
        self._boot_id.write_text(f"{uuid.uuid4()}\n")

    def enter_space(self, *, machine: bool) -> None:
        """Start all that comes in a new pid namespace; what runs in others goes on.

        :param machine: it looks like another machine, with another boot id and name.
        """
        holder = subprocess.Popen(
            self.machine.command("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", _HOLD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        inside = next(pid for pid in below(holder.pid) if name_of(pid) == "sh")  # it may be starting its cat
        space = Machine(inside, self.machine.address, is_host=True)
        self._spaces.append((holder, space))
        boot_id = self._boot_id
        if machine:
            boot_id = self._boot_id.with_name(f"boot-{self.name}-{inside}")
            boot_id.write_text(f"{uuid.uuid4()}\n")
            self._names[inside] = f"machine-{inside}"
        bind = ("mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id")
        subprocess.run(space.command(*bind), check=True, capture_output=True, timeout=20)

    def leave_spaces(self) -> None:
        """End all that runs in other pid namespaces than the host's own."""
        spaces, self._spaces = getattr(self, "_spaces", []), []
        for holder, _ in spaces:
            holder.communicate(timeout=20)

    @property
    def _here(self) -> Machine:
        return self._spaces[-1][1] if self._spaces else self.machine

    def set_clock(self, wrong_s: float) -> None:
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", wrong_s))

    def start(self, *command: str, env: dict[str, str]) -> None:
        here = self._here
        enter = ["sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.cgroup)]
        if here.holder in self._names:
            enter += ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self._names[here.holder]]
        ahead = str(self._late_s)
        clocks = ["unshare", "--time", "--monotonic", ahead, "--boottime", ahead, "--fork", "--kill-child"]
        paths = [str(CLOCKS), str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CHAOS_CLOCK": str(self._clock),
            "CHAOS_NODE": self.name,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS[self.index]))),
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                here.command(*enter, *clocks, sys.executable, *command),
                env={**os.environ, **own, **env},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pids(self) -> list[int]:
        """All processes on it but those that hold it."""
        found = [one for space in (self.machine, *self._others) for one in space.processes()]
        return [pid for pid in found if name_of(pid) not in ("sh", "cat") and not is_holder(pid)]

    @property
    def _others(self) -> list[Machine]:
        return [space for _, space in self._spaces if Path(f"/proc/{space.holder}/ns/pid_for_children").exists()]

    def find(self, *texts: str) -> list[int]:
        """Python's processes with one of these in their command line."""
        lines = {pid: command_line(pid) for pid in self.pids}
        return [
            pid
            for pid, line in lines.items()
            if line.startswith(sys.executable) and any(text in line for text in texts)
        ]

    @property
    def of_replicas(self) -> dict[int, str]:
        """Processes that belong to a replica, its shim included, and its mark."""
        return {pid: mark for pid in self.pids if (mark := mark_of(pid))}

    def send(self, signum: int, *pids: int) -> None:
        for pid in pids or self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def go_on(self) -> None:
        """Nothing on it is stopped any more, nor the command that entered it, which
        stops itself with what it has started."""
        self.send(signal.SIGCONT)
        if self.popen is not None:
            self.popen.send_signal(signal.SIGCONT)

    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        if self.popen is not None:
            self.send(signal.SIGKILL)
            self.popen.kill()
            self.popen.wait(20)
            self.popen = None
        self.leave_spaces()

    def remove_cgroup(self) -> None:
        """Once nothing is in it any more: what was killed may still be ending."""
        if self.cgroup.exists():
            eventually(lambda: not cgroups.members(self.cgroup), f"the end of all on {self.name}")
            eventually(lambda: cgroups.remove(self.cgroup), f"the end of {self.cgroup}")


def below(pid: int) -> list[int]:
    """All that descends from a process."""
    children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [found for child in children for found in (child, *below(child))]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_holder(pid: int) -> bool:
    return command_line(pid).startswith("unshare --pid ")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def mark_of(pid: int) -> str:
    """Of the generation to which a process belongs; empty: to none, or it has ended."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((word.partition("=")[2] for word in words if word.startswith(f"{MARK}=")), "")
