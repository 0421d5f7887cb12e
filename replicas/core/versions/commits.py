"""Commits: from packed to committed; the main transfer, the decision and the verdict.

One publish moves at a time. Its transfer serves the live targets; when all of them hold
the version (or, past the deadline with ``on_lost = "drop"``, some of them), it is
*decided*: recorded, then sent to every member; only newer versions follow. Targets
left behind are caught up (:mod:`replicas.core.versions.catch_up`), then readmitted.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

from replicas import errors
from replicas import messages as wire
from replicas.common.sizes import count_text, snake_case
from replicas.core.base.effects import Send, SyncEnded
from replicas.core.base.ledger import CANDIDATE
from replicas.core.members.member_state import MemberState
from replicas.core.moving.attempt import Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.transfer import Transfer
from replicas.core.versions.catch_up import CatchUp, Whom
from replicas.core.versions.contents import Contents
from replicas.core.versions.load_rounds import Newest
from replicas.core.versions.manifests import Manifests, answer
from replicas.core.versions.publishes import ALL_NEEDED, MATE_NEEDED, TOO_FEW, Publish, Publishes
from replicas.core.versions.recommits import Recommit, Recommits
from replicas.core.versions.steps import Steps, number_in
from replicas.messages import WireError
from replicas.messages.identity import Member

READING_S = 2.0
"""For this long after a publish starts moving, slow manifest readers are tolerated."""
READY_S = 3.0
"""Members of a later attempt have at least this long to get ready."""
_EVERY_RANK = "call publish on every rank of the source, equally often: not under `if rank == 0`"
LAST_WORDS_S = 0.4
"""Grace after the deadline: the rank's own error is more specific than ours."""


