"""The parts of a run in a Slurm job: the supervisor, and one agent on each node.

The nodes share the run's state folder, so that the job can continue on other nodes when
it is queued again. The supervisor writes the address for its agents there, in a file
named after the job, its restart and the step: agents never take the file of an earlier
start for it. The file follows the run's token, and is removed when the run is over.

An agent runs in a child of the task. It is started again if it was killed, if it lost a
supervisor that may still be alive, or if its token was replaced; the supervisor tells
it which replicas belong on its node. An agent that ends for another reason ends the
task. Slurm's signals reach every process of a job, so the task itself ignores them, and
waits for its agent, which leaves in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from replicas.cli.base import complain
from replicas.common.reason import Reason
from replicas.config.structs import Config
from replicas.config.values import is_loopback
from replicas.control.exit_codes import BUG, DONE, FAILED, UNAVAILABLE
from replicas.errors import ReplicasError, UsageError, WorldError
from replicas.linux import private
from replicas.linux.processes import die_with_parent, send_signal, signal_name
from replicas.linux.scarce import naming_limits
from replicas.status import WAIT_S
from replicas.supervisor.operator import supervise
from replicas.supervisor.scheduler_hooks import SchedulerHooks, invitation, on_cluster
from replicas.supervisor.supervisor import Supervisor
from replicas.trust.way import split

_START_S = 120.0
"""How long an agent waits for its supervisor to listen."""
_LOOK_AGAIN_S = 0.2
_AGAIN_S = 1.0
_END_S = 20.0
_PROBE_S = 5.0
_LOST = UNAVAILABLE
"""Exit code of an agent that lost its supervisor."""
_IDENTITIES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS")
_OF_STEPS = ("SLURM_STEP", "SLURM_TASK", "SLURM_PMI", "PMI_", "PMIX_")


_SCONTROL_S = 10.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """This task of a Slurm job, read from its environment.

    :ivar names: of all nodes, if Slurm names them.
    :ivar start: the job and its restart, the same for all parts of one start of the
        run, of which an allocation may have several.
    """

    node: str
    index: int
    nodes: int
    start: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str], *, whole_run: bool) -> Task:
        """Read this process's task from Slurm's variables.

        :param environ: the environment with these variables.
        :param whole_run: True if one job step (``srun``) is the whole run: then the
            nodes are those of the step. False if the batch script starts the parts of
            the run as several steps: then the nodes are those of the job.
        :raises UsageError: this process does not belong to a Slurm job, or its step has
            several tasks on this node.
        """
        job = environ.get("SLURM_JOB_ID")
        if job is None:
            raise UsageError(
                "this is not a task of a Slurm job: SLURM_JOB_ID is not set",
                hint="use srun, or submit the script that `replicas slurm CONFIG` prints",
            )
        if whole_run and environ.get("SLURM_LOCALID", "0") != "0":
            raise UsageError(
                "a node of a run may have only one task, and this is another one",
                hint="start the step with --ntasks-per-node=1",
            )
        step = environ.get("SLURM_STEP_ID", "") if whole_run else "batch"
        return cls(
            node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
            index=int(environ.get("SLURM_NODEID", "0")),
            nodes=int(environ.get("SLURM_STEP_NUM_NODES" if whole_run else "SLURM_JOB_NUM_NODES", "1")),
            start=f"{job}-{environ.get('SLURM_RESTART_COUNT', '0')}-{step}",
            names=host_names(environ.get("SLURM_STEP_NODELIST" if whole_run else "SLURM_JOB_NODELIST", "")),
        )

    def invitation(self, config: Config) -> Path:
        """Return the path of the file by which agents of this start join.

        The supervisor writes ``token@host:port`` into it, and agents read that. It is
        not opened here.
        """
        return config.run.state_dir / f"slurm-{self.start}.join"


def host_names(text: str) -> tuple[str, ...]:
    """Return the names in a list as Slurm writes it, such as ``n[01-03,7],head``.

    Return an empty tuple for a list of another form.
    """
    found: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        before, bracket, rest = name.partition("[")
        numbers, _, after = rest.partition("]")
        for part in numbers.split(",") if bracket else ():
            first, _, last = part.partition("-")
            if not (first.isdecimal() and (last or first).isdecimal()):
                return ()  # only a message lacks the names then
            each = range(int(first), int(last or first) + 1)
            found += [one for number in each for one in host_names(f"{before}{number:0{len(first)}}{after}")]
        found += () if bracket else (name,)
    return tuple(found)


def run_part(config: Config, part: Literal["all", "supervisor", "agent"]) -> int:
    """Run this task's part of the run to its end, and return the exit code of the task.

    :param part: "all" is the agent of this node, and on the first node the supervisor,
        too.
    :raises UsageError: this is not a task of a Slurm job, or the nodes cannot reach
        this one.
    """
    task = Task.of(os.environ, whole_run=part == "all")
    if part == "agent" or (part == "all" and task.index > 0):
        return _agent(config, task)
    if part == "supervisor":
        return _supervise(config, task)
    with _own_agent(config, task):
        return _supervise(config, task)


# ------------------------------------------------------------ the supervisor


def _supervise(config: Config, task: Task) -> int:
    """Supervise the run to its end, and return the exit code.

    Meanwhile keep the file with which agents join; remove it at the end.
    """
    path, is_ours = task.invitation(config), False

    def write(supervisor: Supervisor) -> None:
        """Write the supervisor's present token and address to ``path``, for agents.

        Also remove such files of earlier starts of the job.

        :raises WorldError: writing failed.
        """
        nonlocal is_ours
        try:
            for old in path.parent.glob("slurm-*.join"):
                if old != path:  # the start that wrote it was killed
                    private.remove(old)
            private.replace(path, f"{invitation(supervisor)}\n".encode())
        except OSError as error:
            raise WorldError(
                f"cannot write {path}, with which agents join: {error.strerror or error}",
                hint="make room on its disk, or set run.state_dir in the config",
            ) from error
        is_ours = True

    hooks = SchedulerHooks(
        adapt=lambda config: _on_job(config, task),
        preempting=frozenset([signal.SIGTERM]),
        opened=write,
        renewed=write,
        nodes=task.names,
    )
    try:
        return supervise(config, hooks)
    finally:
        if is_ours:  # else another supervisor of the job has written it
            with contextlib.suppress(OSError):  # the next start removes it
                private.remove(path)


def _on_job(config: Config, task: Task) -> Config:
    """Return a copy of the config for this job, changed in two places.

    It listens on an address that the other nodes reach, and waits for their agents.

    :raises UsageError: there is no such address.
    """
    needed = is_loopback(config.control.host) or is_loopback(config.store.bind)
    return on_cluster(config, _own_address(task) if needed else "", task.nodes)


def _own_address(task: Task) -> str:
    """Return the address at which the other nodes of the job reach this one.

    It is the first of these that is not loopback: the address of the node's name, of
    the host name, the one that Slurm has (``NodeAddr``), and this machine's address on
    the route to another node. A node's own name may lead to 127.0.1.1, as Debian's
    installer sets it up.

    :raises UsageError: only loopback was found, and there are other nodes.
    """
    for name in (task.node, socket.gethostname(), _slurms_address(task.node)):
        if found := _address_of(name):
            return found
    for name in task.names:
        there = _address_of(name) if name != task.node else ""
        if there and (found := _end_of_route(there)):
            return found
    if task.nodes > 1:
        raise UsageError(
            f"no address was found at which the other nodes reach {task.node}: its own name leads to loopback, Slurm "
            "has no other NodeAddr of it, and no name of another node resolves",
            hint="give the node its address in /etc/hosts or DNS, or NodeAddr in slurm.conf; or name its host in "
            '[control] listen = "HOST:PORT" and [store] bind = "HOST"',
        )
    return "127.0.0.1"


def _address_of(name: str) -> str:
    """Look a host name up; return its first address that is not loopback, or "".

    This may block. "" also stands for an unknown name.
    """
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else ():
            if not is_loopback(str(place[0])):
                return str(place[0])
    return ""


def _slurms_address(node: str) -> str:
    """Ask ``scontrol`` for the address (``NodeAddr``) of a node, 10 s at most.

    Return an empty text if there is no answer.
    """
    try:
        told = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node], capture_output=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(rb"\bNodeAddr=(\S+)", told.stdout)
    return found[1].decode(errors="replace") if found else ""


def _end_of_route(there: str) -> str:
    """Return this machine's own address on the route to the address ``there``.

    Return an empty text if there is no route, or it is loopback. Sends nothing.
    """
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends nothing
        here = str(probe.getsockname()[0])
        return "" if is_loopback(here) else here
    return ""


# ------------------------------------------------------------ an agent


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment without the variables of a Slurm task.

    Lightning, MPI and others would otherwise take the ranks for Slurm tasks.
    """
    return {
        name: value for name, value in environ.items() if name not in _IDENTITIES and not name.startswith(_OF_STEPS)
    }


