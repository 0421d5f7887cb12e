"""Pull one version from its holders into a slot, over a few connections.

Theory of operation
===================

Each connection has a thread, requests the lowest block that is not under way
(:class:`~replicas.carry.blocks.BlockQueue`), and keeps two requests open, so that the
server never waits for requests. A block is digested while its bytes are in the
processor's caches. Each complete chunk can be served to other hosts at once
(:class:`~replicas.carry.image.Image`).

*Number of connections.* Two at first, or :data:`FIRST_FAR` to a holder that was far
the last time, as a connection needs round trips to gain speed, and a small delta ends
before that. While blocks wait to be requested, and the rate has grown by :data:`PAYS`
since the number last doubled, the number doubles again, up to :data:`MOST`. With fewer
blocks than connections, each connection takes one block.

*Holders* are in order of preference. All connections go to the first that works. A
holder that fails, or is silent (servers send signs of life), is given up for this pull,
and the next one gets its requests. Received bytes stay: a failed pull resumes when
run again. If a further connection cannot be made, the present ones continue, and the
holder stays; so also if this process lacks descriptors, ports or memory. A connection
that breaks in its handshake, as in a flood, is retried :data:`TRIES` times. A slow
holder makes room for another (:mod:`replicas.carry.holders`).

*Deltas.* If both ends have a base (:mod:`replicas.carry.delta`), the puller requests
blocks as deltas, and gets deltas or bytes. It requests a block that came out wrong as
bytes.

*Verification.* The version's digest comes over the session, and is the digest of its
blocks' digests. If the received blocks do not match it, the puller asks holders for
their blocks' digests until these match, requests the wrong blocks again, if possible
from other holders, and reports the holder that served them.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import xxhash

from replicas.carry import dialler
from replicas.carry.blocks import BlockQueue, combined
from replicas.carry.delta import DELTA_NBYTES_MAX, DeltaError, apply_block
from replicas.carry.differences import Deltas
from replicas.carry.holders import Holder, Holders
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.serve import ASK, CHANGES, DELTA_FOLLOWS, DIGESTS, RANGE

TRIES = 6
"""Attempts at a handshake with a holder to which no connection works."""
AGAIN_S = 0.1
"""Pause before the second attempt; doubles each time."""
ASKED = 2
"""Most open requests of one connection, in blocks."""
FIRST, FIRST_FAR, MOST = 2, 16, 64
"""Connections at first, at first to a far holder, and at most."""
PAYS = 1.15
"""Growth of the rate for which the connections are doubled again."""
LOOK_S = 0.2
"""Interval of measurements of the rate."""
Start = Callable[[Callable[[], None]], object]
"""Starts a thread that runs the given function."""


class Failed(Exception):
    """No holder is left. ``why``: by holder's name, or "" for this process."""

    def __init__(self, why: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in why.items()) or "no holder serves it")
        self.why = why


