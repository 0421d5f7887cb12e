"""What an agent and its supervisor say to each other, one MessagePack map per frame.

The agent dials, says :class:`Hello`, and is answered with :class:`Welcome` or
:class:`Refused`. It then relays the whole
:class:`~replicas.supervisor.wire.part_state.PartState` of each part whenever that
changes, and once more after each reconnection. Orders are repeated by the supervisor
after a reconnection, so none is missed; each has the shim's mark (``nonce``). One for a
shim that the agent does not have is ignored: the supervisor knows from the states in a
Hello that it is gone.

:class:`Beat` and :class:`Heard` carry the lease: the agent may go on that long after
it *sent* a beat that was heard, and the supervisor waits longer than that after it
*received* one (:mod:`replicas.core.lives.lease_times`).

What shims are told and say (specs, states) keeps the form of
:mod:`replicas.supervisor.wire`, objects with names: agent and supervisor
may be of different releases when a supervisor is replaced. ``PROTOCOL`` is raised when
a message changes its meaning; unknown fields are ignored. All that an agent sends has a
bound: its texts, its shims, and each frame.
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
"""Largest state of one part as it travels."""
SHIMS_MAX = 16_384
"""Most shims of one agent."""


class PartNews(msgspec.Struct, frozen=True, tag=True):
    """The state of a part, which has changed: see :func:`part_state`."""

    state: Plain


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an agent.

    :ivar incarnation: random, new for each process of an agent.
    :ivar machine: what the node offers; None: its supervisor is on the same machine.
    :ivar scope: where its pids are valid (boot and pid namespace).
    :ivar address: at which ranks of other nodes reach those of this one.
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
    """Sent each second; numbers grow."""

    number: _Number


class StacksFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stacks of a shim's ranks; ``text`` by ``group/replica/rank``."""

    nonce: _Mark
    found: dict[_Word, str]


class Cleaned(msgspec.Struct, frozen=True, tag=True):
    """Nothing that was started under these marks is left on the node."""

    nonces: tuple[_Mark, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node is about to be taken away: move its replicas, then send ``Over``."""

    reason: _Text


class LogReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a :class:`LogQuery`; ``error``: why there is none."""

    number: _Number
    body: bytes = b""
    error: _Text = ""
    hint: _Text = ""


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an :class:`Examine`."""

    number: _Number
    findings: tuple[Finding, ...]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor takes the agent.

    :ivar supervisor: random, new for each process of a supervisor.
    :ivar lease_s: how long it may go on without being heard; 0: without limit, as the
        end of the supervisor cannot be missed on its own machine.
    :ivar adopt_s: how long it goes on when the supervisor is gone.
    :ivar token: for the ranks of this node; empty: they have the supervisor's.
    :ivar state_id: identity of the state folder; empty: the agent has one of its own.
    """

    run: str
    supervisor: str
    lease_s: _Seconds
    adopt_s: _Seconds
    endpoint: str
    token: str
    state_id: str


class NewToken(msgspec.Struct, frozen=True, tag=True):
    """The tokens were replaced: for the ranks, and for its next connection."""

    member: str
    operator: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent is not taken; ``again``: it may be later."""

    message: str
    again: bool = False


class Heard(msgspec.Struct, frozen=True, tag=True):
    """The beat of this number has arrived."""

    number: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a shim, unless one with its mark was started before."""

    spec: Plain
    memory_nbytes: int | None = None
    max_processes: int | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    nonce: str
    timeout_s: _Seconds
    stacks: bool = False


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    nonce: str
    host: str
    port: _Port


class Kill(msgspec.Struct, frozen=True, tag=True):
    nonce: str


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    nonce: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The end of this shim has been noted: it need not be reported again."""

    nonce: str


class ShimLeft(msgspec.Struct, frozen=True, kw_only=True):
    """A shim of an agent that is dead; ``pid`` 0: it is not known."""

    nonce: str
    pid: _Pid = 0
    start_time: _Number = 0
    cgroup: str = ""


class Clean(msgspec.Struct, frozen=True, tag=True):
    """End what is left of an earlier agent of this node, and say so."""

    shims: tuple[ShimLeft, ...]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next lines of this node's logs; ``number``: of the reader, new for each.

    :ivar selection: a ``Selection`` of :mod:`replicas.control.log_files`; None: the
        reader is done, and asks for its last lines until a reply has none.
    """

    number: int
    selection: Plain | None


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check the machine of this node, as ``replicas doctor`` does; ``number``: new.

    :ivar supervisor: pid of that of the same machine; 0: it is on another one.
    """

    number: int
    demand: Demand
    supervisor: _Pid = 0


class Over(msgspec.Struct, frozen=True, tag=True):
    """End everything, and then yourself: the run is over, or the node is not needed."""

    reason: str = "the run is over"


Query = LogQuery | Examine
ShimOrder = Start | Stop | Meet | Kill | AskStacks | Forget
Order = Welcome | NewToken | Refused | Heard | ShimOrder | Clean | Query | Over
AgentMessage = Hello | PartNews | Beat | StacksFound | Cleaned | Leaving | LogReply | Examined

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_from_agent: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def encode(message: Order | AgentMessage) -> bytes:
    return _encoder.encode(message)


def decode_order(data: bytes) -> Order:
    """:raises msgspec.DecodeError: it is no order of this protocol."""
    return decoded(_orders, data)


def decode_from_agent(data: bytes) -> AgentMessage:
    """:raises msgspec.DecodeError: it is no message of this protocol, or too large."""
    message = decoded(_from_agent, data)
    if isinstance(message, PartNews) and len(data) > STATE_NBYTES:
        raise msgspec.DecodeError(f"the state of a part has {len(data):,} bytes, of {STATE_NBYTES:,} allowed")
    return message


def part_state(data: Plain) -> PartState:
    """The state of a part as its agent has sent it. msgspec.DecodeError: it is none."""
    try:
        return read(PartState, data)
    except Malformed as error:
        raise msgspec.DecodeError(str(error)) from None
