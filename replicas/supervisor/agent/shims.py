"""The shims of one agent: start them as ordered, and tell the supervisor their state.

A shim is known by its mark (``nonce``) from the order to start it until the supervisor
has noted its end. :meth:`Shims.news` has the states that have changed since they were
last told; :meth:`Shims.all` has all of them, for a supervisor that comes, or comes
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from replicas import environ
from replicas.common.logs import Log
from replicas.linux.processes import start_time
from replicas.supervisor.agent.containment import Containment
from replicas.supervisor.agent.forkservers import Forkservers
from replicas.supervisor.agent.messages import Plain, ShimState, Start
from replicas.supervisor.agent.node import Node, base_environment
from replicas.supervisor.wire.orders import ExitReport, NodeSpec, OtherRelease

log = Log("replicas.agent")


class _Shim:
    """One shim; ``node`` None: it could not be started."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.node: Node | None = None
        self.failure: ExitReport | None = None
        self.stopping = False
        self.start_time = 0
        self.silent_s = 0.0
        self.lost: dict[tuple[str, str], int] = {}
        self.told: ShimState | None = None
        self.stacks: dict[str, str] = {}

    def state(self) -> ShimState:
        spec, node = self.spec, self.node
        known: dict[str, Any] = {
            "nonce": spec.nonce,
            "group": spec.group,
            "replica": spec.replica,
            "generation": spec.generation,
            "node": spec.node,
            "stopping": self.stopping,
        }
        if node is None:
            report = _plain(self.failure.message()["report"]) if self.failure is not None else None
            return ShimState(**known, gone=self.failure is not None, report=report)
        for loss in node.losses:
            key = (loss.where, loss.reason)
            self.lost[key] = self.lost.get(key, 0) + loss.lines
        node.losses.clear()
        return ShimState(
            **known,
            pid=node.pid,
            start_time=self.start_time,
            cgroup=node.spec.cgroup,
            main_pid=node.main_pid,
            rendezvous=node.rendezvous,
            report=None if node.report is None else _plain(node.report.message()["report"]),
            remains=None if node.remains is None else _plain(node.remains.message()),
            belongings=_plain(node.belongings.message()),
            losses=tuple(
                {"count": lines, "where": where, "reason": reason} for (where, reason), lines in self.lost.items()
            ),
            gone=node.gone.is_set(),
            silent_s=self.silent_s,
        )


def _plain(message: Plain) -> Plain:
    """The message in the form in which it is decoded: without tuples of names."""
    return {key: value for key, value in message.items() if key != "type"}


