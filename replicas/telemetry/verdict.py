"""Judge a run: sentences about everything that is wrong, the worst first. Pure.

Read from one status, so that the page, ``replicas top`` and a report say the same. A
sentence has no age in it: it stays the same as long as the trouble lasts, and ``since``
says when it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from replicas.common.sizes import count_text, list_text
from replicas.core.lives.lifecycle import SETTLED
from replicas.core.lives.ordering import GOOD, needed_replicas
from replicas.status import WAIT_S, ChannelStatus, GroupStatus, ReplicaState, ReplicaStatus, RunStatus
from replicas.telemetry.words import outcome_text

Level = Literal["bad", "warn", "note"]
BEHIND_S = 30.0
"""Seconds that a target may take to load a committed version before it is named."""
OPEN_S = 60.0
LOOP_LAG_S = 1.0
_NAMED = 3
_ENDS = {"run": "ends the run", "group": "ends its group", "replica": "is final (until replicas reset-failed)"}
_ORDER = {"bad": 0, "warn": 1, "note": 2}


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """One trouble, or unfinished work (``note``).

    ``about``: a track of the timeline, such as ``replica rollout/1`` or ``run``.
    ``since``: when it began; ``until``: when it ends at the latest; both in seconds
    since 1970, None if unknown. ``then``: what happens then, in words; empty: the
    trouble is over.
    """

    level: Level
    about: str
    text: str
    since: float | None = None
    until: float | None = None
    then: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``sentence``: the worst trouble, or that all is well; ``troubles``: all."""

    level: Literal["good", "bad", "warn", "note"]
    sentence: str
    troubles: tuple[Trouble, ...] = ()


def verdict(status: RunStatus, now: float) -> Verdict:
    """Judge a run by its status at the time ``now`` (seconds since 1970): return all
    troubles, and the worst as one sentence. Change nothing."""
    found = sorted(_troubles(status, now), key=lambda one: _ORDER[one.level])
    if status.exit_code is not None:
        why = f": {status.ended_by}" if status.ended_by else ""
        good = status.exit_code == 0
        sentence = f"The run is over, with exit code {status.exit_code}{why}."
        found = [one for one in found if one.level != "note"]  # all replicas have ended
        return Verdict(level="good" if good else "bad", sentence=sentence, troubles=tuple(found))
    if not found:
        return Verdict(level="good", sentence=f"All is well: {_well(status)}.")
    return Verdict(level=found[0].level, sentence=found[0].text, troubles=tuple(found))


def _well(status: RunStatus) -> str:
    """Return in words how many replicas are ready, and the versions of channels."""
    replicas = [one for group in status.groups for one in group.replicas]
    parts = [f"{count_text(sum(one.state == 'ready' for one in replicas), 'replica')} ready"]
    if finished := sum(one.state == "finished" for one in replicas):
        parts.append(f"{finished} finished")
    parts += [f"{one.name} at version {one.committed_version}" for one in status.channels if one.committed_version]
    return ", ".join(parts)


def _troubles(status: RunStatus, now: float) -> Iterator[Trouble]:
    """Yield all troubles and unfinished work of the run, not ordered by severity.

    :param now: the present time, in seconds since 1970.
    """
    if not status.store.up:
        text = "The rendezvous store does not answer: no new process group forms."
        yield Trouble(level="bad", about="run", text=text)
    if status.draining and status.exit_code is None:
        left = [one for group in status.groups for one in group.replicas if one.state not in SETTLED]
        text = f"The run is being drained: {count_text(len(left), 'replica')} left."
        yield Trouble(level="warn", about="run", text=text, until=_until(left, now))
    if status.event_loop_lag_s > LOOP_LAG_S:
        yield Trouble(level="warn", about="run", text="The supervisor is slow: its event loop lags by over a second.")
    away = {node.name for node in status.nodes if node.state in ("away", "lost")}
    for group in status.groups:
        yield from _of_group(group, away, now)
    for channel in status.channels:
        yield from _of_channel(channel, status, now)
    for node in (one for one in status.nodes if one.name in away):
        runs = f"; it runs {list_text(node.replicas, _NAMED)}" if node.replicas else ""
        what = "lost: its replicas start elsewhere" if node.state == "lost" else f"away: its agent is silent{runs}"
        since = now - node.heard_age_s
        yield Trouble(level="warn", about=f"node {node.name}", text=f"Node {node.name} is {what}.", since=since)


