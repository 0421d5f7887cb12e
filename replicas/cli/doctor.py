"""The checks of ``replicas doctor``: a run and its ports, and the machine.

They change nothing, and need no running supervisor. Checks of the machine alone, which
agents do on theirs, are in :mod:`replicas.supervisor.agent.checks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from replicas import errors
from replicas.cli.find_run import ENDPOINT_FILE, NotTrusted, read_endpoint, starting, trusted
from replicas.common.sizes import size_text
from replicas.config.structs import Config
from replicas.control.socket import SOCKET_FILE
from replicas.linux.processes import start_time
from replicas.linux.sockets import Listener, holder, listeners
from replicas.messages.bounds import CARRY_PORTS as PORTS
from replicas.supervisor.agent.checks import Demand, Finding, examine_machine, family
from replicas.supervisor.agent.machine import Machine, inspect_machine
from replicas.supervisor.fleet.plans import notes, problems
from replicas.supervisor.state.leftovers import lock_holders
from replicas.supervisor.state.run_state import RunState
from replicas.trust.tokens import OPERATOR_FILE


def examine(config: Config | None, state_dir: Path | None) -> Iterator[Finding]:
    """Run all checks, from the run to the machine. Blocks, with GPUs for seconds.

    :param config: of the run, if known. :param state_dir: of the run, if it has one.
    """
    machine = inspect_machine()
    ours: Collection[int] = ()
    if state_dir is not None:
        try:
            trusted(state_dir)
        except NotTrusted as error:
            yield Finding("run", "problem", error.message, "run this as its owner, or remove it")
            state_dir = None
    if state_dir is not None:
        supervisor = supervisor_of(state_dir)
        yield _run(state_dir, supervisor)
        if supervisor is not None:
            saved = RunState(state_dir / "state.json").peek()
            agent = saved.agent if saved is not None else None  # the agent may not be a child of this supervisor
            ours = family(supervisor, agent.pid if agent is not None else 0)
    if config is not None:
        yield from _plan(config, machine)
        yield from _ports(config, ours)
    yield from examine_machine(machine, state_dir, ours, Demand() if config is None else Demand.of_all(config))


def supervisor_of(state_dir: Path) -> int | None:
    """Return the pid of the living supervisor of this state folder, or None.

    The supervisor may be starting, and not answer yet.
    """
    try:
        pid = read_endpoint(state_dir).pid
    except errors.Disconnected:
        pid = starting(state_dir)
    holders = lock_holders(state_dir / "lock") if (state_dir / "lock").exists() else []
    return pid if pid in holders and start_time(pid) is not None else None


def _run(state_dir: Path, supervisor: int | None) -> Finding:
    if supervisor is not None:
        return Finding("run", "ok", f"supervised by process {supervisor}, state in {state_dir}")
    stale = [name for name in (ENDPOINT_FILE, "token", OPERATOR_FILE, SOCKET_FILE) if (state_dir / name).exists()]
    if not stale:
        return Finding("run", "ok", f"not running, state in {state_dir}")
    text = f"its supervisor was killed; it left {', '.join(stale)} in {state_dir}"
    return Finding("run", "note", f"{text}: the next start replaces them and goes on")


def _plan(config: Config, machine: Machine) -> Iterator[Finding]:
    found = problems(config, machine)
    for problem in found:
        yield Finding("plan", "problem", problem, "change the config, or the machine")
    for note in notes(config, machine):
        yield Finding("plan", "note", note)
    if not found:
        gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
        has = f"{gpus}, {machine.cpus} CPUs and {size_text(machine.memory_nbytes)} for this process"
        yield Finding("plan", "ok", f"it fits this machine, which has {has}")


def _ports(config: Config, ours: Collection[int]) -> Iterator[Finding]:
    wanted = [
        ("control.listen", config.control.host, config.control.port),
        ("store", config.store.bind, config.store.port),
    ]
    listening = [one for one, _ in listeners()]
    names = tuple(f"process {pid} (" for pid in ours)
    for key, host, port in wanted:
        holders = [holder(one.inode) for one in listening if one.port == port]
        if not port:
            yield Finding("ports", "ok", f"{key}: any free one")
        elif not holders:
            yield Finding("ports", "ok", f"{key}: {host}:{port} is free")
        elif all(holder.startswith(names) for holder in holders):
            yield Finding("ports", "ok", f"{key}: {host}:{port} is this run's")
        else:
            text = f"{key}: {host}:{port} is held by {', '.join(sorted(set(holders)))}"
            yield Finding("ports", "problem", text, "end that process, or choose another port (0: any free one)")
    yield _carriers(config.cluster.carry_port, listening)


def _carriers(first: int, listening: Collection[Listener]) -> Finding:
    """Check the ports of carriers on this machine; each rank needs one."""
    if not first:
        text = "cluster.carry_port: any free one; where a firewall is between nodes, set it, and open these ports"
        return Finding("ports", "ok", text)
    ports = range(first, min(first + PORTS, 1 << 16))
    holders = {one.port: holder(one.inode) for one in listening if one.port in ports}
    others = {port: holder for port, holder in sorted(holders.items()) if "replicas.carry.carrier" not in holder}
    text = f"cluster.carry_port: {len(ports) - len(others)} of the ports {first} to {ports[-1]} are for carriers here"
    if not others:
        return Finding("ports", "ok", f"{text}; all nodes must reach them on all others, through any firewall")
    text += f"; {', '.join(f'{port} is held by {holder}' for port, holder in others.items())}"
    remedy = f"end these programs, or set cluster.carry_port so that the {PORTS} ports from it on are free"
    return Finding("ports", "note" if len(others) < len(ports) else "problem", text, remedy)
