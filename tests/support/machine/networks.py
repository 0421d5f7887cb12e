"""Machines of a small network that is made for a test, joined by a bridge. Needs root.

Theory of operation
===================

Each machine is a process that holds its namespaces: of the network, and for a *host*
also of mounts and processes, with a ``/proc`` of its own. Nothing has a name in any
file system. The holder ends when its standard input does, so also when the test run is
killed by SIGKILL; the kernel then kills whatever still runs on a host, and takes the
network away.

The switch is one more machine: the bridge, and an address for what the others share.
With ``attach`` the test itself gets an address on the bridge (:attr:`Network.address`),
so that the machines can reach a coordinator in the test's process.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Machine", "Network", "Traffic", "bare_hosts", "hosts", "network", "why_no_hosts", "why_no_networks"]

TIMEOUT_S = 20.0
LINK = "eth0"
_TOOLS = ("ip", "nsenter", "unshare", "setpriv")
_HOLD = "echo; cat; exit"
"""The first process of a host must reap those whose parents have ended, as a shell does
while it waits for a child."""


class Traffic(NamedTuple):
    """Bytes on a machine's link, with the headers of the packets."""

    received: int
    sent: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.received - before.received, self.sent - before.sent)


@dataclass(frozen=True)
class Machine:
    """``holder``: the process that holds its namespaces; ``address``: its own on the
    network.

    ``is_host``: it has processes and mounts of its own. Every ``/proc/PID`` of it is
    seen from here too, by another pid.
    """

    holder: int
    address: str
    is_host: bool = False

    def command(self, *words: str) -> list[str]:
        """A command that runs in it. On a host it is the child of a process, which it
        does not outlive."""
        spaces = f"/proc/{self.holder}/ns"
        if not self.is_host:
            return ["nsenter", f"--net={spaces}/net", *words]
        enter = [f"--net={spaces}/net", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children"]
        return ["nsenter", *enter, "setpriv", "--pdeathsig", "KILL", "env", f"--chdir={Path.cwd()}", *words]

    def processes(self, name: str = "") -> list[int]:
        """Those that run on a host (called ``name``, if it is given), by the pids that
        they have here."""
        space = Path(f"/proc/{self.holder}/ns/pid_for_children").readlink()
        return [pid for pid, found in _processes().items() if found == space and name in ("", _name_of(pid))]

    @staticmethod
    def pid_of(process: int) -> int:
        """What a process that was started on a host with :meth:`command` has become, by
        the pid that it has here."""
        (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return int(child)

    def traffic(self) -> Traffic:
        """What has gone over its link so far."""
        for line in Path(f"/proc/{self.holder}/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == LINK:
                return Traffic(int(fields.split()[0]), int(fields.split()[8]))
        raise LookupError(f"{self} has no link")

    def set_up_link(self, *, mtu: int = 1500) -> None:
        """Give its link its address, and set it up."""
        _run(*self._ip("ip", "addr", "add", *_within(self.address), "dev", LINK))
        _run(*self._ip("ip", "link", "set", LINK, "mtu", str(mtu), "up"))

    @contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """What it sends takes its time: ``rate`` in the words of tc, such as
        ``"800mbit"``."""
        shape = f"tbf rate {rate} burst 1mb latency 50ms".split()
        _run(*self._ip("tc", "qdisc", "add", "dev", LINK, "root", *shape))
        try:
            yield
        finally:
            _run(*self._ip("tc", "qdisc", "del", "dev", LINK, "root"))

    def cut_off(self, other: Machine) -> None:
        """Nothing that it sends reaches ``other`` any more."""
        _run(*self._ip("ip", "route", "add", "blackhole", f"{other.address}/32"))

    def join_again(self, other: Machine) -> None:
        _run(*self._ip("ip", "route", "del", "blackhole", f"{other.address}/32"))

    def _ip(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *words]


@dataclass(frozen=True)
class Network:
    """``address``: of this process on it; empty when it is not attached."""

    machines: tuple[Machine, ...]
    switch: Machine
    address: str = ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT_S)


def _processes() -> dict[int, Path]:
    """The pid namespace of every process that is seen from here and has not ended."""
    found: dict[int, Path] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX":
                continue
            found[int(path.name)] = (path / "ns/pid").readlink()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile, or is none of ours
            continue
    return found


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return ""


@functools.cache
def why_no_networks() -> str:
    """Why this machine cannot make such a network; empty when it can."""
    return _why_not(is_host=False)


@functools.cache
def why_no_hosts() -> str:
    """Why this machine cannot make hosts; empty when it can."""
    return _why_not(is_host=True)


def _why_not(*, is_host: bool) -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with _network(1, is_host=is_host, attach=is_host) as made:
            for machine in made.machines:
                subprocess.run(machine.command("true"), check=True, capture_output=True, timeout=TIMEOUT_S)
            return ""
    except subprocess.CalledProcessError as error:
        return f"namespaces cannot be made: {' '.join(error.cmd)}: {error.stderr.decode().strip()}"
    except (subprocess.SubprocessError, OSError) as error:
        return f"namespaces cannot be made: {error}"


@contextmanager
def network(size: int) -> Iterator[list[Machine]]:
    """So many machines, and one more, the last, for what they share."""
    with _network(size, is_host=False, attach=False) as made:
        yield [*made.machines, made.switch]


@contextmanager
def hosts(size: int, *, ipv6: bool = False) -> Iterator[Network]:
    """So many hosts, on a network that this process can reach; ``ipv6``: it has no
    other addresses."""
    with _network(size, is_host=True, attach=True, ipv6=ipv6) as made:
        yield made


@contextmanager
def bare_hosts(addresses: Sequence[str]) -> Iterator[tuple[Machine, ...]]:
    """A host for each address, without any link: whoever makes one calls
    :meth:`Machine.set_up_link`."""
    with ExitStack() as stack:
        yield tuple(Machine(stack.enter_context(_holder(is_host=True)), address, True) for address in addresses)


@contextmanager
def _network(size: int, *, is_host: bool, attach: bool, ipv6: bool = False) -> Iterator[Network]:
    net = f"10.{random.randint(64, 127)}.{random.randint(0, 255)}."
    net = f"fd{random.randint(16, 255):x}:{random.randint(1, 65535):x}::" if ipv6 else net
    with ExitStack() as stack:
        switch = Machine(stack.enter_context(_holder(is_host=False)), f"{net}254")
        _run(*switch._ip("ip", "link", "add", "bridge", "type", "bridge"))
        _run(*switch._ip("ip", "addr", "add", *_within(switch.address), "dev", "bridge"))
        _run(*switch._ip("ip", "link", "set", "bridge", "up"))
        made: list[Machine] = []
        for index in range(size):
            machine = Machine(stack.enter_context(_holder(is_host=is_host)), f"{net}{index + 1}", is_host)
            _join(switch, f"port{index}", LINK, str(machine.holder))
            machine.set_up_link()
            made.append(machine)
        ours = f"{net}253" if attach else ""
        if attach:
            link = f"rt{secrets.token_hex(4)}"
            _join(switch, "test", link, str(os.getpid()))
            stack.callback(_run, *switch._ip("ip", "link", "del", "test"))  # and the other end with it
            _run("ip", "addr", "add", *_within(ours), "dev", link)
            _run("ip", "link", "set", link, "up")
        yield Network(tuple(made), switch, ours)


def _within(address: str) -> list[str]:
    """With its network, in the words of ip; an IPv6 address is used at once."""
    return [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]


def _join(switch: Machine, port: str, link: str, process: str) -> None:
    """A cable from the bridge to the network of a process."""
    _run(*switch._ip("ip", "link", "add", port, "type", "veth", "peer", "name", link, "netns", process))
    _run(*switch._ip("ip", "link", "set", port, "master", "bridge", "up"))


@contextmanager
def _holder(*, is_host: bool) -> Iterator[int]:
    """A process that holds new namespaces until its standard input ends."""
    own = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"] if is_host else []
    command = ["unshare", "--net", *own, "sh", "-c", _HOLD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            _, complaint = process.communicate(timeout=TIMEOUT_S)
            raise OSError(complaint.decode().strip())
        machine = Machine(process.pid, "")
        _run(*machine._ip("ip", "link", "set", "lo", "up"))
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