_STATES: tuple[tuple[ReplicaState, Level, str, str], ...] = (
    ("failed", "bad", "has failed for good", "have failed for good"),
    ("backoff", "warn", "has ended, and waits to be started again", "have ended, and wait to be started again"),
    ("silent", "warn", "is silent", "are silent"),
    ("draining", "note", "is being ended", "are being ended"),
    ("starting", "note", "is starting", "are starting"),
    ("pending", "note", "waits for its start", "wait for their start"),
    ("drained", "note", "was drained", "were drained"),
)


def _of_group(group: GroupStatus, away: set[str], now: float) -> Iterator[Trouble]:
    """Yield the troubles of a group and its replicas; a silent replica on a node of
    ``away`` (names of nodes that do not answer) is left out, as the node has its own
    sentence."""
    # the node's own sentence covers silent replicas on a node that is away
    replicas = [one for one in group.replicas if one.state != "silent" or away.isdisjoint(one.nodes)]
    for state, level, *words in _STATES:
        found = [(one, one.state_age_s) for one in replicas if one.state == state]
        yield from _common_trouble(found, level, *words, now=now)
    good = sum(one.state in GOOD for one in group.replicas)
    if group.min_ready is not None and good < (needed := needed_replicas(group.min_ready, len(group.replicas))):
        text = f"Group {group.name} has {good} of the {needed} ready replicas that it needs."
        yield Trouble(level="bad", about=f"group {group.name}", text=text)
    if group.restart_budget_remaining_ratio < 0.5:
        left = f"{group.restart_budget_remaining_ratio:.0%}"
        text = f"Group {group.name} has {left} of its restart budget left; without any, a failure {_ENDS[group.on_failure]}."
        yield Trouble(level="warn", about=f"group {group.name}", text=text)
    if group.no_progress_remaining_ratio < 0.5:
        cycles = max((one.cycles for one in group.replicas), default=0)
        names = list_text([one.name for one in group.replicas if one.cycles == cycles], _NAMED)
        most, mended = group.no_progress_cycles, f"once mended: replicas reset-failed {names}"
        final = f"from {most} on, a failure {_ENDS[group.on_failure]}"
        end = f"not started again; {mended}" if cycles >= most else final
        text = f"{names} failed {count_text(cycles, 'time')} in a row without a new step or version; {end}."
        yield Trouble(level="warn", about=f"group {group.name}", text=text)


def _common_trouble(
    found: Sequence[tuple[ReplicaStatus, float]], level: Level, one: str, many: str, *, now: float
) -> Iterator[Trouble]:
    """Yield a sentence for each reason for which replicas have the same trouble, or
    only one sentence for more than three reasons.

    :param found: (replica, seconds for which the trouble has lasted). :param level: how
        bad it is.
    :param one, many: the sentence's predicate for one and for several replicas.
    :param now: the present time, in seconds since 1970.
    """
    alike: dict[str, list[tuple[ReplicaStatus, float]]] = {}
    for replica, age_s in found:
        alike.setdefault(replica.reason, []).append((replica, age_s))
    for reason, some in alike.items() if len(alike) <= _NAMED else [("", found)]:
        replicas, since = [replica for replica, _ in some], now - max(age_s for _, age_s in some)
        about, what = (f"replica {replicas[0].name}", one) if not some[1:] else (f"group {replicas[0].group}", many)
        text = f"{list_text([replica.name for replica in replicas], _NAMED)} {what}{f': {reason}' if reason else '.'}"
        then = "stopped" if replicas[0].state == "starting" else ""
        yield Trouble(level=level, about=about, text=text, since=since, until=_until(replicas, now), then=then)


def _until(replicas: Sequence[ReplicaStatus], now: float) -> float | None:
    """Return the time, in seconds since 1970, by which all these replicas have left
    their present states. Return None if one of the states has no known limit."""
    left_s = [one.left_s for one in replicas if one.left_s is not None]
    return now + max(left_s) if left_s and len(left_s) == len(replicas) else None


