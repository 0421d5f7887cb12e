"""The embeddable coordinator: sessions, store and channel state behind one endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import anyio
from starlette.routing import BaseRoute

from replicas import errors
from replicas.common import own_loop
from replicas.common.tasks import cancelled
from replicas.config.file import channels_from
from replicas.config.structs import ChannelConfig
from replicas.config.values import address, checked, folder, is_loopback, listen, path
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.channel_status import channel_status, channel_waits
from replicas.coordinator.decisions import DecisionLog
from replicas.coordinator.engine import Engine
from replicas.coordinator.limits import REASONS
from replicas.coordinator.port_connections import PortRules
from replicas.coordinator.readiness import Readiness, ReadinessBook
from replicas.coordinator.server import Server, bind_listener, session_route
from replicas.coordinator.store import StoreWatcher
from replicas.coordinator.threaded import LoopThread
from replicas.core.base.effects import Event
from replicas.core.members.roster import GroupShape
from replicas.linux import needs
from replicas.messages import arguments
from replicas.messages.bounds import LEASE_MIN_S, RANKS_MAX, shown
from replicas.messages.identity import Member
from replicas.status import ChannelStatus, StoreStatus
from replicas.telemetry.tally import Tally
from replicas.trust.certificate import PortKey, make_pem
from replicas.trust.tokens import PLAIN, JoinToken, Tokens, another_key


class _Listens(NamedTuple):
    """Settings of the control port."""

    host: str
    port: int
    any_port: bool
    key: PortKey | None
    routes: Sequence[BaseRoute]
    live: Callable[[], bool] | None


class Coordinator:
    """Coordinates weight channels for processes that the caller starts.

    ::

        channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
        async with replicas.Coordinator(channels) as coordinator:
            start_my_processes(coordinator.endpoint, coordinator.token)

    Each process then calls ``replicas.join("policy", endpoint=..., token=...,
    group="rollout", replica=3, rank=0, world_size=1)``. Runs on asyncio (anyio on the
    asyncio backend included) and does not import torch into this process.

    :param channels: by name, a :class:`~replicas.config.structs.ChannelConfig` or a
        mapping with the keys of the config file.
    :param groups: number of replicas of each group (or its :class:`GroupShape`):
        operations between peers wait until that many have joined once (default: 1).
    :param run: name of the run; a member that gives another name is refused.
    :param host: address of the control port: sessions of members, and HTTP pages.
    :param port: number of the control port; 0 lets the kernel choose.
    :param any_port: let it choose, too, where ``port`` is in use.
    :param store_bind: the only address on which the master TCPStore listens.
    :param store_port: its port; 0 lets the kernel choose.
    :param carry_port: members of other hosts pull versions at this port or one of the
        63 behind it; 0: the kernel of each host chooses.
    :param token: the token that members must show; default: a new random one.
    :param tls: ``"auto"``: the control port speaks TLS unless ``host`` is on loopback.
        ``"off"``: for a network that protects it by itself; :attr:`token` then says so.
    :param certificate: PEM file of the certificate for TLS; default: one that this
        class makes, whose key :attr:`token` names.
    :param key: PEM file of the certificate's key; default: it is in the same file.
    :param state_dir: folder of decision log and self-made TLS key; None: in memory.
    :param epochs: newest epoch of each channel under an earlier coordinator of the run;
        epoch numbers continue from there.
    :param routes: further Starlette routes to serve.
    :param live: result of ``GET /livez``, also under a flood; None: see ``routes``.
    :raises errors.BadConfig: the channels are not valid, by the rules of a config file.
    :raises errors.UsageError: another argument is not valid.
    :raises errors.WorldError: another coordinator has the decision log."""

    def __init__(
        self,
        channels: Mapping[str, ChannelConfig | Mapping[str, Any]],
        *,
        groups: Mapping[str, GroupShape | int] | None = None,
        run: str = "embedded",
        host: str = "127.0.0.1",
        port: int = 0,
        any_port: bool = False,
        store_bind: str = "127.0.0.1",
        store_port: int = 0,
        carry_port: int = 0,
        token: str | Tokens | None = None,
        tls: Literal["auto", "on", "off"] = "auto",
        certificate: Path | None = None,
        key: Path | None = None,
        state_dir: Path | None = None,
        epochs: Mapping[str, int] | None = None,
        routes: Sequence[BaseRoute] = (),
        live: Callable[[], bool] | None = None,
    ) -> None:
        """Check the arguments, and open the decision log; open no port yet."""
        needs.check()
        self._shapes = {
            arguments.name("groups: a name", name): _shape(f"groups[{shown(name)}]", one)
            for name, one in _mapping("groups", groups).items()
        }
        configs = channels_from(channels, {name: shape.replicas for name, shape in self._shapes.items()})
        brackets = "[{}]:0" if isinstance(host, str) and ":" in host else "{}:0"
        host, _ = checked("host", listen, brackets.format(host) if isinstance(host, str) else host)
        port = _port("port", port)
        bind = checked("store_bind", address, store_bind)
        self._store = StoreWatcher(bind, _port("store_port", store_port), lambda up: self.engine.store_changed(up))
        pages = _checked_routes(routes)
        if live is not None and not callable(live):
            raise errors.UsageError(f"live must be a function without arguments, not {shown(live)}")
        home = None if state_dir is None else checked("state_dir", folder, state_dir)
        run = arguments.text("run", run)
        newest = {
            name: arguments.integer(f"epochs[{shown(name)}]", one, least=0)
            for name, one in _mapping("epochs", epochs).items()
        }
        self._decisions = DecisionLog(None if home is None else home / "decisions.jsonl")
        try:
            port_key = _port_key(host, tls, certificate, key, home)
            self._listens = _Listens(host, port, arguments.flag("any_port", any_port), port_key, pages, live)
            self.tokens: Tokens = _tokens(token, port_key, host)
            """The valid tokens by role; the caller's routes may use it."""
        except BaseException:
            self._decisions.close()
            raise
        self.engine: Engine = Engine(
            configs,
            self._shapes,
            run=run,
            decisions=self._decisions,
            store=self._store,
            epochs=newest,
            carry_port=_port("carry_port", carry_port),
        )
        self._tally = Tally()
        self.engine.subscribe(lambda event: self._tally.count(event, time.time()))
        self._book = ReadinessBook()
        self.keep_decisions = False
        """Keep the decision log at an orderly end, for a coordinator to continue."""
        self.wait_for_store = True
        """Open the control port only when the store is up. If False, members can
        connect before, and :meth:`store_started` waits until its port is bound."""
        self._starting: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._tick: asyncio.Task[None] | None = None
        self._thread: LoopThread[Self] | None = None
        self.endpoint: str = ""
        """``host:port`` of the control port; set on entry."""

    async def __aenter__(self) -> Self:
        """Open the control port, start the master TCPStore, and return this object.

        :raises errors.WorldError: a port is in use, or the store did not start. All is
            closed again: create a new coordinator to try again."""
        own_loop.require("a coordinator")
        try:
            listener = bind_listener(self._listens.host, self._listens.port, or_any=self._listens.any_port)
        except BaseException:
            self._decisions.close()
            raise
        try:
            routes = [session_route(self.engine, self.tokens), *self._listens.routes]
            hosts = AllowedHosts(self._listens.host, listener.getsockname()[0])
            rules = PortRules(
                self.engine.refused, lambda given: self.tokens.role(given) is not None, hosts, self._listens.live
            )
            tls = None if self._listens.key is None else self._listens.key.context
            self._server = Server(listener, routes, rules, tls=tls)
            self.engine.without_store()  # the store comes up later than the first members
            await self._store.resolve()  # members on other machines need its address
            self._starting = asyncio.create_task(self._store.start(wait=self.wait_for_store))
            if self.wait_for_store:
                await self.store_started()
            self._server.start()
        except BaseException:
            listener.close()
            self._decisions.close()
            with anyio.CancelScope(shield=True):
                await self._end_store()
            raise
        host, port = listener.getsockname()[:2]
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tick = asyncio.create_task(self.engine.tick_forever())
        own_loop.register(self)
        return self

    async def store_started(self) -> None:
        """Wait until the store is up (see wait_for_store); WorldError: it is not."""
        assert self._starting is not None
        await asyncio.shield(self._starting)

    async def _end_store(self) -> None:
        """Cancel a start of the store that is under way; kill its process, and wait."""
        if self._starting is not None:
            await cancelled(self._starting)
        await self._store.aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End sessions, port and store, and wait for that. Delete the decision log,
        unless after an error or with :attr:`keep_decisions`."""
        own_loop.unregister_loop(self)
        if self._tick is not None:
            await cancelled(self._tick)
        if self._server is not None:
            await self._server.aclose()
        self.engine.close()
        await self._end_store()
        # after an error the next coordinator continues from it
        self._decisions.close(remove=error is None and not self.keep_decisions)

    def start(self) -> Self:
        """Start it on an event loop in a thread, and return it when its ports are open.
        It runs until :meth:`close` or the end of the process.

        :raises errors.WorldError: a port is in use, or the store did not start.
        :raises errors.UsageError: it was started before."""
        return self.in_thread().__enter__()

    def close(self) -> None:
        """End the thread of :meth:`start` or :meth:`in_thread`, if any; wait for that.

        :raises errors.InternalError: it lasts over 30 s. An error that has ended its
            loop before is raised, too."""
        if self._thread is not None:
            self._thread.close()

    def in_thread(self) -> AbstractContextManager[Self]:
        """Return a context manager that runs it on an event loop in its own thread.

        ::

            with replicas.Coordinator(channels).in_thread() as coordinator:
                address = {"endpoint": coordinator.endpoint, "token": coordinator.token}
                with replicas.join("policy", group="trainer", **address) as channel:
                    channel.publish(model).wait()

        :meth:`start` and :meth:`close` do the same without a block. :attr:`endpoint`
        and :attr:`token` may be read on any thread; all else of it belongs to its own.

        :raises errors.WorldError: a port is in use, or the store did not start.
        :raises errors.UsageError: it is in a thread already."""
        if self._thread is not None:
            raise errors.UsageError("in_thread: this coordinator was started before", hint="make a new Coordinator")
        self._thread = LoopThread(self)
        return self._thread

    @property
    def token(self) -> str:
        """Token that members must show: pass it to ``join(token=...)``. With TLS it
        also holds the hash of the control port's key: a member that joins with it
        refuses a port with another key."""
        return self.tokens.text("member")

    @property
    def tls(self) -> bool:
        """True if the control port speaks TLS."""
        return self._listens.key is not None

    # ------------------------------------------------------------ for the supervisor

    @property
    def store_address(self) -> tuple[str, int]:
        """``(host, port)`` of the master TCPStore; its replacement has another port."""
        return self._store.address

    @property
    def store_up(self) -> bool:
        """True once the master TCPStore listens, until it ends or fails a ping (one
        every 2 s); True again with its replacement. Reading this sends no request."""
        return self._store.up

    @property
    def store_pid(self) -> int | None:
        """Pid of the master TCPStore's process, or None while there is none."""
        return self._store.pid

    @property
    def loop_lag_s(self) -> float:
        """Recent delay of this process's event loop in seconds (a decaying maximum)."""
        return self.engine.lag_s

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """Add a function that the loop calls with each later event; it must not block.

        What it raises is logged, and ends nothing here. But a ``KeyboardInterrupt`` or
        ``SystemExit`` on the program's main thread ends its event loop afterwards."""
        self.engine.subscribe(callback)

    def readiness(self, group: str, replica: int, generation: int, *, external: bool = False) -> Readiness:
        """Return whether a generation (one start) of a replica is ready, and why not.

        :param external: another launcher starts it: members of all generations count.
        """
        world = self._shapes.get(group, GroupShape()).world_size
        now = asyncio.get_running_loop().time()
        channels = self.engine.channels.values()
        return self._book.of(channels, group, replica, generation, world, now, external=external)

    def expect(self, members: Mapping[str, Collection[Member]], told: Tally | None = None) -> None:
        """Replace the members, by channel, whose return recovery waits for. ``told``
        counts the run's events so far: it has the commits that were reported."""
        for name, channel in self.engine.channels.items():
            channel.recovery.expect(members.get(name, ()), (told or Tally()).commits.get(name, ()))

    @property
    def recovering(self) -> bool:
        """True if members of an earlier coordinator may still come back."""
        return any(channel.recovery.active for channel in self.engine.channels.values())

    def joined(self, group: str) -> dict[int, frozenset[str]]:
        """Return ids (incarnations) of the group's present members, by replica."""
        found: dict[int, set[str]] = {}
        for channel in self.engine.channels.values():
            for replica, incarnations in channel.roster.joined(group).items():
                found.setdefault(replica, set()).update(incarnations)
        return {replica: frozenset(incarnations) for replica, incarnations in sorted(found.items())}

    def forget(self, group: str, replica: int) -> None:
        """Prepare for a new start of an external replica: ranks that have left count as
        missing again, and its drain ends."""
        self.engine.change_all(lambda channel, now: channel.start_new_life(group, replica, now))

    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None:
        """Remove members of this and earlier generations: they ended for ``reason``."""
        self.engine.change_all(lambda channel, now: channel.end_replica(group, replica, generation, reason, now))

    def set_draining(self, group: str, replica: int, generation: int) -> None:
        """Drain this generation (one start of a replica) and earlier ones: no new
        version waits for them. Open syncs may finish; :meth:`busy` names those."""
        self.engine.change_all(lambda channel, now: channel.set_draining(group, replica, generation, now))

    def busy(self, group: str, replica: int) -> str:
        """Return as text the work that an end of the replica would interrupt, or ""."""
        words = (channel.drains.busy(group, replica) for channel in self.engine.channels.values())
        return next((text for text in words if text), "")

    def waits(self) -> dict[str, str]:
        """Return texts of what each channel, and each open publish, waits for, by name,
        as ``{"version 7 of policy": "for rollout/0/0, 12 s at most"}``."""
        return channel_waits(self.engine.channels.values(), asyncio.get_running_loop().time())

    def progress(self, group: str, replica: int) -> tuple[int, ...]:
        """Return a replica's progress, as a flat tuple of three numbers a channel:
        newest step (-1: none), newest version, count of operations without a step."""
        return tuple(mark for channel in self.engine.channels.values() for mark in channel.marks.of(group, replica))

    def set_group(self, group: str, shape: GroupShape) -> None:
        """Use a new ``shape`` of the group; forget the progress of removed replicas."""
        shape = self._shapes[arguments.name("group", group)] = _shape("shape", shape)
        for channel in self.engine.channels.values():
            channel.roster.groups[group] = shape
            channel.marks.drop_replicas(group, shape.replicas)

    def channel_statuses(self) -> tuple[ChannelStatus, ...]:
        """Return the status of each channel, with its counters, for pages."""
        now = asyncio.get_running_loop().time()
        channels = self.engine.channels.values()
        return tuple(self._tally.channel(channel_status(channel, now)) for channel in channels)

    def store_status(self) -> StoreStatus:
        """Return whether the store is up (:attr:`store_up`), its address, and how many
        keys it had at the last ping. Sends no request."""
        host, port = self._store.address
        return StoreStatus(up=self._store.up, host=host, port=port, keys=self._store.keys)

    def refused(self) -> dict[str, int]:
        """Return how many connections and messages were refused, for each reason."""
        return dict.fromkeys(REASONS, 0) | self.engine.refusals

    def sidecar_replacements(self) -> dict[str, int]:
        """Return how often members' helper processes were replaced, by reason."""
        return dict(self._tally.sidecars)


