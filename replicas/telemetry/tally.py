"""The counters of a run, as a fold of its events. Pure.

Metrics, ``status`` and the state file all show the numbers of one :class:`Tally`;
nothing else counts. (A coordinator without a supervisor has one of its own.) The events
suffice to rebuild it: apply :meth:`Tally.count` to each, in order, from the last
:class:`~replicas.telemetry.events.RunStarted` that was not a resumption, which resets
all counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
from msgspec.structs import replace

from replicas.core.base.effects import (
    CaughtUp,
    EpochStarted,
    LoadFailed,
    MemberJoined,
    MemberLost,
    OperationEnded,
    ReplicaLoaded,
    Retried,
    SidecarReplaced,
    SyncEnded,
    VersionDecided,
    WrongBytes,
)
from replicas.core.lives.lifecycle import Transition
from replicas.messages.identity import Member
from replicas.status import ChannelStatus, ReplicaStatus, RunStatus
from replicas.telemetry.events import (
    ConnectionsRefused,
    Event,
    EventsLost,
    LogLinesDropped,
    Reloaded,
    ReloadRefused,
    RunStarted,
)

SYNC_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
START_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 1800)

_COMMITS = 256
"""Commits of a channel whose times are kept: a replica is rarely further behind."""

Counts = dict[str, int]
Times = Mapping[str, Sequence[tuple[int, float]]]


class Histogram(msgspec.Struct):
    """A histogram of durations: the number in each bucket, and the sum in seconds.

    ``counts``: durations in each bucket, and last those above all bounds.
    """

    counts: list[int] = []
    total_s: float = 0.0

    def observe(self, seconds: float, bounds: tuple[float, ...]) -> None:
        """Count one duration in its bucket, and add it to the sum.

        :param bounds: upper bounds of the buckets in seconds, the same in each call.
        """
        if not self.counts:
            self.counts = [0] * (len(bounds) + 1)
        self.counts[bisect_left(bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[int]:
        """Return the number of durations up to each bound, and last of all durations;
        an empty list before the first one."""
        return list(accumulate(self.counts))


class Tally(msgspec.Struct):
    """A run's counters: by name of the group or channel, then by reason, outcome or
    phase.

    ``events_lost``: events that could not be written to disk; ``events_untold``: those
    of them that no :class:`EventsLost` has reported yet. ``epochs``: the newest epoch
    of each channel. ``members``: the members of each channel, with those that were lost
    with a supervisor and have not come back yet. ``reload_ok``: whether the config that
    was last read is in use. ``commits``: number and time of a channel's newest commits.
    ``received``: bytes by channel and replica. ``loads``: by channel and group.
    ``operations`` and ``operation_times``: by channel and kind. ``ready``: names of
    replicas. ``serving``: the version of each replica, by channel. ``mixed``: since
    when ready replicas have served different versions of a channel. ``promotions``:
    as ``commits``, of the versions that were promoted. ``decided``: decisions about
    versions, by channel.
    """

    restarts: dict[str, Counts] = {}
    starts: dict[str, Histogram] = {}
    recoveries: dict[str, Histogram] = {}
    syncs: dict[str, Counts] = {}
    sync_nbytes: Counts = {}
    wrong: Counts = {}
    sync_phases: dict[str, dict[str, Histogram]] = {}
    retries: dict[str, Counts] = {}
    failed_loads: dict[str, Counts] = {}
    sidecars: Counts = {}
    refused: Counts = {}
    log_lines_dropped: Counts = {}
    events_lost: int = 0
    events_untold: int = 0
    epochs: Counts = {}
    members: dict[str, set[Member]] = {}
    reload_ok: bool = True
    commits: dict[str, list[tuple[int, float]]] = {}
    version_nbytes: Counts = {}
    received: dict[str, Counts] = {}
    loads: dict[str, dict[str, Histogram]] = {}
    operations: dict[str, dict[str, Counts]] = {}
    operation_times: dict[str, dict[str, Histogram]] = {}
    ready: set[str] = set()
    serving: dict[str, Counts] = {}
    mixed: dict[str, float] = {}
    promotions: dict[str, list[tuple[int, float]]] = {}
    decided: dict[str, Counts] = {}

    def count(self, event: Event, at: float = 0.0) -> None:
        """Count one event, if it has a counter; a new run's start first resets all
        counters.

        :param at: time of the event, in seconds since 1970.
        """
        match event:
            case Transition():
                self._moved(event, at)
            case SyncEnded():
                self._synced(event, at)
            case CaughtUp():
                _add(self.sync_nbytes, event.channel, event.moved_nbytes)
                self._received(event.channel, event.moved_to)
            case WrongBytes(channel):
                _add(self.wrong, channel)
            case ReplicaLoaded():
                self.serving.setdefault(event.channel, {})[f"{event.group}/{event.replica}"] = event.version
                self._mix(event.channel, at)
                if event.version and event.load_s:  # else another coordinator has reported it
                    spread = self.loads.setdefault(event.channel, {}).setdefault(event.group, Histogram())
                    spread.observe(event.load_s, SYNC_BUCKETS)
            case VersionDecided():
                self._decided(event, at)
            case OperationEnded(channel, kind):
                _add(self.operations.setdefault(channel, {}).setdefault(kind, {}), event.outcome)
                spread = self.operation_times.setdefault(channel, {}).setdefault(kind, Histogram())
                spread.observe(event.seconds, SYNC_BUCKETS)
            case LoadFailed():
                _add(self.failed_loads.setdefault(event.channel, {}), "refused" if event.kept else "failed")
            case Retried(channel, reason):
                _add(self.retries.setdefault(channel, {}), reason)
            case SidecarReplaced():
                _add(self.sidecars, event.reason, event.count)
            case ConnectionsRefused():
                _add(self.refused, event.reason, event.count)
            case EpochStarted(channel, epoch):
                self.epochs[channel] = max(epoch, self.epochs.get(channel, 0))
            case MemberJoined(channel, member):
                self.members.setdefault(channel, set()).add(member)
            case MemberLost(channel, member):
                self.members.get(channel, set()).discard(member)
            case LogLinesDropped(where="file"):  # lines dropped by the tee are still in the log
                _add(self.log_lines_dropped, event.group, event.count)
            case EventsLost(count=count):
                known = min(count, self.events_untold)
                self.events_untold -= known
                self.events_lost += count - known
            case Reloaded() | ReloadRefused():
                self.reload_ok = isinstance(event, Reloaded)
            case RunStarted(resumed=False):
                fresh = Tally()
                for name in self.__struct_fields__:
                    setattr(self, name, getattr(fresh, name))

    def lost_event(self) -> None:
        """Count an event that could not be written to disk, as lost and as not yet
        reported. The ``EventsLost`` event that reports it later does not count it
        again."""
        self.events_lost += 1
        self.events_untold += 1

    def _moved(self, step: Transition, at: float) -> None:
        """Count a change of a replica's state: readiness, restarts, and times of starts
        and recoveries.

        :param at: time of the event, in seconds since 1970.
        """
        (self.ready.add if step.after == "ready" else self.ready.discard)(f"{step.group}/{step.replica}")
        for channel in self.serving:
            self._mix(channel, at)
        if step.restart_reason is not None:
            _add(self.restarts.setdefault(step.group, {}), step.restart_reason)
        if step.start_s is not None:
            self.starts.setdefault(step.group, Histogram()).observe(step.start_s, START_BUCKETS)
        if step.recovery_s is not None:
            self.recoveries.setdefault(step.group, Histogram()).observe(step.recovery_s, START_BUCKETS)

    def _mix(self, channel: str, at: float) -> None:
        """Update ``mixed``: set the time since when ready replicas serve different
        versions of the channel, or remove it if they serve one.

        :param at: time of the event, in seconds since 1970.
        """
        if len(self.served(channel)) > 1:
            self.mixed.setdefault(channel, at)
        else:
            self.mixed.pop(channel, None)

    def served(self, channel: str) -> dict[int, int]:
        """Return {version: number of ready replicas that serve it} of the channel."""
        serving = self.serving.get(channel, {}).items()
        return dict(Counter(version for name, version in serving if version and name in self.ready))

    def _received(self, channel: str, moved_to: Counts) -> None:
        """Add the bytes of a channel's sync, by replica, to the totals that replicas
        have received."""
        counts = self.received.setdefault(channel, {})
        for replica, nbytes in moved_to.items():
            _add(counts, replica, nbytes)

    def _synced(self, event: SyncEnded, at: float) -> None:
        """Count a sync, and the bytes and phases of a committed one."""
        record = event.record
        _add(self.syncs.setdefault(event.channel, {}), record.outcome)
        if record.outcome != "committed":
            return
        _add(self.sync_nbytes, event.channel, record.moved_nbytes)
        self._received(event.channel, record.moved_to)
        self.version_nbytes[event.channel] = record.nbytes
        commits = self.commits.setdefault(event.channel, [])
        commits.append((record.version, at))
        del commits[:-_COMMITS]
        phases = self.sync_phases.setdefault(event.channel, {})
        for phase, seconds in {**record.phases, "total": record.seconds}.items():
            phases.setdefault(phase, Histogram()).observe(seconds, SYNC_BUCKETS)

    def _decided(self, event: VersionDecided, at: float) -> None:
        """Count a decision about a version. If targets have to load the version now
        (``promoted``, ``rolled_back``), record its time, from which lags are computed.

        :param at: time of the event, in seconds since 1970.
        """
        _add(self.decided.setdefault(event.channel, {}), event.what)
        lists = {"promoted": (self.promotions,), "rolled_back": (self.promotions, self.commits)}
        for versions in lists.get(event.what, ()):
            known = versions.setdefault(event.channel, [])
            known.append((event.version, at))
            del known[:-_COMMITS]

    def shown_in(self, status: RunStatus, now: float = 0.0) -> RunStatus:
        """Return a copy of the status in which the counters of replicas, groups and
        channels have the values of this tally.

        :param now: the present time, in seconds since 1970, up to which the lags of
            replicas are computed.
        """
        promoted = {channel.name for channel in status.channels if channel.follow == "promoted"}
        due = self.commits | {name: self.promotions.get(name, []) for name in promoted}
        archived = {channel.archive: channel.name for channel in status.channels if channel.archive}
        groups = (
            replace(
                group,
                restarts=dict(self.restarts.get(group.name, {})),
                replicas=tuple(self._replica(one, due, now, archived.get(group.name)) for one in group.replicas),
            )
            for group in status.groups
        )
        return replace(
            status,
            groups=tuple(groups),
            channels=tuple(map(self.channel, status.channels)),
            sidecar_replacements=dict(self.sidecars),
            refused=dict.fromkeys(status.refused, 0) | self.refused,
        )

    def channel(self, status: ChannelStatus) -> ChannelStatus:
        """Return a copy of a channel's status with this tally's counters of the channel
        in place of those in ``status``."""
        name, operations = status.name, Counter[str]()
        for counts in self.operations.get(name, {}).values():
            operations.update(counts)
        commits = self.commits.get(name)
        return replace(
            status,
            syncs=dict(self.syncs.get(name, {})),
            retries=dict(self.retries.get(name, {})),
            bytes_total=self.sync_nbytes.get(name, 0),
            wrong_total=self.wrong.get(name, 0),
            operations=dict(operations),
            committed_at=commits[-1][1] if commits else None,
            version_nbytes=self.version_nbytes.get(name, 0),
            served=self.served(name),
            mixed_since=self.mixed.get(name),
        )

    def _replica(self, status: ReplicaStatus, due: Times, now: float, archived: str | None) -> ReplicaStatus:
        """Return a copy of a replica's status with received bytes and lags.

        :param due: (version, time) pairs of each channel: since when targets should
            have loaded that version.
        :param now: the present time; all times are in seconds since 1970.
        :param archived: the channel whose versions it archives: the last of these, not
            the one that was copied out of its slot, is what it has loaded.
        """
        if archived is not None:
            status = replace(status, versions={**status.versions, archived: status.step or 0})
        received = {name: counts[status.name] for name, counts in self.received.items() if status.name in counts}
        lag_s = {name: _lag_s(due.get(name, ()), version, now) for name, version in status.versions.items()}
        lag_s = {name: min(seconds, status.lived_s) for name, seconds in lag_s.items()}  # no lag before it lived
        return replace(status, received_nbytes=received, lag_s=lag_s)


def _lag_s(due: Sequence[tuple[int, float]], version: int, now: float) -> float:
    """Return for how many seconds a version newer than ``version`` has been due, or 0
    if none is.

    :param due: versions and when each was due, in seconds since 1970, oldest first.
    """
    return max(0.0, now - next((at for number, at in due if number > version), now))


class CounterDeltas:
    """Reports by how much counters have grown, at most every ``interval_s`` seconds."""

    def __init__(self, interval_s: float = 0.0) -> None:
        """Begin with all counters at 0.

        :param interval_s: least seconds between two reports of :meth:`since` that have
            growth; 0: no limit.
        """
        self._known: Counts = {}
        self._interval_s = interval_s
        self._due = 0.0

    def since(self, counts: Mapping[str, int], now: float | None = None) -> list[tuple[str, int]]:
        """Return (name, growth since the last report) of each counter that has grown.

        This is then the last report. The list is empty, and nothing is recorded, for
        ``interval_s`` after the last report with growth.

        :param counts: the counters' present values.
        :param now: the present time, in seconds of any steady clock. None: report
            immediately.
        """
        if now is not None and now < self._due:
            return []
        grown = [(name, count - self._known.get(name, 0)) for name, count in counts.items()]
        self._known = dict(counts)
        found = [(name, count) for name, count in grown if count > 0]
        if found and now is not None:
            self._due = now + self._interval_s
        return found


def _add(counts: Counts, key: str, count: int = 1) -> None:
    """Add ``count`` to a counter, which begins at 0."""
    counts[key] = counts.get(key, 0) + count
