"""A session with the coordinator: a WebSocket that reconnects and resumes.

Theory of operation
===================

All of this runs on the session thread. :meth:`Session.send` appends to an outbox; the
coordinator's acks remove messages. After a reconnect to the same term the others are
sent again; after one to a new coordinator (another term) the outbox is discarded, and
the handler (``resumed=False``) announces the work that is still open.

A heartbeat goes out every ``heartbeat_interval_s``, and the coordinator acks each; of a
message that arrives slowly it acks the bytes. A connection on which no *byte* arrived
for the time of three acks is replaced: a slow link is not a dead one. A connection is
never judged right after this process itself was suspended: data that arrived meanwhile
is read first. That data may be out of date, so the handler's ``paused`` comes before.

The session reconnects as long as the channel is open; operations end by their own
deadlines. Each failed try in a row brings a longer, jittered pause and a longer
timeout. Three things end a session for good, by the handler's ``session_over``: the
message ``Refused``, a refused token, and :data:`MALFORMED_MAX` malformed frames in a
row. Before that a malformed frame ends only its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_never, wait_random_exponential
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from replicas import errors
from replicas import messages as wire
from replicas.channel.session.connection import CLOSE_TIMEOUT_S, FrameConnection, dial
from replicas.channel.session.loop import SessionLoop
from replicas.channel.session.outbox import Outbox
from replicas.common.backoff import Backoff
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import cancelled, is_set_within, say_if_slow
from replicas.messages.bounds import clean, most_nbytes, text_of
from replicas.status import WAIT_S

logger = Log("replicas.channel")

REACH_S = 2.0
"""Limit for the TCP connection: a new try comes before a repeated SYN (1, 3, 7 s)."""
ANSWER_S = 10.0
"""Limit from then to the Welcome: a suspended coordinator answers when it resumes."""
DIAL_PAUSE_S = 1.0
"""Longest pause between tries: a new coordinator waits only seconds for members."""
FRUITLESS_PAUSE_S = 5.0
"""Longest pause after connections that brought no new message."""
LIVED_S = 10.0
"""Seconds after which a connection does not count as a failed try."""
MISSED_ACKS = 3
SLACK_S = 0.5
SILENCE_S = 10.0
"""Longest silence tolerated, unless the coordinator asks for few heartbeats."""
MALFORMED_MAX = 5
"""Malformed frames in a row that end the session: the coordinator is incompatible."""
ACK_AFTER = 64
"""Messages received since the last send that trigger an ack before a heartbeat."""

_T = TypeVar("_T")
_HEARTBEAT = wire.encode_body(wire.Heartbeat())
_TRANSIENT = (OSError, TimeoutError, WebSocketException)
# random: all members lose a coordinator at once
_unreached = wait_random_exponential(multiplier=0.05, max=DIAL_PAUSE_S)
_fruitless = wait_random_exponential(multiplier=0.05, max=FRUITLESS_PAUSE_S)


class SessionHandler(Protocol):
    """Callbacks of a session to its channel, on the session thread; must not block."""

    def update_hello(self, hello: wire.Hello) -> wire.Hello:  # add the member's current state
        """Return ``hello`` with the member's current state."""

    def before_heartbeat(self) -> None:
        """Send messages that are due; they go out before the heartbeat."""

    def welcomed(self, welcome: wire.Welcome, resumed: bool) -> None:
        """Handle a Welcome; unless ``resumed``, announce all open work."""

    def handle(self, message: wire.FromCoordinator) -> None:
        """Handle one message of the coordinator; each comes once, in order."""

    def paused(self) -> None:
        """Handle a suspension of this process: the next messages may be out of date."""

    def disconnected(self, reason: str) -> None:
        """Handle the loss of a connection; the session reconnects on its own."""

    def session_over(self, error: errors.ReplicasError) -> None:
        """End the channel's work with ``error``: the session ended for good."""


class _Over(Exception):
    """The session has ended for good."""

    def __init__(self, error: errors.ReplicasError) -> None:
        """Store the error with which the session ends."""
        super().__init__(str(error))
        self.error = error


class _Fruitless(Exception):
    """A connection has ended before any new message went either way."""


