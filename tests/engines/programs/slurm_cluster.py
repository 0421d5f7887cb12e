"""A real Slurm on hosts of a network that is made for a test: a controller and one node
daemon for each, as root, without munge.

The daemons and all that they start run in the hosts' pid namespaces, so they end with
the hosts. Slurm's packages are installed, or unpacked beside this environment by
fetch_slurm.sh.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from tests.support.machine.networks import Machine, hosts, why_no_hosts
from tests.support.runs import ROOT
from tests.support.waits import eventually

__all__ = ["Slurm", "slurm", "why_no_slurm"]

UNPACKED = Path(sys.prefix) / "slurm"
TIMEOUT_S = 60.0
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "echo; cat; exit")
CONFIG = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SchedulerParameters=sched_interval=2,sched_min_interval=0,requeue_delay=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=work Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=9 PreemptMode=OFF
"""


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    unpacked = (UNPACKED / "usr" / kind / word for kind in ("sbin", "bin") for word in (f"{name}-wlm", name))
    return found or next((str(path) for path in unpacked if path.exists()), "")


def why_no_slurm() -> str:
    """Why there can be no such cluster here; empty: there can."""
    missing = [name for name in ("slurmctld", "slurmd", "slurmstepd", "sbatch") if not _program(name)]
    if missing:
        return f"needs {', '.join(missing)}: tests/engines/fetch_slurm.sh {UNPACKED}"
    return why_no_hosts()


class Slurm:
    """The cluster. Its commands run on the first host, as on a login node."""

    def __init__(self, folder: Path, machines: tuple[Machine, ...]) -> None:
        self.folder, self.machines = folder, machines
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._off: set[Machine] = set()
        libraries = ""
        if _program("slurmctld").startswith(str(UNPACKED)):
            places = UNPACKED / "usr/lib"
            found = [str(path.parent) for path in places.glob("*/libmunge.so.2")]
            libraries = os.pathsep.join([*found, *(f"{one}/slurm-wlm" for one in found)])
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        self.environment["PATH"] = os.pathsep.join((str(Path(_program("sbatch")).parent), os.environ["PATH"]))
        if libraries:
            self.environment["LD_LIBRARY_PATH"] = libraries
        self._write(libraries)

    def _write(self, libraries: str) -> None:
        nodes = "\n".join(
            f"NodeName=n{index} NodeHostname={socket.gethostname()} NodeAddr={machine.address} "
            "CPUs=2 RealMemory=2000 State=UNKNOWN"
            for index, machine in enumerate(self.machines, 1)
        )
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                host=socket.gethostname(),
                address=self.machines[0].address,
                plugins=f"PluginDir={libraries.rpartition(os.pathsep)[2]}" if libraries else "",
                folder=self.folder,
                nodes=nodes,
            )
        )
        for index, machine in enumerate(self.machines, 1):
            names = [f"{one.address} n{number}" for number, one in enumerate(self.machines, 1)]
            path = self.folder / f"hosts{index}"
            path.write_text("\n".join([f"{machine.address} {socket.gethostname()}", *names, "127.0.0.1 localhost", ""]))
            subprocess.run(machine.command("mount", "--bind", str(path), "/etc/hosts"), check=True, timeout=20)

    def start(self) -> None:
        self._daemon(self.machines[0], _program("slurmctld"), "-D", "-c")
        for index, machine in enumerate(self.machines, 1):
            self._daemon(machine, _program("slurmd"), "-D", "-N", f"n{index}", "-d", _program("slurmstepd"))
        self._wait_until_idle()
        for machine in self.machines:  # control groups are all hosts' together; slurmd wants to see them at its start
            subprocess.run(machine.command("mount", "-t", "tmpfs", "none", "/sys/fs/cgroup"), check=True, timeout=20)

    def _daemon(self, machine: Machine, *command: str) -> None:
        out = (self.folder / "daemons.log").open("ab")
        with out:
            self._daemons.append(
                subprocess.Popen(machine.command(*command), env=self.environment, stdout=out, stderr=out)
            )

    def _wait_until_idle(self) -> None:
        def states() -> list[str]:
            done = self.run("sinfo", "-h", "-N", "-p", "work", "-o", "%T", check=False)
            return done.split()

        eventually(lambda: states() == ["idle"] * len(self.machines), f"idle nodes; {states()}", timeout_s=TIMEOUT_S)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """What a command prints, on the first host."""
        done = subprocess.run(
            self.machines[0].command(*(("env", f"--chdir={cwd}") if cwd else ()), *command),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> Mapping[str, str]:
        """What the controller knows of a job: ``JobState``, ``ExitCode``,
        ``Restarts``."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def allocated_at(self, number: str) -> float:
        """When a job got its nodes, in seconds since 1970, by the controller's log.

        Until then a job waits for the scheduler's next look, up to 3 s.
        """
        text = (self.folder / "ctld.log").read_text()
        times = re.findall(rf"^\[(\S+)\] sched\S* .*JobId={number} .*n\[1-", text, re.MULTILINE)
        return datetime.fromisoformat(times[-1]).timestamp()

    def wait_for(self, number: str, *states: str, timeout_s: float = TIMEOUT_S) -> Mapping[str, str]:
        eventually(
            lambda: self.job(number)["JobState"] in states,
            f"{states} of job {number}: {self.job(number)}",
            timeout_s=timeout_s,
        )
        return self.job(number)

    def switch_off(self, node: str) -> None:
        """End a host with all that runs on it, for good."""
        machine = self.machines[int(node[1:]) - 1]
        self._off.add(machine)
        os.kill(machine.holder, signal.SIGKILL)

    def processes(self) -> list[str]:
        """Command lines of what runs on the hosts beside Slurm's own daemons."""
        return [line for machine in self.machines if machine not in self._off for line in _commands(machine).values()]

    def pids(self, node: str, words: str) -> list[int]:
        """Processes on a node with these words in their command lines."""
        return [pid for pid, line in _commands(self.machines[int(node[1:]) - 1]).items() if words in line]


def _commands(machine: Machine) -> dict[int, str]:
    found = {}
    for pid in machine.processes():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if line and line != "cat" and not any(one in line for one in _DAEMONS):
                found[pid] = line
    return found


@contextlib.contextmanager
def slurm(folder: Path, size: int = 2) -> Iterator[Slurm]:
    with hosts(size) as network:
        cluster = Slurm(folder, network.machines)
        cluster.start()
        yield cluster