# ------------------------------------------------------------ trust


def _port_key(host: str, tls: object, certificate: object, key: object, home: Path | None) -> PortKey | None:
    """Return the TLS key that Coordinator's arguments name or make; None for no TLS. A
    new key is kept in ``home``, the state folder. UsageError: they cannot be used."""
    if tls not in ("auto", "on", "off"):
        raise errors.UsageError(f'tls must be "auto", "on" or "off", not {shown(tls)}')
    if tls == "off" or (tls == "auto" and certificate is None and is_loopback(host)):
        return None
    if certificate is not None:
        file = path("file")
        own_key = None if key is None else checked("key", file, key)
        return PortKey.configured(checked("certificate", file, certificate), own_key)
    return PortKey.of_folder(home) if home is not None else PortKey.of_pem(make_pem())


def _tokens(given: object, port_key: PortKey | None, host: str) -> Tokens:
    """Return the tokens that the argument ``token`` gives, new ones for None, with
    the port's key set. Raise UsageError for no token, or one with another key."""
    key = port_key.hash if port_key is not None else "" if is_loopback(host) else PLAIN
    if isinstance(given, Tokens):
        found = given
    else:
        token = JoinToken.parse(arguments.token("token", given)) if given is not None else None
        if token is not None and token.key not in ("", key):
            raise another_key("token")
        found = Tokens(None if token is None else token.secret)
    found.key = key
    return found


