"""Pull one version from its holders into a slot, over a few connections.

Theory of operation
===================

Each connection has a thread, requests the lowest block that is not under way
(:class:`~replicas.carry.blocks.Blocks`), and keeps two requests open, so that the
server never waits for requests. What arrives is in the pull's
:class:`~replicas.carry.received.Received`, whose lock all of the pull uses.

*Holders* are in order of preference. All connections go to the first that works. A
holder that fails, or is silent (servers send signs of life), is given up for this pull,
and the next one gets its requests. Received bytes stay: a failed pull resumes when
run again. If a further connection cannot be made, the present ones continue, and the
holder stays; so also if this process lacks descriptors, ports or memory. A connection
that breaks in its handshake, as in a flood, is retried :data:`TRIES` times. A holder
that says nothing in a handshake is frozen, and given up if another is left. A slow
holder makes room for another (:mod:`replicas.carry.holders`).

*Deltas.* If both ends have a base (:mod:`replicas.carry.delta`), the puller requests
blocks as deltas, and gets deltas or bytes. It requests a wrong block as bytes.

*Verification.* The version's digest comes over the session, and is the digest of its
blocks' digests. If the received blocks do not match it, the puller asks holders for
their blocks' digests until these match, requests the wrong blocks again, if possible
from other holders, and reports the holder that served them.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from replicas.carry import dialler
from replicas.carry.blocks import combined
from replicas.carry.holders import Holder, Holders
from replicas.carry.image import Image
from replicas.carry.received import Received
from replicas.carry.serve import ASK, CHANGES, DIGESTS, RANGE

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
        """Store ``why`` each holder was given up, by its name; the name "" stands for
        this process, and "deadline" for the time limit."""
        super().__init__("; ".join(f"{name}: {text}" for name, text in why.items()) or "no member can send it")
        self.why = why


class Pull:
    """Receives one version into a slot, from one or more holders. Thread-safe.

    :param memory: the slot's file, mapped for writing.
    :param source: address to connect from; empty means any.
    :param base: the bytes of a version that holders also have, to request deltas.
    :param trips: round trips in seconds by host, shared with other pulls.
    :param encrypt: use TLS, and never connect without.
    :ivar received: the blocks so far, and their holders.
    :ivar holders: those that are left, and why others were given up.
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
        """Keep the arguments, and connect nowhere before :meth:`run`.

        :param image: the part of the slot that the version fills.
        :param memory: the slot's file, mapped for writing.
        :param transfer: the transfer's number. :param secret: shared by its members.
        :param source: address to connect from; empty means any.
        :param base: the bytes of a version that holders also have, to request deltas.
        :param trips: round trips in seconds by host, shared with other pulls.
        :param encrypt: use TLS, and never connect without.
        """
        self.received = Received(image, memory, base)
        self._blocks, self._changed = self.received.blocks, self.received.changed
        self.holders = Holders()
        self._dialler = dialler.Connector(transfer, secret, source, trips, encrypt=encrypt)
        self._running = 0
        self._most = MOST
        self._cut: Counter[Holder] = Counter()
        """By holder: handshakes that broke, in a row."""
        self._lack = self._stopped = ""
        self.active = False

    def run(self, holders: Sequence[Holder], deadline: float, start: Start, digest: str = "") -> str:
        """Pull all missing blocks, verify them, and return the digest. Blocks.

        At its end no thread of it is left. After Failed, what has arrived stays in the
        slot, and the next call pulls the rest.

        :param holders: carriers to pull from, in order of preference.
        :param deadline: of the monotonic clock.
        :param start: starts a thread that runs the given function.
        :param digest: of the version; empty if not known yet, to skip the check.
        :raises Failed: no holder is left, the deadline has passed, or :meth:`stop` was
            called.
        """
        with self._changed:
            self.holders, self.active = Holders(holders), True
        try:
            self._receive_all(deadline, start)
            while digest and combined(self._blocks.digests) != digest:
                self._find_wrong(holders, digest, deadline)
                self._receive_all(deadline, start)
            return combined(self._blocks.digests)
        finally:
            with self._changed:
                self.active = False
                self._changed.notify_all()

    def _receive_all(self, deadline: float, start: Start) -> None:
        """Receive all missing blocks, unverified, over several connections.

        At the end, also after an error, their threads have ended.

        :param deadline: of the monotonic clock.
        :param start: starts a thread that runs the given function.
        :raises Failed: no holder is left, the deadline has passed, or :meth:`stop` was
            called.
        """
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
        """Start connections, each with a thread, until all blocks have arrived, or
        :meth:`stop` was called. The caller ends them.

        Double their number as long as that raises the rate by more than 15 %; move on
        from a slow holder. The caller holds the pull's lock, which is free during
        waits.

        :param deadline: of the monotonic clock.
        :param start: starts a thread that runs the given function.
        :raises Failed: no holder is left, or the deadline has passed.
        """
        best, at, received = 0.0, time.monotonic(), self.received.nbytes
        nbytes = received.total()
        wanted = FIRST_FAR if self._dialler.is_far(self.holders.first) else FIRST
        while not self._blocks.done and not self._stopped:
            if not self._running and (self._lack or not self.holders):
                raise Failed({"": self._lack, **self.holders.why} if self._lack else dict(self.holders.why))
            if (left := deadline - time.monotonic()) <= 0:
                raise Failed({**self.holders.why, "deadline": "the deadline passed"})
            while self.holders and not self._lack and self._running < min(wanted, self._most) and self._blocks.waiting:
                self._add_connection(start)
            self._changed.wait(min(left, LOOK_S))
            slow = self.holders.replace_slow(received, self._blocks.left_nbytes)
            if slow is not None:
                self._dialler.hang_up(slow)
            if (elapsed_s := time.monotonic() - at) >= LOOK_S:
                rate, at, nbytes = (received.total() - nbytes) / elapsed_s, time.monotonic(), received.total()
                if rate > best * PAYS and wanted < MOST and self._blocks.waiting:
                    wanted, best = (2 * wanted if best else wanted), rate

    def _add_connection(self, start: Start) -> None:
        """Start a thread with one more connection, or record that no more can be made.

        The caller holds the lock.

        :param start: starts a thread that runs the given function.
        """
        self._running += 1
        try:
            start(self._connection)
        except RuntimeError as error:
            self._running -= 1
            self._note_shortage(str(error), self._running)

    def _find_wrong(self, holders: Sequence[Holder], digest: str, deadline: float) -> None:
        """Find the blocks with wrong bytes, and queue them to be requested again.

        Ask one holder after the other for the digests of all blocks, until they combine
        to ``digest``, the version's, and so are right. Then make all holders usable
        again; those that served wrong bytes come last.

        :param deadline: of the monotonic clock.
        :raises Failed: no holder knows the blocks' digests, a holder served wrong bytes
            a second time, or :meth:`stop` was called.
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
            except (dialler.ConnectFailed, OSError) as error:
                self.holders.why.setdefault(holder.name, dialler.failure_text(error, holder))
                continue
            if combined(blocks) == digest:
                break
        else:
            raise Failed({**self.holders.why, "": "the bytes are not what was published"})
        with self._changed:
            wrong = [number for number, block in enumerate(blocks) if block != self._blocks.digests[number]]
            liars = {self._blocks.served_by[number] for number in wrong}
            if liars & self.received.wrong.keys():
                raise Failed({**self.holders.why, **self.received.wrong})
            for number in wrong:
                self.received.reject_block(number)
            self.holders.why |= {name: self.received.wrong[name] for name in liars}
            self.holders.restart(sorted(holders, key=lambda one: one.name in self.received.wrong))

    def _digests_of(self, holder: Holder, deadline: float) -> list[bytes]:
        """Connect to a holder, and return the digests of all blocks, as it says.

        :param deadline: of the monotonic clock.
        :raises OSError, ConnectFailed: the holder cannot be reached, or does not answer
            in time.
        :raises HungUp: :meth:`stop` was called.
        """
        with self._dialler.connect(holder) as line:
            line.send(ASK.pack(DIGESTS, 0, 0))
            left = 16 * self._blocks.count
            answer = bytearray(left)
            while left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the deadline passed")
                if piece := line.piece(left):
                    line.receive_all(memoryview(answer)[-left:][:piece])
                    left -= piece
        return [bytes(answer[at : at + 16]) for at in range(0, len(answer), 16)]

    def stop(self, why: str) -> None:
        """Any other thread: end :meth:`run`, which raises Failed; wait for its end.

        No thread writes to the slot then. Each later run fails, too.

        :param why: the reason, for that error.
        """
        with self._changed:
            self._stopped = why
            self._dialler.hang_up()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.active)

    # ------------------------------------------------------------ one connection

    def _connection(self) -> None:
        """Thread of one connection: connect to the first holder, and receive blocks
        until none is missing or the connection fails. Raises no error of it."""
        try:
            with self._changed:
                holder = self.holders.first
            if holder is not None:
                self._use(holder)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _use(self, holder: Holder) -> None:
        """Connect to the holder; receive blocks until none is missing, or an error.

        Raises no error of the connection: the holder is then given up, or fewer
        connections are used.
        """
        with self._changed:
            last = self.holders.is_last(holder)
        try:
            with self._dialler.connect(holder, last=last) as line:
                self._receive_over(line)
        except dialler.HungUp:
            pass
        except dialler.ConnectFailed as error:
            self._not_made(holder, error)
        except OSError as error:
            self._give_up(holder, dialler.failure_text(error, holder), cut=dialler.is_cut(error))

    def _not_made(self, holder: Holder, error: dialler.ConnectFailed) -> None:
        """Decide what a connection that could not be made means for the pull.

        The first five broken handshakes in a row only delay the next try: block
        meanwhile. A holder that is silent in one is retried only if it is the last: it
        may be frozen. If this process lacks a resource, or the holder has other
        connections, limit the number of connections. In all other cases give the holder
        up.
        """
        with self._changed:
            others = self._running - 1
            if isinstance(error, dialler.OutOfResources):
                self._note_shortage(error.why, others)
            elif isinstance(error, dialler.HandshakeBroken) and (not error.cut or self.holders.is_last(holder)):
                self._cut[holder] += 1
                tries, works = self._cut[holder], self._dialler.proven[holder]
                if tries < TRIES:
                    self._changed.wait_for(lambda: self._stopped or self._blocks.done, AGAIN_S * 2 ** (tries - 1))
                elif works:
                    self._most = works
                else:
                    self._give_up(holder, error.why, cut=error.cut)
            elif self._dialler.made[holder]:
                self._most = max(1, others)
            else:
                self._give_up(holder, error.why, cut=error.cut)

    def _note_shortage(self, why: str, others: int) -> None:
        """Limit the connections of this pull to ``others``, the number that exist now.

        Called when this process can have no more of them. If there are none,
        :meth:`run` fails with the reason ``why``. The caller holds the lock.
        """
        self._most = max(1, others)
        self._lack = "" if others else why

    def _give_up(self, holder: Holder, why: str, *, cut: bool) -> None:
        """Use the holder no longer, unless that is so already or the pull is over.

        The next holder may get the full number of connections.

        :param why: the reason. ``cut``: the network path to it seems broken.
        """
        with self._changed:
            if holder in self.holders and not self._stopped and not self._blocks.done:
                self.holders.give_up(holder, why, cut=cut)
                self._most = MOST

    def _receive_over(self, line: dialler.HolderConnection) -> None:
        """Receive blocks over ``line`` until an exception ends the connection.

        That is HungUp once no block is missing. Requested blocks that have not arrived
        are queued again.
        """
        asked: deque[int] = deque()
        with self._changed:
            self._cut[line.holder] = 0
            self.holders.mark_connected(line.holder)
        try:
            while True:
                self._ask(line, asked)
                self.received.receive_block(line, asked[0])
                asked.popleft()
        finally:
            with self._changed:
                for number in asked:
                    self._blocks.requeue(number)
                self._changed.notify_all()

    def _ask(self, line: dialler.HolderConnection, asked: deque[int]) -> None:
        """Request blocks over one connection until it has two open requests, or one if
        few blocks are left to request.

        Block while it has none, and all missing blocks are requested elsewhere.

        :param line: the connection over which they are requested.
        :param asked: numbers of the open requests of this connection, to which the new
            ones are added.
        :raises HungUp: all blocks have arrived, the holder was given up, or
            :meth:`stop` was called.
        """
        with self._changed:
            while True:
                if self._stopped or self._blocks.done or line.holder not in self.holders:
                    raise dialler.HungUp
                new: list[int] = []
                most = ASKED if self._blocks.waiting > self._running else 1
                while len(asked) + len(new) < most and (number := self._blocks.next_block()) is not None:
                    new.append(number)
                asked.extend(new)
                if asked:
                    break
                self._changed.wait()
        if new:
            base, served = self.received.base is not None, self._blocks.served_by  # a block served before was wrong
            kinds = {number: CHANGES if base and not served[number] else RANGE for number in new}
            line.send(b"".join(ASK.pack(kind, *self._blocks.range_of(number)) for number, kind in kinds.items()))
