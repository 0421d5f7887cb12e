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
one. What has landed stays: a pull that failed goes on from there when it is run again.
A further connection that cannot be made is no failure of its holder: those that there
are go on. Nor is it one of a holder that this process has no descriptor, port or memory
left. A slow one makes room for another (:mod:`replicas.carry.holders`).

*Verified by block.* The publisher's digests of the blocks come over the session,
perhaps after the bytes. A block that differs is emptied and asked for again, and the
holder that served it is given up, by name. Without them only the digest of all blocks
is told.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import xxhash

from replicas.carry import greeting
from replicas.carry.blocks import Asking, combined
from replicas.carry.holders import Holder, Holders, words
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.serve import ASK, HEAD, OVER

CONNECT_S, LAST_CONNECT_S = 1.5, 3.0
"""In which a holder must have accepted: a lost first packet is sent again after 1 s.

The second one is for the last holder that is left, as is that of :data:`LAST_SILENT_S`.
"""
SILENT_S, LAST_SILENT_S = 1.5, 4.0
"""Without a byte or a sign of life for so long a holder is frozen, or cut off."""
WAKES_S = 0.25
"""Between two looks at a silent connection, and at what of a chunk has come."""
ASKED = 2
"""Blocks that one connection has asked for at most."""
FIRST, MOST = 2, 64
"""Connections to begin with, and at most."""
PAYS = 1.15
"""By which the rate must have grown for the connections to be doubled again."""
LOOK_S = 0.2
"""Between two looks at the rate."""
_SECONDS = struct.Struct("ll")
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""Errors of this process, or its machine, when it dials."""


class Failed(Exception):
    """No holder is left. ``why``: for each one, by its name; "": of this process."""

    def __init__(self, why: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in why.items()) or "nobody serves it")
        self.why = why


class _Over(Exception):
    """The connection is not needed any more."""


class _Capped(Exception):
    """It could not be made, which is no failure of its holder."""


class Pull:
    """One version on its way into a slot.

    :param memory: the slot's file, mapped for writing.
    :param source: address to connect from; empty: any.
    """

    def __init__(self, image: Image, memory: mmap.mmap, transfer: int, secret: bytes, source: str = "") -> None:
        self.image = image
        self._data = memoryview(memory)[image.offset : image.offset + image.nbytes]
        self._transfer, self._secret, self._source = transfer, secret, source
        self._asking = Asking(image.nbytes)
        self._digests: list[bytes] = [b""] * self._asking.count
        self._by: list[str] = [""] * self._asking.count
        self._expected: Sequence[bytes] = ()
        self._holders = Holders()
        self._sockets: dict[socket.socket, Holder] = {}
        self._put_off: set[socket.socket] = set()
        self._halves: dict[int, int] = {}
        """Bytes of blocks that are on their way, by number."""
        self._running = 0
        self._most = MOST
        self._dialled: Counter[Holder] = Counter()
        """Connections to each holder, those included that are still being made."""
        self._lack = ""
        self.active = False
        self._changed = threading.Condition()
        self._stopped = ""
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
            self._holders, self.active = Holders(holders), True
            self._most, self._lack = MOST, ""
            try:
                while not self._asking.done and not self._stopped:  # a late digest may show a wrong block
                    try:
                        self._wait(deadline, start)
                    finally:
                        self._hang_up()
                        self._changed.wait_for(lambda: not self._running)
            finally:
                self.active = False
                self._changed.notify_all()
            if self._stopped:
                raise Failed({"": self._stopped})
            return combined(self._digests)

    def _wait(self, deadline: float, start: Callable[[Callable[[], None]], object]) -> None:
        """Keep as many connections as pay, until all is here."""
        wanted, best, at, nbytes = FIRST, 0.0, time.monotonic(), self.received_nbytes
        while not self._asking.done and not self._stopped:
            if not self._running and (self._lack or not self._holders):
                raise Failed({"": self._lack, **self.why} if self._lack else dict(self.why))
            if (left := deadline - time.monotonic()) <= 0:
                raise Failed({**self.why, "deadline": "the time was up"})
            while self._holders and self._running < min(wanted, self._most) and not self._asking.idle:
                self._running += 1
                try:
                    start(self._connection)
                except RuntimeError as error:  # no thread is left
                    self._running -= 1
                    self._lacks(str(error), self._running)
                    break
            self._changed.wait(min(left, LOOK_S))
            self._look()
            if (elapsed_s := time.monotonic() - at) >= LOOK_S:
                rate, at, nbytes = (self.received_nbytes - nbytes) / elapsed_s, time.monotonic(), self.received_nbytes
                if rate > best * PAYS and wanted < MOST and not self._asking.idle:
                    wanted, best = (2 * wanted if best else wanted), rate

    def _look(self) -> None:
        """End the connections to a slow holder, if there are others."""
        left_nbytes = self._asking.left_nbytes - sum(self._halves.values())
        holder = self._holders.put_off(self.received, left_nbytes)
        for sock, of in self._sockets.items():
            if of == holder:
                self._put_off.add(sock)
                with contextlib.suppress(OSError):  # it ends by itself
                    sock.shutdown(socket.SHUT_RDWR)

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
    def why(self) -> dict[str, str]:
        """Why holders were given up or put off, by name."""
        return self._holders.why

    @property
    def cut(self) -> set[str]:
        """Those of them to whom nothing, or little, gets through, as it seems."""
        return self._holders.cut

    @property
    def received_nbytes(self) -> int:
        return sum(list(self.received.values()))

    def _hang_up(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # not connected yet: its thread sees that it is over
                sock.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ one connection

    def _connection(self) -> None:
        holder: Holder | None = None
        try:
            with self._changed:
                holder = self._holders.first
            if holder is not None:
                self._receive_from(holder)
        except (_Over, _Capped):
            pass
        except OSError as error:
            self._give_up(holder, error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _give_up(self, holder: Holder | None, error: OSError) -> None:
        with self._changed:
            if holder is not None and holder in self._holders and not self._stopped and not self._asking.done:
                self._holders.give_up(holder, error)
                self._most = MOST

    def _lacks(self, why: str, others: int) -> None:
        """No further connection can be made here: do with the others, if any."""
        self._most = max(1, others)
        self._lack = "" if others else why

    def _not_made(self, holder: Holder, error: OSError) -> None:
        """A connection could not be made; :class:`_Capped`: its holder may be good."""
        with self._changed:
            others = self._running - 1
            if error.errno in _LACKS:
                self._lacks(words(error), others)
            elif self._dialled[holder] > 1:
                self._most = max(1, others)
            else:
                raise error
            raise _Capped

    def _is_last(self, holder: Holder) -> bool:
        with self._changed:
            return self._holders.is_last(holder)

    def _greeted(self, holder: Holder) -> socket.socket:
        """Return a connection to it, known to :meth:`_hang_up` from before it dials."""
        family, kind, number, _, address = socket.getaddrinfo(holder.host, holder.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
        try:
            with self._changed:
                if self._stopped or self._asking.done:
                    raise _Over
                self._sockets[sock] = holder
            sock.settimeout(LAST_CONNECT_S if self._is_last(holder) else CONNECT_S)
            if self._source:
                sock.bind((self._source, 0))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting.greet(sock, self._transfer, self._secret)
            sock.settimeout(None)
            with self._changed:
                self._holders.talks(holder)
        except BaseException:
            sock.close()
            self._forget(sock)
            raise
        return sock

    def _forget(self, sock: socket.socket) -> None:
        """:raises _Over: its holder has made room for another one."""
        with self._changed:
            self._sockets.pop(sock, None)
            if sock in self._put_off:
                self._put_off.discard(sock)
                raise _Over

    @contextlib.contextmanager
    def _made(self, holder: Holder) -> Iterator[socket.socket]:
        """A connection, counted."""
        with self._changed:
            self._dialled[holder] += 1
        try:
            try:
                sock = self._greeted(holder)
            except OSError as error:
                self._not_made(holder, error)
                raise
            with sock:
                yield sock
        finally:
            with self._changed:
                self._dialled[holder] -= 1

    def _receive_from(self, holder: Holder) -> None:
        asked: deque[int] = deque()
        with self._made(holder) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SECONDS.pack(0, int(WAKES_S * 1e6)))
            try:
                while True:
                    self._ask(sock, holder, asked)
                    self._block(sock, holder, asked[0])
                    asked.popleft()
            finally:
                with self._changed:
                    for number in asked:
                        self._halves.pop(number, None)
                        self._asking.give_back(number)
                    self._changed.notify_all()
                self._forget(sock)

    def _ask(self, sock: socket.socket, holder: Holder, asked: deque[int]) -> None:
        """Ask for the next blocks; when there are none, wait, or be over."""
        with self._changed:
            while True:
                if self._stopped or self._asking.done or holder not in self._holders or sock in self._put_off:
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
            self._halves[number] = at - self._asking.range_of(number)[0]
            if not piece:
                piece = self._head(sock, holder, end - at)
                continue
            here = min(at - at % CHUNK_NBYTES + CHUNK_NBYTES, end)
            nbytes = self._receive(sock, holder, self._data[at : min(here, at + piece)])
            digest.update(self._data[at : at + nbytes])
            at, piece = at + nbytes, piece - nbytes
            with self._changed:
                self.received[holder.name] = self.received.get(holder.name, 0) + nbytes
            if at == here:
                self.image.fill(max(at - 1, 0) // CHUNK_NBYTES * CHUNK_NBYTES, at)
        self._landed(number, digest.digest(), holder)

    def _head(self, sock: socket.socket, holder: Holder, most: int) -> int:
        head = bytearray(HEAD.size)
        got = 0
        while got < HEAD.size:
            got += self._receive(sock, holder, memoryview(head)[got:])
        (piece,) = HEAD.unpack(head)
        if piece == OVER:
            raise ConnectionError("it does not serve the version any more")
        if piece > most:
            raise ConnectionError("it sends more than was asked for")
        return int(piece)

    def _receive(self, sock: socket.socket, holder: Holder, into: memoryview) -> int:
        """All of it, or what has come within :data:`WAKES_S`."""
        began = time.monotonic()
        while True:
            try:
                nbytes = sock.recv_into(into, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - began < (LAST_SILENT_S if self._is_last(holder) else SILENT_S):
                    continue
                raise TimeoutError("it was silent for too long") from None
            if not nbytes:
                raise ConnectionError("it closed the connection")
            return nbytes

    def _landed(self, number: int, digest: bytes, holder: Holder) -> None:
        with self._changed:
            self._digests[number], self._by[number] = digest, holder.name
            if self._expected and digest != self._expected[number]:
                self._bad(number)
                raise _Over  # which gives it back
            self._asking.landed(number)
            self._halves.pop(number, None)
            self._changed.notify_all()

    def _bad(self, number: int) -> None:
        """A block is not what was published: never again from whoever served it."""
        name = self._by[number]
        self.image.empty(*self._asking.range_of(number))
        self._digests[number] = b""
        self.again += 1
        self._holders.forged(name, f"block {number} is not what was published")
