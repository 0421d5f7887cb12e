"""Reconstruct the status of a run from its events. Pure.

A report has no supervisor to ask. Events give the state of each replica, node and
channel, but no budgets, heartbeats, pids or slots, so this status lacks them.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from replicas.core.base import effects
from replicas.core.lives.lifecycle import Transition
from replicas.messages.identity import Member
from replicas.status import ChannelStatus, GroupStatus, MemberStatus, NodeStatus, ReplicaStatus, RunStatus, StoreStatus
from replicas.telemetry import events
from replicas.telemetry.tally import Tally
from replicas.telemetry.tracks import replica_of


class Past:
    """A run's status, reconstructed from the events that were fed so far."""

    def __init__(self) -> None:
        """Begin with a run of which nothing is known."""
        self.at = 0.0
        """Time of the newest event."""
        self._tally = Tally()
        self._begin_run(events.RunStarted(run="", pid=0, version=""))

    def _begin_run(self, event: events.RunStarted) -> None:
        """Forget the previous run; begin with this event, and with nothing else
        known."""
        self._began_at = self.at
        self._started = event
        self._ended: events.RunEnded | None = None
        self._draining, self._store_up = False, True
        self._replicas: dict[tuple[str, int], ReplicaStatus] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._nodes: dict[str, tuple[NodeStatus, float]] = {}
        self._channels: dict[str, ChannelStatus] = {}
        self._members: dict[str, dict[Member, None]] = {}
        self._ranks: dict[str, int] = {}

    def feed(self, record: events.Record) -> None:
        """Apply the next event, in the order of their numbers, to the known state."""
        event, self.at = record.event, record.at
        self._tally.count(event, record.at)
        match event:
            case events.RunStarted(resumed=False):
                self._begin_run(event)
            case events.RunStarted():
                self._started, self._ended, self._draining = event, None, False
            case events.RunEnded():
                self._ended = event
            case events.Draining(target=""):
                self._draining = True
            case Transition():
                self._moved(event)
            case events.ReplicaExited(group=group, replica=index):
                self._change((group, index), last_exit=event.reason, versions={})
            case events.Scaled():
                for key in [one for one in self._replicas if one[0] == event.group and one[1] >= event.after]:
                    del self._replicas[key]
            case events.NodeChanged():
                self._node_changed(event)
            case _:
                self._of_channel(event)

    def _moved(self, event: Transition) -> None:
        """Apply a change of a replica's state: state, nodes, restarts, and since
        when."""
        key = event.group, event.replica
        known = self._replicas.get(key)
        nodes = event.nodes or (known.nodes if known is not None else ())
        restarts = (known.restarts if known is not None else 0) + (event.restart_reason is not None)
        about: dict[str, Any] = {"state": event.after, "generation": event.generation, "reason": event.reason}
        self._change(key, nodes=nodes, restarts=restarts, **about)
        if known is None or known.state != event.after:
            self._since[key] = self.at - (event.silent_s or 0.0)

    def _change(self, key: tuple[str, int], **changed: Any) -> None:
        """Replace fields in the status of a replica (group, index), which is made if
        missing."""
        known = self._replicas.get(key)
        if known is None:
            known = ReplicaStatus(
                name=f"{key[0]}/{key[1]}", group=key[0], replica=key[1], state="pending", generation=0
            )
        self._replicas[key] = replace(known, **changed)

    def _node_changed(self, event: events.NodeChanged) -> None:
        """Update the status of a node, or remove the status of one that has left."""
        if event.after in ("up", "draining", "away", "lost"):
            known = self._nodes[event.node][0].address if event.node in self._nodes else ""
            node = NodeStatus(name=event.node, state=event.after, address=event.address or known)  # type: ignore[arg-type]  # one of these
            self._nodes[event.node] = node, self.at
        else:
            self._nodes.pop(event.node, None)

    def _of_channel(self, event: events.Event) -> None:
        """Apply an event of a channel; ignore any other event."""
        name = getattr(event, "channel", "")
        if not name:
            return
        known = self._channels.get(name) or ChannelStatus(
            name=name, epoch=0, committed_version=0, digest="", members=()
        )
        match event:
            case effects.SyncEnded(record=record):
                done = record.outcome == "committed"
                about = {"committed_version": record.version, "step": record.step} if done else {}
                groups = [record.publisher.partition("/")[0]] if record.publisher else []
                known = replace(known, last_sync=record, sources=_with(known.sources, *groups), **about)
            case effects.EpochStarted(epoch=epoch):
                known = replace(known, epoch=epoch)
            case effects.VersionDecided(version=version, what="promoted"):
                known = replace(known, current=version, follow="promoted")
            case effects.VersionDecided(version=version, what="rolled_back") if known.current:
                known = replace(known, current=version)
            case effects.StepFell(before=before):
                known = replace(known, step_before=before)
            case effects.StoreChanged(up=up):
                self._store_up = up
            case effects.ReplicaLoaded(group=group, replica=index, version=version):
                if (replica := self._replicas.get((group, index))) is not None:
                    self._change((group, index), versions={**replica.versions, name: version})
                known = replace(known, targets=_with(known.targets, group))
            case effects.MemberJoined(member=member):
                self._members.setdefault(name, {})[member] = None
                self._ranks[member.group] = max(self._ranks.get(member.group, 0), member.rank + 1)
            case effects.MemberLost(member=member):
                self._members.setdefault(name, {}).pop(member, None)
        self._channels[name] = known

    def status(self, now: float) -> RunStatus:
        """Return the status of the run at ``now`` (seconds since 1970, not before the
        last event); fields that events do not tell have their defaults."""
        nodes = tuple(self._node(node, now - at) for node, at in self._nodes.values())
        replicas = tuple(
            replace(self._replicas[key], state_age_s=max(0.0, now - self._since.get(key, now)))
            for key in sorted(self._replicas)
        )
        status = RunStatus(
            run=self._started.run,
            version=self._started.version,
            endpoint="",
            pid=self._started.pid,
            uptime_s=now - self._began_at,
            ready=all(one.state in ("ready", "finished") for one in replicas),
            draining=self._draining,
            store=StoreStatus(up=self._store_up, host="", port=0),
            groups=tuple(self._group(name, replicas) for name in dict.fromkeys(one.group for one in replicas)),
            channels=tuple(self._channel(one) for one in self._channels.values()),
            nodes=nodes,
            exit_code=self._ended.exit_code if self._ended is not None else None,
            ended_by=self._ended.reason if self._ended is not None else "",
        )
        return self._tally.shown_in(status, now)

    def _node(self, node: NodeStatus, age_s: float) -> NodeStatus:
        """Return a copy of a node's status with the names of the replicas that are
        known to run on it, and ``age_s`` as ``heard_age_s``.

        :param age_s: seconds since the node's last event; below 0 counts as 0.
        """
        has = (one.name for one in self._replicas.values() if node.name in one.nodes)
        return replace(node, replicas=tuple(sorted(has)), heard_age_s=max(0.0, age_s))

    def _group(self, name: str, replicas: tuple[ReplicaStatus, ...]) -> GroupStatus:
        """Return the status of group ``name``, with those of ``replicas`` that it
        has."""
        own = tuple(one for one in replicas if one.group == name)
        return GroupStatus(name=name, launcher="", world_size=self._ranks.get(name, 1), replicas=own, size=len(own))

    def _channel(self, channel: ChannelStatus) -> ChannelStatus:
        """Return a copy of a channel's status with its present members added."""
        members = (
            MemberStatus(
                name=member.name,
                state="live",
                role="source" if member.group in channel.sources else "target",
                loaded=self._loaded(member.name, channel.name),
            )
            for member in sorted(self._members.get(channel.name, ()))
        )
        return replace(channel, members=tuple(members))

    def _loaded(self, member: str, channel: str) -> int:
        """Return the version that the member's replica has loaded, or 0."""
        group, _, index = replica_of(member).partition("/")
        replica = self._replicas.get((group, int(index)))
        return replica.versions.get(channel, 0) if replica is not None else 0


def _with(groups: tuple[str, ...], *others: str) -> tuple[str, ...]:
    """Return the names in ``groups`` and then in ``others``, each once."""
    return tuple(dict.fromkeys((*groups, *others)))
