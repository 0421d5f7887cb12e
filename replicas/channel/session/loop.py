"""The session thread: one daemon thread per process, one asyncio loop for all channels.

Theory of operation
===================

The user's threads never touch a socket. They pass functions to this loop
(:meth:`SessionLoop.call`) and wait, if at all, on a
:class:`~replicas.channel.session.pending.Pending`. State of the loop changes on its
thread only.

**Fork.** A forked child (a DataLoader worker) inherits the descriptors but not the
thread. If the child kept a session open, it would hide the death of the rank. In the
child each registered descriptor, epoll's too, is therefore replaced by ``/dev/null``:
the number stays taken, so that an object that still has it cannot close an unrelated
file. The child keeps the objects alive, unused, so that no finaliser runs on them.

**The thread does not end on errors.** An exception that escapes the loop (a SystemExit
in a handler, say) ends every channel with InternalError, so that no caller waits
forever; then the loop runs again, for later joins. If it cannot, because this process
has closed its descriptors (as libraries that daemonise do), the thread ends for good.
Other files may have its numbers by then, so it closes none of them. The program's code
never runs here: log handlers have a thread of their own (:mod:`replicas.common.logs`),
and the caller's thread makes the texts of the program's exceptions.

**Every wait ends.** All waits for this thread, and their limits:

=============================  ================================================
``SessionLoop.run``            its ``timeout_s``
``Pending.wait``, ``await``    the deadline of the operation, on this thread
``close``: open operations     the deadlines of the operations
``close``: leaving             ``CLOSE_TIMEOUT_S``
publish: admission, a slot     the publish's deadline, plus an allocation
=============================  ================================================

They are waits on a :class:`~replicas.channel.session.pending.Pending`, each of which
fails when this thread ends for good (:attr:`SessionLoop.end`), or a Latch with a limit.

**Exit.** At interpreter exit the open channels say good-bye, then the loop ends.
``atexit`` functions run before daemon threads are frozen.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from replicas import errors
from replicas.carry.rank_side import Carrier
from replicas.channel.session.pending import Promise, SessionEnd
from replicas.common.logs import Log
from replicas.common.tasks import cancelled, result_of
from replicas.common.waits import locked
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress
from replicas.messages.bounds import text_of
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.sidecar.rank_side.forkserver_client import Forkserver, Unusable
from replicas.sidecar.rank_side.sidecar_handle import Sidecar
from replicas.trust.certificate import make_pem

T = TypeVar("T")
logger = Log("replicas.channel")

EXIT_TIMEOUT_S = 3.0
ENDS_MAX = 100
"""Number of unexpected ends of the loop after which its thread ends for good."""


class SessionLoop:
    """The thread with the asyncio loop of all channels (:func:`session_loop`)."""

    def __init__(self) -> None:
        """Make the loop; :meth:`start_thread` starts the thread that runs it."""
        self.pid = os.getpid()
        self.fds: set[int] = set()
        """Descriptors that a forked child must not keep open."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forkservers: dict[str, asyncio.Task[Forkserver]] = {}
        self._own_forkserver: KeptForkserver | None = None
        self._carriers: dict[tuple[str, int], asyncio.Task[Carrier]] = {}
        self.inherited: set[Forkserver | KeptForkserver | Sidecar | Carrier] = set()
        """Connections whose descriptors a forked child must not keep open either."""
        self.closers: dict[object, Callable[[], None]] = {}
        """Close functions of open channels; called at exit, newest first."""
        self.users: set[Callable[[errors.ReplicasError], None]] = set()
        """Functions that end the open channels if the loop ends; session thread."""
        self.end = SessionEnd()
        """Fails all waits for this thread when it ends."""
        self._stopping = self._begun = self._over = False
        self._ends = 0
        selector = selectors.DefaultSelector()
        if isinstance(selector, selectors.EpollSelector):
            self.fds.add(selector.fileno())
        self.loop = asyncio.SelectorEventLoop(selector)
        self.loop.set_exception_handler(_log_exception)
        self.loop.slow_callback_duration = math.inf  # asyncio's own logger has handlers of the program
        self._thread = threading.Thread(target=self._run, name="replicas-session", daemon=True)

    def start_thread(self) -> SessionLoop:
        """Start the thread and return this object; raise NoCapacity if it cannot start.

        (In the constructor, an interrupt would lose it.)
        """
        try:
            with naming_limits():
                self._thread.start()
        except OSError as error:
            self.loop.close()
            text = f"cannot start the session thread: {error.strerror}"
            raise errors.NoCapacity(text, phase="join") from error
        return self

    def _run(self) -> None:
        """On the thread: run the loop until exit, again after unexpected ends.

        After :data:`ENDS_MAX` such ends, or an OSError of the loop itself, end for
        good. At the end fail all waits for this thread (:attr:`end`).
        """
        self._begun = True
        asyncio.set_event_loop(self.loop)
        try:
            while self._ends < ENDS_MAX:
                error: BaseException | None = None
                try:
                    self.loop.run_forever()
                except BaseException as raised:  # noqa: BLE001  # no caller may wait for this thread
                    error = raised
                if self._stopping:
                    return
                self._handle_unexpected_end(error)
                if isinstance(error, OSError):  # the loop's descriptors were closed: the numbers may be other files now
                    _abandoned.append(self)
                    return
            self.loop.close()
        finally:
            self._over = True
            self.end.set()

    def _handle_unexpected_end(self, error: BaseException | None) -> None:
        """Log that the loop has ended; end all open channels with an error.

        :param error: what the loop raised; None if it was stopped.
        """
        self._ends += 1
        self.end.error = _loop_ended(error)
        logger.critical("%s", self.end.error.message, exc_info=error)
        for end in list(self.users):
            try:
                end(_loop_ended(error))
            except BaseException:
                logger.exception("going on after a bug in closing a channel; please report this")

    @property
    def alive(self) -> bool:
        """True while queued calls will run, that is, until the thread ends.

        (``Thread.is_alive`` is wrong after an interrupt.)
        """
        return self._begun and not self._over and not self._stopping

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Any thread: run ``function(*args)`` on the loop soon, in call order.

        Never raises: once the thread has ended, the waiters' Pendings fail. If
        ``function`` raises, that is only logged.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *args)

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None) -> T:
        """Other threads: run a coroutine on the loop; block for its value.

        :param make: called on the loop; returns the coroutine.
        :param timeout_s: limit in seconds. None: the coroutine has a deadline of its
            own, and runs to its end even if an interrupt ends this call: it must then
            free its result itself, as no caller gets that.
        :raises TimeoutError: it took longer than ``timeout_s``. If the wait fails for
            any reason, the coroutine is cancelled, unless ``timeout_s`` is None.
        :raises replicas.errors.InternalError: this is the session thread.
        """
        if threading.current_thread() is self._thread:
            raise errors.InternalError("the session thread cannot wait for itself")
        pending: Promise[T] = Promise("a call", self.end)
        tasks: list[asyncio.Task[None]] = []
        try:
            self.call(lambda: tasks.append(self.spawn(self._resolve_from(pending, make), "a call")))
            return pending.wait_for_session(timeout_s)
        except BaseException:
            if timeout_s is not None:
                self.call(lambda: [task.cancel() for task in tasks])
            raise

    @staticmethod
    async def _resolve_from(pending: Promise[T], make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Await the coroutine of ``make()``; end ``pending`` with its outcome."""
        try:
            pending.resolve(await make())
        except asyncio.CancelledError:
            pending.fail(errors.Gone("the call was cancelled before its end", hint=""))
            raise
        except BaseException as error:  # noqa: BLE001  # for the waiter
            # a SystemExit or the like must not end the waiting threads
            pending.fail(error if isinstance(error, Exception) else _as_internal(error))

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Session thread: start a task named ``name``, and keep it until it has ended.

        Its exception is logged as a bug, and ends no channel.
        """
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        """Forget an ended task, and log its unhandled error."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("going on after a bug in task %s; please report this", task.get_name(), exc_info=error)

    async def forkserver(self, name: str | None) -> Forkserver:
        """Return a connection to a forkserver: a process that forks sidecars.

        Connects at the first call, or if the last connection ended or failed. All
        channels share it.

        :param name: socket of a node's forkserver; None: this process keeps one.
        :raises OSError, RuntimeError: none could be reached or started.
        """
        key = name or ""
        task = self._forkservers.get(key)
        known = result_of(task)
        if task is None or (task.done() and (known is None or not known.alive)):
            self.inherited -= {known}
            label = SocketAddress.parse(key).name or "of this process"
            task = self.loop.create_task(self._connected(name), name=f"forkserver {label}")
            self._forkservers[key] = task
        return await asyncio.shield(task)

    async def _connected(self, name: str | None) -> Forkserver:
        """Return a new connection to forkserver ``name`` (None: to one of our own).

        Starts one of our own also if that of ``name`` (of the node's agent) has ended,
        or is of another release. Adds the connection's descriptors to
        :attr:`inherited`.
        """
        try:
            forkserver = await Forkserver.connect(name or self._keep_forkserver())
        except Unusable as error:
            if not name:
                raise
            logger.warning("starting a process of its own (150 MB) that forks helper processes: %s", error)
            forkserver = await Forkserver.connect(self._keep_forkserver())
        self.inherited.add(forkserver)
        return forkserver

    def _keep_forkserver(self) -> str:
        """Return the address of this process's own forkserver.

        If there is none, or it was given up, make its socket; the process starts at the
        first connection, and again if it dies. The kernel kills it (by a death signal)
        when the session thread ends, at the latest.
        """
        if self._own_forkserver is None or self._own_forkserver.over:
            self._own_forkserver = KeptForkserver(os.environ, _log_given_up)
            self.inherited.add(self._own_forkserver)
        return self._own_forkserver.address

    async def carrier(self, address: str, port: int, *, encrypt: bool) -> Carrier:
        """Return this process's transfer server (carrier), which is a child process.

        Starts it at the first call, or if the last one ended. Channels share it.

        :param address: IP address of this member, at which it listens.
        :param port: the first port to try, or 0 for any.
        :param encrypt: give the carrier a TLS certificate if it has none.
        :raises replicas.carry.rank_side.CarrierDied: it could not be started.
        """
        task = self._carriers.get((address, port))
        known = result_of(task)
        if task is None or (task.done() and (known is None or not known.usable)):
            task = self.loop.create_task(self._make_carrier(address, port), name=f"carrier at {address}")
            self._carriers[address, port] = task
        carrier = await asyncio.shield(task)
        if encrypt and not carrier.certificate_hash:
            pem = await asyncio.to_thread(make_pem)
            if not carrier.certificate_hash:  # another channel may have certified it meanwhile
                carrier.certify(pem)
        return carrier

    async def _make_carrier(self, address: str, port: int) -> Carrier:
        """Start a carrier process that listens at ``address``, and return it.

        Until it ends, its descriptors are in :attr:`inherited`, so that a forked child
        of this process replaces them.

        :param port: the first port to try, or 0 for any.
        """
        carrier = await Carrier.start(address, port)
        self.inherited.add(carrier)
        carrier.ends.append(lambda: self.inherited.discard(carrier))
        return carrier

    def close(self) -> None:
        """Main thread, at exit: close all channels, helper processes and the loop.

        Blocks for a few seconds at most, unless a channel takes long to leave. Waits
        that are still open then fail with Gone; the loop is of no use any more.
        """
        if self._over:
            if self not in _abandoned:
                self.loop.close()
            return
        for closer in reversed(list(self.closers.values())):
            closer()
        try:
            self.run(self._finish, EXIT_TIMEOUT_S)
        except TimeoutError:
            logger.warning("no longer waiting for the session thread, which did not end in %s s", EXIT_TIMEOUT_S)
        self.end.error = errors.Gone("this process ends", hint="")
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(EXIT_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    async def _finish(self) -> None:
        """End this process's forkserver and carriers; drop connections to forkservers.

        Then cancel all other tasks of the loop, and wait for their ends.
        """
        for task in self._forkservers.values():
            if (forkserver := result_of(task)) is not None:
                forkserver.close()
        if self._own_forkserver is not None:
            await self._own_forkserver.aclose()
        for starting in self._carriers.values():
            if (carrier := result_of(starting)) is not None:
                carrier.kill()
            starting.cancel()
        await cancelled(*(asyncio.all_tasks() - {asyncio.current_task()}))

    def abandon(self) -> None:
        """In a forked child: replace the parent's descriptors by ``/dev/null``.

        They are those of the loop, its sessions and its helper processes. The numbers
        stay taken, so that no other file gets them.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self.fds.union(*(connection.fds for connection in self.inherited)):
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def _as_internal(error: BaseException) -> errors.InternalError:
    """Return (do not raise) an InternalError with the type and text of ``error``."""
    return errors.InternalError(f"{type(error).__name__}: {text_of(error)}")


def _loop_ended(error: BaseException | None) -> errors.ReplicasError:
    """Return the error that all channels get when the loop has ended.

    :param error: the error that ended the loop; None if the loop was stopped.
    """
    why = "it was stopped" if error is None else f"{type(error).__name__}: {text_of(error)}"
    text = f"the session thread's loop has ended: {why}"
    if not isinstance(error, OSError):
        return errors.InternalError(text)
    text = f"{text}: this process has closed file descriptors of this library"
    return errors.Disconnected(text, hint="join again; close descriptors (to daemonise, say) before the first join")


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that asyncio reports: the loop's exception handler."""
    logger.error("%s", context.get("message"), exc_info=context.get("exception"))


def _log_given_up(reason: str) -> None:
    """Log that this process's own forkserver is not started again."""
    logger.error("continuing without process groups in this process: its forkserver, which starts helpers, %s", reason)


_lock = threading.Lock()
_current: SessionLoop | None = None
_abandoned: list[SessionLoop] = []


def session_loop() -> SessionLoop:
    """Return the session loop of this process; start one if none runs.

    :raises replicas.errors.NoCapacity: its thread cannot be started.
    """
    return locked(_lock, _session_loop)


def _session_loop() -> SessionLoop:
    """Return the session loop, started if need be; the caller holds the lock."""
    global _current
    if _current is None or not _current.alive:
        _current = SessionLoop()
        _current.start_thread()
    return _current


def _after_fork_in_child() -> None:
    """In a forked child: drop the parent's loop; a join here starts a new one.

    The parent's descriptors are replaced by ``/dev/null``.
    """
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.abandon()
        _abandoned.append(_current)
        _current = None


def _at_exit() -> None:
    """Close the session loop of this process, if there is one; block up to seconds."""
    global _current
    found, _current = _current, None
    if found is not None and found.pid == os.getpid():
        found.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