class Shims:
    """The shims of an agent, by their marks. For the event loop's thread only.

    :param changed: called when there is something to tell.
    :param state_dir: folder of the node's logs and of the token for its ranks.
    """

    def __init__(self, containment: Containment, state_dir: Path, changed: Callable[[], None]) -> None:
        self._containment, self._state_dir, self._changed = containment, state_dir, changed
        self._shims: dict[str, _Shim] = {}
        self._forkservers = Forkservers(self._cannot_sync)
        self.identity = ""
        """What the processes have as the id of their state folder."""
        self.address = ""
        """At which ranks of other nodes reach those of this one."""
        self.lease_until: float | None = None
        """When a shim that is started now ends by itself, unless it is pinged."""
        self.patience_s = 0.0
        """How long shims go on without a ping; 0: without limit."""
        self.endpoint = ""
        """Where this node reaches the supervisor; empty: as that says.

        A name may lead to another address when another supervisor takes over.
        """
        self.empty = asyncio.Event()
        """Set while no shim has a process left."""
        self.empty.set()

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._shims

    # ------------------------------------------------------------ orders

    def start(self, order: Start) -> None:
        """Start a shim, unless it is known; what fails is told as its end.

        :raises replicas.supervisor.wire.orders.Malformed: it is no spec.
        """
        nonce = str(order.spec.get("nonce", ""))
        if nonce in self._shims:
            return
        try:
            spec = self._localized(NodeSpec.of(order.spec))
        except (OtherRelease, OSError) as error:
            self._fail(_stub(order.spec), str(error))
            return
        shim = self._shims[nonce] = _Shim(spec)
        try:
            shim.node = self._containment.start(
                spec,
                lambda: self._moved(shim),
                memory_nbytes=order.memory_nbytes,
                max_processes=order.max_processes,
            )
        except OSError as error:
            self._fail(spec, str(error))
            return
        shim.start_time = start_time(shim.node.pid) or 0
        self._moved(shim)

    def _fail(self, spec: NodeSpec, text: str) -> None:
        shim = self._shims[spec.nonce] = _Shim(spec)
        shim.failure = ExitReport("lost", text=f"a shim cannot be started: {text}")
        self._moved(shim)

    def _localized(self, spec: NodeSpec) -> NodeSpec:
        """The spec with this node's own environment, folders and address."""
        folder = self._state_dir / "logs" / spec.group / str(spec.replica) / f"gen-{spec.generation}"
        own = {environ.TOKEN_FILE: str(self._state_dir / "token"), environ.LOG_DIR: str(folder)}
        own |= {environ.STATE_ID: self.identity} if self.identity else {}
        own |= {environ.ENDPOINT: self.endpoint} if self.endpoint else {}
        env = {**base_environment(), **spec.env, **own}
        if spec.sidecars:
            ahead = spec.sidecars == "ahead"
            env[environ.FORKSERVER] = self._forkservers.address(env, ahead=ahead, identity=self.identity)
        living = [env, *(shim.spec.env for shim in self._living())]
        self._forkservers.retain({one.get(environ.FORKSERVER, "") for one in living})
        return spec._replace(
            env=env,
            log_dir=str(folder),
            local_addr=self.address or spec.local_addr,
            lease_until=self.lease_until or 0.0,
            patience_s=self.patience_s,
        )

    def stop(self, nonce: str, timeout_s: float, *, stacks: bool = False) -> None:
        if (shim := self._shims.get(nonce)) is not None and shim.node is not None:
            shim.stopping = True
            shim.node.stop(timeout_s, stacks=stacks)
            self._changed()

    def _cannot_sync(self, forkserver: str, reason: str) -> None:
        """Stop the replicas that cannot sync without this forkserver."""
        for shim in self._living():
            if shim.node is not None and shim.spec.env.get(environ.FORKSERVER) == forkserver:
                shim.node.stop(shim.spec.stop_timeout_s, broken=f"the sidecar forkserver of its node {reason}")

    def meet(self, nonce: str, host: str, port: int) -> None:
        if (node := self._node(nonce)) is not None and node.rendezvous is None:
            node.rendezvous = (host, port)
            node.meet(host, port)

    def kill(self, nonce: str) -> None:
        if (node := self._node(nonce)) is not None:
            node.kill()

    async def stacks(self, nonce: str) -> dict[str, str]:
        """Stacks by ``group/replica/rank``. TimeoutError: the shim does not answer."""
        node = self._node(nonce)
        return {} if node is None else await node.stacks()

    def forget(self, nonce: str) -> None:
        """The supervisor has noted the shim's end."""
        shim = self._shims.get(nonce)
        if shim is not None and shim.state().gone:
            del self._shims[nonce]

    def _node(self, nonce: str) -> Node | None:
        shim = self._shims.get(nonce)
        return shim.node if shim is not None else None

    # ------------------------------------------------------------ watching

    def look(self, now: float, lease_until: float | None) -> None:
        """Ping the shims, each of which then lives until ``lease_until`` at least.

        Call it every second.
        """
        self.lease_until = lease_until
        for shim in self._living():
            assert shim.node is not None
            shim.node.lease_until, shim.node.patience_s = lease_until, self.patience_s
            silent_s = shim.node.silent_s(now)
            shim.silent_s = silent_s if silent_s > 1.5 else 0.0
        self._changed()

    def end(self, timeout_s: float) -> None:
        """SIGTERM to all processes now, SIGKILL after ``timeout_s``."""
        for shim in self._living():
            self.stop(shim.spec.nonce, timeout_s)

    def kill_all(self) -> None:
        """Kill the shims that are left; their processes are swept."""
        for shim in self._living():
            self.kill(shim.spec.nonce)

    async def aclose(self) -> None:
        """End what serves the shims; call it when they are gone."""
        await self._forkservers.aclose()

    def _living(self) -> list[_Shim]:
        return [shim for shim in self._shims.values() if shim.node is not None and not shim.node.gone.is_set()]

    def _moved(self, shim: _Shim) -> None:
        if shim.node is not None and shim.node.last_stacks:
            shim.stacks = shim.node.last_stacks
        if self._living():
            self.empty.clear()
        else:
            self.empty.set()
        self._changed()

    # ------------------------------------------------------------ telling

    def all(self) -> tuple[ShimState, ...]:
        """The state of each shim; all of it counts as told."""
        found: list[ShimState] = []
        for shim in self._shims.values():
            known = shim.told.losses if shim.told is not None else ()
            shim.told = shim.state()
            found.append(msgspec.structs.replace(shim.told, known_losses=known))
        return tuple(found)

    def news(self) -> list[ShimState]:
        """States that have changed since they were told; they count as told then."""
        found: list[ShimState] = []
        for shim in self._shims.values():
            state = shim.state()
            if state != shim.told:
                shim.told = state
                found.append(state)
        return found

    def saved_stacks(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Mark and stacks of each shim that has saved some which were not told."""
        for shim in self._shims.values():
            if shim.stacks:
                stacks, shim.stacks = shim.stacks, {}
                yield shim.spec.nonce, stacks


def _stub(spec: Plain) -> NodeSpec:
    """What identifies a spec of another release, for its report."""

    def word(name: str) -> str:
        return str(spec.get(name, ""))

    def number(name: str) -> int:
        value = spec.get(name)
        return value if isinstance(value, int) else 0

    return NodeSpec(
        run=word("run"),
        group=word("group"),
        replica=number("replica"),
        generation=number("generation"),
        node=number("node"),
        nnodes=1,
        nproc_per_node=1,
        launcher=word("launcher"),
        command=(),
        env={},
        cwd="/",
        log_dir=word("log_dir"),
        stop_timeout_s=0.0,
        nonce=word("nonce"),
    )
