"""Machines for the demo: namespaces with a network between them, or only their names.

As root on Linux each machine is a holder process with namespaces of its own (network,
mounts, processes), joined by a bridge. Killing the holder switches the machine off: the
kernel kills all its processes, and removes its network. A holder ends when its standard
input does, so nothing outlives this program, even if that is killed.

Elsewhere all *machines* are this one, on loopback. To switch one off then means to kill
the programs that were started on it by name.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["Machine", "machines"]

TOOLS = ("ip", "nsenter", "unshare", "setpriv")
TIMEOUT_S = 20.0
HOLD = "umount --recursive --lazy /sys/fs/cgroup; echo; cat; exit"
"""The first process of a machine must reap orphans, as a shell does while it waits.

It has no control groups: those of a switched-off machine would stay.
"""


class Machine:
    """One machine; with ``holder`` None this machine."""

    def __init__(self, name: str, address: str, holder: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.address, self._holder = name, address, holder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program that ends with this process at the latest."""
        words = command
        if self._holder is not None:
            spaces = f"/proc/{self._holder.pid}/ns"
            enter = [f"--net={spaces}/net", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children"]
            words = ["nsenter", *enter, "setpriv", "--pdeathsig", "KILL", *command]
        with log.open("ab") as out:
            process = subprocess.Popen(
                words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._started.append(process)
        return process

    def signal(self, process: subprocess.Popen[bytes], signum: int) -> None:
        """Signal the program, not its children."""
        pid = process.pid
        if self._holder is not None:  # this is nsenter, its parent
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(child)
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self.signal(process, signal.SIGKILL)
        process.wait(TIMEOUT_S)

    def switch_off(self) -> None:
        """Kill all processes of the machine immediately, as a power failure does."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait(TIMEOUT_S)
        for process in self._started:
            process.kill()
            process.wait(TIMEOUT_S)


def why_not() -> str:
    """Return why machines cannot have namespaces of their own, or an empty text."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{', '.join(missing)} is not installed"
    try:
        with _isolated(("probe",)):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"namespaces cannot be made: {error}"


@contextmanager
def machines(*names: str) -> Iterator[tuple[str, list[Machine]]]:
    """Yield a description of the machines, and the machines; switch all off in the
    end."""
    why = why_not()
    with ExitStack() as stack:
        if why:
            made = [Machine(name, "127.0.0.1") for name in names]
            words = f"{len(names)} agents on this machine's loopback ({why})"
        else:
            made = stack.enter_context(_isolated(names))
            words = f"{len(names)} machines: namespaces with a network of their own"
        for machine in made:
            stack.callback(machine.switch_off)
        yield words, made


@contextmanager
def _isolated(names: tuple[str, ...]) -> Iterator[list[Machine]]:
    net = f"10.{random.randint(64, 127)}.{random.randint(0, 255)}"
    with ExitStack() as stack:
        switch = stack.enter_context(_holder("--net"))
        _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(switch, "ip", "link", "set", "bridge", "up")
        made = []
        for index, name in enumerate(names):
            holder = stack.enter_context(_holder("--net", "--pid", "--fork", "--kill-child", "--mount-proc"))
            port, address = f"port{index}", f"{net}.{index + 1}"
            peer = ("type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            _inside(switch, "ip", "link", "add", port, *peer)
            _inside(switch, "ip", "link", "set", port, "master", "bridge", "up")
            _inside(holder, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _inside(holder, "ip", "link", "set", "eth0", "up")
            made.append(Machine(name, address, holder))
        yield made


@contextmanager
def _holder(*spaces: str) -> Iterator[subprocess.Popen[bytes]]:
    command = ["unshare", "--mount", *spaces, "sh", "-c", HOLD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise OSError(process.communicate(timeout=TIMEOUT_S)[1].decode().strip())
        _inside(process, "ip", "link", "set", "lo", "up")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def _inside(holder: subprocess.Popen[bytes], *words: str) -> None:
    enter = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
    subprocess.run([*enter, *words], check=True, capture_output=True, timeout=TIMEOUT_S)
