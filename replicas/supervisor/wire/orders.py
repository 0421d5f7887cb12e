"""Messages between agent, shim and launcher, and notes in their logs.

A message is one JSON object in a packet of a SOCK_SEQPACKET socketpair. A larger one is
in a file, whose descriptor comes with a blank packet: the kernel limits packets to
about 200 KiB, but commands and environments to 2 MiB.

Agent → shim: ``start`` (a :class:`PartSpec`), ``rendezvous`` (host and port, for parts
other than 0), ``stop`` (with ``stacks``: save them first; with ``broken``: why the part
cannot run on), ``stacks``, ``ping`` (``until``: the shim's lease, in seconds of the
monotonic clock; ``patience_s``: how long it runs without another ping). Shim → agent:
``state`` (the whole :class:`~replicas.supervisor.wire.part_state.PartState`, at each
change), ``pong``, and ``stacks`` (texts by ``group/replica/rank``). Between shim and
launcher: ``start``, ``rendezvous`` and ``report`` (an
:class:`~replicas.supervisor.wire.part_state.ExitReport`); between shim and log pump:
``drain``, ``drained`` and ``dropped`` (a
:class:`~replicas.supervisor.wire.part_state.LogLoss`).

Standard library only, and no dataclasses: they would take a fifth of a shim's start-up
time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from replicas import __version__

MAX_NBYTES = 1 << 20
"""Largest packet."""
FILE_MAX_NBYTES = 16 << 20
_INLINE_NBYTES = 64 << 10
_IN_FILE = b" "
REMAINS_INTERVAL_S = 1.0
"""Interval of a shim's reports of processes that SIGKILL has not ended, in seconds."""
Message = dict[str, Any]
T = TypeVar("T")
MISFITS = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


class OtherOrders(Exception):
    """The supervisor runs another release, whose orders differ."""

    def __init__(self, release: str, error: Exception) -> None:
        """Make the exception, with a text that asks to restart the supervisor.

        :param release: of the supervisor. :param error: why its spec cannot be read.
        """
        super().__init__(
            f"the code of replicas was replaced under the running supervisor, which is of release {release}, by code of "
            f"release {__version__}: restart the supervisor ({type(error).__name__}: {error})"
        )


class Malformed(ValueError):
    """The packet is not a valid message. The receiver reports and ignores it."""


@contextlib.contextmanager
def reading(kind: str) -> Iterator[None]:
    """Context manager: turn errors of the block into Malformed.

    They are those that missing or wrong fields cause.

    :param kind: of the message that is read, for the error.
    """
    try:
        yield
    except MISFITS as error:
        raise Malformed(f"a {kind} with wrong fields: {error!r}"[:200]) from error


class PartSpec(NamedTuple):
    """The spec of one part of a generation of a replica.

    :param nonce: random mark of this shim and of all processes started under it.
    :param env: the whole environment of the replica's processes.
    :param sidecars: when its ranks need sidecars: ``ahead`` (soon), ``later``
        (perhaps), or empty (never).
    :param preload: modules that the template of its processes has loaded.
    :param cgroup: path of the control group in which its processes start; may be empty.
    :param rendezvous_timeout_s: how long the nodes of a replica wait for each other.
    :param tee: True if the ranks' lines also go to the supervisor's stderr.
    :param lease_until: when the shim ends, unless a ping gives it a later time, in
        seconds of the machine's monotonic clock; 0 for no such time.
    :param patience_s: how long it runs without a ping; 0 for no limit.
    :param shim: pid of the shim; like ``pipes`` and ``scratch``, the shim sets it for
        the launcher.
    :param pipes: the shim's descriptors of each local rank's stdout and stderr.
    :param scratch: folder in which torchrun may write.
    :param release: release of the supervisor; its children run the code that is
        installed when they start.
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
    preload: tuple[str, ...] = ()
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
    def of(cls, data: Mapping[str, Any]) -> PartSpec:
        """Read a spec, as :func:`plain` wrote it.

        :raises OtherOrders: a field is unknown or wrong, as in a spec of another
            release.
        :raises Malformed: it has no fields.
        """
        if not isinstance(data, dict):
            raise Malformed(f"a start without fields: a {type(data).__name__}")
        try:
            if unknown := data.keys() - {*cls._fields}:
                raise TypeError(f"no such field: {', '.join(sorted(map(str, unknown)))}"[:200])
            spec: PartSpec = _decoded(cls, data)
        except MISFITS as error:
            raise OtherOrders(str(data.get("release", "unknown")), error) from error
        return spec


@functools.cache
def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that makes a value of this type from decoded data.

    A type is a plain type, a tuple or dict of types, a type with a bound
    (``Annotated[str, 64]``: characters; ``Annotated[int, 9]``: from 0 to 9), a type or
    None, or a NamedTuple: unknown names are ignored, and fields with a default may be
    missing. The function raises an error of ``MISFITS`` (TypeError, ValueError etc.) if
    the data do not fit, without the value in the text, as it may be a secret.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return functools.partial(_bounded, decoder(inner[0]), inner[1])
    if origin in (Union, UnionType):
        some = decoder(inner[0])
        return lambda value: None if value is None else some(value)
    if origin is dict:
        key, item = map(decoder, inner)
        return lambda value: {key(name): item(one) for name, one in value.items()}
    if origin is tuple:
        every = decoder(inner[0]) if inner[-1] is Ellipsis else None
        return functools.partial(_sequence, tuple(map(decoder, inner)) if every is None else every)
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return functools.partial(_record, kind, {name: decoder(hint) for name, hint in hints.items()})
    return functools.partial(_exactly, kind)


def _bounded(read: Callable[[Any], Any], most: float, value: Any) -> Any:
    """Return the value, decoded by ``read``, if it is within its bound.

    :param most: the longest text, in characters, or the largest number.
    :raises ValueError: it is longer or larger, or negative.
    """
    found = read(value)
    if not 0 <= (len(found) if isinstance(found, str) else found) <= most:
        raise ValueError(f"a {type(found).__name__} beyond its bound of {most}")
    return found


def _sequence(read: Callable[[Any], Any] | tuple[Callable[[Any], Any], ...], value: Any) -> Any:
    """Return a list as a tuple of decoded items.

    :param read: decodes each item; a tuple has a decoder for each position.
    :raises TypeError: it is not a list.
    :raises ValueError: it has another length than the tuple of decoders.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"a {type(value).__name__} is not of type list")
    if isinstance(read, tuple):
        return tuple([one(item) for one, item in zip(read, value, strict=True)])
    return tuple(map(read, value))


