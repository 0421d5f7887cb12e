"""Recovery: rebuild a channel's state from the decision log and the returning members.

Theory of operation
===================

The decision log holds the newest committed version (and numbers that must not be used
again). Members of an earlier coordinator say in their Hello which versions they know
committed, hold, serve and were assigned, and then announce their work in progress.
Facts count at once, whenever they come: epochs and numbers only grow, and a version
that any member has seen committed *is* committed. Decisions that need all members wait
for a window: :data:`RECOVERY_S` after the first of them came (or after the start, if
there is a decision log). Until then nothing is admitted, moved or granted. The window
is twice as long if a member has yet to send ``Resumed``. A publish without a number
gets none before the end of the window: another rank of its replica may announce one.

A supervisor that knows its predecessor's members names them (:meth:`Recovery.expect`).
The window then ends as soon as each of them has sent ``Resumed``, and its host is
known; members whose replica has ended are not waited for. A member that has not come by
the end of the window is reported as lost. It may still come, as may an unexpected
member, and its facts still count; but its number may be taken, and versions that it
alone held discarded.

Then, for each version that is held and not committed:

* announced again by its source: the publish continues, and its holders need no bytes;
* not announced although a source of that time is a member: that source has had its
  verdict, a failure: discarded;
* its source is gone: committed, if every target among the members holds it with one
  digest; else discarded. Its number is not used again.

The manifest of the newest committed version is fetched from any holder of it, which
describes the version first (``Describe``).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from replicas import errors
from replicas import messages as wire
from replicas.core.base.effects import MemberLost
from replicas.core.base.ledger import Decision, Ledger
from replicas.core.members.member_state import MemberState
from replicas.core.moving.attempt import Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.operations.matching import Matching
from replicas.core.versions.commits import Commits
from replicas.messages.identity import Member
from replicas.status import SyncRecord

RECOVERY_S = 3.0  # longer than members take to find the new coordinator


class RecordedState:
    """The state of a channel that may be shown: commits that are already on disk.

    The state machine is ahead of the disk: it decides, and continues as if the decision
    were recorded. That is safe for its messages, which follow the record in the order
    of effects. Answers outside that order (a newcomer's Welcome, a status page, a
    metric, readiness) come from here.

    :ivar ledger: the decisions that are on disk.
    :ivar last: the publish that ended last.
    :ivar disk_problem: why a decision cannot be written to disk; empty if it can.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Start from the decisions on disk.

        :param ledger: those decisions; owned here from now on.
        """
        self.ledger = ledger
        self.last: SyncRecord | None = None
        self.disk_problem = ""

    @property
    def latest(self) -> int:
        """Number of the newest commit that is on disk; 0 if there is none."""
        return self.ledger.newest

    @property
    def digest(self) -> str:
        """Digest of the newest version on disk; empty if unknown at the commit."""
        return self.ledger.digest

    def recorded(self, decision: Decision) -> None:
        """Apply a decision that is on disk now, so that readers are shown it."""
        self.ledger.apply(decision)


class Recovery:
    """The recovery of one channel under a new coordinator."""

    def __init__(self, context: ChannelContext, commits: Commits, pairing: Matching) -> None:
        """Begin the window for returning members if the log has a commit.

        In the window (3 to 6 s) nothing is admitted, moved or granted.

        :param pairing: the matching of operations.
        """
        self._context, self._roster, self._commits, self._pairing = context, context.roster, commits, pairing
        self._aborted = context.past.aborted
        self._started: float | None = None
        self._told = False
        self._awaited: set[Member] = set()
        """Expected members that have not said Hello."""
        self._described: MemberState | None = None
        """The holder that was asked to describe a version."""
        self._asked = 0
        """That version."""
        self._answer: wire.Described | None = None
        self._deferred: list[tuple[MemberState, wire.PublishBegin | wire.Packed | wire.PackFailed, float]] = []
        self._done = self._without_log = not context.past.decided[0]  # [0]: the newest decided version
        """True while no member of an earlier coordinator has come."""

    @property
    def active(self) -> bool:
        """True during the window in which members of an earlier coordinator return.

        Decisions that need all members wait meanwhile.
        """
        return not self._done

    # ------------------------------------------------------------ expected members

    def expect(self, members: Collection[Member], told: Collection[tuple[int, float]] = ()) -> None:
        """Set the members that the earlier coordinator had, so that they are waited
        for.

        :param members: empty if they are unknown.
        :param told: ``(version, time)`` of the commits that its events have reported.
        """
        if told:
            self._commits.told = {version for version, _ in told} | self._aborted
        self._told = bool(members)
        self._awaited = {member for member in members if member not in self._roster}

    def stop_expecting(self, group: str, replica: int, reason: str) -> None:
        """Stop waiting for members of an ended replica, and report them as lost.

        :param reason: why they are lost, for the event.
        """
        self._give_up([one for one in self._awaited if (one.group, one.replica) == (group, replica)], reason)

    def _give_up(self, members: Collection[Member], reason: str) -> None:
        """Stop waiting for expected members, and emit an event of the loss of each."""
        self._awaited.difference_update(members)
        for member in sorted(members):
            self._context.emit(MemberLost(self._context.config.name, member, reason))

    @property
    def _all_back(self) -> bool:
        """True if all expected members have reported, and can be admitted.

        False if it is not known which members the earlier coordinator had.
        """
        # an observer has no known host
        known = all(state.resumed and (state.host or state.observes) for state in self._roster)
        return self._told and not self._awaited and known

    def wait_text(self, now: float) -> tuple[str, float | None]:
        """Return what members wait for in the window, and the seconds left.

        The text continues "waits ...": "for 1 of 3 members of the former coordinator".
        Return ("", None) if the window is over.
        """
        if self._done:
            return "", None
        unheard = sum(not state.resumed for state in self._roster)
        known, absent = len(self._awaited) + len(self._roster), len(self._awaited) + unheard
        members = f"{absent} of {known} members" if absent else "members"
        return f"for {members} to reconnect after the coordinator's restart", max(0.0, self._left_s(now))

    def _left_s(self, now: float) -> float:
        """Return the seconds until the window ends at the latest."""
        window_s = RECOVERY_S if all(state.resumed for state in self._roster) else 2 * RECOVERY_S
        return window_s - (0.0 if self._started is None else now - self._started)

    # ------------------------------------------------------------ reports of members

    def on_hello(self, state: MemberState, now: float) -> None:
        """Learn from the Hello of a member that comes from an earlier coordinator.

        Decide the commits that the member has seen, and continue its numbers of
        versions and publishes. Queue Discard for bytes of it that differ from those
        committed. If the log has no commit, the first such member begins the window.
        """
        commits, hello = self._commits, state.hello
        self._awaited.discard(state.member)
        self._roster.epoch = max(self._roster.epoch, hello.epoch + 1)  # no member has seen a later epoch
        versions = [hello.latest, hello.loaded, hello.assigned, *(held.version for held in hello.held)]
        commits.publishes.numbered = max(commits.publishes.numbered, *versions)
        if state.is_source:
            commits.publishes.came_back(state.member, hello.publishes)
        # without a log, only this member knows
        if self._started is None and not commits.latest and commits.main is None:
            self._done = False
            self._started = now
        commits.told |= set() if self._told else {hello.latest}  # the events say it better
        ledger = self._context.ledger
        commits.adopt_commit(hello.latest, hello.latest_digest, hello.latest_content, served=state.is_target)
        if self._without_log and state.is_target and hello.latest > ledger.current():  # it may serve it
            facts = {"digest": hello.latest_digest, "content": hello.latest_content}
            self._context.decide("promote" if hello.latest in ledger.versions else "commit", hello.latest, **facts)
        for known in list(ledger.versions.values()):  # the member's bytes may differ from the committed ones
            digest = state.held.get(known.content, "")
            if digest and known.digest and digest != known.digest:
                state.drop_version(known.content)
                self._context.send(state.member, wire.Discard(known.content))

    def defers(
        self, state: MemberState, message: wire.PublishBegin | wire.Packed | wire.PackFailed, now: float
    ) -> bool:
        """Return True if the message was stored until the end of the window.

        During the window a source's new publish is stored, with messages that follow
        it. Messages on resumed publishes are not: the caller handles them now.
        """
        # a target's publish is refused, now as well as later
        at_once = isinstance(message, wire.PublishBegin) and (message.resumed or not state.is_source)
        known = self._commits.publishes.get(state.member, message.publish)
        if self._done or at_once or (known is not None and state.member in known.begun):
            return False
        self._deferred.append((state, message, now))
        return True

    # ------------------------------------------------------------ the end of the window

    def tick(self, now: float) -> None:
        """End the window when it is time: decide the versions that members hold.

        Also handle the messages that were deferred, and count members that did not come
        back as lost. Call it regularly.
        """
        if self._done:
            return
        if self._started is None:
            self._started = now
        if not self._all_back and self._left_s(now) > 0:
            return
        self._done = True
        self._give_up(list(self._awaited), "absent")
        if any(state.is_peer and state.from_before for state in self._roster):
            self._pairing.stop_waiting_for_joins()
        deferred, self._deferred = self._deferred, []
        for state, message, at in deferred:
            if self._roster.get(state.member) is not state:  # lost meanwhile, or another incarnation
                continue
            if isinstance(message, wire.PublishBegin):
                left_s = max(0.0, message.deadline_s - (now - at))  # a part of its time has passed here
                message = msgspec.structs.replace(message, deadline_s=left_s)
            self._commits.publishing(state, message, now)
        self._end_known_publishes(now)  # first: versions that these publishes carried are settled below
        commits = self._commits
        carried = {publish.version for publish in commits.publishes.without_verdict()}
        held = {version for state in self._roster for version in state.held}
        # a version of an open publish ends with that publish
        for version in sorted({version for version in held if version > commits.latest} - carried):
            self._resolve_version(version)

    def _end_known_publishes(self, now: float) -> None:
        """Fail resumed publishes that an earlier coordinator has ended without commit.

        That is known from the log, or because a rank that had begun the publish has
        come back and does not resume it: so the rank has had its verdict.
        """
        commits = self._commits
        for publish in [publish for publish in commits.publishes.without_verdict() if publish.asked.resumed]:
            ranks = self._roster.replica(publish.group, publish.replica)
            told = [s for s in ranks if s.from_before and s.hello.publishes >= publish.asked.publish and s.resumed]
            silent = [s.member for s in told if s.member not in publish.begun]
            # a committed publish has that verdict
            if publish.version in self._aborted or (silent and publish.version > commits.latest):
                commits.told.add(publish.version)
                names = ", ".join(member.name for member in silent)
                why = f"{names} knows that it failed" if names else "it had failed"
                text = f"version {publish.version} was not committed before the coordinator restarted: {why}"
                commits.fail(publish, errors.SyncError(text, phase="commit", hint="publish again"), now)

    def _resolve_version(self, version: int) -> None:
        """Decide about a version that members hold, but that no open publish carries.

        Commit it if all targets hold the same bytes and no source has come back. (A
        source would resume the publish.) Else queue Discard to the holders.
        """
        targets = [s for s in self._roster if s.is_target and s.carries]
        digests = {state.held.get(version, "") for state in targets}
        # a source that is present would have announced it
        sources = any(state.is_source and state.from_before for state in self._roster)
        if version not in self._aborted and not sources and len(digests) == 1 and digests != {""}:
            publishes = self._commits.publishes
            publishes.numbered = max(publishes.numbered, version)
            self._commits.adopt_commit(version, digests.pop(), served=False)
            return
        for state in self._roster.holders.of(version):
            state.drop_version(version)
            self._context.send(state.member, wire.Discard(version))

    # ----------------------------------------------- the bytes of the committed version

    def advance(self, now: float) -> None:
        """Get the manifest of a version that is needed here, from a member that has it.

        Take the next step: queue Describe to a holder, or fetch the manifest that its
        answer names. Do nothing if no manifest is missing, or during the window.
        """
        commits = self._commits
        contents = commits.contents
        wanted = [
            *contents.wanted,
            *contents.leased,
            *([commits.recommits.waiting.content] if commits.recommits.waiting else ()),
        ]
        unknown = [one for one in wanted if contents.of(one) is None and self._roster.holders.of(one)]
        if self.active or not unknown:
            return
        version = unknown[0]
        asked, answer = self._described, self._answer
        if asked is not None and asked.member in self._roster and self._asked in unknown:
            waits = answer is None or self._read(asked, answer, now)
            if waits:
                return
        # min: the same history asks the same member
        holder = min(self._roster.holders.of(version), key=lambda state: state.member, default=None)
        self._described, self._answer, self._asked = holder, None, version
        if holder is not None:
            self._context.send(holder.member, wire.Describe(version))

    def described(self, state: MemberState, message: wire.Described) -> None:
        """Store a holder's description of a version, for :meth:`advance`.

        Descriptions that were not asked for are ignored.
        """
        if state is self._described:
            self._answer = message

    def undescribed(self, state: MemberState) -> None:
        """Record that a holder cannot describe its copy of a version.

        The member does not count as a holder then, and :meth:`advance` asks another
        one. A member that was not asked is ignored.
        """
        if state is self._described:
            state.drop_version(self._asked)
            self._described = self._answer = None

    def _read(self, holder: MemberState, answer: wire.Described, now: float) -> bool:
        """Fetch and read the manifest that a holder described; then store the payload.

        Return False if the description is of no use, so that another is needed. Return
        True if the manifest is here, or under way: then call again.
        """
        commits, wanted = self._commits, answer.manifest_hash
        known = self._context.ledger.versions.get(answer.version)
        decided = known.digest if known is not None else ""
        if answer.version != self._asked or commits.contents.of(answer.version) is not None:
            return False
        try:
            if not wanted or (answer.digest and decided and answer.digest != decided):
                raise errors.ManifestMismatch(f"{holder.member} has no version {answer.version}, or another one")
            encoded = commits.manifests.get(holder.member, wanted, now)
            joined = commits.manifests.joined(wanted, [encoded], whole=True) if encoded is not None else None
        except errors.ManifestMismatch:
            self.undescribed(holder)
            return False
        if joined is None:  # the holder was asked for it, or it is being read
            return True
        payload = Payload(
            version=answer.version,
            manifest_hash=wanted,
            manifest=joined.manifest,
            encoded=joined.encoded,
            nbytes=joined.manifest.data_nbytes,
            device=answer.device,
            meta=answer.meta,
            digest=decided or answer.digest,
        )
        self._described = self._answer = None
        commits.restore(payload)
        return True