class Session:
    """A member's session with a coordinator, reconnecting until it is closed."""

    def __init__(
        self,
        loop: SessionLoop,
        endpoint: str,
        token: str | Callable[[], str],
        hello: wire.Hello,
        handler: SessionHandler,
        *,
        token_owners: frozenset[int] | None = None,
    ) -> None:
        """Store the arguments; connect nothing before :meth:`open`. ``token``: the join
        token, or a function that reads it for each connection. ``handler``: the
        channel, called on the session thread. ``token_owners``: users who may own the
        port."""
        self._loop = loop
        self.endpoint = endpoint
        self._token = token if callable(token) else lambda: token
        self._token_owners = token_owners
        self._hello = hello
        self._handler = handler
        self.term = 0
        self.connected = False
        self._outbox = Outbox()
        self._received = self._unacked = 0
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._closing = False
        self.heartbeat_interval_s = 1.0
        self._in_vain = 0
        self._gained = (0, 0)
        self._task: asyncio.Task[None] | None = None
        self._last_error = ""
        self._malformed = 0
        self._heard = 0.0
        self._clock = PauseClock(0.0)

    # ------------------------------------------- for the channel, on the session thread

    async def open(self, timeout_s: float) -> None:
        """Connect within ``timeout_s``, or raise Disconnected, or the coordinator's
        refusal. Then start the task that keeps the session alive."""
        try:
            with say_if_slow(self._tell_wait, f"up to {timeout_s:g} s"):
                async with asyncio.timeout(timeout_s):
                    connection = await self._retrying(self._connect_once)
        except _Over as over:
            raise over.error from over.__cause__
        except TimeoutError:
            text = f"no coordinator answered at {self.endpoint} within {timeout_s:g} s: {self._last_error or 'silence'}"
            raise errors.Disconnected(text, channel=self._hello.channel) from None
        self._task = self._loop.spawn(self._run(connection), f"session {self._hello.channel}")

    def send(self, body: wire.FromMember) -> None:
        """Queue a message unless closing; raise UsageError if it cannot be sent."""
        if self._closing:
            return
        kind, channel = type(body).__name__, self._hello.channel
        try:
            encoded = wire.encode_body(body)
        except Exception as error:
            raise errors.UsageError(f"cannot encode a {kind}: {text_of(error)}", channel=channel) from error
        if len(encoded) > most_nbytes(kind):
            text = f"a {kind} of {len(encoded):,} bytes exceeds the limit of {most_nbytes(kind):,}"
            raise errors.UsageError(text, channel=channel)
        self._outbox.append(encoded)
        self._wake.set()

    async def close(self, reason: str, timeout_s: float) -> None:
        """Send Bye within ``timeout_s`` if connected; end the session's task, and wait.

        :param reason: the text of the Bye.
        """
        if self._task is None or self._closing:
            self._closing = True
            return
        if self.connected:
            self._flushed.clear()
            self.send(wire.Bye(reason))  # before _closing, after which nothing is sent
        self._closing = True
        if self.connected:
            await is_set_within(self._flushed, timeout_s)
        self._task.cancel()
        await asyncio.wait([self._task], timeout=timeout_s + CLOSE_TIMEOUT_S)

    async def _run(self, first: FrameConnection) -> None:
        """Serve the connection ``first``, then new ones, until the session's end."""
        there = [first]  # open() has made the first connection, later tries make their own

        async def use() -> None:
            """Serve a connection, the first or a new one, to its end."""
            await self._use(there.pop() if there else await self._connect_once())

        try:
            while not self._closing:
                await self._retrying(use)
        except _Over as over:
            self._end(over.error)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # any error must end the waits on this channel, not hang them
            logger.error("ending channel %s because of a bug; please report this", self._hello.channel, exc_info=error)
            self._end(errors.InternalError(f"{type(error).__name__}: {text_of(error)}", channel=self._hello.channel))

    async def _use(self, connection: FrameConnection) -> None:
        """Serve a connection until it is lost, and close it. Raise _Fruitless if that
        was soon, and no new message was received, and none of ours acknowledged."""
        began = time.monotonic()
        ended: BaseException | None = None
        try:
            await self._serve(connection)
        except _TRANSIENT as error:
            self.connected, ended = False, error
            logger.info("channel %s: reconnecting; lost the coordinator: %s", self._hello.channel, _text(error))
            self._handler.disconnected(_text(error))
            asyncio.get_running_loop().call_later(WAIT_S, self._tell_wait, "while operations end by their deadlines")
        finally:
            self.connected = False
            await _hang_up(connection, self._loop.fds)
        before, self._gained = self._gained, (self._outbox.acked, self._received)
        if self._gained == before and time.monotonic() - began < LIVED_S and not self._closing:
            raise _Fruitless(_text(ended) if ended is not None else "the coordinator closed the connection") from ended

    def _tell_wait(self, end: str) -> None:
        """Log, unless connected, that the session waits; ``end`` tells until when."""
        if not (self.connected or self._closing):
            name, why = self._hello.channel, self._last_error or "no answer yet"
            logger.warning("channel %s: waiting for a coordinator at %s, %s: %s", name, self.endpoint, end, why)

    async def _retrying(self, function: Callable[[], Awaitable[_T]]) -> _T:
        """Return ``function()``, retried after pauses while the connection fails."""
        self._in_vain = 0
        found: _T = await AsyncRetrying(
            stop=stop_never, wait=self._pause_s, retry=retry_if_exception_type((*_TRANSIENT, _Fruitless)), reraise=True
        )(function)
        return found

    def _end(self, error: errors.ReplicasError) -> None:
        """Stop the session for good, and pass ``error`` to the handler."""
        self._closing = True
        self._flushed.set()
        self._handler.session_over(error)

    def _pause_s(self, state: RetryCallState) -> float:
        """After a failed try (tenacity's callback), keep its error, count it if
        fruitless, and return the seconds to wait: more after a fruitless connection."""
        error = state.outcome.exception() if state.outcome is not None else None
        fruitless = isinstance(error, _Fruitless)
        self._in_vain += fruitless
        if error is not None:
            self._last_error = _text(error)
        return float((_fruitless if fruitless else _unreached)(state))

    async def _connect_once(self) -> FrameConnection:
        """Return a new connection after the handshake; _Over if no retry can help."""
        async with asyncio.timeout(REACH_S) as limit:

            def reached() -> None:
                """Give the handshake more time: TCP has connected."""
                limit.reschedule(asyncio.get_running_loop().time() + ANSWER_S)

            try:
                connection = await dial(self.endpoint, self._token(), reached, self._token_owners)
            except InvalidStatus as error:
                if (refusal := _refusal(error, self.endpoint)) is not None:
                    refusal.channel = self._hello.channel
                    raise _Over(refusal) from error
                raise
            except errors.UsageError as error:
                if self.term:  # another program may own the port for a moment
                    raise ConnectionRefusedError(str(error)) from error
                error.channel = self._hello.channel
                raise _Over(error) from error
            self._loop.fds.add(connection.fd)
            try:
                await self._shake_hands(connection)
            except BaseException:
                await _hang_up(connection, self._loop.fds)
                raise
            return connection

    async def _shake_hands(self, connection: FrameConnection) -> None:
        """Send Hello; take over the Welcome, and call the handler's ``welcomed``."""
        known = self._handler.update_hello(self._hello)
        hello = msgspec.structs.replace(known, resume_term=self.term, received=self._received)
        await connection.send(wire.encode(wire.MemberFrame(0, self._received, hello)))
        body = self._decode(await connection.recv()).body
        if isinstance(body, wire.Refused):
            raise _Over(body.error.exception())
        if not isinstance(body, wire.Welcome):
            raise InvalidHandshake(f"the coordinator answered the join with a message {type(body).__name__}")
        resumed = self.term != 0 and body.term == self.term
        if resumed:
            self._outbox.drop_acked(body.received)
            self._outbox.rewind()
        else:
            self._outbox, self._received = Outbox(), 0
        self.term = body.term
        self.heartbeat_interval_s = body.settings.heartbeat_interval_s
        self.connected = True
        self._handler.welcomed(body, resumed)
        self._wake.set()

    async def _serve(self, connection: FrameConnection) -> None:
        """Read, write and listen until one of the three fails; raise that error."""
        self._reset_silence(time.monotonic())
        work = (self._read, self._write, self._listen)
        tasks = [asyncio.create_task(part(connection), name=f"session {part.__name__}") for part in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            results = await cancelled(*tasks)
        for kind in (_Over, Exception):  # an end for good counts more than a lost connection
            for result in results:
                if isinstance(result, kind):
                    raise result

    async def _read(self, connection: FrameConnection) -> None:
        """Pass each new message to the handler; raise at the connection's end."""
        while True:
            frame = self._decode(await connection.recv())
            self._outbox.drop_acked(frame.ack)
            if isinstance(frame.body, wire.Refused):
                raise _Over(frame.body.error.exception())
            if frame.seq == 0 or frame.seq <= self._received:  # no number, or handled before the reconnect
                continue
            if frame.seq != self._received + 1:
                raise WebSocketException(f"message {frame.seq} came after {self._received}")
            self._received = frame.seq
            if isinstance(frame.body, wire.View) and frame.body.heartbeat_interval_s:
                self.heartbeat_interval_s = frame.body.heartbeat_interval_s
            self._unacked += 1
            if self._unacked >= ACK_AFTER:
                self._wake.set()
            self._note_pause()
            self._handler.handle(frame.body)

    async def _write(self, connection: FrameConnection) -> None:
        """Send queued messages as they come, and heartbeats, until a send fails."""
        beat = time.monotonic()
        while True:
            self._wake.clear()
            for number, body in self._outbox.unsent():
                await self._put(connection, number, body)
            if self._closing and self._outbox.all_sent:
                self._flushed.set()
            now = time.monotonic()
            if now >= beat or self._unacked >= ACK_AFTER:
                beat = now + self.heartbeat_interval_s
                self._handler.before_heartbeat()
                await self._put(connection, 0, _HEARTBEAT)
            await is_set_within(self._wake, max(0.0, beat - time.monotonic()))

    async def _put(self, connection: FrameConnection, number: int, body: bytes) -> None:
        """Send one frame: ``number`` (0: unnumbered), the newest ack, and ``body``."""
        self._unacked = 0
        await connection.send(wire.encode_frame(number, self._received, body))

    async def _listen(self, connection: FrameConnection) -> None:
        """Raise TimeoutError when no byte has arrived for too long."""
        while True:
            self._clock.due = time.monotonic() + self.heartbeat_interval_s / 2
            await asyncio.sleep(self.heartbeat_interval_s / 2)
            self._note_pause()
            self._heard = max(self._heard, connection.heard)
            missed_s = MISSED_ACKS * self.heartbeat_interval_s + SLACK_S
            patience_s = Backoff(missed_s, max(missed_s, SILENCE_S)).after(self._in_vain)  # more each time
            silence_s = time.monotonic() - self._heard
            if silence_s > patience_s:
                raise TimeoutError(f"no bytes came for {silence_s:.1f} s")

    def _reset_silence(self, now: float) -> None:
        """Measure silence, and suspensions of this process, from ``now``."""
        self._heard, self._clock.due = now, now + self.heartbeat_interval_s / 2

    def _note_pause(self) -> None:
        """Reset the silence, and tell the handler, if this process was suspended."""
        now = time.monotonic()
        if self._clock.measure_pause(now):
            self._reset_silence(now)  # first read what arrived meanwhile
            self._handler.paused()

    def _decode(self, data: str | bytes) -> wire.ServerFrame:
        """Decode a frame. If it is malformed, raise WebSocketException, to reconnect;
        raise _Over, which ends the session, if it is the fifth malformed one in a
        row."""
        try:
            frame = wire.decode_server_frame(data if isinstance(data, bytes) else data.encode())
        except msgspec.DecodeError as error:
            self._malformed += 1
            if self._malformed < MALFORMED_MAX:
                raise WebSocketException(f"a malformed frame: {error}") from error
            text = f"the coordinator at {self.endpoint} sent a malformed frame: {error}"
            hint = "use the same version of torch-replicas everywhere"
            raise _Over(errors.InternalError(text, channel=self._hello.channel, hint=hint)) from error
        if frame.seq:  # not a Welcome, which precedes each malformed frame
            self._malformed = 0
        return frame


async def _hang_up(connection: FrameConnection, fds: set[int]) -> None:
    """Close the connection, and forget its descriptor in ``fds``."""
    try:
        await connection.close()
    finally:
        fds.discard(connection.fd)
        connection.abort()


def _refusal(error: InvalidStatus, endpoint: str) -> errors.UsageError | None:
    """Return the error for an HTTP status that refuses for good, or None to retry."""
    status = error.response.status_code
    if status in (401, 403):
        text = f"the coordinator at {endpoint} does not accept the token{_reason(error)}"
        hint = "use the token of the run that listens there (REPLICAS_TOKEN_FILE, or token=...)"
    elif 400 <= status < 500:
        text = f"{endpoint} is not a coordinator: it answers HTTP {status} to a session"
        hint = "REPLICAS_ENDPOINT must be the control port of the run"
    else:
        return None
    return errors.UsageError(text, hint=hint)


def _reason(error: InvalidStatus) -> str:
    """Return the reason in a coordinator's refusal, in parentheses, or ""."""
    try:
        body = msgspec.json.decode(error.response.body or b"", type=dict[str, str])
    except msgspec.MsgspecError:
        return ""
    return f" ({clean(body.get('error', ''))[:100]})"


def _text(error: BaseException) -> str:
    """Return the text of ``error``, or the name of its type if that is empty."""
    return text_of(error) or type(error).__name__
