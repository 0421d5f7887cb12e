"""The state of one member of a channel, of a replica's life, and of its progress."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicas.core.base.membership import MEMBER, MemberEvent, Standing
from replicas.messages import ChannelSettings, Hello, Labels, SlotPlace
from replicas.messages.identity import Member, ProcessIdentity


class Held(dict[int, str]):
    """Digests of the versions that a member holds.

    :ivar on_change: called as ``on_change(version, held)`` when one is added or
        removed.
    """

    on_change: Callable[[int, bool], None] | None = None

    def __setitem__(self, version: int, digest: str) -> None:
        """Set the digest of a held version; call :attr:`on_change` if it is new."""
        new = version not in self
        super().__setitem__(version, digest)
        if new and self.on_change is not None:
            self.on_change(version, True)

    def __delitem__(self, version: int) -> None:
        """Remove a version that is held no longer, and call :attr:`on_change`."""
        super().__delitem__(version)
        if self.on_change is not None:
            self.on_change(version, False)

    def pop(self, version: int, *default: Any) -> Any:
        """Remove a version as ``dict.pop`` does.

        Call :attr:`on_change` if it was held.
        """
        if version not in self:
            return super().pop(version, *default)
        digest = self[version]
        del self[version]
        return digest

    if not TYPE_CHECKING:  # those of dict would not call the methods above
        popitem, setdefault = MutableMapping.popitem, MutableMapping.setdefault
        update, clear = MutableMapping.update, MutableMapping.clear


@dataclass(slots=True, eq=False)
class Life:
    """One life of a replica: a generation, or one process for each of its ranks.

    Ranks may join before the others, and after others have left in good order, so the
    present members do not define it. Ranks that a supervisor started (their Hello has a
    proof) are one life if they have one generation; a newer generation ends it.

    Other launchers may give each life the same generation, and restart one rank while
    the others continue. As long as the life has a member, every rank that joins belongs
    to it. Once it has none, it is over if a rank was lost and has not come back, if
    another process joins as one of its ranks, or if the generation differs. So ranks
    that are restarted together must not join before the former leases have ended.

    :ivar ranks: the process of each rank that has joined, by its number.
    :ivar lost: ranks that did not leave in good order.
    :ivar resumed: it began under another coordinator, so ``ranks`` is incomplete.
    :ivar published: number of the replica's publishes when the first rank of a source
        joined this life; -1 before.
    :ivar counts: ranks of a source that have joined: for a rank that has left in good
        order its process and its own count, from which it continues if it joins again.
    """

    generation: int
    ranks: dict[int, ProcessIdentity] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    resumed: bool = False
    published: int = -1
    counts: dict[int, tuple[ProcessIdentity, int] | None] = field(default_factory=dict)

    def is_continued_by(self, hello: Hello) -> bool:
        """Return True if a joining rank belongs to this life, none of whose members is
        present.

        A life is one run of a replica's processes. False: the rank begins another one.

        :param hello: the rank's first message.
        """
        if hello.proof or self.generation != hello.generation:
            return self.generation == hello.generation
        return self.ranks.get(hello.rank, hello.process) == hello.process and not self.lost - {hello.rank}

    def joined(self, hello: Hello) -> None:
        """Enter the process of a rank that joins this life, in place of an earlier one.

        The rank does not count as lost now. If it comes from an earlier coordinator,
        the life counts as resumed: its list of ranks may miss some.

        :param hello: the rank's first message.
        """
        self.ranks[hello.rank] = hello.process
        self.lost.discard(hello.rank)
        self.resumed = self.resumed or hello.resume_term != 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of a member in reading a manifest. Times: monotonic clock."""

    manifest_hash: str
    since: float
    at: float
    nbytes: int
    total_nbytes: int

    @property
    def ends_at(self) -> float:
        """The time when the member will have read the manifest, at its average rate."""
        return self.since + (self.at - self.since) * self.total_nbytes / max(1, self.nbytes)


