"""Messages between supervisor, shim and launcher, and notes in their logs.

A message is one JSON object, a packet of a SOCK_SEQPACKET socketpair, or a file whose
descriptor comes with a blank one: the kernel allows packets of some 200 KiB, and
commands and environments of 2 MiB.

Supervisor → shim: ``start`` (a :class:`NodeSpec`), ``rendezvous`` (host and port, for
nodes other than 0), ``stop`` (with ``stacks``: after they have been saved; with
``broken``: why it cannot go on), ``stacks``, ``ping`` (``until``: the shim's lease, in
seconds of the monotonic clock; ``patience_s``: how long it goes on without another
ping). Shim → supervisor: ``started`` (pid of the main process), ``rendezvous`` (of node
0), ``ended`` (an :class:`ExitReport`: the main process is gone), ``gone`` (no process
is left), ``pong``, ``stacks`` (rank, pid and text of each), ``belongings`` (resources
of its processes, :mod:`replicas.supervisor.cleanup.inventory`), ``dropped`` (a
:class:`LogLoss`), ``remains`` (a :class:`Remains`). Between shim and launcher:
``start``, ``rendezvous`` and ``report``.

Standard library only, and no dataclasses: they would take a fifth of a shim's start-up
time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from replicas import __version__

MAX_NBYTES = 1 << 20
"""A packet is not longer."""
FILE_MAX_NBYTES = 16 << 20
_INLINE_NBYTES = 64 << 10
_IN_FILE = b" "
REMAINS_INTERVAL_S = 1.0
"""Interval of a shim's reports of processes that SIGKILL has not ended, in seconds."""
_MAX_REMAINS = 16
Message = dict[str, Any]


class OtherRelease(Exception):
    """The supervisor runs another release than the installed one, with other orders."""

    def __init__(self, release: str, error: Exception) -> None:
        super().__init__(
            f"the code of replicas was replaced under the running supervisor, which is of release {release}, by code of "
            f"release {__version__}: restart the supervisor ({type(error).__name__}: {error})"
        )


class Malformed(ValueError):
    """The packet is no valid message: it is reported, and changes nothing."""


