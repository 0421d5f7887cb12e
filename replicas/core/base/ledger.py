"""The ledger of one channel: its decisions, folded into tables.

Theory of operation
===================

What is committed and what is served are two decisions, and both are recorded. The
decision log is a sequence of :class:`Decision`; a :class:`Ledger` is what they amount
to: versions, labels, leases, scores. It is folded in three places, from the same
decisions in the same order: by the state machine, which is ahead of the disk; by the
log, of what is on disk, which also rewrites its file from it; and by the part that
answers readers, who must not learn of a decision before it is on disk.

*Content.* A version is a number; its content are bytes. A version that was committed to
go back to an older one has that one's content: the bytes stay where they are, under the
number with which they were published (:meth:`Ledger.content`).

*Labels.* ``current`` is the version that targets load, ``previous`` the one before it,
``candidate`` a committed version that is not served (yet). A commit names the label
that it moves; users have labels of their own. A version of a label or a lease is
*kept*, as is what it is the content of.

Pure: times are seconds since 1970, given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

CURRENT, CANDIDATE, PREVIOUS = "current", "candidate", "previous"
OWN_LABELS = (CURRENT, CANDIDATE, PREVIOUS)
KEPT_RECORDS = 16
"""Newest versions that are known without a label or a lease."""


DecisionKind = Literal["commit", "abort", "promote", "reject", "soak", "label", "hold", "release", "score"]


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the decision log; as an effect: durable before any later effect.

    ``commit``: the version is committed, and label ``name`` moves to it. ``abort``: it
    was being published, and will never be committed. ``promote``: it becomes
    ``current``. ``reject``: it never does, because of ``why``. ``soak``: all its canary
    replicas serve it from ``at`` on; with ``value`` 0: no longer. ``label``: label
    ``name`` moves to it; with version 0 it ends. ``hold``: lease ``name`` keeps it for
    ``value`` seconds, or as long as member ``why`` lives (0 seconds). ``release``:
    lease ``name`` ends. ``score``: its score ``name`` is ``value``, the mean of
    ``count`` reports.

    :ivar content: of a commit: the version whose bytes it has; 0: its own.
    :ivar at: when it was decided, in seconds since 1970; 0: unknown.
    """

    kind: DecisionKind
    channel: str
    version: int
    digest: str = ""
    epoch: int = 0
    term: int = 0
    name: str = ""
    value: float = 0.0
    count: int = 0
    why: str = ""
    content: int = 0
    at: float = 0.0
    step: float | None = None
    nbytes: int = 0


class Score(msgspec.Struct, frozen=True):
    """The mean of ``count`` reports."""

    value: float
    count: int = 1

    def with_report(self, value: float) -> Score:
        """Return the mean with one more report; this score does not change."""
        return Score(self.value + (value - self.value) / (self.count + 1), self.count + 1)


class Lease(msgspec.Struct, frozen=True):
    """A promise to keep a version until a time; 0: as long as its holder lives.

    ``holder``: name of the member that asked for it; empty: a person.
    """

    name: str
    version: int
    until: float = 0.0
    holder: str = ""


class Version(msgspec.Struct):
    """The record of one committed version.

    :ivar digest: empty if unknown; it may be learned after the commit.
    """

    number: int
    commit: Decision
    digest: str
    rejected: str = ""
    scores: dict[str, Score] = msgspec.field(default_factory=dict)

    @property
    def content(self) -> int:
        """Number of the version whose bytes this one has: its own, or an older one."""
        return self.commit.content or self.number