def _of_channel(channel: ChannelStatus, status: RunStatus, now: float) -> Iterator[Trouble]:
    """Yield the troubles of a channel, among them those of ready replicas that are
    behind on the channel or hold a version open.

    :param status: that of the run, for its replicas.
    :param now: the present time, in seconds since 1970.
    """
    about = f"channel {channel.name}"
    if channel.step is not None and channel.step_before is not None and channel.step < channel.step_before:
        text = f"The step of {channel.name} fell from {channel.step_before:g} to {channel.step:g}"
        text += ": did its trainer lose its checkpoint?"
        yield Trouble(level="bad", about=about, text=text)
    if (last := channel.last_sync) is not None and last.outcome != "committed":
        text = f"Version {last.version} of {channel.name} was not committed: {outcome_text(last.outcome)}."
        yield Trouble(level="warn", about=about, text=text)
    if channel.disk_problem:
        text = f"A decision of {channel.name} cannot be written to disk, and waits: {channel.disk_problem}"
        yield Trouble(level="bad", about=about, text=text)
    if channel.waits and channel.left_s is not None:
        text = f"{channel.name} waits {channel.waits}."
        yield Trouble(level="note", about=about, text=text, until=now + channel.left_s)
    for one in channel.under_way:
        if one.seconds > WAIT_S and one.waits:
            then = "" if one.state == "moving" else "it fails"
            text = f"The publish of version {one.version} of {channel.name} ({one.state}) waits {one.waits}."
            yield Trouble(
                level="note", about=about, text=text, since=now - one.seconds, until=now + one.left_s, then=then
            )
    name = channel.name
    replicas = [one for group in status.groups for one in group.replicas if one.state == "ready"]
    if (
        channel.mixed_since is not None
        and not channel.canary
        and (channel.adopt_together or now - channel.mixed_since > BEHIND_S)
    ):
        on = {v: list_text([one.name for one in replicas if one.versions.get(name) == v]) for v in channel.served}
        parts = (f"version {v} on {on[v] or n}" for v, n in sorted(channel.served.items(), reverse=True))
        late = next((one.name for one in replicas if one.versions.get(name) == min(channel.served)), "")
        hint = f" (see replicas stacks {late})" if late else ""
        text = f"Replicas serve different versions of {name}: {', '.join(parts)}{hint}."
        yield Trouble(level="warn", about=about, text=text, since=channel.mixed_since)
    behind = [(one, one.lag_s[name]) for one in replicas if one.lag_s.get(name, 0.0) > BEHIND_S]
    words = (f"{verb} behind: a newer version of {name} is not loaded yet" for verb in ("is", "are"))
    yield from _common_trouble(behind, "warn", *words, now=now)
    holding = [(one, one.open_s[name]) for one in replicas if one.open_s.get(name, 0.0) > OPEN_S]
    words = (f"{verb} an update of {name} open, and with it a slot" for verb in ("holds", "hold"))
    yield from _common_trouble(holding, "warn", *words, now=now)


_ILL = ("failed", "silent", "backoff", "draining", "behind", "starting", "pending", "drained")
"""States of replicas that are not well, the worst first."""
WELL = len(_ILL)


def illness(replica: ReplicaStatus) -> int:
    """Return a sort key: 0 for a replica in the worst state (failed), higher ones for
    better states, up to :data:`WELL` for a replica that is well.

    A ready or finished replica counts as ``behind``, not as well, if on any channel it
    has not loaded a version 30 s after it should have.
    """
    behind = replica.state in GOOD and max(replica.lag_s.values(), default=0.0) > BEHIND_S
    state = "behind" if behind else replica.state
    return _ILL.index(state) if state in _ILL else WELL


def ill_first(status: RunStatus) -> tuple[list[GroupStatus], list[ReplicaStatus]]:
    """Return all groups and all replicas as new lists, those in the worst state
    first."""
    groups = sorted(status.groups, key=lambda group: min(map(illness, group.replicas), default=WELL))
    return groups, sorted((one for group in groups for one in group.replicas), key=illness)
