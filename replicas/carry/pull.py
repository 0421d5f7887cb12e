"""Pull one version from its holders into a slot, over a few connections.

Theory of operation
===================

Each connection has a thread, takes the lowest block that nobody has asked for
(:class:`~replicas.carry.blocks.Asking`), and keeps two asked, so that the server never
waits for us. A block is digested while its bytes are in the processor's caches; each
chunk that lands is there for whoever pulls from this host
(:class:`~replicas.carry.image.Image`).

*How many connections.* Two to begin with. As long as blocks wait to be asked for, and
the rate has grown by :data:`PAYS` since the number last doubled, it doubles again, up
to :data:`MOST`: a link with a long round trip takes many, one inside a machine none.

*Holders* come in order of preference. All connections are to the first one that works;
one that fails, or is silent for :data:`SILENT_S` (a server sends a sign of life while
it waits), is given up for this pull, and what had been asked of it is asked of the next
one. A connection that is cut before it has proven itself says less, as a server closes
those under a flood: where others work there are no more of them, else it is tried
:data:`TRIES` times. What has landed stays: a pull that failed goes on from there when
it is run again.

*Encrypted*, each connection is TLS with the very certificate that the holder's rank has
told (:mod:`replicas.carry.tls`); a holder without one is none, and nothing falls back.

*Verified by block.* The publisher's digests of the blocks come over the session,
perhaps after the bytes. A block that differs is emptied and asked for again, and the
holder that served it is given up, by name. Without them only the digest of all blocks
is told.
"""

from __future__ import annotations

import mmap
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from replicas.carry import endpoint, greeting, tls
from replicas.carry.blocks import Asking, combined
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.serve import ASK, HEAD, OVER

CONNECT_S = 3.0
"""In which a holder must have accepted: a lost first packet is sent again after 1 s."""
GREET_S = 3.0
"""In which it must then have proven itself; it may hear of the transfer a bit later."""
TRIES = 6
"""To be let in by a holder to which no connection works."""
AGAIN_S = 0.1
"""Before another one, each time twice as long."""
SILENT_S = 2.5
"""Without a byte or a sign of life for so long a holder is frozen, or cut off."""
ASKED = 2
"""Blocks that one connection has asked for at most."""
FIRST, MOST = 2, 64
"""Connections to begin with, and at most."""
PAYS = 1.15
"""By which the rate must have grown for the connections to be doubled again."""
LOOK_S = 0.2
"""Between two looks at the rate."""
_SECONDS = struct.Struct("ll")


@dataclass(frozen=True)
class Holder:
    """Where the version can be pulled from.

    ``name``: of the member, for messages. ``certificate_hash``: of what it shows in
    TLS.
    """

    name: str
    host: str
    port: int
    certificate_hash: str = ""

    @property
    def address(self) -> str:
        return endpoint.shown(self.host, self.port)


class Failed(Exception):
    """No holder is left. ``why``: for each one, by its name."""

    def __init__(self, why: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in why.items()) or "nobody serves it")
        self.why = why


class _Over(Exception):
    """The connection is not needed any more."""


