"""The shims of one agent: start them as ordered, and relay the states of their parts.

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

from replicas import environ
from replicas.common.logs import Log
from replicas.supervisor.agent.containment import Containment
from replicas.supervisor.agent.forkservers import Forkservers
from replicas.supervisor.agent.messages import Plain, Start
from replicas.supervisor.agent.shim_process import ShimProcess, base_environment
from replicas.supervisor.wire.orders import OtherOrders, PartSpec
from replicas.supervisor.wire.part_state import IDENTITY, UNKNOWN, ExitReport, PartState

log = Log("replicas.agent")


class Shims:
    """The shims of an agent, by their marks. For the event loop's thread only.

    :param changed: called when there is something to tell.
    :param state_dir: folder of the node's logs and of the token for its ranks.
    """

    def __init__(self, containment: Containment, state_dir: Path, changed: Callable[[], None]) -> None:
        self._containment, self._state_dir, self._changed = containment, state_dir, changed
        self._shims: dict[str, ShimProcess] = {}
        self._states: dict[str, PartState] = {}
        """Of all parts, those included whose shims could not be started."""
        self._told: dict[str, PartState] = {}
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
        return nonce in self._states

    # ------------------------------------------------------------ orders

    def start(self, order: Start) -> None:
        """Start a shim, unless it is known; what fails is told as its end.

        :raises replicas.supervisor.wire.orders.Malformed: it is no spec.
        """
        state = _identity(order.spec)
        nonce = state.nonce
        if nonce in self._states:
            return
        try:
            self._shims[nonce] = self._containment.start(
                self._localized(PartSpec.of(order.spec)),
                lambda: self._moved(nonce),
                memory_nbytes=order.memory_nbytes,
                max_processes=order.max_processes,
            )
        except (OtherOrders, OSError) as error:
            report = ExitReport("lost", text=f"a shim cannot be started: {error}")
            self._states[nonce] = state._replace(report=report, gone=True)
        self._moved(nonce)

    def _localized(self, spec: PartSpec) -> PartSpec:
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
        if (shim := self._shims.get(nonce)) is not None:
            shim.stop(timeout_s, stacks=stacks)

    def _cannot_sync(self, forkserver: str, reason: str) -> None:
        """Stop the replicas that cannot sync without this forkserver."""
        for shim in self._living():
            if shim.spec.env.get(environ.FORKSERVER) == forkserver:
                shim.stop(shim.spec.stop_timeout_s, broken=f"the sidecar forkserver of its node {reason}")

    def meet(self, nonce: str, host: str, port: int) -> None:
        if (shim := self._shims.get(nonce)) is not None:
            shim.meet(host, port)

    def kill(self, nonce: str) -> None:
        if (shim := self._shims.get(nonce)) is not None:
            shim.kill()

    def show_stacks(self, nonce: str) -> None:
        """Have a shim send its stacks, which :meth:`stacks` then has."""
        if (shim := self._shims.get(nonce)) is not None:
            shim.show_stacks()

    def forget(self, nonce: str) -> None:
        """The supervisor has noted the shim's end."""
        if nonce in self._states and self._states[nonce].gone:
            for known in (self._shims, self._states, self._told):
                known.pop(nonce, None)

    # ------------------------------------------------------------ watching

    def look(self, now: float, lease_until: float | None) -> None:
        """Ping the shims, each of which then lives until ``lease_until`` at least.

        Call it every second.
        """
        self.lease_until = lease_until
        for shim in self._living():
            shim.look(now, lease_until, self.patience_s)
            self._states[shim.spec.nonce] = shim.state
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

    def _living(self) -> list[ShimProcess]:
        return [shim for shim in self._shims.values() if not shim.state.gone]

    def _moved(self, nonce: str) -> None:
        if (shim := self._shims.get(nonce)) is not None:
            self._states[nonce] = shim.state
        if self._living():
            self.empty.clear()
        else:
            self.empty.set()
        self._changed()

    # ------------------------------------------------------------ telling

    def all(self) -> tuple[PartState, ...]:
        """The state of each part; all of it counts as told."""
        before, self._told = self._told, {**self._states}
        return tuple(
            state._replace(known_losses=before[nonce].losses if nonce in before else ())
            for nonce, state in self._states.items()
        )

    def news(self) -> list[PartState]:
        """States that have changed since they were told; they count as told then."""
        changed = [state for nonce, state in self._states.items() if state != self._told.get(nonce)]
        self._told |= {state.nonce: state for state in changed}
        return changed

    def stacks(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Mark and stacks of each shim that has sent some, which are told then."""
        for nonce, shim in self._shims.items():
            if (stacks := shim.stacks) is not None:
                shim.stacks = None
                yield nonce, stacks


def _identity(spec: Plain) -> PartState:
    """What part a spec is of, which may be of another release."""
    known: dict[str, Any] = {name: spec.get(name) for name in IDENTITY}
    return UNKNOWN._replace(**{name: one for name, one in known.items() if type(one) is type(getattr(UNKNOWN, name))})
