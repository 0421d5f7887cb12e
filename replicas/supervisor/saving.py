"""Write the state that survives a kill of the supervisor (state.json)."""

from __future__ import annotations

import time

from replicas.common.logs import Log
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.nodes import Nodes
from replicas.supervisor.state.run_state import ProcessRecord, Saved, machine, process_record, this_process
from replicas.telemetry.event_log import EventLog

log = Log("replicas.supervisor")


class Saving:
    """Writes state.json of a run, from which the next supervisor takes it over."""

    def __init__(self, context: FleetContext, nodes: Nodes) -> None:
        """Keep the arguments; write nothing yet."""
        self._context, self._nodes = context, nodes
        self._machine, self._process = machine(), this_process()
        self._helpers: dict[int, ProcessRecord] = {}

    def save(self, fleet: Fleet, events: EventLog, draining: str, *, sync: bool) -> bool:
        """Write the present state of the run to state.json. Return False on failure.

        Blocks for the write. The next supervisor reads the file to take the run over.

        :param events: the event log, whose last number and counters are saved.
        :param draining: why the whole run is being drained, or "".
        :param sync: also fsync, so that the state survives a crash of the machine.
        """
        state, wall = self._context.state, time.time()
        return state.run_state.save(
            Saved(
                starts=state.leases.starts,
                run=self._context.config.run.name,
                machine=self._machine,
                supervisor=self._process,
                at=wall,
                seq=events.seq,
                tally=events.tally,
                groups=fleet.saved(wall),
                shims=fleet.shims(),
                helpers=self._helper_records(),
                agents=self._nodes.cluster.records(),
                port=int(self._context.coordinator.endpoint.rpartition(":")[2]),
                draining=draining,
            ),
            sync=sync,
        )

    def _helper_records(self) -> tuple[ProcessRecord, ...]:
        """Return pid and start time of the store and of the local agent.

        They identify the processes for the next supervisor. Cached by pid; a process
        that does not run or cannot be looked up is left out, and the latter is logged.
        """
        known, self._helpers = self._helpers, {}
        for pid in filter(None, (self._context.coordinator.store_pid, self._nodes.agent_pid)):
            try:
                found = known.get(pid) or process_record(pid)
            except OSError as error:  # e.g. this process has no descriptor left
                log.warning("saving the state without process %d, which cannot be looked up: %s", pid, error)
                continue
            if found is not None:
                self._helpers[pid] = found
        return tuple(self._helpers.values())
