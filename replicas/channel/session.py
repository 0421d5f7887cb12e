"""One session with the coordinator: a WebSocket that is made anew when it breaks, and goes on where it was.

Theory of operation
===================

All of this runs on the session thread. :meth:`Session.send` appends to an outbox; the writer sends what is above its
cursor, and the coordinator's acks take it out again. A reconnect says ``resume_term`` and how far we got; when the
Welcome is of the same term, the cursor goes back to the first unacknowledged message, so that each is handled exactly
once. A Welcome of another term means that the coordinator is a new one which knows nothing of what was under way: the
outbox is void, numbers start at 1 again, and the handler is told (``resumed=False``): it announces what is still open.

A heartbeat goes out every ``heartbeat_interval_s`` (of the Welcome, or of a later View), and the coordinator acks each. A
connection on which nothing came for :data:`SILENCE_S` is given up and made anew, but never judged right after this process
itself was paused: what had arrived meanwhile is read first.

Reconnecting goes on as long as the channel is open, with growing, jittered delays; operations end by their own deadlines.
A malformed frame ends the connection, and the next one resumes: something on the way may have spoiled it. Only
:class:`Refused`, a refused token and :data:`MALFORMED_MAX` malformed frames with nothing good in between end a session for
good: the handler's ``session_over``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Protocol

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_never, wait_random_exponential
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from replicas import errors
from replicas.channel.loop import SessionLoop
from replicas.messages import (
    Bye,
    FromCoordinator,
    FromMember,
    Heartbeat,
    Hello,
    MemberFrame,
    Refused,
    ServerFrame,
    View,
    Welcome,
    decode_server_frame,
    encode,
    encode_body,
    encode_frame,
)
from replicas.messages.bounds import most_nbytes, text_of

__all__ = ["MALFORMED_MAX", "Session", "SessionHandler"]

logger = logging.getLogger("replicas.channel")
_quiet = logging.getLogger("replicas.channel.websocket")
_quiet.setLevel(logging.ERROR)

DIAL_TIMEOUT_S = 10.0
DIAL_PAUSE_S = 1.0
"""Longest pause between two attempts: a new coordinator waits only a few seconds for the members of the one before."""
SILENCE_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MAX_FRAME_NBYTES = 256 << 20
MALFORMED_MAX = 5
"""Malformed frames in a row: no accident, but a coordinator that speaks another language."""
ACK_AFTER = 64
"""Messages received without anything sent, after which an ack goes out before the next heartbeat."""

_HEARTBEAT = encode_body(Heartbeat())
_TRANSIENT = (OSError, TimeoutError, WebSocketException)


class SessionHandler(Protocol):
    """What a session needs of its channel. Called on the session thread; must not block."""

    def introduce(self, hello: Hello) -> Hello:
        """``hello`` with what this member knows now."""

    def before_heartbeat(self) -> None: ...

    def welcomed(self, welcome: Welcome, resumed: bool) -> None: ...

    def handle(self, message: FromCoordinator) -> None: ...

    def disconnected(self, reason: str) -> None: ...

    def session_over(self, error: errors.ReplicasError) -> None: ...


class _Over(Exception):
    """The session has ended for good."""

    def __init__(self, error: errors.ReplicasError) -> None:
        super().__init__(str(error))
        self.error = error


class Session:
    """See the module's header. :param endpoint: ``host:port``. :param hello: complete but for what changes."""

    def __init__(self, loop: SessionLoop, endpoint: str, token: str, hello: Hello, handler: SessionHandler) -> None:
        self._loop = loop
        self.endpoint = endpoint
        self._token = token
        self._hello = hello
        self._handler = handler
        self.term = 0
        self.connected = False
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._sent = 0
        self._numbered = 0
        self._received = 0
        self._unacked = 0
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._closing = False
        self._heard = 0.0
        self._interval_s = 1.0
        self._task: asyncio.Task[None] | None = None
        self._fd = -1
        self._last_error = ""
        self._malformed = 0

    @property
    def heartbeat_interval_s(self) -> float:
        """How often it sends a sign of life, as the coordinator said last."""
        return self._interval_s

    # ------------------------------------------------------------ for the channel, on the session thread

    async def open(self, timeout_s: float) -> None:
        """Connect for the first time; the handler has been welcomed when this returns.

        :raises replicas.errors.ReplicasError: refused, or nobody answered within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                websocket = await self._dial()
        except _Over as over:
            raise over.error from over.__cause__
        except TimeoutError:
            raise errors.Disconnected(
                f"no coordinator answered at {self.endpoint} within {timeout_s:g} s: {self._last_error or 'silence'}",
                channel=self._hello.channel,
            ) from None
        self._task = self._loop.spawn(self._run(websocket), f"session {self._hello.channel}")

    def send(self, body: FromMember) -> None:
        """Queue a numbered message. Never blocks; it is sent, or sent again, as soon as there is a connection.

        :raises replicas.errors.UsageError: it cannot be encoded, or is too large; nothing is queued.
        """
        if self._closing:
            return
        encoded = self._encoded(body)
        self._numbered += 1
        self._outbox.append((self._numbered, encoded))
        self._wake.set()

    def _encoded(self, body: FromMember) -> bytes:
        kind = type(body).__name__
        try:
            encoded = encode_body(body)
        except Exception as error:
            text = f"a {kind} cannot be sent: {text_of(error)}"
            raise errors.UsageError(text, channel=self._hello.channel) from error
        if len(encoded) > most_nbytes(kind):
            text = f"{kind} of {len(encoded):,} bytes: at most {most_nbytes(kind):,} are taken"
            raise errors.UsageError(text, channel=self._hello.channel)
        return encoded

    def abandon(self) -> None:
        """End at once, without a word: the join was interrupted."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()

    async def close(self, reason: str, timeout_s: float) -> None:
        """Say good-bye (as far as ``timeout_s`` allows) and end."""
        if self._task is None or self._closing:
            return
        if self.connected:
            self.send(Bye(reason))
        self._closing = True
        if self.connected:
            self._flushed.clear()
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), timeout_s)
        self._task.cancel()
        await asyncio.wait([self._task], timeout=timeout_s + CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ connections

    async def _run(self, websocket: ClientConnection) -> None:
        try:
            while True:
                try:
                    await self._serve(websocket)
                except _TRANSIENT as error:
                    self.connected = False
                    logger.info("%s: connection lost: %s", self._hello.channel, _text(error))
                    self._handler.disconnected(_text(error))
                finally:
                    self.connected = False
                    await self._hang_up(websocket)
                if self._closing:
                    return
                websocket = await self._dial()
        except _Over as over:
            self._end(over.error)
        except Exception as error:  # a bug must end the waits on this channel, not hang them
            logger.error("%s: the session ends because of a bug", self._hello.channel, exc_info=error)
            self._end(errors.InternalError(f"{type(error).__name__}: {text_of(error)}", channel=self._hello.channel))

    def _end(self, error: errors.ReplicasError) -> None:
        self._closing = True
        self._flushed.set()
        self._handler.session_over(error)

    async def _hang_up(self, websocket: ClientConnection) -> None:
        try:
            await websocket.close()
        finally:
            transport = websocket.transport
            self._loop.unregister_fd(self._fd)
            transport.abort()

    async def _dial(self) -> ClientConnection:
        """Try until somebody answers; whoever calls limits the time."""
        retrying = AsyncRetrying(
            stop=stop_never,
            wait=wait_random_exponential(multiplier=0.05, max=DIAL_PAUSE_S),
            retry=retry_if_exception_type(_TRANSIENT),
            before_sleep=self._note_error,
            reraise=True,
        )
        connection: ClientConnection = await retrying(self._connect_once)
        return connection

    def _note_error(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None:
            self._last_error = _text(error)

    async def _connect_once(self) -> ClientConnection:
        try:
            websocket = await connect(
                f"ws://{self.endpoint}/session",
                additional_headers={"Authorization": f"Bearer {self._token}"},
                compression=None,
                proxy=None,
                open_timeout=DIAL_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=None,
                max_size=MAX_FRAME_NBYTES,
                logger=_quiet,
                user_agent_header=None,
            )
        except InvalidStatus as error:
            self._judge_status(error)
            raise
        self._fd = websocket.transport.get_extra_info("socket").fileno()
        self._loop.register_fd(self._fd)
        try:
            await self._shake_hands(websocket)
        except BaseException:
            await self._hang_up(websocket)
            raise
        return websocket

    def _judge_status(self, error: InvalidStatus) -> None:
        status = error.response.status_code
        if status in (401, 403):
            raise _Over(
                errors.UsageError(
                    f"the coordinator at {self.endpoint} does not accept the token",
                    channel=self._hello.channel,
                    hint="use the token of the run that listens there (REPLICAS_TOKEN_FILE, or token=...)",
                )
            ) from error
        if 400 <= status < 500:
            raise _Over(
                errors.UsageError(
                    f"{self.endpoint} answers HTTP {status} to a session: it is not a coordinator",
                    channel=self._hello.channel,
                    hint="REPLICAS_ENDPOINT must be the control port of the run",
                )
            ) from error

    async def _shake_hands(self, websocket: ClientConnection) -> None:
        known = self._handler.introduce(self._hello)
        hello = msgspec.structs.replace(known, resume_term=self.term, received=self._received)
        await websocket.send(encode(MemberFrame(0, self._received, hello)))
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            body = self._decode(await websocket.recv()).body
        if isinstance(body, Refused):
            raise _Over(body.error.exception())
        if not isinstance(body, Welcome):
            raise InvalidHandshake(f"the coordinator answered {type(body).__name__} in place of Welcome")
        resumed = self.term != 0 and body.term == self.term
        if resumed:
            self._forget(body.received)
            self._sent = self._outbox[0][0] - 1 if self._outbox else self._numbered
        else:
            self._outbox.clear()
            self._numbered = self._sent = self._received = 0
        self.term = body.term
        self._interval_s = body.settings.heartbeat_interval_s
        self._heard = time.monotonic()
        self.connected = True
        self._handler.welcomed(body, resumed)
        self._wake.set()

    # ------------------------------------------------------------ traffic

    async def _serve(self, websocket: ClientConnection) -> None:
        reader = asyncio.create_task(self._read(websocket), name="session reader")
        writer = asyncio.create_task(self._write(websocket), name="session writer")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for kind in (_Over, Exception):
            for result in results:
                if isinstance(result, kind):
                    raise result

    async def _read(self, websocket: ClientConnection) -> None:
        while True:
            frame = self._decode(await websocket.recv())
            self._heard = time.monotonic()
            self._forget(frame.ack)
            if isinstance(frame.body, Refused):
                raise _Over(frame.body.error.exception())
            if frame.seq == 0 or frame.seq <= self._received:
                continue
            if frame.seq != self._received + 1:
                raise WebSocketException(f"message {frame.seq} came after {self._received}")
            self._received = frame.seq
            if isinstance(frame.body, View) and frame.body.heartbeat_interval_s:
                self._interval_s = frame.body.heartbeat_interval_s
            self._unacked += 1
            if self._unacked >= ACK_AFTER:
                self._wake.set()
            self._handler.handle(frame.body)

    async def _write(self, websocket: ClientConnection) -> None:
        beat = time.monotonic()
        while True:
            self._wake.clear()
            for number, body in list(self._outbox):
                if number > self._sent:
                    self._sent = number
                    await self._put(websocket, number, body)
            if self._closing and self._sent == self._numbered:
                self._flushed.set()
            now = time.monotonic()
            if now >= beat or self._unacked >= ACK_AFTER:
                self._judge_silence(now, late_s=now - beat)
                beat = now + self._interval_s
                self._handler.before_heartbeat()
                await self._put(websocket, 0, _HEARTBEAT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, beat - time.monotonic()))

    async def _put(self, websocket: ClientConnection, number: int, body: bytes) -> None:
        self._unacked = 0
        async with asyncio.timeout(SILENCE_S):
            await websocket.send(encode_frame(number, self._received, body))

    def _judge_silence(self, now: float, late_s: float) -> None:
        if late_s > 2 * self._interval_s:
            self._heard = now  # we were not running ourselves: read first what came meanwhile
        if now - self._heard > max(SILENCE_S, 4 * self._interval_s):
            raise TimeoutError(f"nothing heard for {now - self._heard:.0f} s")

    def _forget(self, acked: int) -> None:
        while self._outbox and self._outbox[0][0] <= acked:
            self._outbox.popleft()

    def _decode(self, data: str | bytes) -> ServerFrame:
        try:
            frame = decode_server_frame(data if isinstance(data, bytes) else data.encode())
        except msgspec.DecodeError as error:
            self._malformed += 1
            if self._malformed < MALFORMED_MAX:
                raise WebSocketException(f"a malformed frame: {error}") from error
            raise _Over(
                errors.InternalError(
                    f"the coordinator at {self.endpoint} sent a malformed frame: {error}",
                    channel=self._hello.channel,
                    hint="use the same version of torch-replicas everywhere",
                )
            ) from error
        if frame.seq:
            self._malformed = 0
        return frame


def _text(error: BaseException) -> str:
    return text_of(error) or type(error).__name__
