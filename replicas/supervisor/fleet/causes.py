"""Find why a generation ends, from its health and its shims' reports; describe it.

Only the report of a failure shows the last lines of a rank, and the traceback that
torchelastic wrote if the log lacks it. Pure: callers pass the time.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from replicas.common.reason import Reason
from replicas.common.sizes import list_text
from replicas.config.structs import HealthConfig
from replicas.coordinator import Readiness
from replicas.core.lives.lifecycle import Lifecycle, ReplicaEvent, Transition
from replicas.linux.processes import signal_name
from replicas.status import WAIT_S, OnFailure, ReplicaState
from replicas.supervisor.state.run_state import Cause
from replicas.supervisor.wire.part_state import ExitReport, LogLoss, RankExit
from replicas.telemetry.events import Event, LogLinesDropped, RankEnd, ReplicaExited

STOPPED = "stopped"
"""The end of a generation that was stopped as ordered."""
_MANY = 1000
_END_S = 2.0
"""Time within which the report of a lost rank, with the cause, arrives."""
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals from outside, which the program's last line of output does not explain."""


@dataclass
class Health:
    """The health of one generation, as observed: ready, silent, with lost ranks.

    :ivar view: the coordinator's last view of it.
    :ivar left: a rank left in order after it was ready; it is not expected back.
    :ivar unready_at: when it was ready last. :ivar lost_at: when a rank ended.
    """

    view: Readiness | None = None
    was_ready: bool = False
    left: bool = False
    unready_at: float = 0.0
    lost_at: float = -math.inf

    def silence(self, config: HealthConfig) -> tuple[str, float]:
        """Return the silent ranks, in words, and the seconds of their silence.

        Without silent ranks: "" and 0.0.

        :param config: has the limit, for the text.
        """
        view = self.view
        if view is None or not view.silent:
            return "", 0.0
        ranks = ", ".join(map(str, view.silent))
        return f"no heartbeat from rank {ranks} (limit: {config.heartbeat_timeout_s:g} s)", view.heartbeat_age_s or 0.0

    def step(self, state: ReplicaState, *, ready: bool, silent: bool, now: float) -> ReplicaEvent | None:
        """Note what was observed. Return the event to apply to the replica's state.

        Return None if the state shows it already, and need not change.

        :param state: the present state of the replica.
        :param ready: it is ready now.
        :param silent: a node or rank of it is silent now.
        :param now: time of the loop's clock.
        """
        if ready:
            self.was_ready, self.unready_at = True, now
        if silent:
            return ReplicaEvent.SILENT if state != "silent" else None
        if ready and state != "ready":
            self.left = False
            return ReplicaEvent.READY
        return ReplicaEvent.UNREADY if not ready and state != "starting" and now - self.lost_at > _END_S else None

    def until(self, config: HealthConfig, life: Lifecycle, now: float) -> float:
        """Return the loop time after which :meth:`judge` finds start or load too late.

        Return 0 if there is no such time.

        :param config: has the timeouts.
        :param life: the replica's states, with the time of its start.
        :param now: present time of the loop's clock.
        """
        ready_by = 0.0 if self.left else self.unready_at + config.load_deadline_s
        return ready_by if self.was_ready else now - life.starting_s(now) + config.start_timeout_s

    def judge(self, config: HealthConfig, *, ready: bool, starting_s: float, now: float) -> Cause | None:
        """Return why the generation must be ended for its health, or None; end nothing.

        Reasons are faults in :attr:`view`, and timeouts of the start, of heartbeats, of
        progress and of loading.

        :param config: has the timeouts.
        :param ready: it is ready now.
        :param starting_s: seconds since its start.
        :param now: time of the loop's clock.
        """
        view = self.view
        if not ready and not self.was_ready and starting_s > config.start_timeout_s:
            why = f": {view.reason}" if view is not None and view.reason else ""
            return Cause("start_timeout", f"not ready within {config.start_timeout_s:g} s{why}")
        if view is None:
            return None
        if view.heartbeat_age_s is not None and view.heartbeat_age_s > config.heartbeat_timeout_s:
            return Cause("heartbeat_timeout", f"no heartbeat for {config.heartbeat_timeout_s:g} s")
        if view.progressed_s is not None and view.progressed_s > config.progress_timeout_s:
            return Cause("progress_timeout", f"no progress for {config.progress_timeout_s:g} s")
        if view.partial:
            return Cause("load_failed", f"{view.partial}; its weights may be a mix of versions")
        # After a rank has left, it is late only if other ranks wait.
        overdue = not ready and self.was_ready and (not self.left or view.stranded)
        if overdue and now - self.unready_at > config.load_deadline_s:
            return Cause("load_timeout", f"not ready again within {config.load_deadline_s:g} s: {view.reason}")
        return None