class Pull:
    """The pull of one version into a slot. Thread-safe.

    :param memory: the slot's file, mapped for writing.
    :param source: address to connect from; empty means any.
    :param base: the bytes of a version that holders also have, to request deltas.
    :param trips: round trips in seconds by host, shared with other pulls.
    :param encrypt: use TLS, and never connect without.

    The many fields are the state that its connections share.
    """

    def __init__(
        self,
        image: Image,
        memory: mmap.mmap,
        transfer: int,
        secret: bytes,
        source: str = "",
        base: memoryview | None = None,
        trips: dict[str, float] | None = None,
        *,
        encrypt: bool = False,
    ) -> None:
        self.image, self.deltas = image, Deltas(image.nbytes)
        self._base = base
        self._data = memoryview(memory)[image.offset : image.offset + image.nbytes]
        self._dialler = dialler.Connector(transfer, secret, source, trips, encrypt=encrypt)
        self._asking = BlockQueue(image.nbytes)
        self._digests: list[bytes] = [b""] * self._asking.count
        self._by: list[str] = [""] * self._asking.count
        self._holders = Holders()
        self._halves: dict[int, int] = {}
        """Received bytes of incomplete blocks, by number."""
        self._running = 0
        self._most = MOST
        self._cut: Counter[Holder] = Counter()
        """By holder: handshakes that broke, in a row."""
        self._lack = ""
        self.active = False
        self._changed = threading.Condition()
        self._stopped = ""
        self.received: dict[str, int] = {}
        """Network bytes by holder, including wrong ones."""
        self.landed_nbytes = 0
        """Received bytes of the image, from bytes and deltas."""
        self.wrong: dict[str, str] = {}
        """The last wrong block by holder, in any run."""
        self.again = 0
        """Number of blocks requested again."""

    # ------------------------------------------------------------ what the carrier does

    def run(self, holders: Sequence[Holder], deadline: float, start: Start, digest: str = "") -> str:
        """Pull all missing blocks, verify them, and return the digest. Blocks.

        :param deadline: of the monotonic clock. :param start: starts a thread.
        :param digest: of the version; empty if not known yet, to skip the check.
        :raises Failed: no holder is left, or the deadline has passed.
        """
        with self._changed:
            self._holders, self.active = Holders(holders), True
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

    def _receive_all(self, deadline: float, start: Start) -> None:
        with self._changed:
            self._most, self._lack = MOST, ""
            self._cut.clear()
            self._dialler.reopen()
            try:
                self._manage_connections(deadline, start)
            finally:
                self._dialler.hang_up()
                self._changed.wait_for(lambda: not self._running)
            if self._stopped:
                raise Failed({"": self._stopped})

    def _manage_connections(self, deadline: float, start: Start) -> None:
        """Start connections as long as more of them pay, until all blocks are here."""
        best, at, nbytes = 0.0, time.monotonic(), self.received_nbytes
        wanted = FIRST_FAR if self._dialler.is_far(self._holders.first) else FIRST
        while not self._asking.done and not self._stopped:
            if not self._running and (self._lack or not self._holders):
                raise Failed({"": self._lack, **self.why} if self._lack else dict(self.why))
            if (left := deadline - time.monotonic()) <= 0:
                raise Failed({**self.why, "deadline": "the time was up"})
            while self._holders and self._running < min(wanted, self._most) and self._asking.waiting:
                if not self._add_connection(start):
                    break
            self._changed.wait(min(left, LOOK_S))
            slow = self._holders.replace_slow(self.received, self._asking.left_nbytes - sum(self._halves.values()))
            if slow is not None:
                self._dialler.hang_up(slow)
            if (elapsed_s := time.monotonic() - at) >= LOOK_S:
                rate, at, nbytes = (self.received_nbytes - nbytes) / elapsed_s, time.monotonic(), self.received_nbytes
                if rate > best * PAYS and wanted < MOST and self._asking.waiting:
                    wanted, best = (2 * wanted if best else wanted), rate

    def _add_connection(self, start: Start) -> bool:
        """Start one more connection; return False if no thread is left for it."""
        self._running += 1
        try:
            start(self._connection)
        except RuntimeError as error:
            self._running -= 1
            self._note_shortage(str(error), self._running)
            return False
        return True

    def _find_wrong(self, holders: Sequence[Holder], digest: str, deadline: float) -> None:
        """Find the wrong blocks, and have them requested again.

        :raises Failed: no holder knows the blocks' digests, or a holder served wrong
            bytes a second time.
        """
        with self._changed:
            if self._stopped:
                raise Failed({"": self._stopped})
            self._dialler.reopen()
        for holder in holders:
            try:
                blocks = self._digests_of(holder, deadline)
            except dialler.HungUp:
                raise Failed({"": self._stopped}) from None
            except dialler.ConnectFailed as error:
                self.why.setdefault(holder.name, error.why)
                continue
            except OSError as error:
                self.why.setdefault(holder.name, f"{holder.address} {dialler.end_text(error)}")
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
                self._reject_block(number)
            why, cut = self.why, self.cut
            self._holders = Holders(sorted(holders, key=lambda one: one.name in self.wrong))
            self._holders.why, self._holders.cut = why, cut

    def _digests_of(self, holder: Holder, deadline: float) -> list[bytes]:
        """Ask this holder for the digests of all blocks."""
        with self._dialler.connect(holder) as line:
            line.send(ASK.pack(DIGESTS, 0, 0))
            left = 16 * self._asking.count
            answer = bytearray(left)
            while left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the time was up")
                if piece := line.piece(left):
                    line.receive_all(memoryview(answer)[-left:][:piece])
                    left -= piece
        return [bytes(answer[at : at + 16]) for at in range(0, len(answer), 16)]

    def stop(self, why: str) -> None:
        """End :meth:`run`; return when no thread writes the slot."""
        with self._changed:
            self._stopped = why
            self._dialler.hang_up()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.active)

    def release_base(self) -> None:
        """Release the base, after the pull has ended."""
        if self._base is not None:
            self._base.release()
            self._base = None

    @property
    def why(self) -> dict[str, str]:
        """Why holders were given up or put off, by name."""
        return self._holders.why

    @property
    def cut(self) -> set[str]:
        """Names of those whose network path seems broken or slow."""
        return self._holders.cut

    @property
    def asks_for_deltas(self) -> bool:
        return self._base is not None

    @property
    def received_nbytes(self) -> int:
        return sum(list(self.received.values()))

    # ------------------------------------------------------------ one connection

    def _connection(self) -> None:
        holder: Holder | None = None
        try:
            with self._changed:
                holder = self._holders.first
            if holder is not None:
                self._receive_from(holder)
        except dialler.HungUp:
            pass
        except dialler.ConnectFailed as error:
            if holder is not None:
                self._not_made(holder, error)
        except OSError as error:
            if holder is not None:
                self._give_up(holder, f"{holder.address} {dialler.end_text(error)}", cut=dialler.is_cut(error))
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _not_made(self, holder: Holder, error: dialler.ConnectFailed) -> None:
        """Continue with the present connections, try again, or give the holder up."""
        with self._changed:
            others = self._running - 1
            if isinstance(error, dialler.OutOfResources):
                self._note_shortage(error.why, others)
            elif isinstance(error, dialler.HandshakeBroken):
                self._cut[holder] += 1
                tries, works = self._cut[holder], self._dialler.proven[holder]
                if tries < TRIES:
                    self._changed.wait_for(lambda: self._stopped or self._asking.done, AGAIN_S * 2 ** (tries - 1))
                elif works:
                    self._most = works
                else:
                    self._give_up(holder, error.why, cut=error.cut)
            elif self._dialler.made[holder]:
                self._most = max(1, others)
            else:
                self._give_up(holder, error.why, cut=error.cut)

    def _note_shortage(self, why: str, others: int) -> None:
        """Note that this process cannot make further connections."""
        self._most = max(1, others)
        self._lack = "" if others else why

    def _give_up(self, holder: Holder, why: str, *, cut: bool) -> None:
        with self._changed:
            if holder in self._holders and not self._stopped and not self._asking.done:
                self._holders.give_up(holder, why, cut=cut)
                self._most = MOST

    def _receive_from(self, holder: Holder) -> None:
        with self._changed:
            last = self._holders.is_last(holder)
        with self._dialler.connect(holder, last=last) as line:
            asked: deque[int] = deque()
            with self._changed:
                self._cut[holder] = 0
                self._holders.mark_connected(holder)
            try:
                while True:
                    self._ask(line, asked)
                    self._block(line, asked[0])
                    asked.popleft()
            finally:
                with self._changed:
                    for number in asked:
                        self._halves.pop(number, None)
                        self._asking.requeue(number)
                    self._changed.notify_all()

    def _ask(self, line: dialler.HolderConnection, asked: deque[int]) -> None:
        """Request the next blocks; wait while there are none.

        :raises HungUp: all blocks have arrived, or the holder was given up.
        """
        with self._changed:
            while True:
                if self._stopped or self._asking.done or line.holder not in self._holders:
                    raise dialler.HungUp
                new: list[int] = []
                most = ASKED if self._asking.waiting > self._running else 1
                while len(asked) + len(new) < most and (number := self._asking.next_block()) is not None:
                    new.append(number)
                asked.extend(new)
                if asked:
                    break
                self._changed.wait()
        if new:
            kinds = {number: CHANGES if self._by_delta(number) else RANGE for number in new}
            line.send(b"".join(ASK.pack(kind, *self._asking.range_of(number)) for number, kind in kinds.items()))

    def _by_delta(self, number: int) -> bool:
        """Return True to request a block as a delta, False after a wrong one."""
        return self._base is not None and not self._by[number]

    def _block(self, line: dialler.HolderConnection, number: int) -> None:
        """Receive one block, and digest its bytes as they arrive."""
        start, end = self._asking.range_of(number)
        at, digest, piece = start, xxhash.xxh3_128(), 0
        while at < end:
            self._halves[number] = at - start
            if not piece:
                piece = line.piece(end - at)
                if piece == DELTA_FOLLOWS:
                    piece = 0
                    if (found := self._delta(line)) and not self._apply(line.holder, number, found, digest):
                        return
                    at = end if found else at
                continue
            here = min(at - at % CHUNK_NBYTES + CHUNK_NBYTES, end)
            nbytes = line.receive(self._data[at : min(here, at + piece)])
            digest.update(self._data[at : at + nbytes])
            at, piece = at + nbytes, piece - nbytes
            self._count_received(line.holder, nbytes, nbytes)
            if at == here:
                self.image.mark_present(max(at - 1, 0) // CHUNK_NBYTES * CHUNK_NBYTES, at)
        self._finish_block(number, digest.digest(), line.holder)

    def _delta(self, line: dialler.HolderConnection) -> bytes:
        """Receive the delta of a block; return b"" if its bytes follow."""
        nbytes = line.number()
        if self._base is None or nbytes > DELTA_NBYTES_MAX:
            raise ConnectionError("sends more than was asked for")
        found = bytearray(nbytes)
        line.receive_all(memoryview(found))
        return bytes(found)

    def _apply(self, holder: Holder, number: int, found: bytes, digest: xxhash.xxh3_128) -> bool:
        """Make a block from its delta; return False if the delta is not valid."""
        if self._base is None:
            raise dialler.HungUp
        start, end = self._asking.range_of(number)
        block = self._data[start:end]
        try:
            apply_block(self._base[start:end], found, block)
        except DeltaError as error:
            with self._changed:
                self._by[number] = holder.name
                self.wrong[holder.name] = f"block {number}: {error}"
                self.again += 1
                self._asking.requeue(number)
            return False
        digest.update(block)
        self.deltas.keep(number, found)
        self._count_received(holder, len(found), end - start)
        self.image.mark_present(start, end)
        return True

    def _count_received(self, holder: Holder, nbytes: int, landed: int) -> None:
        with self._changed:
            self.received[holder.name] = self.received.get(holder.name, 0) + nbytes
            self.landed_nbytes += landed

    def _finish_block(self, number: int, digest: bytes, holder: Holder) -> None:
        with self._changed:
            self._digests[number], self._by[number] = digest, holder.name
            self._asking.mark_received(number)
            self._halves.pop(number, None)
            self._changed.notify_all()

    def _reject_block(self, number: int) -> None:
        """Note a wrong block, and have it requested again, as bytes."""
        name = self._by[number]
        self.image.mark_missing(*self._asking.range_of(number))
        self.deltas.drop(number)
        self._asking.request_again(number)
        self.again += 1
        self.wrong[name] = self.why[name] = f"block {number} is not what was published"
