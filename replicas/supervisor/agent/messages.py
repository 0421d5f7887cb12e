"""The messages between an agent and its supervisor, one MessagePack map per frame.

The agent dials and sends :class:`Hello`; the supervisor answers with :class:`Welcome`
or :class:`Refused`. The agent then sends the whole
:class:`~replicas.supervisor.wire.part_state.PartState` of each part whenever it
changes, and again after each reconnection. The supervisor repeats its orders after a
reconnection, so none is missed. Each order names its shim by the shim's mark
(``nonce``). The agent ignores orders for shims that it does not have: the Hello told
the supervisor that they are gone.

:class:`Beat` and :class:`Heard` carry the lease: it starts when the agent *sends* a
beat that is heard; the supervisor waits longer than the lease after it *received* one
(:mod:`replicas.core.lives.lease_times`).

Specs and states of shims keep the form of :mod:`replicas.supervisor.wire`, objects with
names: agent and supervisor may be of different releases when a supervisor is replaced.
``PROTOCOL`` is raised when a message changes its meaning; unknown fields are ignored.
Texts, shims and frames of an agent are bounded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from replicas.common.decoding import decoded
from replicas.messages.bounds import TEXT_LENGTH
from replicas.supervisor.agent.checks import Demand, Finding
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.wire.orders import Malformed, read
from replicas.supervisor.wire.part_state import PartState

PROTOCOL = 2
Plain = dict[str, Any]
_Pid = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Mark = Annotated[str, msgspec.Meta(max_length=64)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH)]
STATE_NBYTES = 1 << 20
"""Largest encoded state of one part."""
SHIMS_MAX = 16_384
"""Most shims of one agent."""


class PartNews(msgspec.Struct, frozen=True, tag=True):
    """The changed state of a part; :func:`part_state` reads it."""

    state: Plain


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an agent.

    :ivar incarnation: random, new for each agent process.
    :ivar machine: resources of the node; None if the supervisor is on the same machine.
    :ivar scope: boot and pid namespace in which its pids are valid.
    :ivar address: address of this node's ranks for ranks of other nodes.
    """

    protocol: int = PROTOCOL
    release: _Word
    node: _Word
    incarnation: _Mark
    pid: _Pid
    start_time: _Number
    scope: _Word
    address: _Word = ""
    labels: Annotated[dict[_Word, _Word], msgspec.Meta(max_length=256)] = {}
    machine: Machine | None = None
    limits_refused: _Text = ""
    parts: Annotated[tuple[Plain, ...], msgspec.Meta(max_length=SHIMS_MAX)] = ()


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat, sent each second; numbers grow."""

    number: _Number


class StacksFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stacks of a shim's ranks; ``text`` by ``group/replica/rank``."""

    nonce: _Mark
    found: dict[_Word, str]


class Cleaned(msgspec.Struct, frozen=True, tag=True):
    """No process started under these marks is left on the node."""

    nonces: tuple[_Mark, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node is about to be taken away: move its replicas, then send ``Over``."""

    reason: _Text


class LogReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a :class:`LogQuery`: JSON Lines, or an ``error``."""

    number: _Number
    body: bytes = b""
    error: _Text = ""
    hint: _Text = ""


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an :class:`Examine`."""

    number: _Number
    findings: tuple[Finding, ...]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor accepts the agent.

    :ivar supervisor: random, new for each supervisor process.
    :ivar lease_s: how long the agent may run unheard; 0 for no limit, on the
        supervisor's own machine, where its end cannot be missed.
    :ivar adopt_s: how long the agent runs on after the supervisor is gone.
    :ivar token: for the ranks of this node; empty if they use the supervisor's file.
    :ivar state_id: identity of the state folder; empty if the agent has its own folder.
    """

    run: str
    supervisor: str
    lease_s: _Seconds
    adopt_s: _Seconds
    endpoint: str
    token: str
    state_id: str


class NewToken(msgspec.Struct, frozen=True, tag=True):
    """New tokens: ``member`` for the ranks, ``operator`` for the next connection."""

    member: str
    operator: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor rejects the agent; ``again`` if a later try may succeed."""

    message: str
    again: bool = False


class Heard(msgspec.Struct, frozen=True, tag=True):
    """Acknowledges the beat of this number."""

    number: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a shim, unless a shim with this mark was started before."""

    spec: Plain
    memory_nbytes: int | None = None
    max_processes: int | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a shim's processes: SIGTERM now, SIGKILL after ``timeout_s``."""

    nonce: str
    timeout_s: _Seconds
    stacks: bool = False


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rendezvous (host and port) of a replica's parts, for one shim."""

    nonce: str
    host: str
    port: _Port


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a shim; the agent then kills its processes."""

    nonce: str


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    """Ask for the stacks of a shim's ranks; the answer is :class:`StacksFound`."""

    nonce: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The supervisor has recorded the end of this shim; stop reporting it."""

    nonce: str


class ShimLeft(msgspec.Struct, frozen=True, kw_only=True):
    """A shim of a dead agent; ``pid`` is 0 if it is unknown."""

    nonce: str
    pid: _Pid = 0
    start_time: _Number = 0
    cgroup: str = ""


class Clean(msgspec.Struct, frozen=True, tag=True):
    """End the processes of an earlier agent of this node; reply with Cleaned."""

    shims: tuple[ShimLeft, ...]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the next lines of this node's logs.

    :ivar number: identifies the reader.
    :ivar selection: a ``Selection`` of :mod:`replicas.control.log_files`; None if the
        reader is done. It then asks for its last lines until a reply is empty.
    """

    number: int
    selection: Plain | None


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check the machine of this node, as ``replicas doctor`` does.

    :ivar number: identifies the request.
    :ivar supervisor: pid of the supervisor; 0 if it is on another machine.
    """

    number: int
    demand: Demand
    supervisor: _Pid = 0


class Over(msgspec.Struct, frozen=True, tag=True):
    """End all shims and exit: the run is over, or the node is not needed."""

    reason: str = "the run is over"


Query = LogQuery | Examine
ShimOrder = Start | Stop | Meet | Kill | AskStacks | Forget
Order = Welcome | NewToken | Refused | Heard | ShimOrder | Clean | Query | Over
AgentMessage = Hello | PartNews | Beat | StacksFound | Cleaned | Leaving | LogReply | Examined

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_from_agent: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def encode(message: Order | AgentMessage) -> bytes:
    """Encode a message as MessagePack, for one frame."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> Order:
    """Decode a message of the supervisor to an agent.

    :raises msgspec.DecodeError: the data is not a valid order.
    """
    return decoded(_orders, data)


def decode_from_agent(data: bytes) -> AgentMessage:
    """Decode a message of an agent.

    :raises msgspec.DecodeError: the data is not a valid message, or is too large.
    """
    message = decoded(_from_agent, data)
    if isinstance(message, PartNews) and len(data) > STATE_NBYTES:
        raise msgspec.DecodeError(f"the state of a part has {len(data):,} bytes, of {STATE_NBYTES:,} allowed")
    return message


def part_state(data: Plain) -> PartState:
    """Convert the plain state in a :class:`PartNews` or Hello to a PartState.

    :raises msgspec.DecodeError: the state is malformed.
    """
    try:
        return read(PartState, data)
    except Malformed as error:
        raise msgspec.DecodeError(str(error)) from None
