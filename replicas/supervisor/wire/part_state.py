"""The state of a part, from its shim to the supervisor's status.

A shim sends the whole :class:`PartState` of its part whenever that changes, its agent
relays it, and the supervisor reads it with the same decoder
(:func:`replicas.supervisor.wire.orders.read`): a state that is lost on the way is
replaced by the next one, and one that comes twice changes nothing. Each of these named
tuples travels as an object with names (:func:`replicas.supervisor.wire.orders.plain`).
Standard library only.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated, Any, NamedTuple

from replicas import __version__
from replicas.linux.processes import start_time
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec, note, plain

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

    :param since: when it was first sent, in seconds since 1970.
    :param processes: pid and command line of each; pid 0: one that cannot be seen.
    """

    since: float
    processes: tuple[tuple[int, str], ...]


class RankExit(NamedTuple):
    """How a rank ended.

    :param code: exit code, or minus the signal that killed it.
    :param text: its last words in one line, if any.
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
    :param cut_s: it was told to end, and killed so many seconds later, as it had not
        ended; 0: it was not.
    """

    outcome: str
    text: str = ""
    ranks: tuple[RankExit, ...] = ()
    cut_s: float = 0.0


class Belongings(NamedTuple):
    """What the processes of a part hold; ``processes``: pid and start time of each."""

    gpu: bool = False
    processes: tuple[tuple[int, int], ...] = ()


class PartState(NamedTuple):
    """One part of a generation of a replica: its shim, and the processes under it.

    :param nonce: random mark of the shim and of all processes started under it.
    :param node: which part of the replica it is.
    :param pid: of the shim; 0: it was not started, or could not be.
    :param cgroup: path of the control group of its processes; empty: none.
    :param release: of the code that the shim runs.
    :param main_pid: of the main process, once it is started.
    :param rendezvous: host and port at which the parts of the replica meet, once known.
    :param report: how the main process ended.
    :param remains: processes that SIGKILL has not ended yet; None: there are none, or
        the shim is silent.
    :param losses: lines that its logs have lost so far, one for each place and reason.
    :param stopping: it was told to end.
    :param gone: no process of it is left.
    :param silent_s: for how long the shim has not answered its agent, which sets it.
    :param known_losses: those of ``losses`` that a supervisor was told before this
        connection; its agent sets it.
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
    belongings: Belongings = Belongings()
    losses: tuple[LogLoss, ...] = ()
    stopping: bool = False
    gone: bool = False
    silent_s: Annotated[float, 1e9] = 0.0
    known_losses: tuple[LogLoss, ...] = ()

    def of_part(self, one: PartSpec | PartState) -> PartState:
        """This state, said of the part of which ``one`` is."""
        return self._replace(**{name: getattr(one, name) for name in IDENTITY})


IDENTITY = ("nonce", "group", "replica", "generation", "node")
UNKNOWN = PartState("", "", 0, 0, 0)
"""Of a part whose spec cannot be read: its agent knows which it is."""


def first_state(spec: PartSpec, shim: int) -> PartState:
    """The state of a part whose shim has this pid, and has started nothing yet."""
    return UNKNOWN.of_part(spec)._replace(pid=shim, start_time=start_time(shim) or 0, cgroup=spec.cgroup)


class Teller:
    """The state of a part, sent at each change.

    :ivar state: as last changed; :meth:`pong` sends it again if it found no room.
    :ivar control: the connection to the agent; None: that is gone.
    """

    def __init__(self, control: socket.socket, spec: PartSpec) -> None:
        self.control: socket.socket | None = control
        self.state = first_state(spec, os.getpid())._replace(release=__version__)
        self._told = False

    def now(self, **changes: Any) -> None:
        """Change the state, and send all of it."""
        self.state = self.state._replace(**changes)
        self._told = self.send(state_message(self.state))

    def lost(self, loss: LogLoss) -> None:
        """Count lines that a log has lost."""
        losses = {(one.where, one.reason): one for one in self.state.losses}
        known = losses.get((loss.where, loss.reason))
        losses[loss.where, loss.reason] = loss._replace(lines=loss.lines + (known.lines if known else 0))
        self.now(losses=tuple(losses.values()))

    def pong(self) -> None:
        """Answer a ping."""
        if self._told:
            self.send({"type": "pong"})
        else:
            self.now()

    def send(self, message: orders.Message) -> bool:
        """Send without waiting; False: the agent is gone, or has no room for it."""
        if self.control is None:
            return False
        try:
            return orders.send(self.control, message)
        except OSError as error:  # e.g. this process has no descriptor left
            note(f"the agent cannot be told {message['type']!r}: {error.strerror}")
            return False


def state_message(state: PartState) -> orders.Message:
    return {"type": "state", "state": plain(state)}
