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

*As deltas.* Where both ends have a base (:mod:`replicas.carry.delta`), a block is asked
for as its delta, and comes as that or as its bytes. A block that came out wrong is
asked for as bytes.

*Verified by block.* The version's digest, which comes over the session, is that of the
digests of its blocks. So when it is not that of the blocks that came, holders are asked
for theirs until one has those of the digest: they tell which blocks are wrong. These
are asked for again, elsewhere if there is an elsewhere, and the holder that has served
them is named.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from replicas.carry import endpoint, greeting, tls
from replicas.carry.blocks import Asking, combined
from replicas.carry.delta import DELTA_NBYTES_MAX, DeltaError, apply_block
from replicas.carry.differences import Deltas
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.serve import ASK, CHANGES, DELTA_FOLLOWS, DIGESTS, HEAD, OVER, RANGE

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
_SECONDS, _LENGTH = struct.Struct("ll"), struct.Struct("<I")


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


class _Unreached(_CutAtDoor):
    """There is no connection at all, and no other one works."""


class Pull:
    """One version on its way into a slot.

    :param memory: the slot's file, mapped for writing.
    :param source: address to connect from; empty: any.
    :param base: the bytes of a version that holders have, too: blocks come as deltas.
    :param encrypt: in TLS, and never without.
    """

    def __init__(
        self,
        image: Image,
        memory: mmap.mmap,
        transfer: int,
        secret: bytes,
        source: str = "",
        base: memoryview | None = None,
        *,
        encrypt: bool = False,
    ) -> None:
        self.image, self.deltas = image, Deltas(image.nbytes)
        self._base = base
        self._tls = tls.client_context() if encrypt else None
        self._data = memoryview(memory)[image.offset : image.offset + image.nbytes]
        self._transfer, self._secret, self._source = transfer, secret, source
        self._asking = Asking(image.nbytes)
        self._digests: list[bytes] = [b""] * self._asking.count
        self._by: list[str] = [""] * self._asking.count
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
        self._hung_up = False
        self.why: dict[str, str] = {}
        """Why holders were given up, by name."""
        self.received: dict[str, int] = {}
        """Bytes of the network by holder, those that were wrong included."""
        self.landed_nbytes = 0
        """Bytes of the image that have come."""
        self.wrong: dict[str, str] = {}
        """Holders that have served wrong bytes, in any run, and which."""
        self.again = 0
        """Blocks that were asked for again."""

    # ------------------------------------------------------------ what the carrier does

    def run(
        self,
        holders: Sequence[Holder],
        deadline: float,
        start: Callable[[Callable[[], None]], object],
        digest: str = "",
    ) -> str:
        """Pull all that is missing; return the digest. On a thread of its own.

        :param deadline: of the monotonic clock. :param start: starts a thread.
        :param digest: of the version; empty: not known yet, and not compared.
        :raises Failed: no holder is left, or the deadline has passed.
        """
        with self._changed:
            self._holders, self.why, self.active = deque(holders), {}, True
        try:
            self._receive_all(deadline, start)
            while digest and combined(self._digests) != digest:
                self._find_wrong(holders, digest, deadline)
                self._receive_all(deadline, start)
            return combined(self._digests)
        finally:
            with self._changed:
                self.active = False
                self._changed.notify_all()

    def _receive_all(self, deadline: float, start: Callable[[Callable[[], None]], object]) -> None:
        with self._changed:
            try:
                self._wait(deadline, start)
            finally:
                self._hung_up = True  # also those that connect just now
                self._hang_up()
                self._changed.wait_for(lambda: not self._running)
                self._hung_up = False
            if self._stopped:
                raise Failed({"": self._stopped})

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

    def _find_wrong(self, holders: Sequence[Holder], digest: str, deadline: float) -> None:
        """Mark the blocks that are not what was published, to be asked for again.

        :raises Failed: no holder knows the digests of the blocks, or one that was asked
            again has served wrong bytes again.
        """
        for holder in holders:
            try:
                blocks = self._digests_of(holder, deadline)
            except _Over:
                raise Failed({"": self._stopped}) from None
            except _CutAtDoor as error:
                self.why.setdefault(holder.name, error.why)
                continue
            except OSError as error:
                self.why.setdefault(holder.name, f"{holder.address} {_words(error)}")
                continue
            if combined(blocks) == digest:
                break
        else:
            raise Failed({**self.why, "": "the bytes are not what was published"})
        with self._changed:
            wrong = [number for number, block in enumerate(blocks) if block != self._digests[number]]
            liars = {self._by[number] for number in wrong}
            if liars & self.wrong.keys():
                raise Failed({**self.why, **self.wrong})
            for number in wrong:
                self._bad(number)
            self._holders = deque(sorted(holders, key=lambda one: one.name in self.wrong))

    def _digests_of(self, holder: Holder, deadline: float) -> list[bytes]:
        """What this holder says are the digests of all blocks."""
        with self._dialled(holder) as sock:
            sock.sendall(ASK.pack(DIGESTS, 0, 0))
            left = 16 * self._asking.count
            answer = bytearray(left)
            while left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the time was up")
                if piece := self._head(sock, left):
                    _receive_all(sock, memoryview(answer)[-left:][:piece])
                    left -= piece
        return [bytes(answer[at : at + 16]) for at in range(0, len(answer), 16)]

    def stop(self, why: str) -> None:
        """End :meth:`run`, and wait for that: then nobody writes the slot."""
        with self._changed:
            self._stopped = why
            self._hang_up()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.active)

    def without_base(self) -> None:
        """Let go of the base: the pull has ended."""
        if self._base is not None:
            self._base.release()
            self._base = None

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
        except _Unreached as error:
            if holder is not None:
                self._give_up(holder, error.why)
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
        asked: deque[int] = deque()
        with self._dialled(holder) as sock:
            try:
                while True:
                    self._ask(sock, holder, asked)
                    self._block(sock, holder, asked[0])
                    asked.popleft()
            finally:
                with self._changed:
                    for number in asked:
                        self._asking.give_back(number)

    @contextlib.contextmanager
    def _dialled(self, holder: Holder) -> Iterator[socket.socket]:
        """A connection to a holder, both ends proven; silence ends it."""
        sock = self._connect(holder)
        proven = False
        try:
            self._greet(sock, holder)
            with self._changed:
                self._proven[holder.name] += 1
                self._cut[holder.name] = 0
                proven = True
            _fail_when_silent(sock)
            yield sock
        finally:
            self._lose(sock)
            with self._changed:
                self._proven[holder.name] -= proven

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
            raise (_CutAtDoor if self._proven[holder.name] else _Unreached)(why) from error
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
            if self._stopped or self._hung_up:
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
            kinds = (CHANGES if self._by_delta(number) else RANGE for number in new)
            sock.sendall(
                b"".join(ASK.pack(kind, *self._asking.range_of(n)) for kind, n in zip(kinds, new, strict=True))
            )

    def _by_delta(self, number: int) -> bool:
        """Return True if a block is asked for as a delta: not if one was wrong."""
        return self._base is not None and not self._by[number]

    def _block(self, sock: socket.socket, holder: Holder, number: int) -> None:
        """Receive one block, digest it as it comes, and compare."""
        at, end = self._asking.range_of(number)
        digest, piece = xxhash.xxh3_128(), 0
        while at < end:
            if not piece:
                piece = self._head(sock, end - at)
                if piece == DELTA_FOLLOWS:
                    piece = 0
                    if (found := self._delta(sock)) and not self._apply(holder, number, found, digest):
                        return
                    at = end if found else at
                continue
            here = min(at - at % CHUNK_NBYTES + CHUNK_NBYTES, end)
            nbytes = _receive(sock, self._data[at : min(here, at + piece)])
            digest.update(self._data[at : at + nbytes])
            at, piece = at + nbytes, piece - nbytes
            self._came(holder, nbytes, nbytes)
            if at == here:
                self.image.fill(max(at - 1, 0) // CHUNK_NBYTES * CHUNK_NBYTES, at)
        self._landed(number, digest.digest(), holder)

    def _delta(self, sock: socket.socket) -> bytes:
        """Receive the delta of a block; empty: its bytes follow."""
        length = bytearray(_LENGTH.size)
        _receive_all(sock, memoryview(length))
        (nbytes,) = _LENGTH.unpack(length)
        if self._base is None or nbytes > DELTA_NBYTES_MAX:
            raise ConnectionError("sends more than was asked for")
        found = bytearray(nbytes)
        _receive_all(sock, memoryview(found))
        return bytes(found)

    def _apply(self, holder: Holder, number: int, found: bytes, digest: xxhash.xxh3_128) -> bool:
        """Make the block of its delta; False: it is none, and its bytes are needed."""
        assert self._base is not None
        start, end = self._asking.range_of(number)
        block = self._data[start:end]
        try:
            apply_block(self._base[start:end], found, block)
        except DeltaError as error:
            with self._changed:
                self._by[number] = holder.name
                self.wrong[holder.name] = f"block {number}: {error}"
                self.again += 1
                self._asking.give_back(number)
            return False
        digest.update(block)
        self.deltas.keep(number, found)
        self._came(holder, len(found), end - start)
        self.image.fill(start, end)
        return True

    def _came(self, holder: Holder, nbytes: int, landed: int) -> None:
        with self._changed:
            self.received[holder.name] = self.received.get(holder.name, 0) + nbytes
            self.landed_nbytes += landed

    @staticmethod
    def _head(sock: socket.socket, most: int) -> int:
        head = bytearray(HEAD.size)
        _receive_all(sock, memoryview(head))
        (piece,) = HEAD.unpack(head)
        if piece == OVER:
            raise ConnectionError("does not serve the version any more")
        if piece > most and piece != DELTA_FOLLOWS:
            raise ConnectionError("sends more than was asked for")
        return int(piece)

    def _landed(self, number: int, digest: bytes, holder: Holder) -> None:
        with self._changed:
            self._digests[number], self._by[number] = digest, holder.name
            self._asking.landed(number)
            self._changed.notify_all()

    def _bad(self, number: int) -> None:
        """A block is not what was published: ask for it again, of others first."""
        name = self._by[number]
        self.image.empty(*self._asking.range_of(number))
        self.deltas.drop(number)
        self._asking.wrong(number)
        self.again += 1
        self.wrong[name] = self.why[name] = f"block {number} is not what was published"


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


def _receive_all(sock: socket.socket, into: memoryview) -> None:
    while into:
        into = into[_receive(sock, into) :]


def _words(error: OSError) -> str:
    """What the other end has done."""
    if isinstance(error, ssl.SSLError):
        return f"broke the connection ({error.reason or error})"
    return str(error) if error.strerror is None else f"broke the connection ({error.strerror})"