def verdict(reports: list[ExitReport]) -> Cause | None:
    """Return the failure that came first, not its consequences.

    Return None if all reports are ok.

    :param reports: of the parts of one generation.
    """
    if all(report.outcome == "ok" for report in reports):
        return None
    failed = [report for report in reports if report.outcome == "failed"]
    ranks = [report.ranks[0] for report in failed if report.ranks]
    if ranks:
        first = min(ranks, key=lambda rank: (rank.code == -signal.SIGTERM, rank.at, rank.rank))
        return Cause("signal" if first.code < 0 else "exit", _words(first))
    lost = [report for report in reports if report.outcome == "node"]
    if lost and not failed:
        return Cause("node", lost[0].text)
    other = failed or [report for report in reports if report.outcome == "lost"]
    text = next((report.text for report in other if report.text), "its programs ended")
    return Cause("exit" if failed else "lost", text)


def _words(rank: RankExit) -> str:
    """Return how a rank ended, in words: "rank 3 exited with code 1: KeyError"."""
    what = f"rank {rank.rank} exited with code {rank.code}{' after ' if rank.after else ''}{rank.after}"
    if rank.code < 0:
        what = f"rank {rank.rank} was killed by {signal_name(-rank.code)}"
    return f"{what}: {rank.text}" if rank.text and -rank.code not in _SENT else what


def exited(group: str, replica: int, generation: int, reports: list[ExitReport], *, reason: str) -> ReplicaExited:
    """Return the event for the end of a generation's programs.

    It has the last log lines of the rank that ended first.

    :param reports: of the generation's parts.
    :param reason: why the generation ended, in words.
    """
    outcomes: tuple[Literal["failed", "lost", "stopped"], ...] = ("failed", "lost", "stopped")
    found = {"lost" if report.outcome == "node" else report.outcome for report in reports}
    ranks = sorted((rank for report in reports for rank in report.ranks), key=lambda rank: (rank.at, rank.rank))
    ends = [RankEnd(rank=one.rank, code=one.code, pid=one.pid, text=one.text) for one in ranks]
    if ends:
        ends[0] = msgspec.structs.replace(ends[0], lines=ranks[0].lines, error=ranks[0].error)
    return ReplicaExited(
        group=group,
        replica=replica,
        generation=generation,
        outcome=next((one for one in outcomes if one in found), "ok"),
        reason=reason,
        ranks=tuple(ends),
    )


def dropped(group: str, replica: int, generation: int, loss: LogLoss) -> LogLinesDropped:
    """Return the event for lines that a generation's log or the terminal lost."""
    where: Literal["file", "tee"] = "tee" if loss.where == "tee" else "file"
    return LogLinesDropped(
        group=group, replica=replica, generation=generation, count=loss.lines, where=where, reason=loss.reason
    )