class Commits:
    """Publishes, transfers and decisions of one channel."""

    def __init__(self, context: ChannelContext) -> None:
        """Start without publishes, with the decisions of the context's ledger."""
        self._context, self._roster = context, context.roster
        config = context.config
        all_ranks = any(party.ranks == "all" for party in config.sources)
        self.publishes = Publishes(config.name, context.past.floor, all_ranks=all_ranks)
        self.recommits = Recommits(context, self.publishes, self._recommit)
        self.told = {self.latest, *context.past.aborted}
        """Versions whose end an earlier coordinator reported: not reported again."""
        self.contents = Contents(context)
        self.steps = Steps(config.name)
        self._decided_here = False
        """True if the newest commit's publish began here: no other has its number."""
        self.catch_ups = [CatchUp(context, self._take_first_digest, whom) for whom in get_args(Whom)]
        self.manifests = Manifests(config.name, context.out)
        self._unread: list[tuple[MemberState, wire.Packed | wire.Filled]] = []
        """Messages about publishes whose manifest is still missing here, in order."""

    @property
    def latest(self) -> int:
        """The newest committed version; 0 if there is none."""
        return self._context.ledger.newest

    @property
    def decided(self) -> str:
        """Digest of the newest committed version; empty while unknown."""
        return self._context.ledger.digest

    @property
    def committed(self) -> Payload | None:
        """Payload (manifest, facts) of the newest commit; None if unknown here."""
        return self.contents.of(self.latest)

    # ------------------------------------------------------------ messages of members

    @property
    def main(self) -> Transfer | None:
        """The transfer of the publish that moves; None without one."""
        return self.publishes.moving.transfer if self.publishes.moving is not None else None

    @property
    def newest(self) -> Newest:
        """Number and ``meta`` of the newest committed version, for ranks that ask."""
        return self.contents.newest(self.latest)

    @property
    def transfers(self) -> list[Transfer]:
        """The running transfers: that of the publish that moves, and catch-ups."""
        known = (self.main, *(catch_up.transfer for catch_up in self.catch_ups))
        return [transfer for transfer in known if transfer is not None]

    def publishing(
        self, state: MemberState, message: wire.PublishBegin | wire.Packed | wire.PackFailed, now: float
    ) -> None:
        """Handle a rank's message: it begins a publish, has packed, or cannot pack."""
        publish = self.publishes.get(state.member, message.publish)
        match message:
            case wire.PublishBegin():
                self._on_publish_begin(state, message, now)
            case wire.Packed():
                self._packed(state, message, now)
            case wire.PackFailed() if publish is not None:
                self.fail(publish, self._context.hosts.blame(message.error.exception(), [state], self.latest), now)

    def _on_publish_begin(self, state: MemberState, message: wire.PublishBegin, now: float) -> None:
        """Begin or join the publish; queue its version number, or an error."""
        context, member = self._context, state.member
        try:
            if not state.is_source:
                raise errors.UsageError(
                    f"{member} is not a source of channel {context.config.name!r} and cannot publish on it",
                    channel=context.config.name,
                    hint="name its group under `sources`",
                )
            publish = self.publishes.begin_publish(member, message, now)
        except errors.ReplicasError as error:
            context.send(member, wire.PublishEnd(message.publish, error=WireError.of(error)))
            found = self.publishes.get(member, message.publish)
            if found is not None and isinstance(error, errors.RanksDisagree):
                self.fail(found, error, now)
            return
        context.send(member, wire.PublishAdmitted(message.publish, publish.version))
        if publish.over:
            context.send(member, wire.PublishEnd(publish.asked.publish, publish.receipt, publish.error))

    def _packed(self, state: MemberState, message: wire.Packed, now: float) -> None:
        """Record that a rank has packed, once its manifest is here; else ask for it."""
        known = self.publishes.get(state.member, message.publish)
        if message.manifest_hash and known is not None and not known.over:
            encoded = self.manifests.get(state.member, message.manifest_hash, now)
            if encoded is None:
                earlier = [one for one in self._unread if one[0] is state and one[1].publish == message.publish]
                if not earlier:  # a rank packs a publish once
                    self._unread.append((state, message))
                return
            known.manifests[state.member] = encoded
            state.parts.add(known.version)
            state.lent.add(known.version)
            if message.place is not None:
                state.places[known.version] = message.place
        self.publishes.packed(state.member, message, state.hello.world_size, now)

    def filled(self, state: MemberState, message: wire.Filled, now: float) -> None:
        """Record that a slot that was sent while it was packed is complete now."""
        if any(one is state and earlier.publish == message.publish for one, earlier in self._unread):
            self._unread.append((state, message))
            return
        publish = self.publishes.filled(state.member, message, now)
        if publish is None or publish.payload is None:
            return
        publish.payload.filling, publish.payload.digest = None, message.digest
        state.places[publish.version] = message.place
        if publish.version in state.held:
            state.held[publish.version] = message.digest
        if publish.transfer is not None:
            publish.transfer.settle(now)

    def transferring(
        self,
        member: Member,
        message: wire.TransferReady | wire.TransferDone | wire.TransferFailed | wire.TransferMoved,
        now: float,
    ) -> None:
        """Pass a member's message about a transfer on to the transfers."""
        for transfer in self.transfers:
            match message:
                case wire.TransferReady():
                    transfer.ready(member, message.transfer, now)
                case wire.TransferDone():
                    transfer.done(member, message, now)
                case wire.TransferMoved():
                    if (one := transfer.attempt.under_way(member, message.transfer)) is not None:
                        one.note_received(message.received, now)
                case wire.TransferFailed():
                    transfer.member_failed(member, message.transfer, message.error.exception(), now, message.holders)
        if self.publishes.moving is not None:
            self.publishes.moving.note_holders(now)

    # ------------------------------------------------------------ from packed to moving

    def send_manifest(self, state: MemberState, ask: wire.ManifestAsk, now: float) -> None:
        """Queue the asked pieces of a manifest to a member; an empty one if unknown."""
        known = [*(transfer.payload for transfer in self.transfers), *self.contents.known]
        self._context.out.extend(Send(state.member, piece) for piece in answer(state, ask, known, now))

    def piece(self, state: MemberState, piece: wire.ManifestPiece, now: float) -> bool:
        """Add a manifest's piece; if it is unusable fail its publish, return False."""
        try:
            if self.manifests.add(state.member, piece, now):
                self._handle_unread(now)
            return True
        except errors.ReplicasError as error:
            for one, message in list(self._unread):
                if one is state and isinstance(message, wire.Packed) and message.manifest_hash == piece.manifest_hash:
                    publish = self.publishes.get(state.member, message.publish)
                    mismatch = errors.ManifestMismatch(f"{state.member}: {error.message}", hint=error.hint)
                    if publish is not None:
                        self.fail(publish, mismatch, now)
            self._handle_unread(now)
            return False

    def _handle_unread(self, now: float) -> None:
        """Handle the messages on publishes that waited for a manifest's bytes."""
        unread, self._unread = self._unread, []
        for state, message in unread:
            if self._roster.get(state.member) is not state:
                continue
            if isinstance(message, wire.Packed):
                self._packed(state, message, now)
            else:
                self.filled(state, message, now)

    def _prepare(self, publish: Publish, now: float) -> None:
        """Make the publish's payload once its manifest is read, or fail the publish."""
        try:
            publish.payload = payload = self.manifests.payload(publish)
        except errors.ReplicasError as exc:
            self.fail(publish, exc, now)
            return
        if payload is not None and not payload.part_owners:
            for state in self._roster.states(publish.carriers[:1]):
                state.held.setdefault(publish.version, payload.digest)
                state.parts.discard(publish.version)

    def advance(self, now: float) -> None:
        """Start what can start now: the next queued publish, a recommit, a catch-up."""
        for publish in [publish for publish in self.publishes.queue if publish.payload is None]:
            self._prepare(publish, now)
        for publish in [publish for publish in self.publishes.queue if publish.version <= self.latest]:
            self._end_overtaken(publish, now)
        free = (one for one in self.publishes.queue if not self.recommits.blocks(one.version))
        first = next(free, None) if self.main is None else None
        # without a payload: its manifest is being read
        if first is not None and first.payload is not None and self._may_start(first, now):
            self._start(first, first.payload, now)
        self.recommits.advance()
        wanted = self.contents.for_latecomers()
        for catch_up in self.catch_ups:
            catch_up.advance(wanted, self.main, now)

    def _may_start(self, publish: Publish, now: float) -> bool:
        """Return False while targets are too few, or the hosts of new ones unknown."""
        enough = self._target_replicas() >= self._context.config.min_targets
        return enough and not self._context.hosts.delays_publish(publish.packed_at, now)

    def _target_replicas(self) -> int:
        """Return how many replicas have a live target; ``min_targets`` are needed."""
        return len({(s.member.group, s.member.replica) for s in self._roster.targets if not s.draining})

    def _end_overtaken(self, publish: Publish, now: float) -> None:
        """End a publish whose version is not newer than the newest commit: as committed
        if an earlier coordinator has committed this very publish, else as failed."""
        if publish.asked.resumed and publish.version == self.latest and not self._decided_here:
            holders = self._holders(publish.version)
            publish.receipt = publish.receipt_of(holders, {}, self._roster, self.decided, now)
            if self.committed is None and publish.payload is not None:
                publish.payload.digest = publish.payload.digest or self.decided
                self.restore(publish.payload)
            self._verdict(publish, "committed", now)
            return
        text = f"version {publish.version} was not committed, as the newer version {self.latest} was committed first"
        self.fail(publish, errors.StaleVersion(text, version=publish.version), now)

    def _start(self, publish: Publish, payload: Payload, now: float) -> None:
        """Start the transfer of the publish to the live targets that lack it."""
        self.publishes.start_moving(publish, now)
        targets = self._roster.targets
        needers = [s.member for s in targets if publish.version not in s.held and not s.draining]
        publish.transfer = transfer = Transfer(
            self._context,
            payload,
            needers,
            kind="main",
            deadline=publish.deadline,
            on_end=partial(self._main_ended, publish),
        )
        for catch_up in self.catch_ups:
            catch_up.end_if_served_by(transfer, now)
        transfer.start(now)

    # ------------------------------------------------------------ the end of a publish

    def _main_ended(self, publish: Publish, transfer: Transfer, error: errors.ReplicasError | None, now: float) -> None:
        """Commit a publish whose transfer has ended, or fail it for all its ranks."""
        if error is not None:
            self.fail(publish, error, now)
            return
        config, holders = self._context.config, self._holders(publish.version)
        if publish.version <= self.latest:
            self._end_overtaken(publish, now)
        elif config.on_lost == "raise" and (lost := publish.lost | transfer.left_out):
            why = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
            self.fail(publish, self._too_few(publish, f"targets were lost while it was sent ({why})", ALL_NEEDED), now)
        elif len({(m.group, m.replica) for m in holders}) < config.min_targets:
            text = f"only {count_text(len(holders), 'member')} received it, and min_targets = {config.min_targets} replicas"
            self.fail(publish, self._too_few(publish, text, TOO_FEW), now)
        elif not self.contents.is_held(publish.version):
            text = f"version {publish.version} was lost before its commit: its source has died"
            gone = [member.name for member in publish.carriers if member not in self._roster]
            self.fail(publish, errors.PeersLost(text, phase="commit", members=gone, hint="publish again"), now)
        else:
            self._commit(publish, transfer, now)

    def _too_few(self, publish: Publish, text: str, hint: str, phase: str = "acknowledge") -> errors.PeersLost:
        """Return the error of a publish that lacks targets; ``text``: in which way."""
        text = f"version {publish.version} is not committed: {text}"
        return errors.PeersLost(text, phase=phase, members=tuple(publish.lost), hint=hint)

    def _commit(self, publish: Publish, transfer: Transfer, now: float) -> None:
        """Decide the version, leave targets without it behind, queue the verdict."""
        payload = transfer.payload
        for state in self._roster.targets:
            if publish.version not in state.held:
                why = transfer.why.get(state.member, "it had not received all of it by the deadline")
                if not state.draining or state.member in transfer.asked:  # else the publish did not wait for it
                    publish.lost[state.member.name] = why
                self._roster.leave_behind(state, why, missed=publish.version)
        digests = {s.held[payload.version] for s in self._roster if s.held.get(payload.version)}
        if not payload.digest and len(digests) == 1:  # all holders agree: they may have it from another coordinator
            payload.digest = digests.pop()
        for state in self._roster:
            held = state.held.get(payload.version)
            if held == "":  # the image's own source may have none yet
                state.held[payload.version] = payload.digest
            elif held is not None and held != payload.digest:
                state.drop_version(payload.version)
                self._context.send(state.member, wire.Discard(payload.version))
        payload.filling = None  # the publisher may not have reported its slot full
        self.manifests.current = payload.manifest
        label = CANDIDATE if self._context.config.follow == "promoted" else ""
        self._decide(publish.version, payload.digest, payload, name=label)
        self._decided_here = True
        members = transfer.verified | self._holders(publish.version)
        publish.receipt = publish.receipt_of(members, publish.lost, self._roster, self.decided, now)
        for state in self._roster.states(transfer.verified):
            state.failures, state.slow = 0, False  # it works in joint transfers
        self._verdict(publish, "committed", now, transfer)
        self._context.marks.note(publish.group, publish.replica, version=publish.version)

    def _decide(self, version: int, digest: str, payload: Payload | None, *, content: int = 0, name: str = "") -> None:
        """Commit the version; members hear of it once that is on disk. ``content``: the
        version whose bytes it has (0: its own); ``name``: its label (or current)."""
        context = self._context
        self.steps.committed(*self.newest)  # the step may be of an earlier coordinator, and learned since
        self._decided_here = False
        context.keeping.update_keepers(content or version)
        facts = {"step": number_in(payload.meta, "step"), "nbytes": payload.nbytes} if payload is not None else {}
        context.decide("commit", version, digest=digest, content=content, name=name, **facts)
        if payload is not None:
            self.contents.add(payload)
        context.tell_all()
        if not content and (fell := self.steps.committed(*self.newest)) is not None:
            context.out.append(fell)

    def _recommit(self, one: Recommit) -> bool:
        """Commit older content again; return False if its manifest is unknown here."""
        payload = self.contents.of(one.version)
        if payload is not None:
            self._decide(one.number, payload.digest, payload, content=one.content)
        return payload is not None

    def _holders(self, version: int) -> set[Member]:
        """Return the targets that hold the whole version."""
        return {s.member for s in self._roster if s.is_target and s.carries and version in s.held}

    def _take_first_digest(self, payload: Payload) -> None:
        """Store the digest of this payload as the newest commit's, if that has none."""
        if payload is self.committed and not self.decided:
            self._context.ledger.learn_digest(payload.digest)

    # ----------------------------------------------- publishes of another coordinator

    def adopt_commit(self, version: int, digest: str, content: int = 0, *, served: bool = True) -> None:
        """Commit a version that a member knows as committed, if newer than ours; if it
        is our newest, learn its digest. ``content``: the version whose bytes it has (0:
        its own). ``served``: targets may load it, so it is not a candidate."""
        if version > self.latest:
            name = "" if served or self._context.config.follow == "newest" else CANDIDATE
            self._decide(version, digest, None, content=content, name=name)
        elif 0 < version == self.latest and not self.decided:
            self._context.ledger.learn_digest(digest)

    def restore(self, payload: Payload) -> None:
        """Store a version's manifest and facts, known here again after a restart."""
        self.contents.add(payload)
        if payload is self.committed or self.manifests.current is None:
            self.manifests.current = payload.manifest

    # ------------------------------------------------------------ failures

    def fail(self, publish: Publish, error: errors.ReplicasError, now: float) -> None:
        """Fail a publish, unless over, for all ranks; have its version discarded."""
        if publish.over:
            return
        error.channel = error.channel or self._context.config.name
        error.version = error.version or publish.version
        error.unanimous = True
        publish.error = WireError.of(error)
        transfer = publish.transfer
        if transfer is not None:
            transfer.stop(complete=False)
        if publish.state == "moving" and publish.version > self.latest:
            self._context.decide("abort", publish.version)
        asked = transfer.asked if transfer is not None else frozenset()
        committed = self.decided if publish.version == self.latest else ""  # another source's commit, learned too late
        for state in self._roster:
            if committed and state.held.get(publish.version) == committed and state.member not in publish.begun:
                continue
            if state.drop_version(publish.version) or state.member in asked:  # the member may hold it unreported
                self._context.send(state.member, wire.Discard(publish.version))
        self._verdict(publish, snake_case(type(error).__name__), now)

    def _verdict(self, publish: Publish, outcome: str, now: float, transfer: Transfer | None = None) -> None:
        """Queue a publish's receipt or error to its ranks; emit its record, with the
        bytes of a ``transfer``. ``outcome``: ``committed``, or an error's name."""
        context = self._context
        record = publish.record(outcome, now, moved=transfer is not None)
        self.publishes.end(publish, committed=publish.receipt is not None)
        end = wire.PublishEnd(publish.asked.publish, publish.receipt, publish.error)
        context.out.extend(Send(member, end) for member in sorted(publish.begun) if member in self._roster)
        if not (publish.asked.resumed and publish.version in self.told):
            context.emit(SyncEnded(context.config.name, record))

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, state: MemberState, now: float, *, in_order: bool) -> None:
        """Go on without a lost member (out of the roster already). Fail its replica's
        publishes that are being packed; ``in_order``: only those that it has begun."""
        member = state.member
        self.manifests.lost(member)
        self._unread = [(one, message) for one, message in self._unread if one is not state]
        for publish in self.publishes.without_verdict():
            mine = (publish.group, publish.replica) == (member.group, member.replica)
            # also before it has begun: its next process may be at another step
            awaited = not in_order and member.rank in self.publishes.unpacked(publish, state.hello.world_size)
            if publish.state == "packing" and mine and (member in publish.begun or awaited):
                text = f"{member} was lost ({state.note}) while version {publish.version} was packed"
                self.fail(publish, errors.PeersLost(text, members=[member.name], phase="pack", hint=MATE_NEEDED), now)
            elif publish.state == "moving" and state.is_target:
                publish.lost[member.name] = state.note or "lost"
        for transfer in self.transfers:
            transfer.lost(member, now)

    def tick(self, now: float, *, recovering: bool) -> None:
        """End what is late, leave out slow targets. ``recovering``: some may return."""
        for transfer in self.transfers:
            transfer.tick(now)
        for publish in self.publishes.without_verdict():
            if publish.state == "moving" and now > publish.moving_at + READING_S:
                self._leave_laggards(publish, now)
            grace = LAST_WORDS_S if publish.state == "packing" else 0.0
            if not publish.over and now > publish.deadline + grace:
                self._end_at_deadline(publish, now, recovering=recovering)
        if self.publishes.moving is not None and self.main is not None:
            self.publishes.moving.awaited = self.main.awaited_members
        for catch_up in self.catch_ups:
            catch_up.tick(now)

    def _leave_laggards(self, publish: Publish, now: float) -> None:
        """Leave out targets that are not ready after half of the time, if others are;
        those that were offered the version later have at least :data:`READY_S`."""
        transfer = publish.transfer
        if transfer is None or self._context.config.on_lost == "raise":
            return
        half = late = publish.moving_at + (publish.deadline - publish.moving_at) / 2
        if transfer.attempt.offered_at > publish.moving_at:
            late = max(half, transfer.attempt.offered_at + READY_S)
        laggards = transfer.attempt.unready if now > late else transfer.slow_readers(late)
        if now > half:
            laggards |= transfer.never_answered
        if laggards and (laggards < transfer.needers or transfer.verified):
            waited = f"{now - publish.moving_at:.1f} s"
            transfer.exclude(laggards, now, reason="refused", why=f"it was not ready to receive within {waited}")

    def _end_at_deadline(self, publish: Publish, now: float, *, recovering: bool) -> None:
        """Fail a publish at its deadline, or commit it with targets that have it."""
        transfer = publish.transfer
        waited = f"{publish.deadline - publish.began_at:.1f} s"
        text = f"version {publish.version} waited {waited} for"
        error: errors.ReplicasError
        if publish.version <= self.latest and (publish.state == "queued" or publish.asked.resumed):
            self._end_overtaken(publish, now)  # or committed, by the previous coordinator
            return
        if publish.state == "packing":
            error = self._unpacked_error(publish, waited)
        elif publish.state == "queued" and recovering:
            error = errors.DeadlineExceeded(f"{text} members to reconnect to the restarted coordinator", phase="queue")
        elif publish.state == "queued" and publish.payload is None:
            text = f"version {publish.version}: the coordinator has not read its list of tensors within {waited}"
            error = errors.DeadlineExceeded(text, phase="queue")
        elif publish.state == "queued" and self.main is None:
            needed = self._context.config.min_targets
            there = f"{count_text(self._target_replicas(), 'target replica')} joined, and min_targets = {needed}"
            error = self._too_few(publish, there, TOO_FEW, phase="queue")
        elif transfer is None or publish.state == "queued":
            error = errors.Busy(f"{text} the transfer of an earlier version to end", phase="queue")
        elif transfer.verified and self._context.config.on_lost == "drop":
            transfer.stop(complete=True)
            self._main_ended(publish, transfer, None, now)
            return
        else:
            late = sorted(member.name for member in transfer.awaited_members)
            text = f"version {publish.version}: {', '.join(late)} did not receive it within {waited}"
            if transfer.attempt.waits_for_slots:
                error, waiting = errors.Busy(text, phase="offer", members=late), transfer.awaited_members
                error = self._context.hosts.blame(error, self._roster.states(waiting), self.latest)
            else:
                phase = "transfer" if transfer.attempt.is_moving(now) else "acknowledge"
                error = errors.DeadlineExceeded(text, phase=phase, members=late)
        self.fail(publish, error, now)

    def _unpacked_error(self, publish: Publish, waited: str) -> errors.DeadlineExceeded:
        """Return the error that names the ranks that have not packed in ``waited``."""
        replica = self._roster.replica(publish.group, publish.replica)
        ranks = self.publishes.unpacked(publish, max((state.hello.world_size for state in replica), default=1))
        late = [rank for rank in ranks if rank not in {member.rank for member in publish.begun}]
        names = [f"{publish.group}/{publish.replica}/{rank}" for rank in late or ranks]
        joined = any(state.member.rank in late for state in replica)
        what = "pack it" if not late else "call publish" if joined else "join"
        text, hint = f"version {publish.version}: {', '.join(names)} did not {what} within {waited}", _EVERY_RANK
        phase = "begin" if late else "pack"
        return errors.DeadlineExceeded(text, phase=phase, members=names, hint=hint if late else None)