@contextlib.contextmanager
def _own_agent(config: Config, task: Task) -> Iterator[None]:
    """Context manager: run the agent of the supervisor's own node in a child process.

    At the end of the block it gets 20 s to end; then, or after an error, it is killed.
    """
    pid = _forked(lambda: _agent(config, task), signal.SIGTERM)
    pidfd = os.pidfd_open(pid)
    try:
        yield
        select.select([pidfd], [], [], _END_S)  # it ends with the run
    finally:
        send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def _agent(config: Config, task: Task) -> int:
    """Run an agent of this node until the run is over; return the task's exit code.

    Wait for the supervisor, 120 s at most, run the agent in a forked child, and wait
    for its end. If the agent ended while the run continues, as with a new supervisor or
    after a crash, start another. Replaces the signal handlers of this process.

    :raises WorldError: the supervisor did not come in time.
    """
    from replicas.supervisor.agent.remote import Invitation, serve_node  # heavy: not for the supervisor's own process

    came = _noted_signals()
    path = task.invitation(config)
    labels = {"node": task.node, "index": str(task.index)}
    state_dir = config.run.state_dir / "nodes" / task.node

    def serve() -> int:
        """Run the agent to its end, in the forked child; return the child's exit code.

        First remove the variables of a Slurm task from its environment.
        """
        for name in list(os.environ.keys() - without_step(os.environ).keys()):
            del os.environ[name]
        lost = serve_node(Invitation(text), name=task.node, labels=labels, state_dir=state_dir)
        return _LOST if lost else DONE

    text = _wait_for(path, came)
    while text:
        code = os.waitstatus_to_exitcode(os.waitpid(_forked(serve, signal.SIGTERM), 0)[1])
        reason = "" if came else _why_again(code, text, _read(path))
        if not reason:
            return max(code, DONE)
        complain(f"the agent of node {task.node} {reason}; starting another")
        time.sleep(_AGAIN_S)
        text = _read(path)
    return DONE


