"""`Wire`: a connection between a member's session and the engine, in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from replicas import errors
from replicas import messages as protocol
from replicas.coordinator.engine import Engine
from replicas.coordinator.hello_checks import NotYet
from replicas.coordinator.sessions import MemberSession
from replicas.messages.identity import Member


class Wire:
    """In-memory connection of a member's session and the engine: both of its ends.

    All calls are on the session thread.

    :param introduced: called with this wire and the member of its Hello.
    :param accepted: whether the member's token is the run's.
    :ivar frozen: nothing passes in either direction until this event is set; None: all
        frames pass.
    """

    def __init__(self, engine: Engine, introduced: Callable[[Wire, Member], None], *, accepted: bool) -> None:
        """Make a connection between a session and the coordinator's engine; send
        nothing.

        :param introduced: called with this wire and the member that the first message
            names, when the engine has accepted that member.
        :param accepted: whether the member's token is the run's; if not, its first
            message is answered by a refusal.
        """
        self._engine = engine
        self._accepted = accepted
        self._introduced = introduced
        self._session: MemberSession | None = None
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._cut = asyncio.Event()
        self.frozen: asyncio.Event | None = None
        self._heard = time.monotonic()
        self.on_writable: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ the member's end

    fd = -1

    @property
    def heard(self) -> float:
        """Time (``time.monotonic()``) of the coordinator's last message. While the wire
        is frozen, the present time.

        So the session does not see a silence of the coordinator: a process that is
        really stopped does not notice the time, and reads the waiting messages when it
        wakes.
        """
        return time.monotonic() if self.frozen is not None else self._heard

    async def send(self, message: bytes, /) -> None:
        """Pass the member's message to the engine in this process; while frozen, wait
        first. A message that the engine rejects cuts the connection.

        :raises ConnectionError: the connection was cut before.
        """
        await self._passes()
        if self._cut.is_set():
            raise ConnectionError("the connection was cut")
        frame = protocol.decode_member_frame(message)
        if isinstance(frame.body, protocol.Hello):
            self._introduce(frame.body)
        elif self._session is not None and not self._engine.receive(self._session, frame):
            self.abort()

    async def recv(self) -> bytes:
        """Wait for the next frame of the coordinator, and return it. Raises
        ConnectionError after a cut, once no written frame is left."""
        cut = asyncio.ensure_future(self._cut.wait())
        frame = asyncio.ensure_future(self._frames.get())
        try:
            await asyncio.wait((cut, frame), return_when=asyncio.FIRST_COMPLETED)
            await self._passes()
            if not frame.done():
                raise ConnectionError("the connection was cut")
            return frame.result()
        finally:
            cut.cancel()
            frame.cancel()

    async def close(self) -> None:
        """Cut the connection, unless it is cut. The engine keeps the member's session
        (until its lease ends), which may resume over another wire."""
        self.abort()

    def abort(self) -> None:
        """Cut the connection, and detach the member's session from it at the engine;
        frames that the coordinator has written before still arrive."""
        if not self._cut.is_set():
            self._cut.set()
            if self._session is not None:
                self._engine.detach(self._session, self)

    async def _passes(self) -> None:
        """Wait until messages may pass: return immediately unless the wire is
        frozen."""
        while (frozen := self.frozen) is not None:
            await frozen.wait()

    # ------------------------------------------------------------ the coordinator's end

    def _introduce(self, hello: protocol.Hello) -> None:
        """Open the member's session at the engine, or queue the refusal as its answer.
        Cut the connection if the engine cannot take the member yet; the session then
        tries again.

        :param hello: the member's first message.
        """
        try:
            if not self._accepted:
                raise errors.UsageError(f"this fake run does not accept the token of {hello.member}")
            self._session = self._engine.open(hello, self, "127.0.0.1", "127.0.0.1")
        except NotYet:
            self.abort()
            return
        except errors.ReplicasError as error:
            refused = protocol.Refused(protocol.WireError.of(error))
            self.write([protocol.encode(protocol.ServerFrame(0, 0, refused))])
            return
        self._introduced(self, hello.member)

    def takes_more(self) -> bool:
        """Return True if the coordinator may write: always, until the connection is
        cut."""
        return not self._cut.is_set()

    def rtt_s(self) -> float:
        """Return the round-trip time in seconds: a small constant."""
        return 1e-6  # 0 would mean that it is not known

    def write(self, messages: Sequence[bytes]) -> None:
        """Queue the coordinator's messages for the member's :meth:`recv`, also while
        frozen or after a cut; never wait."""
        self._heard = time.monotonic()
        for message in messages:
            self._frames.put_nowait(message)