@dataclass(slots=True, eq=False)
class MemberState:
    """The coordinator's state of one member.

    :ivar note: why it is behind.
    :ivar missed: the version without which it was left behind: it is admitted again
        when it holds that or a newer one.
    :ivar not_before: it is not admitted before this time.
    :ivar rtt_s: recent round-trip time to it; 0: unknown.
    :ivar slow: the others went on without it, because it would have delayed them.
    :ivar draining: it is being ended (:mod:`replicas.core.draining`).
    :ivar archives: it writes the channel's archive, and is never admitted.
    :ivar resumed: it has reported all of its work in progress (at once, unless it comes
        from another coordinator).
    :ivar cut_at: when its connection ended; 0 while it has one.
    :ivar host: number of its host (:mod:`replicas.core.members.hosts`); 0: unknown.
    :ivar reading: the manifest that it asked for last.
    :ivar places: by version, where the slots are that it filled for a publish.
    :ivar lent: versions in its memory that other members of its host may have mapped.
    :ivar carrier_port: where its carrier listens; 0: it has none yet.
    :ivar server: the server that it loads versions into
        (:mod:`replicas.core.members.servers`); None: unknown, or it is no target.
    :ivar certificate_hash: of the certificate that its carrier shows, if it has one.
    """

    member: Member
    hello: Hello
    settings: ChannelSettings
    address: str
    last_seen: float
    cut_at: float = 0.0
    standing: Standing = "joining"
    note: str = ""
    missed: int = 0
    not_before: float = 0.0
    draining: bool = False
    archives: bool = False
    resumed: bool = True
    host: int = 0
    places: dict[int, SlotPlace] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    carrier_port: int = 0
    certificate_hash: str = ""
    server: object = None
    carries: bool = True
    held: Held = field(default_factory=Held)
    parts: set[int] = field(default_factory=set)
    reading: Reading | None = None
    told: int = 0
    """The newest version that it knows committed."""
    labels: Labels | None = None
    """What it was told last of labels."""
    loaded: int = 0
    load_s: float = 0.0
    """How long its last reported update was open."""
    granted_at: float = 0.0
    """When it was last granted an update, or joined."""
    progressed_at: float = 0.0
    retry_at: float = 0.0
    failures: int = 0
    slow: bool = False
    rtt_s: float = 0.0
    view_epoch: int = 0
    """The last epoch of which it was sent a View."""

    def step(self, event: MemberEvent) -> None:
        """Change the member's standing (joining, live, behind, gone) by the table
        ``MEMBER``.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen now.
        """
        self.standing = MEMBER.next(self.standing, event)

    def drop_version(self, version: int) -> bool:
        """Forget the member's copy and part of the version; return True if it had any.

        It sends the member nothing, and frees no memory.
        """
        had = self.held.pop(version, None) is not None or version in self.parts
        self.parts.discard(version)
        self.places.pop(version, None)
        return had

    @property
    def live(self) -> bool:
        """True if the member belongs to the current epoch, the present membership."""
        return self.standing == "live"

    @property
    def caught_up(self) -> bool:
        """True if the member holds the version without which it was left behind, or a
        newer one.

        Also if it missed none. Only such a member is admitted: another would delay each
        sync.
        """
        return not self.missed or max(self.held, default=0) >= self.missed

    @property
    def from_before(self) -> bool:
        """True if the member's session began under another coordinator."""
        return self.hello.resume_term != 0

    @property
    def is_source(self) -> bool:
        """True if the member's group publishes versions."""
        return self.settings.role in ("source", "both")

    @property
    def is_target(self) -> bool:
        """True if the member's group receives versions."""
        return self.settings.role in ("target", "both")

    @property
    def is_peer(self) -> bool:
        """True if the member takes part in collectives."""
        return self.settings.role == "peer"

    @property
    def observes(self) -> bool:
        """True if the member is an observer, which takes no part in syncs."""
        return self.settings.role == "observer"


class HighWaterMarks:
    """The newest step and version that each replica of a channel reached.

    They outlast its generations: a replica that is restarted from a checkpoint repeats
    old steps, which do not count as progress. Operations without a ``step=`` tag cannot
    be compared, so each one counts. A mark never gets smaller.
    """

    def __init__(self) -> None:
        """Start without any replica."""
        self._marks: dict[tuple[str, int], tuple[int, int, int]] = {}

    def of(self, group: str, replica: int) -> tuple[int, int, int]:
        """Return what the replica has reached, as three numbers.

        They are ``(newest step, newest version, count of operations without a step)``,
        or ``(-1, 0, 0)`` if there are none.
        """
        return self._marks.get((group, replica), (-1, 0, 0))

    def drop_replicas(self, group: str, replicas: int) -> None:
        """Forget the group's replicas from index ``replicas`` on; they are removed."""
        self._marks = {key: marks for key, marks in self._marks.items() if key[0] != group or key[1] < replicas}

    def note(self, group: str, replica: int, *, step: int = -1, version: int = 0, operations: int = 0) -> None:
        """Raise the replica's marks to what it has reached.

        A lower number changes nothing.

        :param step: a step that it has done; -1: none.
        :param version: a version that it has loaded or published; 0: none.
        :param operations: number of operations without a step, added to the count.
        """
        known = self.of(group, replica)
        self._marks[group, replica] = max(known[0], step), max(known[1], version), known[2] + operations