def _why_again(code: int, used: str, now: str) -> Reason | None:
    """Return why another agent must follow one that has ended, or None if none must.

    :param code: its exit code, or the negative number of the signal that killed it.
    :param used: ``token@host:port`` with which it joined.
    :param now: the present ``token@host:port``, or an empty text if the run is over.
    """
    if not now:
        return None  # the run is over
    if code < 0:
        return f"was ended by {signal_name(-code)}"
    if code == _LOST and not _is_closed(now):
        return "has lost its supervisor"
    return "had an old token" if code != DONE and used != now else None


def _is_closed(invitation: str) -> bool:
    """Return True if the address in ``token@host:port`` refuses connections.

    Tries to connect. False if it accepts, or does not answer within 5 s.
    """
    try:
        socket.create_connection(split(invitation.rpartition("@")[2]), _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _forked(work: Callable[[], int], last: signal.Signals) -> int:
    """Fork a child that runs ``work`` and exits with its result; return its pid.

    Call it while this process has no other thread. An exception in the child is
    printed, and its exit code says so.

    :param last: the signal that the child gets when this process ends.
    """
    parent = os.getpid()
    with naming_limits():
        pid = os.fork()
    if pid:
        return pid
    code = BUG
    try:
        die_with_parent(parent, last)
        code = work()
    except ReplicasError as error:
        complain(str(error))
        code = FAILED
    except BaseException:  # noqa: BLE001  # no other process could report it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _noted_signals() -> list[int]:
    """Replace the handlers of SIGTERM, SIGINT and SIGUSR1, which Slurm sends.

    From then on they only add the signal's number to the list that is returned.
    """
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: came.append(number))
    return came


def _read(path: Path) -> str:
    """Return ``token@host:port`` from the file, or "" if the file is missing."""
    try:
        return private.read(path).decode().strip()
    except FileNotFoundError:
        return ""


def _wait_for(path: Path, came: list[int]) -> str:
    """Block until the supervisor has written the file, 120 s at most.

    Return its ``token@host:port``, or an empty text if a signal has come first.

    :param came: list to which a handler adds the numbers of signals.
    :raises WorldError: it did not come in time.
    """
    deadline = time.monotonic() + _START_S
    tell_at = time.monotonic() + WAIT_S
    while not (found := _read(path)) and not came:
        if time.monotonic() > deadline:
            raise WorldError(
                f"the supervisor has not written {path} within {_START_S:.0f} s",
                hint="see what it says; and set run.state_dir to a folder that all nodes share",
            )
        if time.monotonic() > tell_at:
            complain(f"waiting up to {_START_S:.0f} s for the supervisor to write {path}")
            tell_at = deadline + 1  # not again
        time.sleep(_LOOK_AGAIN_S)
    return found