@contextlib.contextmanager
def reading(kind: str) -> Iterator[None]:
    """:raises Malformed: the block finds a field missing or of a wrong type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Malformed(f"a {kind} with wrong fields: {error!r}"[:200]) from error


class NodeSpec(NamedTuple):
    """One node of one generation of a replica.

    :param nonce: random mark of this shim and of all processes started under it.
    :param env: the whole environment of the replica's processes.
    :param sidecars: when its ranks need any: ``ahead`` (soon), ``later`` (perhaps), or
        never (empty).
    :param cgroup: path of the control group in which its processes start; empty for
        none.
    :param rendezvous_timeout_s: how long the nodes of a replica wait for each other.
    :param tee: True if the ranks' lines also go to the supervisor's stderr.
    :param lease_until: when the shim ends by itself, unless a ping gives it a later
        time, in seconds of the machine's monotonic clock; 0: there is no such time.
    :param patience_s: how long it goes on without a ping; 0: without limit.
    :param shim: pid of the shim; like ``pipes`` and ``scratch``, the shim sets it for
        the launcher.
    :param pipes: the shim's descriptors of each local rank's stdout and stderr.
    :param scratch: folder in which torchrun may write.
    :param release: of the supervisor; its children run the code that is installed when
        they start.
    """

    run: str
    group: str
    replica: int
    generation: int
    node: int
    nnodes: int
    nproc_per_node: int
    launcher: str
    command: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    log_dir: str
    stop_timeout_s: float
    nonce: str
    sidecars: str = ""
    cgroup: str = ""
    local_addr: str = "127.0.0.1"
    rendezvous_timeout_s: float = 300.0
    log_max_nbytes: int = 64 << 20
    log_keep: int = 3
    log_keep_generations: int = 10
    tee: bool = False
    lease_until: float = 0.0
    patience_s: float = 0.0
    shim: int = 0
    pipes: tuple[tuple[int, int], ...] = ()
    scratch: str = ""
    release: str = __version__

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> NodeSpec:
        """OtherRelease: it is a spec of another release. Malformed: it is none."""
        if not isinstance(data, dict):
            raise Malformed(f"a start with wrong fields: {data!r}"[:200])
        try:
            pipes = tuple((int(out), int(err)) for out, err in data["pipes"])
            spec = cls(**{**data, "command": tuple(data["command"]), "pipes": pipes})
            _check_types(spec)
            return spec
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise OtherRelease(str(data.get("release", "unknown")), error) from error

    def message(self) -> Message:
        return {"type": "start", "spec": self._asdict()}


_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}
_PLAIN: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float}


def _declared(kind: type[NodeSpec] | type[RankExit]) -> Iterator[tuple[str, Any]]:
    """Name and declared type of each field: NamedTuple wraps the latter."""
    return ((name, getattr(hint, "__forward_arg__", hint)) for name, hint in kind.__annotations__.items())


def _check_types(spec: NodeSpec) -> None:
    """:raises TypeError: a field has another type than declared."""
    texts = (*spec.command, *spec.env.keys(), *spec.env.values())
    fields = [(getattr(spec, name), _TYPES.get(kind, object)) for name, kind in _declared(NodeSpec)]
    for value, expected in [*fields, *((text, str) for text in texts)]:
        if not isinstance(value, expected):
            raise TypeError(f"a {type(value).__name__} is not of type {expected}")  # the value may be a secret


class LogLoss(NamedTuple):
    """Lines lost on the way to a log (``where``: ``file``) or terminal (``tee``)."""

    lines: int
    where: str
    reason: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LogLoss:
        with reading("dropped"):
            return cls(int(data["count"]), where=str(data["where"]), reason=str(data["reason"]))

    def message(self) -> Message:
        return {"type": "dropped", "count": self.lines, "where": self.where, "reason": self.reason}


class Remains(NamedTuple):
    """Processes that SIGKILL has not ended yet.

    :param since: when it was first sent, in seconds since 1970.
    :param processes: pid and command line of each; pid 0: one that cannot be seen.
    """

    since: float
    processes: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Remains:
        with reading("remains"):
            return cls(float(data["since"]), tuple((int(pid), str(command)) for pid, command in data["processes"]))

    def message(self) -> Message:
        return {"type": "remains", "since": self.since, "processes": self.processes[:_MAX_REMAINS]}


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

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RankExit:
        with reading("rank"):
            plain = {name: _PLAIN[kind](data[name]) for name, kind in _declared(cls) if kind in _PLAIN}
            return cls(**plain, lines=tuple(str(line) for line in data["lines"]))


class ExitReport(NamedTuple):
    """How the main process of a node ended.

    :param outcome: ``ok``, ``failed`` (ranks failed), ``stopped`` (as asked), ``lost``
        (launcher or shim died), or ``node`` (its agent died or its node was lost).
    :param ranks: failed ranks of this node, the first to fail first.
    :param cut_s: it was told to end, and killed so many seconds later, as it had not
        ended; 0: it was not.
    """

    outcome: str
    text: str = ""
    ranks: tuple[RankExit, ...] = ()
    cut_s: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ExitReport:
        with reading("report"):
            ranks = tuple(RankExit.of(rank) for rank in data["ranks"])
            return cls(str(data["outcome"]), str(data["text"]), ranks, float(data.get("cut_s", 0.0)))

    def message(self, kind: str = "ended") -> Message:
        return {"type": kind, "report": self._asdict() | {"ranks": [rank._asdict() for rank in self.ranks]}}


def encode(message: Message) -> bytes:
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """:raises Malformed: the packet is no message."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not a message: {data[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Malformed(f"not a message: {data[:80]!r}")
    return message


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection, with room for many messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_NBYTES)
    return ends


def send(connection: socket.socket, message: Message) -> bool:
    """Send without waiting; False: nobody reads. OSError: ``EMSGSIZE``, too long."""
    data, files = encode(message), list[int]()
    if len(data) > FILE_MAX_NBYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    try:
        if len(data) > _INLINE_NBYTES:
            files.append(os.memfd_create("replicas-order"))
            with open(files[0], "wb", closefd=False) as file:
                file.write(data)
            data = _IN_FILE
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", *files))] if files else []
        connection.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return False
    finally:
        for descriptor in files:
            os.close(descriptor)
    return True


def receive(connection: socket.socket) -> Message | None:
    """The next message; None at the end of the stream. Malformed: it is none."""
    try:
        data, ancillary, _, _ = connection.recvmsg(MAX_NBYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    for level, kind, found in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(found) == 4:
            with os.fdopen(int(struct.unpack("i", found)[0]), "rb") as file:
                file.seek(0)
                data = file.read(FILE_MAX_NBYTES)
    return decode(data) if data else None


def receive_spec(connection: socket.socket) -> NodeSpec | None:
    """The start order, which is the first; None: the end. Malformed, OtherRelease."""
    message = receive(connection)
    if message is None:
        return None
    with reading("start"):
        spec = message["spec"]
    return NodeSpec.of(spec)


def note(text: str) -> None:
    """Write a line to stderr, one's own log; ignore errors, as its disk may be full."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
