"""The shims of one agent: start them as ordered, and relay the states of their parts.

Each shim starts in a control group for its part and generation. The group exists before
the shim starts a process, so no process is lost, whichever is killed next. Where
control groups cannot be made, processes are found by descent and by their mark.

The agent keeps a shim, by its mark (``nonce``), from the order to start it until the
supervisor has recorded its end. :meth:`Shims.take_changed_states` returns the states
that changed since they were last sent; :meth:`Shims.take_all_states` returns all, for a
new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from replicas import environ
from replicas.common.logs import Log
from replicas.linux.cgroups import RunCgroups
from replicas.supervisor.agent.forkservers import Forkservers
from replicas.supervisor.agent.messages import AskStacks, Forget, Kill, Meet, Plain, ShimOrder, Start, Stop
from replicas.supervisor.agent.shim_process import ShimProcess, base_environment
from replicas.supervisor.wire.orders import OtherOrders, PartSpec
from replicas.supervisor.wire.part_state import IDENTITY, UNKNOWN, ExitReport, PartState

log = Log("replicas.agent")


class Shims:
    """The shims of an agent, each the owner of one part's processes, by marks (nonces).

    For the event loop's thread only.

    :param groups: the control groups of the run on this node.
    :param state_dir: folder of the node's logs and of the token for its ranks.
    :param lock: descriptor of a lock that shims keep held, if any.
    :param begin: starts a shim; raises OSError.
    """

    def __init__(
        self,
        groups: RunCgroups,
        state_dir: Path,
        *,
        lock: int | None = None,
        begin: Callable[[PartSpec, Callable[[], None], int | None, str], ShimProcess] = ShimProcess,
    ) -> None:
        """Begin without shims; start none.

        :param groups: the control groups of the run on this node.
        :param state_dir: folder of the node's logs and of the token for its ranks.
        :param lock: descriptor of a lock that shims keep held, if any.
        :param begin: starts a shim, given its spec, a callback for changes, ``lock``,
            and the address of its template, if any; raises OSError.
        """
        self.groups, self._state_dir, self._lock, self._begin = groups, state_dir, lock, begin
        self.changed: Callable[[], None] = lambda: None
        """Called when there are states or stacks to send."""
        self._shims: dict[str, ShimProcess] = {}
        self._unstarted: dict[str, PartState] = {}
        """The states of parts whose shims could not be started."""
        self._sent_states: dict[str, PartState] = {}
        self._forkservers = Forkservers(self._stop_users_of)
        self.identity = ""
        """Identity of the state folder, in the environment of the processes."""
        self.address = ""
        """Address of this node's ranks for ranks of other nodes."""
        self.lease_until: float | None = None
        """When a shim that is started now ends, unless it is pinged."""
        self.patience_s = 0.0
        """How long shims run without a ping; 0 for no limit."""
        self.endpoint = ""
        """Address of the supervisor from this node; empty for that of the spec.

        A host name may resolve to another address after a takeover.
        """
        self.empty = asyncio.Event()
        """Set while no shim has a process left."""
        self.empty.set()

    def __contains__(self, nonce: str) -> bool:
        """Return True if a shim with this mark (its random id) was ordered before."""
        return nonce in self._shims or nonce in self._unstarted

    @property
    def _states(self) -> dict[str, PartState]:
        """The states of all parts, also of those whose shim did not start, by mark."""
        return {**self._unstarted, **{nonce: shim.state for nonce, shim in self._shims.items()}}

    # ------------------------------------------------------------ orders

    def obey(self, order: ShimOrder) -> None:
        """Carry out an order for one shim; ignore it if the shim is unknown.

        Never waits for the shim. A shim is the child process that owns one part of a
        replica.
        """
        shim = self._shims.get(order.nonce) if not isinstance(order, Start) else None
        match order:
            case Start():
                self._start(order)
            case Forget(nonce):
                self._remove_ended(nonce)
            case Stop(timeout_s=timeout_s, stacks=stacks) if shim is not None:
                shim.stop(timeout_s, stacks=stacks)
            case Meet(host=host, port=port) if shim is not None:
                shim.meet(host, port)
            case Kill() if shim is not None:
                shim.kill()
            case AskStacks() if shim is not None:
                shim.show_stacks()

    def _start(self, order: Start) -> None:
        """Start a shim, unless its mark (its random id) is known.

        If that fails, note a state for its part: ended, with the error in its report.
        """
        state = identify_part(order.spec)
        nonce = state.nonce
        if nonce in self:
            return
        try:
            spec = self._in_group(self._localized(PartSpec.of(order.spec)), order)
            self._shims[nonce] = self._begin(spec, self._update_empty, self._lock, self._forkservers.template(spec))
        except (OtherOrders, OSError) as error:
            report = ExitReport("lost", text=f"its shim, which starts the ranks, cannot be started: {error}")
            self._unstarted[nonce] = state._replace(report=report, gone=True)
        self._update_empty()

    def _localized(self, spec: PartSpec) -> PartSpec:
        """Return the spec with this node's environment, folders, address and lease.

        Start the forkserver (for the ranks' helper processes) that the part needs, and
        end those that no part uses.
        """
        folder = self._state_dir / "logs" / spec.group / str(spec.replica) / f"gen-{spec.generation}"
        own = {environ.TOKEN_FILE: str(self._state_dir / "token"), environ.LOG_DIR: str(folder)}
        own |= {environ.STATE_ID: self.identity} if self.identity else {}
        own |= {environ.ENDPOINT: self.endpoint} if self.endpoint else {}
        env = {**base_environment(), **spec.env, **own}
        if spec.sidecars:
            env[environ.FORKSERVER] = self._forkservers.address(env, ahead=spec.sidecars == "ahead")
        living = [env, *(shim.spec.env for shim in self._living())]
        self._forkservers.retain({one.get(environ.FORKSERVER, "") for one in living})
        return spec._replace(
            env=env,
            log_dir=str(folder),
            local_addr=self.address or spec.local_addr,
            lease_until=self.lease_until or 0.0,
            patience_s=self.patience_s,
        )

    def _in_group(self, spec: PartSpec, order: Start) -> PartSpec:
        """Make a control group for the part; return the spec with its path.

        :param order: has the limits of memory and processes, if any.
        :raises OSError: the group cannot be made, and there are limits. Without limits,
            the failure is logged and the spec returned as it is.
        """
        limited = order.memory_nbytes is not None or order.max_processes is not None
        if self.groups.path is None and not limited:
            return spec
        name = f"{spec.group}.{spec.replica}.{spec.generation}"
        try:
            path = self.groups.add(
                name, spec.node, memory_nbytes=order.memory_nbytes, max_processes=order.max_processes
            )
        except OSError as error:
            if limited:
                raise
            log.warning("starting %s without a control group: %s", name, error)
            return spec
        return spec._replace(cgroup=str(path))

    def _stop_users_of(self, forkserver: str, reason: str) -> None:
        """Stop the parts whose ranks cannot sync without this forkserver.

        :param forkserver: its address; it would fork the ranks' helper processes.
        :param reason: how it failed, for the exit report.
        """
        for shim in self._living():
            if shim.spec.env.get(environ.FORKSERVER) == forkserver:
                shim.stop(shim.spec.stop_timeout_s, broken=f"the forkserver, which starts its sidecars, {reason}")

    def _remove_ended(self, nonce: str) -> None:
        """Forget the shim with this mark (id), if none of its processes is left."""
        if nonce in self and self._states[nonce].gone:
            for known in (self._shims, self._unstarted, self._sent_states):
                known.pop(nonce, None)

    # ------------------------------------------------------------ watching

    def check_shims(self, now: float, lease_until: float | None) -> None:
        """Ping the shims, so that they live until ``lease_until``. Never wait.

        Also note in their states for how long they have not answered. To be called
        every second. Both times are of the machine's monotonic clock.

        :param lease_until: when they end without another ping; None for no lease.
        """
        self.lease_until = lease_until
        for shim in self._living():
            shim.check_shim(now, lease_until, self.patience_s)
        self.changed()

    def stop_all(self, timeout_s: float) -> None:
        """Order all shims to send their processes SIGTERM, and SIGKILL ``timeout_s``
        (seconds) later.

        Does not wait; :attr:`empty` is set when none is left.
        """
        for shim in self._living():
            shim.stop(timeout_s)

    def kill_all(self) -> None:
        """SIGKILL the living shims; does not wait.

        After the end of each shim, this agent kills the processes that it has left.
        """
        for shim in self._living():
            shim.kill()

    async def aclose(self) -> None:
        """Kill the forkservers and templates, and wait up to 5 s for their ends.

        For when all shims are gone.
        """
        await self._forkservers.aclose()

    def _living(self) -> list[ShimProcess]:
        """Return the shims that still have processes."""
        return [shim for shim in self._shims.values() if not shim.state.gone]

    def _update_empty(self) -> None:
        """Set :attr:`empty` if no process is left, else clear it; call ``changed``."""
        if self._living():
            self.empty.clear()
        else:
            self.empty.set()
        self.changed()

    # ------------------------------------------------------------ telling

    def take_all_states(self) -> tuple[PartState, ...]:
        """Return the state of each part, and mark them all as sent.

        Each has, as ``known_losses``, the lost log lines of the state sent before,
        which the supervisor has counted.
        """
        before, self._sent_states = self._sent_states, self._states
        return tuple(
            state._replace(known_losses=before[nonce].losses if nonce in before else ())
            for nonce, state in self._sent_states.items()
        )

    def take_changed_states(self) -> list[PartState]:
        """Return the states that changed since they were sent; mark them as sent."""
        changed = [state for nonce, state in self._states.items() if state != self._sent_states.get(nonce)]
        self._sent_states |= {state.nonce: state for state in changed}
        return changed

    def take_stacks(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Take out the stacks that shims have sent; yield each shim's mark and stacks.

        The stacks are texts by ``group/replica/rank``.
        """
        for nonce, shim in self._shims.items():
            if (stacks := shim.stacks) is not None:
                shim.stacks = None
                yield nonce, stacks


def identify_part(spec: Plain) -> PartState:
    """Return a state with only the identity of a spec's part (group, node, mark...).

    :param spec: maybe of another release: missing or odd fields keep their defaults.
    """
    known: dict[str, Any] = {name: spec.get(name) for name in IDENTITY}
    return UNKNOWN._replace(**{name: one for name, one in known.items() if type(one) is type(getattr(UNKNOWN, name))})
