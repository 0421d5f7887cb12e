"""The state of a part, from its shim to the supervisor's status.

A shim sends the whole :class:`PartState` of its part whenever it changes, its agent
relays it, and the supervisor reads it with the same decoder
(:func:`replicas.supervisor.wire.orders.read`). The next state replaces a lost one, and
a repeated state changes nothing. Each of these named tuples is sent as an object with
names (:func:`replicas.supervisor.wire.orders.plain`).
Standard library only.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, NamedTuple

from replicas import __version__
from replicas.linux.processes import start_time
from replicas.supervisor.wire.orders import Message, MessageSocket, PartSpec, plain

Pid = Annotated[int, 1 << 30]
Number = Annotated[int, 1 << 62]
Mark = Annotated[str, 64]
Word = Annotated[str, 256]


class LogLoss(NamedTuple):
    """Lines lost on the way to a log (``where``: ``file``) or terminal (``tee``)."""

    lines: int
    where: str
    reason: str


class Remains(NamedTuple):
    """Processes that SIGKILL has not ended yet.

    :param since: when SIGKILL was first sent, in seconds since 1970.
    :param processes: pid and command line of each; pid 0 for an invisible process.
    """

    since: float
    processes: tuple[tuple[int, str], ...]


class RankExit(NamedTuple):
    """How a rank ended.

    :param code: exit code, or minus the signal that killed it.
    :param text: the cause or its last line, as one line, if known.
    :param error: the traceback that torchelastic's ``record`` wrote, unless ``lines``
        has it anyway.
    :param lines: last lines of its log; only for the rank that failed first.
    :param after: an earlier death, in words: ``its process 12 (engine) was killed by
        SIGKILL``.
    """

    rank: int
    code: int
    pid: int = 0
    text: str = ""
    at: float = 0.0
    error: str = ""
    lines: tuple[str, ...] = ()
    after: str = ""


class ExitReport(NamedTuple):
    """How the main process of a part ended.

    :param outcome: ``ok``, ``failed`` (ranks failed), ``stopped`` (as asked), ``lost``
        (launcher or shim died), or ``node`` (its agent died or its node was lost).
    :param ranks: failed ranks of this part, the first to fail first.
    :param cut_s: seconds from the order to end to SIGKILL; 0 if it was not killed.
    """

    outcome: str
    text: str = ""
    ranks: tuple[RankExit, ...] = ()
    cut_s: float = 0.0


class Inventory(NamedTuple):
    """Pid and start time of a part's processes, and whether they use a GPU."""

    gpu: bool = False
    processes: tuple[tuple[int, int], ...] = ()


class PartState(NamedTuple):
    """One part of a generation of a replica: its shim, and the processes under it.

    :param nonce: random mark of the shim and of all processes started under it.
    :param node: number of the part within the replica.
    :param pid: pid of the shim; 0 if it was not started.
    :param cgroup: path of the control group of its processes; may be empty.
    :param release: release of the code that the shim runs.
    :param main_pid: pid of the main process, once it is started.
    :param rendezvous: host and port at which the parts of the replica meet, once known.
    :param report: how the main process ended.
    :param remains: processes that SIGKILL has not ended yet; None if there are none, or
        if the shim is silent.
    :param losses: lines that its logs have lost so far, one for each place and reason.
    :param stopping: True if it was ordered to end.
    :param gone: True if no process of it is left.
    :param silent_s: how long the shim has not answered; the agent sets it.
    :param known_losses: the part of ``losses`` that a supervisor learned before this
        connection; the agent sets it.
    """

    nonce: Mark
    group: Word
    replica: Pid
    generation: Number
    node: Pid
    pid: Pid = 0
    start_time: Number = 0
    cgroup: Annotated[str, 4096] = ""
    release: Word = ""
    main_pid: Pid | None = None
    rendezvous: tuple[Word, Annotated[int, 65535]] | None = None
    report: ExitReport | None = None
    remains: Remains | None = None
    belongings: Inventory = Inventory()
    losses: tuple[LogLoss, ...] = ()
    stopping: bool = False
    gone: bool = False
    silent_s: Annotated[float, 1e9] = 0.0
    known_losses: tuple[LogLoss, ...] = ()

    def with_identity_of(self, one: PartSpec | PartState) -> PartState:
        """Return this state with the mark, group, replica etc. of another part."""
        return self._replace(**{name: getattr(one, name) for name in IDENTITY})


IDENTITY = ("nonce", "group", "replica", "generation", "node")
UNKNOWN = PartState("", "", 0, 0, 0)
"""State of a part whose spec cannot be read; its agent adds the identity."""


def first_state(spec: PartSpec, shim: int) -> PartState:
    """Return the state of a part whose shim has started no process yet.

    :param shim: pid of the shim.
    """
    return UNKNOWN.with_identity_of(spec)._replace(pid=shim, start_time=start_time(shim) or 0, cgroup=spec.cgroup)


class StateSender:
    """Sends a part's state (a replica's on one node) to the agent at each change.

    :ivar state: the present state; :meth:`answer_ping` sends it again if the buffer was
        full.
    :param agent: the connection to the agent.
    """

    def __init__(self, agent: MessageSocket, spec: PartSpec) -> None:
        """Begin with the state of a part of which no process has started; send nothing.

        :param agent: the connection to the agent.
        """
        self._agent = agent
        self.state = first_state(spec, os.getpid())._replace(release=__version__)
        self._told = False

    def update(self, **changes: Any) -> None:
        """Change these fields of the state, and send all of it. Never waits."""
        self.state = self.state._replace(**changes)
        self._told = self._agent.send(state_message(self.state))

    def count_lost_lines(self, loss: LogLoss) -> None:
        """Add lines that a log has lost to the state's losses, and send the state."""
        losses = {(one.where, one.reason): one for one in self.state.losses}
        known = losses.get((loss.where, loss.reason))
        losses[loss.where, loss.reason] = loss._replace(lines=loss.lines + (known.lines if known else 0))
        self.update(losses=tuple(losses.values()))

    def answer_ping(self) -> None:
        """Answer a ping, with the state if its last change was not sent."""
        if self._told:
            self._agent.send({"type": "pong"})
        else:
            self.update()


def state_message(state: PartState) -> Message:
    """Return the message that carries the state to the agent."""
    return {"type": "state", "state": plain(state)}