class Ledger:
    """The decisions on one channel so far, as tables: versions, labels, leases, scores.

    In memory only: the decision log writes the file.

    :ivar newest: the newest committed version; 0 if there is none.
    :ivar aborted: later numbers that will not be committed, with their decisions.
    :ivar soaking: the candidate that all canary replicas serve, and since when.
    :ivar changes: number of decisions so far.
    """

    def __init__(self) -> None:
        """Start without versions, as on a new channel."""
        self.newest = 0
        self.versions: dict[int, Version] = {}
        self.labels: dict[str, int] = {}
        self.leases: dict[str, Lease] = {}
        self.aborted: dict[int, Decision] = {}
        self.soaking: tuple[int, float] | None = None
        self.changes = 0

    @property
    def digest(self) -> str:
        """Digest of the newest version; empty if it is unknown, or there is none."""
        return self.versions[self.newest].digest if self.newest else ""

    def learn_digest(self, digest: str) -> None:
        """Set the digest of the newest version, which was unknown at its commit.

        There must be a version. It changes this object only, and writes no file.
        """
        self.versions[self.newest].digest = digest

    def content(self, version: int) -> int:
        """Return the number of the version whose bytes ``version`` has.

        That is an older one after a rollback, else ``version`` itself, also if
        ``version`` is unknown here.
        """
        known = self.versions.get(version)
        return version if known is None else known.content

    def current(self) -> int:
        """Return the version that targets load; 0 if there is none."""
        return self.labels.get(CURRENT, 0)

    def candidate(self) -> int:
        """Return the committed version that is not served yet; 0 if there is none."""
        return self.labels.get(CANDIDATE, 0)

    def labels_of(self, version: int) -> tuple[str, ...]:
        """Return the names of the labels that point to the version; () if none does."""
        return tuple(label for label, number in self.labels.items() if number == version)

    def why_rejected(self, version: int) -> str:
        """Return why the version was rejected, so that no target loads it.

        Return "" if it was not, or is unknown here.
        """
        return self.versions[version].rejected if version in self.versions else ""

    # ------------------------------------------------------------ decisions

    def apply(self, decision: Decision) -> None:
        """Change versions, labels, leases and scores as one decision says.

        In memory only: the caller writes the decision to disk. A rejection or a score
        of an unknown version adds one to :attr:`changes`, and changes nothing else.
        """
        version, name = decision.version, decision.name
        self.changes += 1
        match decision.kind:
            case "abort":
                self.aborted[version] = decision
            case "commit":
                self._commit(decision)
            case "promote":
                self._serve(version)
            case "label" if not version:
                self.labels.pop(name, None)
            case "label":
                self.labels[name] = version
            case "hold":
                until = decision.at + decision.value if decision.value else 0.0
                self.leases[name] = Lease(name, version, until, decision.why)
            case "release":
                self.leases.pop(name, None)
            case "soak":
                self.soaking = (version, decision.at) if decision.value else None
            case "reject" | "score" if version in self.versions:
                self._judge(self.versions[version], decision)

    def _commit(self, decision: Decision) -> None:
        """Add the version that ``decision`` commits to those known here.

        Point the decision's label to it: ``candidate`` if it names that, otherwise
        ``current``. Forget the aborted numbers up to it, and old versions
        (:meth:`_prune`).
        """
        number = decision.version
        self.newest = max(self.newest, number)
        self.versions[number] = Version(number, decision, decision.digest)
        # a newer commit settles them
        self.aborted = {version: known for version, known in self.aborted.items() if version > number}
        if decision.name == CANDIDATE:
            self.labels[CANDIDATE], self.soaking = number, None
        else:
            self._serve(number)
        self._prune()

    def _serve(self, version: int) -> None:
        """Point the label ``current`` to the version, and ``previous`` to the former.

        Remove the label ``candidate``, and what is known of its canary replicas, unless
        it points to a newer version.
        """
        if current := self.current():
            self.labels[PREVIOUS] = current
        self.labels[CURRENT] = version
        if self.candidate() <= version:
            self.labels.pop(CANDIDATE, None)
            self.soaking = None

    def _judge(self, version: Version, decision: Decision) -> None:
        """Store in ``version`` the rejection or the score that ``decision`` is about.

        If the candidate is rejected, there is no candidate then.
        """
        if decision.kind == "score":
            version.scores[decision.name] = Score(decision.value, max(1, decision.count))
            return
        version.rejected = decision.why
        if self.candidate() == version.number:
            del self.labels[CANDIDATE]
            self.soaking = None

    def pinned(self) -> set[int]:
        """Return the versions that a label or a lease points to.

        A label is a name such as ``current``; a lease is a promise to keep the version.
        """
        return {*self.labels.values(), *(lease.version for lease in self.leases.values())}

    def _prune(self) -> None:
        """Forget old versions: keep the newest 16, and those of a label or a lease.

        Versions whose bytes a labelled or leased version has are kept, too.
        """
        pinned = self.pinned()
        needed = {*pinned, *map(self.content, pinned), *sorted(self.versions)[-KEPT_RECORDS:]}
        self.versions = {number: known for number, known in self.versions.items() if number in needed}

    # ------------------------------------------------------------ the file

    def decisions(self) -> Iterator[Decision]:
        """Yield the fewest decisions that rebuild this ledger, to rewrite its file.

        They are for a new ledger, in this order. This ledger does not change.
        """
        channel = next((known.commit.channel for known in self.versions.values()), "")
        labels = [Decision("label", channel, version, name=label) for label, version in self.labels.items()]
        yield from labels  # first: versions that are kept are not forgotten at later commits
        for lease in self.leases.values():
            lasts_s, at = (1.0, lease.until - 1.0) if lease.until else (0.0, 0.0)
            yield Decision("hold", channel, lease.version, name=lease.name, value=lasts_s, why=lease.holder, at=at)
        for number, known in sorted(self.versions.items()):
            yield known.commit
            if known.rejected:
                yield Decision("reject", channel, number, why=known.rejected)
            for name, score in known.scores.items():
                yield Decision("score", channel, number, name=name, value=score.value, count=score.count)
        for label in OWN_LABELS:  # the commits have moved them
            yield Decision("label", channel, self.labels.get(label, 0), name=label)
        if self.soaking is not None:
            yield Decision("soak", channel, self.soaking[0], value=1.0, at=self.soaking[1])
        yield from self.aborted.values()


class Past(msgspec.Struct, frozen=True):
    """State of a channel according to the decision log, when a coordinator starts.

    :param ledger: the decisions so far.
    :param epoch: the last one that members of an earlier coordinator may have seen.
    """

    ledger: Ledger = msgspec.field(default_factory=Ledger)
    epoch: int = 0

    @property
    def decided(self) -> tuple[int, str]:
        """Number and digest of the newest commit; (0, "") if there is none."""
        return self.ledger.newest, self.ledger.digest

    @property
    def aborted(self) -> frozenset[int]:
        """Version numbers after the newest commit that failed and stay unused."""
        return frozenset(self.ledger.aborted)

    @property
    def floor(self) -> int:
        """The newest version number that was ever committed or aborted, or 0."""
        return max(self.decided[0], *self.aborted, 0)