# ------------------------------------------------- arguments, as in a config file


def _mapping(what: str, value: object) -> Mapping[Any, Any]:
    """Return ``value``, or {} for None; other types raise UsageError."""
    if value is not None and not isinstance(value, Mapping):
        raise errors.UsageError(f"{what} must be a mapping, not {shown(value)}")
    return value or {}


def _shape(what: str, shape: object) -> GroupShape:
    """Return a checked copy of a shape, or number of replicas; UsageError: invalid."""
    given = shape if isinstance(shape, GroupShape) else GroupShape(replicas=shape)  # type: ignore[arg-type]  # see below
    return GroupShape(
        replicas=arguments.integer(f"{what}: replicas", given.replicas, least=0, most=RANKS_MAX),
        world_size=arguments.integer(f"{what}: world_size", given.world_size, least=1, most=RANKS_MAX),
        heartbeat_timeout_s=arguments.seconds(
            f"{what}: heartbeat_timeout_s", given.heartbeat_timeout_s, least=LEASE_MIN_S
        ),
    )


def _port(what: str, port: object) -> int:
    """Return ``port`` if it is a port number; else raise UsageError about ``what``."""
    return arguments.integer(what, port, least=0, most=65535)


def _checked_routes(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return the argument ``routes`` as a list; UsageError if one is not a route."""
    try:
        found = list(routes)
    except TypeError as error:
        raise errors.UsageError(f"routes must be a sequence, not {shown(routes)}") from error
    for route in found:
        if not isinstance(route, BaseRoute):
            raise errors.UsageError(f"routes: {shown(route)} is not a Starlette route")
    return found