def line(transition: Transition, logs: Path | None, on_failure: OnFailure = "run") -> str:
    """Return a line for people about this transition, or "" if none is to be printed.

    :param logs: the folder of the run's logs; None if this replica's are on another
        machine.
    :param on_failure: whether the final failure of a replica ends the run, the group,
        or only the replica; for the text.
    """
    name = f"{transition.group}/{transition.replica}"
    again = f" (generation {transition.generation})" if transition.generation > 1 else ""
    reason = transition.reason
    folder = f"replicas logs {name} -g {transition.generation}"
    if logs is not None:
        folder = f"{logs / transition.group / str(transition.replica)}/gen-{transition.generation}"
    match transition.event:
        case ReplicaEvent.START | ReplicaEvent.BACKOFF_ELAPSED:
            return f"{name}: starting{again}"
        case ReplicaEvent.ADOPT:
            return f"{name}: continues under this supervisor{again}"
        case ReplicaEvent.READY if transition.start_s is not None:
            return f"{name}: ready after {transition.start_s:.1f} s{again}"
        case ReplicaEvent.READY:
            return f"{name}: ready again{f' ({reason})' if reason else ''}{again}"
        case ReplicaEvent.HELD_UP | ReplicaEvent.SILENT:
            return f"{name}: {'silent' if transition.event is ReplicaEvent.SILENT else 'still ending'}: {reason}"
        case ReplicaEvent.RETRY:
            when = f"in {transition.resume_s:.1f} s" if transition.resume_s else "when its old processes have ended"
            return f"{name}: {reason}; starting again {when}; logs: {folder}"
        case ReplicaEvent.GIVE_UP:
            end = f"once fixed: replicas reset-failed {name}" if on_failure == "replica" else f"the {on_failure} ends"
            return f"{name}: failed: {reason}; {end}; logs: {folder}"
        case ReplicaEvent.FINISHED | ReplicaEvent.STOPPED:
            return f"{name}: {reason if reason.startswith(STOPPED) else transition.event.value}"
        case ReplicaEvent.LEFT:
            return f"{name}: ended ({reason}); free for the next program to join"
        case ReplicaEvent.UNREADY:
            return f"{name}: not ready{f' ({reason})' if reason else ''}"
        case ReplicaEvent.STOP | ReplicaEvent.RESTART | ReplicaEvent.RESET:
            return ""
        case _:
            return f"{name}: {reason}; stopping it"


class WaitReports:
    """Lines about waits of more than :data:`WAIT_S`, each once, grouped by reason."""

    def __init__(self) -> None:
        """Begin with no wait known or reported."""
        self._since: dict[tuple[str, str], float] = {}

    def due(self, waits: Mapping[str, str], now: float) -> list[str]:
        """Return a line for each wait that has become long; later calls leave it out.

        Long is more than :data:`WAIT_S`; a wait ends when its reason changes. Lines of
        waits with the same reason are merged.

        :param waits: the present waits by name: the text after "waits", "" for none.
        :param now: seconds of any steady clock.
        """
        keys = {name: (name, re.sub("[0-9]+", "", what)) for name, what in waits.items() if what}  # without times
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        due = [name for name, key in keys.items() if now - self._since[key] > WAIT_S]
        self._since |= {keys[name]: math.inf for name in due}
        alike = {what: [name for name in due if waits[name] == what] for what in map(waits.__getitem__, due)}
        return [f"{list_text(names)}: {'waits' if len(names) == 1 else 'wait'} {what}" for what, names in alike.items()]


class FailureReports:
    """Texts for people about failed ranks and lost log lines, each loss once."""

    def __init__(self) -> None:
        """Begin with no loss reported."""
        self._said: set[tuple[str, int, str, str]] = set()

    def text(self, event: Event) -> str:
        """Return lines to print for an event, or "" if it needs none.

        Remembers each loss of log lines by replica, place and reason: "" for its next
        one.
        """
        match event:
            case ReplicaExited(outcome="failed"):
                return _last_words(event)
            case LogLinesDropped():
                return self._dropped(event)
            case _:
                return ""

    def _dropped(self, event: LogLinesDropped) -> str:
        """Return a line about lost log lines, or "" if it was reported before."""
        key = (event.group, event.replica, event.where, event.reason)
        if key in self._said:
            return ""
        if len(self._said) >= _MANY:
            self._said.clear()
        self._said.add(key)
        name = f"{event.group}/{event.replica}"
        if event.where == "tee":
            return f"{name}: not showing some of its lines here, only in its log: {event.reason}"
        return f"{name}: losing lines of its log: {event.reason}"


def _last_words(event: ReplicaExited) -> str:
    """Return the last lines and errors of failed ranks, as lines for people."""
    parts: list[str] = []
    for rank in event.ranks:
        for what, lines in (("last lines", rank.lines), ("error", rank.error.rstrip("\n").split("\n"))):
            if any(lines):
                parts.append(f"{event.group}/{event.replica}: the {what} of rank {rank.rank}:")
                parts += (f"    | {line}" for line in lines)
    return "\n".join(parts)


def lacks(view: Readiness | None) -> Reason | None:
    """Return, in words, why a ready replica does not serve the newest versions.

    It has no version of a channel yet, or ``view``, the coordinator's view of it, has a
    reason (for example a refused version). Return None if it serves all, or without a
    view.
    """
    if view is None:
        return None
    missing = ", ".join(f"no version of {name} yet" for name, version in view.versions.items() if not version)
    return "; ".join(filter(None, (missing, view.reason)))