class _CutAtDoor(Exception):
    """The connection was closed before it had proven itself. ``why``: in words."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Pull:
    """One version on its way into a slot.

    :param memory: the slot's file, mapped for writing.
    :param source: address to connect from; empty: any.
    :param encrypt: in TLS, and never without.
    """

    def __init__(
        self,
        image: Image,
        memory: mmap.mmap,
        transfer: int,
        secret: bytes,
        source: str = "",
        *,
        encrypt: bool = False,
    ) -> None:
        self.image = image
        self._tls = tls.client_context() if encrypt else None
        self._data = memoryview(memory)[image.offset : image.offset + image.nbytes]
        self._transfer, self._secret, self._source = transfer, secret, source
        self._asking = Asking(image.nbytes)
        self._digests: list[bytes] = [b""] * self._asking.count
        self._by: list[str] = [""] * self._asking.count
        self._expected: Sequence[bytes] = ()
        self._holders: deque[Holder] = deque()
        self._sockets: set[socket.socket] = set()
        self._proven: Counter[str] = Counter()
        """Connections that work, by holder."""
        self._cut: Counter[str] = Counter()
        """Connections in a row that were cut at a holder's door."""
        self._running = 0
        self._wanted = FIRST
        self._most = MOST
        self.active = False
        self._changed = threading.Condition()
        self._stopped = ""
        self.why: dict[str, str] = {}
        """Why holders were given up, by name."""
        self.received: dict[str, int] = {}
        """Bytes by holder, those that were wrong and asked for again included."""
        self.again = 0
        """Blocks that were asked for again."""

    # ------------------------------------------------------------ what the carrier does

    def run(self, holders: Sequence[Holder], deadline: float, start: Callable[[Callable[[], None]], object]) -> str:
        """Pull all that is missing; return the digest. On a thread of its own.

        :param deadline: of the monotonic clock. :param start: starts a thread.
        :raises Failed: no holder is left, or the deadline has passed.
        """
        with self._changed:
            self._holders, self.why, self.active = deque(holders), {}, True
            try:
                self._wait(deadline, start)
            finally:
                self._hang_up()
                self._changed.wait_for(lambda: not self._running)
                self.active = False
                self._changed.notify_all()
            if self._stopped:
                raise Failed({"": self._stopped})
            return combined(self._digests)

    def _wait(self, deadline: float, start: Callable[[Callable[[], None]], object]) -> None:
        """Keep as many connections as pay, until all is here."""
        best, at, nbytes = 0.0, time.monotonic(), self.received_nbytes
        self._wanted, self._most = FIRST, MOST
        self._cut.clear()
        while not self._asking.done and not self._stopped:
            if not self._holders and not self._running:
                raise Failed(dict(self.why))
            if (left := deadline - time.monotonic()) <= 0:
                raise Failed({**self.why, "deadline": "the time was up"})
            while self._holders and self._running < self._wanted and not self._asking.idle:
                self._connect_one(start)
            self._changed.wait(min(left, LOOK_S))
            if (elapsed_s := time.monotonic() - at) >= LOOK_S:
                rate, at, nbytes = (self.received_nbytes - nbytes) / elapsed_s, time.monotonic(), self.received_nbytes
                if rate > best * PAYS and self._wanted < self._most and not self._asking.idle:
                    self._wanted, best = (min(2 * self._wanted, self._most) if best else self._wanted), rate

    def _connect_one(self, start: Callable[[Callable[[], None]], object]) -> None:
        self._running += 1
        try:
            start(self._connection)
        except RuntimeError as error:  # this process may have no more threads
            self._running -= 1
            if not self._running:
                raise Failed({**self.why, "threads": str(error)}) from error
            self._wanted = self._most = self._running

    def expect(self, digests: Sequence[bytes]) -> None:
        """Take the publisher's digests: blocks that differ are asked for again."""
        with self._changed:
            self._expected = digests
            for number, digest in enumerate(self._digests):
                if digest and digest != digests[number]:
                    self._asking.wrong(number)
                    self._bad(number)
            self._changed.notify_all()

    def stop(self, why: str) -> None:
        """End :meth:`run`, and wait for that: then nobody writes the slot."""
        with self._changed:
            self._stopped = why
            self._hang_up()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.active)

    @property
    def received_nbytes(self) -> int:
        return sum(list(self.received.values()))

    def _hang_up(self) -> None:
        for sock in self._sockets:  # also those that are not connected yet
            tls.hang_up(sock)

    # ------------------------------------------------------------ one connection

    def _connection(self) -> None:
        holder: Holder | None = None
        try:
            with self._changed:
                holder = self._holders[0] if self._holders else None
            if holder is not None:
                self._receive_from(holder)
        except _Over:
            pass
        except _CutAtDoor as error:
            if holder is not None:
                self._cut_at_door(holder, error.why)
        except OSError as error:
            if holder is not None:
                self._give_up(holder, f"{holder.address} {_words(error)}")
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _cut_at_door(self, holder: Holder, why: str) -> None:
        """Try again; or do with the connections that work, or give the holder up."""
        with self._changed:
            self._cut[holder.name] += 1
            tries = self._cut[holder.name]
            if tries < TRIES:
                self._changed.wait_for(lambda: self._stopped or self._asking.done, AGAIN_S * 2 ** (tries - 1))
            elif works := self._proven[holder.name]:
                self._wanted = self._most = works
            else:
                self._give_up(holder, why)

    def _give_up(self, holder: Holder, why: str) -> None:
        with self._changed:
            if holder in self._holders and not self._stopped and not self._asking.done:
                self._holders.remove(holder)
                self.why[holder.name] = why

    def _receive_from(self, holder: Holder) -> None:
        sock = self._connect(holder)
        asked: deque[int] = deque()
        proven = False
        try:
            self._greet(sock, holder)
            with self._changed:
                self._proven[holder.name] += 1
                self._cut[holder.name] = 0
                proven = True
            _fail_when_silent(sock)
            while True:
                self._ask(sock, holder, asked)
                self._block(sock, holder, asked[0])
                asked.popleft()
        finally:
            self._lose(sock)
            with self._changed:
                self._proven[holder.name] -= proven
                for number in asked:
                    self._asking.give_back(number)

    def _connect(self, holder: Holder) -> socket.socket:
        """A connection that ends when the pull does; nothing is sent yet."""
        if self._tls is not None and not holder.certificate_hash:
            raise tls.NotTheHolder("has told no certificate, and the channel is encrypted")
        sock: socket.socket | None = None
        try:
            sock, there = endpoint.prepare(holder.host, holder.port, self._source)
            self._keep(sock)
            sock.settimeout(CONNECT_S)
            sock.connect(there)
        except BaseException as error:
            if sock is not None:
                self._lose(sock)
            if not isinstance(error, OSError):
                raise
            why = endpoint.unreached(error, holder.host, holder.port, self._source)
            if self._proven[holder.name]:
                raise _CutAtDoor(why) from error
            self._give_up(holder, why)
            raise _Over from error
        if self._tls is None:
            return sock
        with self._changed:  # it changes hands
            self._sockets.discard(sock)
            try:
                sealed = tls.wrap(sock, self._tls)
            except OSError as error:
                raise _CutAtDoor(f"{holder.address} {_words(error)}") from error
            self._keep(sealed)
        return sealed

    def _keep(self, sock: socket.socket) -> None:
        """Note a connection that is to end with the pull."""
        with self._changed:
            self._sockets.add(sock)
            if self._stopped or self._asking.done:
                self._lose(sock)
                raise _Over

    def _lose(self, sock: socket.socket) -> None:
        with self._changed:
            self._sockets.discard(sock)
        sock.close()

    def _greet(self, sock: socket.socket, holder: Holder) -> None:
        """Know the holder, and prove to it that this is a puller."""
        deadline, binding = time.monotonic() + GREET_S, b""
        try:
            sock.settimeout(GREET_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(sock, ssl.SSLSocket):
                tls.meet(sock, holder.certificate_hash)
                binding = bytes.fromhex(holder.certificate_hash)
            greeting.greet(sock, self._transfer, self._secret, binding, deadline)
        except (greeting.Stranger, tls.NotTheHolder):
            raise
        except TimeoutError:
            raise _CutAtDoor(f"{holder.address} did not answer within {GREET_S:g} s") from None
        except OSError as error:
            raise _CutAtDoor(f"{holder.address} {_words(error)}") from error

    def _ask(self, sock: socket.socket, holder: Holder, asked: deque[int]) -> None:
        """Ask for the next blocks; when there are none, wait, or be over."""
        with self._changed:
            while True:
                if self._stopped or self._asking.done or holder not in self._holders:
                    raise _Over
                new: list[int] = []
                while len(asked) + len(new) < ASKED and (number := self._asking.take()) is not None:
                    new.append(number)
                asked.extend(new)
                if asked:
                    break
                self._changed.wait()
        if new:
            sock.sendall(b"".join(ASK.pack(*self._asking.range_of(number)) for number in new))

    def _block(self, sock: socket.socket, holder: Holder, number: int) -> None:
        """Receive one block, digest it as it comes, and compare."""
        at, end = self._asking.range_of(number)
        digest, piece = xxhash.xxh3_128(), 0
        while at < end:
            if not piece:
                piece = self._head(sock, end - at)
                continue
            here = min(at - at % CHUNK_NBYTES + CHUNK_NBYTES, end)
            nbytes = _receive(sock, self._data[at : min(here, at + piece)])
            digest.update(self._data[at : at + nbytes])
            at, piece = at + nbytes, piece - nbytes
            with self._changed:
                self.received[holder.name] = self.received.get(holder.name, 0) + nbytes
            if at == here:
                self.image.fill(max(at - 1, 0) // CHUNK_NBYTES * CHUNK_NBYTES, at)
        self._landed(number, digest.digest(), holder)

    @staticmethod
    def _head(sock: socket.socket, most: int) -> int:
        head = bytearray(HEAD.size)
        got = 0
        while got < HEAD.size:
            got += _receive(sock, memoryview(head)[got:])
        (piece,) = HEAD.unpack(head)
        if piece == OVER:
            raise ConnectionError("does not serve the version any more")
        if piece > most:
            raise ConnectionError("sends more than was asked for")
        return int(piece)

    def _landed(self, number: int, digest: bytes, holder: Holder) -> None:
        with self._changed:
            self._digests[number], self._by[number] = digest, holder.name
            if self._expected and digest != self._expected[number]:
                self._asking.give_back(number)
                self._bad(number)
                raise _Over
            self._asking.landed(number)
            self._changed.notify_all()

    def _bad(self, number: int) -> None:
        """A block is not what was published: never again from whoever served it."""
        name = self._by[number]
        self.image.empty(*self._asking.range_of(number))
        self._digests[number] = b""
        self.again += 1
        self.why[name] = f"block {number} is not what was published"
        self._holders = deque(one for one in self._holders if one.name != name)


def _fail_when_silent(sock: socket.socket) -> None:
    """Let every receiving call fail when nothing comes for :data:`SILENT_S`."""
    if isinstance(sock, ssl.SSLSocket):  # it waits by itself, record by record
        sock.settimeout(SILENT_S)
        return
    sock.settimeout(None)
    seconds = int(SILENT_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SECONDS.pack(seconds, int((SILENT_S - seconds) * 1e6)))


def _receive(sock: socket.socket, into: memoryview) -> int:
    """All of ``into``, or, of a plain connection that is slow, less."""
    got = 0
    try:
        if isinstance(sock, ssl.SSLSocket):
            while got < len(into) and (nbytes := sock.recv_into(into[got:])):
                got += nbytes
        else:
            got = sock.recv_into(into, 0, socket.MSG_WAITALL)
    except (BlockingIOError, TimeoutError):
        raise TimeoutError(f"was silent for {SILENT_S:g} s") from None
    if not got:
        raise ConnectionError("closed the connection")
    return got


def _words(error: OSError) -> str:
    """What the other end has done."""
    if isinstance(error, ssl.SSLError):
        return f"broke the connection ({error.reason or error})"
    return str(error) if error.strerror is None else f"broke the connection ({error.strerror})"
