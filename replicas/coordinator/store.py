"""Start, ping and sweep the store process; replace it when dead, frozen or full."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext

import anyio
import msgspec

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import cancelled, keep_until_done, say_if_slow
from replicas.coordinator.store_process import Reply, Request
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.scarce import naming_limits

log = Log("replicas.store")

START_TIMEOUT_S = 60.0  # torch takes long to import from a cold disk
REPLY_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
PING_INTERVAL_S = 2.0
AGAIN = Backoff(0.1, 5.0)
_SLOW = "it imports torch: check whether that hangs (python -c 'import torch'), or the machine is overloaded"
_RESOLVE_S = 20.0
STRAGGLER_S = 30.0
"""Delay of a second sweep: a sidecar being killed may write after the first one."""


class StoreWatcher:
    """Owns the process of the master TCPStore, and replaces it when it fails."""

    def __init__(self, bind: str, port: int, on_change: Callable[[bool], None]) -> None:
        """Keep the arguments; nothing is started before :meth:`start`.

        :param bind: address or host name to listen on. :param port: of the first store;
            0 lets the kernel choose.
        :param on_change: called on the loop, with True when a store is up at a new
            address, and with False when it has ended.
        """
        self._bind = bind
        self._port = port
        self._on_change = on_change
        self.address: tuple[str, int] = (bind, port)
        self.keys = 0
        self._life = ChildLife(AGAIN)
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeps: list[str] = []
        self._sweep_due = asyncio.Event()

    @property
    def up(self) -> bool:
        """True if the store process listens, and was not found dead or silent since."""
        return self._life.state == "up"

    @property
    def pid(self) -> int | None:
        """Pid of the present store process, or None while there is none."""
        return self._process.pid if self._process is not None else None

    async def resolve(self) -> None:
        """Replace the host name to bind to by its IP address, to give to members.

        Waits for the name service, 20 s at most.

        :raises errors.WorldError: the name has no address here.
        """
        self._bind = await _resolved(self._bind)
        self.address = (self._bind, self._port)

    async def start(self, *, wait: bool) -> None:
        """Start the store's process, and wait until its port is bound.

        From then on tasks of this object ping it, replace it when it fails or is full,
        and delete swept keys, until :meth:`aclose`.

        :param wait: wait until it serves, too; that takes a second more.
        :raises errors.WorldError: it could not listen, or was not up within 60 s.
        """
        await self._spawn(self._port)
        if wait:
            await self._wait_until_up()
        keep_until_done(asyncio.create_task(self._watch()), self._tasks)
        keep_until_done(asyncio.create_task(self._sweep_forever()), self._tasks)

    async def _spawn(self, port: int) -> None:
        """Start one store process, and wait until its port is bound.

        Sets :attr:`address`. A failed or cancelled start leaves no process.

        :param port: to listen on; 0 lets the kernel choose.
        :raises errors.WorldError: it could not bind the port, or not in time.
        """
        self._life.start(asyncio.get_running_loop().time())
        ours, theirs = socket.socketpair()
        words = ["--bind", self._bind, "--port", f"{port}"]
        words += ["--control", f"{theirs.fileno()}", "--parent", f"{os.getpid()}"]
        # no long look-ups of this host's name, and no compute threads
        environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
        try:
            with naming_limits():
                self._process = await asyncio.create_subprocess_exec(
                    *python_module("replicas.coordinator.store_process", *words),
                    pass_fds=[theirs.fileno()],
                    **popen_arguments(environment),
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # an open copy would hide the end of the process
        self.address = (self._bind, await self._read_port(ours))

    async def _wait_until_up(self, *, quiet: bool = False) -> None:
        """Wait until the new process's TCPStore serves, and call ``on_change(True)``.

        :param quiet: nothing else waits for it: do not say that it takes long.
        :raises errors.WorldError: it does not, or not within 60 s. No process is left.
        """
        await self._read_port(None, quiet=quiet)
        self._life.ready()
        self._on_change(True)

    async def _read_port(self, control: socket.socket | None, *, quiet: bool = False) -> int:
        """Return the port that the new process's next message names.

        :param control: the new process's socket; it is kept for its later messages.
        :param quiet: do not say that it takes long.
        :raises errors.WorldError: the process could not listen, ended, or was silent
            for 60 s. After an error, or a cancel, no process is left.
        """
        assert self._process is not None
        try:
            if control is not None:
                control.setblocking(False)
                self._pipe = await asyncio.open_connection(sock=control)
            assert self._pipe is not None
            found = await self._read_message(self._process, self._pipe[0], quiet=quiet)
        except BaseException:  # an abandoned start leaves no process
            with anyio.CancelScope(shield=True):
                await self._kill()
            raise
        if found.error:
            await self._kill()
            raise errors.WorldError(f"rendezvous store: {found.error}", hint=found.hint or None)
        return found.port

    @staticmethod
    async def _read_message(process: asyncio.subprocess.Process, reader: asyncio.StreamReader, *, quiet: bool) -> Reply:
        """Wait for the new process's next message, and return it.

        If none comes in time, or the process ends, return a reply made here that has
        the error.

        :param reader: of the socket to the process.
        :param quiet: do not say that it takes long.
        """
        try:
            text = f"waiting up to {START_TIMEOUT_S:g} s for the process of the rendezvous store to start"
            with nullcontext() if quiet else say_if_slow(log.warning, text):
                async with asyncio.timeout(START_TIMEOUT_S):
                    found = await _next(reader)
        except TimeoutError:
            return Reply(0, error=f"its process did not start within {START_TIMEOUT_S:g} s", hint=_SLOW)
        if found is not None:
            return found
        with contextlib.suppress(TimeoutError):  # it closed its end without exiting
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        ended = "ended" if process.returncode is None else f"ended with code {process.returncode}"
        return Reply(0, error=f"its process {ended} before it listened", hint="see its error among the lines above")

    async def ask(self, prefixes: tuple[str, ...] = ()) -> Reply:
        """Send the process a request, wait for the reply (5 s at most), and return it.

        :param prefixes: keys of the store under these are deleted first; none is a
            ping.
        :returns: the reply; its ``error``, if set, says why the store must be replaced.
        :raises TimeoutError: no reply came. :raises ConnectionError: the store is down.
        """
        async with asyncio.timeout(REPLY_TIMEOUT_S), self._turn:
            if self._pipe is None or not self.up:
                raise ConnectionError("the rendezvous store is down")
            reader, writer = self._pipe
            request = Request(next(self._ids), prefixes)
            writer.write(msgspec.json.encode(request) + b"\n")
            while reply := await _next(reader):
                if reply.id == request.id:  # else it comes late: its request has timed out
                    self.keys = reply.keys
                    return reply
        raise ConnectionError("the rendezvous store has ended")

    # ----------------------------------------------------------- watching and replacing

    async def _watch(self) -> None:
        """Ping the process for ever; replace it if it ended, is full or is silent.

        Then calls ``on_change(False)``, kills it, and starts another. A task of
        :meth:`start`.
        """
        if not self.up:
            try:
                await self._wait_until_up(quiet=True)
            except errors.WorldError as error:
                log.warning("replacing the rendezvous store, which has not come up: %s", error)
                await self._respawn()
        while (process := self._process) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_INTERVAL_S):
                    await process.wait()
            if process.returncode is None and await self._answers():
                continue
            what = "does not respond" if process.returncode is None else "has ended"
            log.warning("replacing the rendezvous store: its process (a TCPStore) %s", what)
            self._life.give_up()
            self._on_change(False)
            await self._kill()
            await self._respawn()

    async def _answers(self) -> bool:
        """Ping the process; return True if it responds and is not full.

        Asks again if this process was suspended meanwhile.
        """
        loop = asyncio.get_running_loop()
        while True:
            clock = PauseClock(loop.time() + REPLY_TIMEOUT_S)
            try:
                reply = await self.ask()
            except ConnectionError:
                return False
            except TimeoutError:
                if clock.measure_pause(loop.time()):
                    continue
                return False
            if reply.error:
                log.warning("replacing the rendezvous store (a TCPStore): %s", reply.error)
            return not reply.error

    async def _respawn(self) -> None:
        """Start store processes, each on a new port, until one is up.

        The delay before each grows up to 5 s. A failed start is logged.
        """
        now = asyncio.get_running_loop().time
        while not self.up:
            self._life.ended(now())
            await asyncio.sleep(self._life.due - now())
            try:
                await self._spawn(0)
                await self._wait_until_up()
            except (errors.WorldError, OSError) as error:
                log.warning("retrying to start the rendezvous store (a TCPStore): %s", error)

    def replace(self, address: tuple[str, int]) -> None:
        """Kill the store's process if it listens at ``address``; do not wait.

        The task that watches it then starts another, at a new port. Do nothing if the
        store has another address by now, or is down.
        """
        if self.up and address == self.address and self._process is not None:
            log.warning("replacing the rendezvous store at %s:%d: a process other than members wrote to it", *address)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # ------------------------------------------------------------ sweeping

    def sweep(self, prefix: str) -> None:
        """Have the store delete all keys under ``prefix`` soon, and again after 30 s.

        Does not wait: a task of :meth:`start` sends the requests. The second time is
        for keys that a dying process has written after the first.
        """
        self._sweep_soon(prefix)
        asyncio.get_running_loop().call_later(STRAGGLER_S, self._sweep_soon, prefix)

    def _sweep_soon(self, prefix: str) -> None:
        """Queue a prefix of keys for :meth:`_sweep_forever`, and wake that."""
        self._sweeps.append(prefix)
        self._sweep_due.set()

    async def _sweep_forever(self) -> None:
        """Have the process delete the keys under queued prefixes, for ever.

        A task of :meth:`start`. If the process does not answer, they stay queued until
        a further prefix comes.
        """
        while True:
            await self._sweep_due.wait()
            self._sweep_due.clear()
            prefixes, self._sweeps = self._sweeps, []
            try:
                await self.ask(tuple(prefixes))
            except (TimeoutError, ConnectionError):
                self._sweeps += prefixes
                log.info("deleting old keys of the rendezvous store later: it does not respond")

    # ------------------------------------------------------------ stopping

    async def _kill(self) -> None:
        """Send the process, if there is one, SIGKILL; wait for its end, 5 s at most."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe[1].close()
            self._pipe = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            log.error("leaving behind the process of the rendezvous store, %d: SIGKILL has not ended it", process.pid)

    async def aclose(self) -> None:
        """Cancel the tasks that watch the process; kill it; wait up to 5 s for its end.

        Its keys are lost.
        """
        self._life.stop()
        await cancelled(*self._tasks)
        await self._kill()


async def _next(reader: asyncio.StreamReader) -> Reply | None:
    """Wait for the next message of the store's process; return None if it has ended.

    None also stands for a message that is malformed.
    """
    try:
        return msgspec.json.decode(await reader.readline(), type=Reply)
    except (ConnectionError, *MALFORMED):
        return None


async def _resolved(host: str) -> str:
    """Return the first IP address of ``host``, by the name service; waits for it.

    :raises errors.WorldError: it has none, none came in time, or it means all
        addresses.
    """
    try:
        with say_if_slow(log.warning, f"waiting up to {_RESOLVE_S:g} s for the address of {host}"):
            async with asyncio.timeout(_RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:  # a TimeoutError is one, without words
        why = error.strerror or f"no answer within {_RESOLVE_S:g} s"
        hint = "choose another [store] bind, such as this machine's IP address"
        raise errors.WorldError(f"store.bind: no address is known here for {host} ({why})", hint=hint) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise errors.WorldError(f"store.bind: {host} means every address of this machine, so others cannot dial it")
    return address