def _record(kind: Any, fields: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    """Return a NamedTuple of the decoded fields; ignore unknown names.

    :param kind: the NamedTuple's class.
    :param fields: a decoder for each field.
    :param value: a mapping of names to values.
    """
    return kind(**{name: fields[name](one) for name, one in value.items() if name in fields})


def _exactly(kind: type, value: Any) -> Any:
    """Return a value of exactly this type; an int becomes a float where needed.

    :raises TypeError: the value is of another type.
    """
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} is not of type {kind.__name__}")
    return value


def read(kind: type[T], value: object) -> T:
    """Return decoded JSON or MessagePack as a value of this type.

    :raises Malformed: it does not fit the type.
    """
    with reading(kind.__name__):
        found: T = _decoded(kind, value)
    return found


def _decoded(kind: Any, value: object) -> Any:
    """Return the value as this type, by :func:`decoder`, or raise one of MISFITS."""
    return decoder(kind)(value)


def plain(value: Any) -> Any:
    """Return the value as data for JSON or MessagePack; :func:`decoder` reads it.

    Named tuples become dicts, and other tuples lists.
    """
    if hasattr(value, "_fields"):
        return {name: plain(one) for name, one in zip(value._fields, value, strict=True)}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def encode(message: Message) -> bytes:
    """Return a message as JSON, the content of one packet."""
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """Decode the content of a packet.

    :raises Malformed: it is not a JSON object with a type.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not a message: {data[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Malformed(f"not a message: {data[:80]!r}")
    return message


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new Unix connection (SOCK_SEQPACKET) for :func:`send`.

    It has room for many messages. Both ends block, and are not inherited.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_NBYTES)
    return ends


def send(connection: socket.socket, message: Message) -> bool:
    """Send without waiting. Return False if the peer is gone or its buffer is full.

    The message is then lost. A large one goes in a memfd, whose descriptor is sent with
    a blank packet.

    :raises OSError: the message is too long (``EMSGSIZE``).
    """
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
    """Return the next message on the connection, or None at the end of the stream.

    Blocks, unless the socket is non-blocking.

    :raises Malformed: the packet is not a message.
    """
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


class MessageSocket:
    """One end of a connection, which its owner's loop watches.

    :param peer: whose messages these are, for reports.
    :param take: called with each message; may raise Malformed.
    :param unwatch: removes the socket from the owner's loop; called before its end.
    :param report: called with a line about a message that is malformed or not sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        take: Callable[[Message], None],
        unwatch: Callable[[socket.socket], object],
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Take over an open connection.

        The owner's loop calls :meth:`read` when data comes.

        :param peer: whose messages these are, for reports.
        :param take: called by :meth:`read` with each message; may raise Malformed.
        :param unwatch: removes the socket from the owner's loop; called before its end.
        :param report: called with a line about a message that is malformed or not sent;
            default: the line goes to stderr.
        """
        self._socket: socket.socket | None = connection
        self._peer, self._take, self._unwatch, self._report = peer, take, unwatch, report or note

    @property
    def open(self) -> bool:
        """True until the peer or :meth:`close` has ended the connection."""
        return self._socket is not None

    def read(self) -> bool:
        """Pass the next message to ``take``. Return False at the end of the stream.

        Closes the connection then. A malformed message is reported and ignored.

        :raises BlockingIOError: the socket does not block, and has no message.
        """
        if self._socket is None:
            return False
        try:
            message = receive(self._socket)
            if message is None:
                self.close()
                return False
            self._take(message)
        except Malformed as error:
            self._report(f"ignoring a malformed message of {self._peer}: {error}")
        return True

    def read_rest(self) -> None:
        """Pass on the messages that have arrived, and close, without waiting.

        For a peer that has ended: a child of it may still have its end open.
        """
        if self._socket is not None:
            self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass
        self.close()

    def send(self, message: Message) -> bool:
        """Send without waiting. Return False if the message was not sent.

        The peer is gone or does not read; or, after a report, the system refuses.
        """
        try:
            return self._socket is not None and send(self._socket, message)
        except OSError as error:  # e.g. this process has no descriptor left
            self._report(f"cannot send {message['type']!r} to {self._peer}: {error.strerror}")
            return False

    def close(self) -> None:
        """Close this end, and have it removed from the loop. Idempotent."""
        connection, self._socket = self._socket, None
        if connection is not None:
            self._unwatch(connection)
            connection.close()


def receive_spec(connection: socket.socket) -> PartSpec | None:
    """Wait for the start order; return its spec, or None at the end of the stream.

    :raises Malformed: the order is not a spec.
    :raises OtherOrders: the spec is of another release.
    """
    message = receive(connection)
    if message is None:
        return None
    with reading("start"):
        spec = message["spec"]
    return PartSpec.of(spec)


def note(text: str) -> None:
    """Write a line to stderr, this process's log; ignore errors such as a full disk."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
