"""The checks of ``replicas doctor``: a run and its ports, and the machine.

They change nothing, and need no running supervisor. Checks of the machine alone, which
agents do on theirs, are in :mod:`replicas.supervisor.agent.checks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from replicas.cli.find_run import ENDPOINT_FILE, STATE_FILE, NotTrusted, starting, trusted
from replicas.common.sizes import list_text, size_text
from replicas.config.structs import Config
from replicas.control.socket import SOCKET_FILE
from replicas.linux.sockets import Listener, holder, listeners
from replicas.messages.bounds import CARRY_PORTS as PORTS
from replicas.supervisor.agent.checks import Demand, Finding, examine_machine, family
from replicas.supervisor.agent.machine import Machine, inspect_machine
from replicas.supervisor.fleet.plans import notes, problems
from replicas.supervisor.state.leftovers import lock_holders
from replicas.supervisor.state.run_state import RunState
from replicas.trust.tokens import OPERATOR_FILE


def examine(config: Config | None, state_dir: Path | None) -> Iterator[Finding]:
    """Run all checks, and yield their findings: on the run, then on the machine.

    Blocks, with GPUs for seconds; changes nothing.

    :param config: of the run, if known. :param state_dir: of the run, if it has one.
    """
    machine = inspect_machine()
    ours: Collection[int] = ()
    if state_dir is not None:
        try:
            trusted(state_dir)
        except NotTrusted as error:
            yield Finding("run", "problem", error.message, "run this as the owner of the folder, or remove that")
            state_dir = None
    if state_dir is not None:
        supervisor, saved = supervisor_of(state_dir), RunState(state_dir / STATE_FILE).peek()
        if supervisor is not None or config is None or config.run.adopt_s:  # else its agent ends with its supervisor
            agent = saved.agent if saved is not None else None  # it may not be a child of this supervisor
            ours = family(supervisor or 0, agent.pid if agent is not None else 0)
        yield _run_finding(state_dir, supervisor, len(ours))
    if config is not None:
        yield from _plan(config, machine)
        yield from _ports(config, ours)
    yield from examine_machine(machine, state_dir, ours, Demand() if config is None else Demand.of_all(config))


def supervisor_of(state_dir: Path) -> int | None:
    """Return the pid of the living supervisor that has this state folder, or None.

    It holds the lock of the folder. It may be starting, and not answer yet.
    """
    pid = starting(state_dir)
    return pid if pid and pid in lock_holders(state_dir / "lock") else None


def _run_finding(state_dir: Path, supervisor: int | None, living: int) -> Finding:
    """Return the finding that says whether the run has a supervisor.

    If it has none: whether its replicas live and can be taken over, its supervisor was
    killed, or it is not running.

    :param supervisor: pid of its living supervisor, or None.
    :param living: the number of the run's processes that live. Without a supervisor
        they are the replicas that outlived the last one.
    """
    if supervisor is not None:
        return Finding("run", "ok", f"the run is supervised by process {supervisor}, state in {state_dir}")
    if living:
        text = f"the run has no supervisor, but {living} of its processes live, state in {state_dir}"
        return Finding("run", "note", f"{text}: a start within run.adopt takes these over; later they end")
    stale = [name for name in (ENDPOINT_FILE, "token", OPERATOR_FILE, SOCKET_FILE) if (state_dir / name).exists()]
    if not stale:
        return Finding("run", "ok", f"the run is not running, state in {state_dir}")
    text = f"the run's supervisor was killed; it left {', '.join(stale)} in {state_dir}"
    return Finding("run", "note", f"{text}: the next start replaces these files and goes on")


def _plan(config: Config, machine: Machine) -> Iterator[Finding]:
    """Yield findings on whether the config fits this machine."""
    found = problems(config, machine)
    for problem in found:
        yield Finding("plan", "problem", problem, "change the config, or the machine")
    for note in notes(config, machine):
        yield Finding("plan", "note", note)
    torchruns = [one for one in config.groups.values() if one.launcher == "torchrun" and one.replicas > 1]
    if slow := [one.name for one in torchruns if not one.preload]:
        text = f"each start of a replica of {list_text(slow)} loads torch twice"
        yield Finding("plan", "ok", f'{text}: preload = ["torch"] in the group makes a restart many times faster')
    if not found:
        gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
        has = f"{gpus}, {machine.cpus} CPUs and {size_text(machine.memory_nbytes)} for this process"
        yield Finding("plan", "ok", f"the config fits this machine, which has {has}")


def _ports(config: Config, ours: Collection[int]) -> Iterator[Finding]:
    """Yield findings on the ports that the config names; bind no socket.

    A port is free, held by the run itself or, which is a problem, by other processes.

    :param ours: pids of the run's own processes.
    """
    wanted = [
        ("control.listen", config.control.host, config.control.port),
        ("store", config.store.bind, config.store.port),
    ]
    listening = [one for one, _ in listeners()]
    names = tuple(f"process {pid} (" for pid in ours)
    for key, host, port in wanted:
        holders = [holder(one.inode) for one in listening if one.port == port]
        if not port:
            yield Finding("ports", "ok", f"{key}: any free port")
        elif not holders:
            yield Finding("ports", "ok", f"{key}: {host}:{port} is free")
        elif all(holder.startswith(names) for holder in holders):
            yield Finding("ports", "ok", f"{key}: {host}:{port} is held by this run itself")
        else:
            text = f"{key}: {host}:{port} is held by {', '.join(sorted(set(holders)))}"
            yield Finding("ports", "problem", text, "end that process, or choose another port (0: any free one)")
    yield _carriers(config.cluster.carry_port, listening)


def _carriers(first: int, listening: Collection[Listener]) -> Finding:
    """Return the finding that says which ports for carriers other programs hold.

    Carriers serve versions to other hosts, one process for each rank on this machine.

    :param first: the first port of their range; 0: carriers use any free ports.
    :param listening: the listening sockets of this machine.
    """
    if not first:
        text = "cluster.carry_port: any free ports; with a firewall between nodes set this key, and open these ports"
        return Finding("ports", "ok", text)
    ports = range(first, min(first + PORTS, 1 << 16))
    holders = {one.port: holder(one.inode) for one in listening if one.port in ports}
    others = {port: holder for port, holder in sorted(holders.items()) if "replicas.carry.carrier" not in holder}
    text = f"cluster.carry_port: {len(ports) - len(others)} of the ports {first} to {ports[-1]} are for carriers here"
    if not others:
        return Finding("ports", "ok", f"{text}; all nodes must reach these ports on all others, through any firewall")
    text += f"; {', '.join(f'{port} is held by {holder}' for port, holder in others.items())}"
    remedy = f"end these programs, or set cluster.carry_port so that the {PORTS} ports from it on are free"
    return Finding("ports", "note" if len(others) < len(ports) else "problem", text, remedy)
