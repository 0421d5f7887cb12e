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
from replicas.core.base.effects import CommitDecision, MemberLost
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

    :ivar latest: number of the newest recorded commit.
    :ivar digest: its digest; empty if it was unknown at the commit.
    :ivar last: the publish that ended last.
    :ivar disk_problem: why a decision cannot be written to disk; empty if it can.
    """

    def __init__(self, latest: int, digest: str) -> None:
        self.latest = latest
        self.digest = digest
        self.last: SyncRecord | None = None
        self.disk_problem = ""

    def recorded(self, decision: CommitDecision) -> None:
        if decision.kind == "commit":
            self.latest, self.digest = decision.version, decision.digest


class Recovery:
    def __init__(self, context: ChannelContext, commits: Commits, pairing: Matching) -> None:
        self._context, self._roster, self._commits, self._pairing = context, context.roster, commits, pairing
        self._aborted = context.past.aborted
        self._started: float | None = None
        self._told = False
        self._awaited: set[Member] = set()
        """Expected members that have not said Hello."""
        self._described: Member | None = None
        self._answer: wire.Described | None = None
        self._deferred: list[tuple[MemberState, wire.PublishBegin | wire.Packed | wire.PackFailed, float]] = []
        self._done = not context.past.decided[0]  # [0]: the newest decided version
        """True while no member of an earlier coordinator has come."""

    @property
    def active(self) -> bool:
        """True if decisions that need all members must wait."""
        return not self._done

    # ------------------------------------------------------------ expected members

    def expect(self, members: Collection[Member], told: Collection[tuple[int, float]] = ()) -> None:
        """Name the members of the earlier coordinator; empty if they are not known.

        :param told: number and time of the commits that its events have reported.
        """
        if told:
            self._commits.told = {version for version, _ in told} | self._aborted
        self._told = bool(members)
        self._awaited = {member for member in members if member not in self._roster}

    def stop_expecting(self, group: str, replica: int, reason: str) -> None:
        """Stop waiting for members of a replica whose processes have ended."""
        self._give_up([one for one in self._awaited if (one.group, one.replica) == (group, replica)], reason)

    def _give_up(self, members: Collection[Member], reason: str) -> None:
        self._awaited.difference_update(members)
        for member in sorted(members):
            self._context.emit(MemberLost(self._context.config.name, member, reason))

    @property
    def _all_back(self) -> bool:
        """Whether all expected members have reported, and can be admitted."""
        # an observer has no known host
        known = all(state.resumed and (state.host or state.observes) for state in self._roster)
        return self._told and not self._awaited and known

    def wait_text(self, now: float) -> tuple[str, float | None]:
        """Return the text after "waits ..." and the seconds left, or ("", None)."""
        if self._done:
            return "", None
        unheard = [state for state in self._roster if not state.resumed]
        known, absent = len(self._awaited) + len(self._roster), len(self._awaited) + len(unheard)
        members = f"{absent} of {known} members" if absent else "members"
        window_s = 2 * RECOVERY_S if unheard else RECOVERY_S
        left_s = max(0.0, window_s - now + (now if self._started is None else self._started))
        return f"for {members} of the former coordinator", left_s

    # ------------------------------------------------------------ reports of members

    def on_hello(self, state: MemberState, now: float) -> None:
        """Take the Hello of a member of an earlier coordinator."""
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
        commits.adopt_commit(hello.latest, hello.latest_digest)
        digest = state.held.get(commits.latest, "")
        # the member's bytes differ from the committed ones
        if digest and commits.decided and digest != commits.decided:
            state.drop_version(commits.latest)
            self._context.send(state.member, wire.Discard(commits.latest))
        if commits.latest > hello.latest:
            self._context.send(state.member, commits.commit_message())

    def defers(
        self, state: MemberState, message: wire.PublishBegin | wire.Packed | wire.PackFailed, now: float
    ) -> bool:
        """Return True if the message was deferred to the end of the window.

        That holds for a publish without a number, and for messages that follow it.
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
        """End the window when it is time, and decide the versions that members hold."""
        if self._done:
            return
        if self._started is None:
            self._started = now
        passed = now - self._started
        unheard = any(not state.resumed for state in self._roster)
        if not self._all_back and (passed < RECOVERY_S or (unheard and passed < 2 * RECOVERY_S)):
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
        carried = {publish.version for publish in commits.publishes.open()}
        held = {version for state in self._roster for version in state.held}
        # a version of an open publish ends with that publish
        for version in sorted({version for version in held if version > commits.latest} - carried):
            self._resolve_version(version)

    def _end_known_publishes(self, now: float) -> None:
        """Fail resumed publishes that a rank of their replica does not announce again.

        That rank has had its verdict, so the whole replica has.
        """
        commits = self._commits
        for publish in [publish for publish in commits.publishes.open() if publish.asked.resumed]:
            ranks = self._roster.replica(publish.group, publish.replica)
            told = [s for s in ranks if s.from_before and s.hello.publishes >= publish.asked.publish and s.resumed]
            silent = [s.member for s in told if s.member not in publish.begun]
            # a committed publish has that verdict
            if publish.version in self._aborted or (silent and publish.version > commits.latest):
                commits.told.add(publish.version)
                names = ", ".join(member.name for member in silent)
                why = f"{names} had its verdict" if names else "it had failed"
                text = f"version {publish.version} was not committed by the previous coordinator: {why}"
                commits.fail(publish, errors.SyncError(text, phase="commit", hint="publish again"), now)

    def _resolve_version(self, version: int) -> None:
        """Commit or discard a held version that no publish carries."""
        targets = [s for s in self._roster if s.is_target and s.carries]
        digests = {state.held.get(version, "") for state in targets}
        # a source that is present would have announced it
        sources = any(state.is_source and state.from_before for state in self._roster)
        if version not in self._aborted and not sources and len(digests) == 1 and digests != {""}:
            publishes = self._commits.publishes
            publishes.numbered = max(publishes.numbered, version)
            self._commits.adopt_commit(version, digests.pop())
            return
        for state in self._roster.holders.of(version):
            state.drop_version(version)
            self._context.send(state.member, wire.Discard(version))

    # ----------------------------------------------- the bytes of the committed version

    def advance(self, now: float) -> None:
        """Ask a holder to describe the committed version, if its payload is unknown."""
        version = self._commits.latest
        if self.active or not version or self._commits.committed is not None:
            return
        if self._described is not None and self._described in self._roster:
            if self._answer is not None:
                self._read(self._described, self._answer, now)
            return
        # min: the same history asks the same member
        holder = min((state.member for state in self._roster.holders.of(version)), default=None)
        self._described, self._answer = holder, None
        if holder is not None:
            self._context.send(holder, wire.Describe(version))

    def described(self, state: MemberState, message: wire.Described) -> None:
        """Take a holder's description of the committed version."""
        commits = self._commits
        if state.member != self._described:
            return
        # a newer version was committed meanwhile
        if message.version != commits.latest or commits.committed is not None:
            self._described = None
            return
        if not message.manifest_hash or (message.digest and commits.decided and message.digest != commits.decided):
            self.undescribed(state)
            return
        self._answer = message

    def undescribed(self, state: MemberState) -> None:
        """Forget a holder's unusable copy, so that another holder is asked."""
        if state.member == self._described:
            self._described = self._answer = None
            state.drop_version(self._commits.latest)

    def _read(self, holder: Member, answer: wire.Described, now: float) -> None:
        """Fetch and read the manifest, then restore the committed payload."""
        commits, wanted = self._commits, answer.manifest_hash
        if answer.version != commits.latest:
            self._described = self._answer = None
            return
        encoded = commits.manifests.get(holder, wanted, now)
        if encoded is None:  # the holder was asked for it; this is called again
            return
        try:
            joined = commits.manifests.joined(wanted, [encoded], whole=True)
        except errors.ManifestMismatch:
            for state in self._roster.states([holder]):
                self.undescribed(state)
            return
        if joined is None:
            return
        payload = Payload(
            version=answer.version,
            manifest_hash=wanted,
            manifest=joined.manifest,
            encoded=joined.encoded,
            nbytes=joined.manifest.data_nbytes,
            device=answer.device,
            meta=answer.meta,
            digest=commits.decided or answer.digest,
        )
        self._described = self._answer = None
        commits.restore(payload)
