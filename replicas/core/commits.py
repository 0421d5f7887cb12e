"""From packed to committed: the main transfer, the decision, and catching up those who came late.

Theory of operation
===================

One publish moves at a time. Its transfer serves the live targets; when all of them hold it (or, past the deadline with
``on_lost = "drop"``, those that do) the version is *decided*: recorded, then told to everyone. A decided version is only
ever followed by newer ones. Targets that were left behind are demoted: they stay members, are caught up, and are admitted
again at a boundary.

Catch-up runs beside the main transfer, over a lane of its own: one transfer at a time of the newest committed version to
all members that lack it, from any holder, targets first, so that trainers are left alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from replicas import errors
from replicas import messages as wire
from replicas.core.effects import CommitDecision, Emit, Record, Send, SyncEnded
from replicas.core.lanes import Lane
from replicas.core.manifest import Manifest, PartManifest, difference, merge_parts
from replicas.core.publishes import Publish, Publishes
from replicas.core.roster import MemberState
from replicas.core.transfers import Payload, Transfer
from replicas.messages import ReceiptData, WireError
from replicas.status import SyncRecord

if TYPE_CHECKING:
    from replicas.core.channel import ChannelState

__all__ = ["Commits"]

CATCH_UP_RETRY_S = 1.0
CATCH_UP_RETRY_MAX_S = 30.0
KEPT_MANIFESTS = 8


class Commits:
    """Publishes, transfers and decisions of one channel."""

    def __init__(self, channel: ChannelState, floor: int) -> None:
        self._channel = channel
        config = channel.config
        source_ranks = "all" if any(party.ranks == "all" for party in config.sources) else "leader"
        self.publishes = Publishes(config.name, source_ranks, floor)  # type: ignore[arg-type]  # one of the two literals
        self.latest = 0
        self.committed: Payload | None = None
        self.main: Transfer | None = None
        self.catch_up: Transfer | None = None
        self.kept_lane: Lane | None = None
        self._uploads: dict[str, bytes] = {}
        self._manifest: Manifest | None = None
        self.totals: dict[str, int] = {}
        self.bytes_total = 0
        self.last: SyncRecord | None = None
        self.retries: dict[str, int] = {}
        self.decided = ""
        """Digest of the newest committed version."""

    # ------------------------------------------------------------ what members say

    @property
    def moving(self) -> bool:
        return self.main is not None

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for transfer in (self.main, self.catch_up) if transfer is not None]

    def upload(self, message: wire.UploadManifest) -> None:
        self._uploads.pop(message.manifest_hash, None)
        self._uploads[message.manifest_hash] = message.manifest
        while len(self._uploads) > KEPT_MANIFESTS * 64:
            del self._uploads[next(iter(self._uploads))]

    def begin(self, state: MemberState, message: wire.PublishBegin, now: float) -> None:
        out, member = self._channel.out, state.member
        error: errors.ReplicasError
        if not state.is_source:
            error = errors.UsageError(
                f"{member} is no source of channel {self._channel.config.name!r} and cannot publish on it",
                channel=self._channel.config.name,
                hint="name its group under `sources`",
            )
            out.append(Send(member, wire.PublishEnd(message.publish, error=WireError.of(error))))
            return
        try:
            publish = self.publishes.begin(member, message, now)
        except errors.RanksDisagree as exc:
            found = self.publishes.get(member, message.publish)
            out.append(Send(member, wire.PublishEnd(message.publish, error=WireError.of(exc))))
            if found is not None and not found.over:
                self._fail(found, exc, now)
            return
        except errors.UsageError as exc:
            out.append(Send(member, wire.PublishEnd(message.publish, error=WireError.of(exc))))
            return
        out.append(Send(member, wire.PublishAdmitted(message.publish, publish.version)))
        if publish.over:
            out.append(Send(member, wire.PublishEnd(publish.number, publish.receipt, publish.error)))

    def packed(self, state: MemberState, message: wire.Packed, now: float) -> None:
        known = self.publishes.get(state.member, message.publish)
        if message.manifest_hash and known is not None and not known.over:
            state.parts.add(known.version)
        publish = self.publishes.packed(state.member, message, state.hello.world_size, now)
        if publish is None:
            return
        try:
            self._prepare(publish)
        except errors.ReplicasError as exc:
            self._fail(publish, exc, now)

    def pack_failed(self, state: MemberState, message: wire.PackFailed, now: float) -> None:
        publish = self.publishes.pack_failed(state.member, message)
        if publish is not None:
            self._fail(publish, message.error.exception(), now)

    def lane_formed(self, lane: Lane, now: float) -> None:
        for transfer in self.transfers:
            transfer.lane_formed(lane, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        if lane is self.kept_lane:
            self._close_kept()
        for transfer in self.transfers:
            transfer.lane_failed(lane, error, now)

    # ------------------------------------------------------------ from packed to moving

    def _prepare(self, publish: Publish) -> None:
        """Join what the ranks packed into one payload.

        :raises errors.ManifestMismatch: the parts do not fit each other, or the channel's manifest.
        """
        carriers = sorted(member for member, packed in publish.packed.items() if packed.manifest_hash)
        if not carriers:
            raise errors.InternalError(f"publish {publish.number} of {publish.group}/{publish.replica} has no bytes")
        uploads = [self._uploads.get(publish.packed[member].manifest_hash) for member in carriers]
        if None in uploads:
            raise errors.InternalError("a manifest was announced and never sent")
        parts = [PartManifest.decode(cast("bytes", upload)) for upload in uploads]
        manifest = merge_parts(parts)
        if self._manifest is not None and manifest.hash != self._manifest.hash and not publish.new_manifest:
            text = difference(self._manifest, manifest)
            if text:
                raise errors.ManifestMismatch(
                    f"the tensors of version {publish.version} do not fit the manifest of channel "
                    f"{self._channel.config.name!r}: {text}",
                    channel=self._channel.config.name,
                    version=publish.version,
                )
        image = manifest.parts is None
        publish.payload = Payload(
            version=publish.version,
            manifest_hash=manifest.hash,
            manifest=manifest.encode(),
            nbytes=manifest.data_nbytes,
            device="cuda" if any(packed.device == "cuda" for packed in publish.packed.values()) else "cpu",
            meta=cast("wire.Meta", publish.meta),
            part_owners=() if image else tuple(carriers),
        )
        if image:
            state = self._channel.roster.get(carriers[0])
            if state is not None:
                state.held[publish.version] = ""
                state.parts.discard(publish.version)

    def advance(self, now: float) -> None:
        """Start what can start: the next publish in the queue, and catch-up."""
        if self.main is None and self.publishes.queue and self._target_replicas() >= self._channel.config.min_targets:
            self._start_next(now)
        if self.catch_up is None:
            self._start_catch_up(now)

    def _target_replicas(self) -> int:
        """Target replicas with a live member: a version waits in the queue until there are ``min_targets``."""
        return len({(s.member.group, s.member.replica) for s in self._channel.roster.targets})

    def _start_next(self, now: float) -> None:
        publish = self.publishes.queue.pop(0)
        if publish.version <= self.latest or publish.payload is None:
            text = f"version {publish.version} was overtaken by version {self.latest}"
            self._fail(publish, errors.StaleVersion(text, version=publish.version), now)
            return
        publish.state = "moving"
        publish.moving_at = now
        self.publishes.moving = publish
        needers = [s.member for s in self._channel.roster.targets if publish.version not in s.held]
        publish.transfer = self.main = Transfer(
            self._channel, publish.payload, needers, kind="main", deadline=publish.deadline, on_end=self._main_ended
        )
        self.main.start(now)

    def _start_catch_up(self, now: float) -> None:
        payload = self.committed
        if payload is None:
            return
        roster = self._channel.roster
        busy = self.main.concerned if self.main is not None and self.main.payload is payload else ()
        needers = [
            s.member
            for s in roster
            if s.is_target
            and s.carries
            and payload.version not in s.held
            and s.member not in busy
            and now >= s.retry_at
            and not roster.suspect(s, now)
        ]
        if not needers:
            return
        deadline = now + self._channel.config.deadline_s
        transfer = Transfer(
            self._channel, payload, needers, kind="catch_up", deadline=deadline, on_end=self._catch_up_ended
        )
        self.catch_up = transfer
        transfer.start(now)

    def _catch_up_ended(self, transfer: Transfer, error: errors.ReplicasError | None, now: float) -> None:
        self.catch_up = None
        self._close_lane(transfer)
        for state in self._channel.roster:
            if state.member in transfer.verified:
                state.failures = 0
            elif state.member in transfer.concerned and state.is_target:
                state.failures += 1
                state.retry_at = now + min(CATCH_UP_RETRY_MAX_S, CATCH_UP_RETRY_S * 2 ** min(state.failures, 5))

    # ------------------------------------------------------------ the end of a publish

    def _main_ended(self, transfer: Transfer, error: errors.ReplicasError | None, now: float) -> None:
        publish = self.publishes.moving
        if publish is None or publish.transfer is not transfer:
            return
        if error is not None:
            self._fail(publish, error, now)
            return
        config = self._channel.config
        if config.on_lost == "raise" and publish.lost:
            self._fail(publish, self._too_few(publish, f"{', '.join(publish.lost)} lost while it was sent"), now)
        elif len({(m.group, m.replica) for m in transfer.verified}) < config.min_targets:
            text = f"{len(transfer.verified)} members hold it, min_targets = {config.min_targets} replicas"
            self._fail(publish, self._too_few(publish, text), now)
        else:
            self._commit(publish, transfer, now)

    def _too_few(self, publish: Publish, text: str) -> errors.PeersLost:
        return errors.PeersLost(
            f"version {publish.version} is not committed: {text}",
            channel=self._channel.config.name,
            version=publish.version,
            phase="transfer",
            members=publish.lost,
        )

    def _commit(self, publish: Publish, transfer: Transfer, now: float) -> None:
        channel, payload = self._channel, transfer.payload
        self._leave_behind(publish, transfer)
        digest = payload.digest or _parts_digest(payload)
        self._vouch(transfer, digest)
        self.latest = publish.version
        self.decided = digest
        self.committed = payload
        self._manifest = Manifest.decode(payload.manifest)
        channel.out.append(
            Record(
                CommitDecision(
                    "commit", channel.config.name, publish.version, digest, channel.roster.epoch, channel.term
                )
            )
        )
        commit = wire.Commit(publish.version, digest, payload.manifest_hash)
        channel.out.extend(Send(state.member, commit) for state in channel.roster)
        seconds = now - publish.began_at
        phases = publish.phases(now, max(0.0, seconds - _accounted(publish, now)))
        publish.receipt = ReceiptData(
            epoch=channel.roster.epoch,
            members=tuple(sorted(transfer.verified)),
            lost=tuple(publish.lost),
            nbytes=payload.nbytes,
            seconds=seconds,
            phases=phases,
            version=publish.version,
        )
        self.bytes_total += payload.nbytes * max(1, len(transfer.verified))
        self._verdict(publish, "committed", now)
        self._keep_lane(transfer)
        self.main = None

    def _vouch(self, transfer: Transfer, digest: str) -> None:
        """Write the digest down for holders that had none yet (the image's own source)."""
        for state in self._channel.roster:
            if state.held.get(transfer.payload.version) == "":
                state.held[transfer.payload.version] = digest

    def _leave_behind(self, publish: Publish, transfer: Transfer) -> None:
        """Targets of the epoch that do not hold it: out of the epoch until they have caught up."""
        for state in self._channel.roster.targets:
            if publish.version not in state.held:
                publish.lost.append(state.member.name)
                self._channel.roster.demote(state)

    def _fail(self, publish: Publish, error: errors.ReplicasError, now: float) -> None:
        """One verdict for all ranks; the number is never used again."""
        if publish.over:
            return
        error.channel = error.channel or self._channel.config.name
        error.version = error.version or publish.version
        error.unanimous = True
        publish.error = WireError.of(error)
        transfer = publish.transfer
        if transfer is not None and transfer is self.main:
            self.main = None
            transfer.state = "failed"
            transfer.cancel()
        for state in self._channel.roster:
            had = state.held.pop(publish.version, None) is not None or publish.version in state.parts
            state.parts.discard(publish.version)
            if had:
                self._channel.out.append(Send(state.member, wire.Discard(publish.version)))
        self._verdict(publish, _snake(type(error).__name__), now)

    def _verdict(self, publish: Publish, outcome: str, now: float) -> None:
        channel = self._channel
        self.publishes.end(publish)
        end = wire.PublishEnd(publish.number, publish.receipt, publish.error)
        channel.out.extend(Send(member, end) for member in sorted(publish.begun) if member in channel.roster)
        receipt = publish.receipt
        record = SyncRecord(
            version=publish.version,
            outcome=outcome,
            seconds=now - publish.began_at,
            nbytes=publish.payload.nbytes if publish.payload is not None else 0,
            phases=receipt.phases if receipt is not None else {},
            members=len(receipt.members) if receipt is not None else 0,
            lost=tuple(publish.lost),
        )
        self.last = record
        self.totals[outcome] = self.totals.get(outcome, 0) + 1
        channel.out.append(Emit(SyncEnded(channel.config.name, record)))

    # ------------------------------------------------------------ losses and time

    def lost(self, state: MemberState, now: float) -> None:
        """A member is gone (already out of the roster)."""
        member = state.member
        if self.kept_lane is not None and member in self.kept_lane.members:
            self._close_kept()
        for publish in self.publishes.open():
            mine = (publish.group, publish.replica) == (member.group, member.replica)
            if publish.state == "packing" and mine and member in publish.begun:
                text = f"{member} was lost while version {publish.version} was packed"
                self._fail(publish, errors.PeersLost(text, members=[member.name], phase="pack"), now)
            elif publish.state == "moving" and state.is_target:
                publish.lost.append(member.name)
        for transfer in self.transfers:
            transfer.lost(member, now)

    def tick(self, now: float) -> None:
        for transfer in self.transfers:
            transfer.tick(now)
        for publish in self.publishes.open():
            if publish.state == "moving" and now > publish.laggard_time():
                self._leave_laggards(publish, now)
            if not publish.over and now > publish.deadline:
                self._deadline(publish, now)
        catch_up = self.catch_up
        if catch_up is not None and now > catch_up.deadline:
            catch_up.cancel()
            catch_up.state = "failed"
            self._catch_up_ended(catch_up, errors.DeadlineExceeded("catch-up", phase="transfer"), now)

    def _leave_laggards(self, publish: Publish, now: float) -> None:
        """Some are not even ready to receive: go on without them, if others are."""
        transfer = publish.transfer
        if transfer is None or transfer.state != "offering" or self._channel.config.on_lost == "raise":
            return
        laggards = transfer.laggards
        if laggards and laggards < transfer.needers:
            transfer.exclude(laggards, now, reason="refused")

    def _deadline(self, publish: Publish, now: float) -> None:
        transfer = publish.transfer
        waited = f"{publish.deadline - publish.began_at:.1f} s"
        if publish.state == "packing":
            missing = [f"{g}/{r}/{k}" for g, r, k in sorted(self._missing(publish))]
            text = f"version {publish.version}: {', '.join(missing)} did not pack it within {waited}"
            self._fail(publish, errors.DeadlineExceeded(text, phase="pack", members=missing), now)
        elif publish.state == "queued" and self.main is None:
            text = (
                f"{self._target_replicas()} target replicas are there, min_targets = {self._channel.config.min_targets}"
            )
            self._fail(publish, self._too_few(publish, text), now)
        elif transfer is None or publish.state == "queued":
            text = f"version {publish.version} waited {waited} for an earlier version to be done"
            self._fail(publish, errors.Busy(text, phase="queue"), now)
        elif transfer.verified and self._channel.config.on_lost == "drop":
            transfer.cancel()
            transfer.state = "complete"
            self._main_ended(transfer, None, now)
        else:
            late = sorted(member.name for member in transfer.laggards)
            kind = (
                errors.Busy
                if transfer.state == "offering" and transfer.lane_formed_or_none()
                else errors.DeadlineExceeded
            )
            phase = "offer" if kind is errors.Busy else "transfer"
            text = f"version {publish.version}: {', '.join(late)} did not take it within {waited}"
            self._fail(publish, kind(text, phase=phase, members=late), now)

    def _missing(self, publish: Publish) -> set[tuple[str, int, int]]:
        world = max(
            (s.hello.world_size for s in self._channel.roster.replica(publish.group, publish.replica)), default=1
        )
        have = {(m.group, m.replica, m.rank) for m in publish.packed}
        return self.publishes.contributors(publish, world) - have

    # ------------------------------------------------------------ lanes

    def _keep_lane(self, transfer: Transfer) -> None:
        """The main lane serves the next version too, as long as it is still of the right members."""
        self._close_kept()
        lane = transfer.lane
        if lane is not None and lane.state == "formed":
            self.kept_lane = lane

    def _close_lane(self, transfer: Transfer) -> None:
        if transfer.lane is not None:
            gone = frozenset(m for m in transfer.lane.members if m not in self._channel.roster)
            self._channel.lanes.close(transfer.lane, self._channel.out, gone=gone)
            transfer.lane = None

    def _close_kept(self) -> None:
        lane, self.kept_lane = self.kept_lane, None
        if lane is not None:
            gone = frozenset(m for m in lane.members if m not in self._channel.roster)
            self._channel.lanes.close(lane, self._channel.out, gone=gone)


def _accounted(publish: Publish, now: float) -> float:
    return sum(publish.phases(now, 0.0).values())


def _parts_digest(payload: Payload) -> str:
    """Digest of a version that exists only as parts: over the parts' digests, in order."""
    joined = "\n".join(payload.part_digests.get(member, "") for member in payload.part_owners)
    return f"parts:{hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()}"


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
