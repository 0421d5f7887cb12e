"""One transfer: moving one version from those who hold it to those who need it, through one lane at a time.

Theory of operation
===================

A transfer knows the version, who needs it and who can send it (a holder of the whole image, or all source ranks with a
part each). It runs in *attempts*. An attempt has a number of its own, which every message carries, so that replies of an
earlier attempt fall on the floor::

    offering ──all ready, lane formed──▶ moving ──all done, digests equal──▶ complete
        │                                   │
        └────── loss, refusal, failure, suspicion, digest mismatch ──▶ next attempt over those that are left

Receivers that verified the version keep it: they leave the set of those in need, and may send in the next attempt.
Nothing is retried inside a lane in which bytes may have moved: each attempt has a new lane. A lane that fails with everybody
alive is built once more; when that fails, too, the members are probed in pairs (:mod:`replicas.core.probes`), and those
that it is up to are quarantined. The states are those of :data:`replicas.core.membership.TRANSFER`.

The transfer decides nothing about versions: its owner (a publish, or catch-up) learns ``complete`` or ``failed`` and asks
for ``verified``. Deadlines are the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from replicas import errors
from replicas.core.effects import Send
from replicas.core.identity import Member
from replicas.core.lanes import Lane, form_timeout
from replicas.core.membership import TRANSFER, TransferState
from replicas.core.payload import Payload, TransferContext
from replicas.core.probes import Probe
from replicas.core.roster import MemberState
from replicas.messages import (
    Backend,
    TransferCancel,
    TransferDone,
    TransferGo,
    TransferOffer,
)

__all__ = ["Transfer"]

MAX_PROBES = 3


class Transfer:
    """See the module's header. ``on_end(transfer, error)`` is called once, with None when complete."""

    def __init__(
        self,
        context: TransferContext,
        payload: Payload,
        needers: Sequence[Member],
        *,
        kind: Literal["main", "catch_up"],
        deadline: float,
        on_end: Callable[[Transfer, errors.ReplicasError | None, float], None],
        avoid: Member | None = None,
    ) -> None:
        self._context = context
        self.payload = payload
        self.needers = set(needers)
        self.kind = kind
        self.deadline = deadline
        self._on_end = on_end
        self._avoid = avoid
        self.id = 0
        self.mode: Literal["image", "parts"] = "image"
        self.senders: tuple[Member, ...] = ()
        self.state: TransferState = "offering"
        self.lane: Lane | None = None
        self.verified: set[Member] = set()
        self.refused: dict[Member, errors.ReplicasError] = {}
        self.why: dict[Member, str] = {}
        """Why members were left out."""
        self.failures = 0
        self.attempts = 0
        self.probes = 0
        self.form_s = 0.0
        self.transfer_s = 0.0
        self.verify_s = 0.0
        self.concerned: tuple[Member, ...] = ()
        """Members of the present attempt, in lane order: senders first."""
        self.asked = frozenset(needers)
        """Everyone who needed it when it began."""
        self._forms_lane = False
        self._probe: Probe | None = None
        self._started = False
        self._ready: set[Member] = set()
        self._done: dict[Member, TransferDone] = {}

    # ------------------------------------------------------------ attempts

    @property
    def over(self) -> bool:
        return self.state in ("complete", "failed")

    @property
    def laggards(self) -> set[Member]:
        """Those who are still waited for."""
        if self.state == "offering" and len(self._ready) < len(self.concerned):
            return set(self.concerned) - self._ready
        return self.needers - self.verified

    def lane_formed_or_none(self) -> bool:
        """Whether what an offered transfer waits for is slots, and not its process group."""
        return self.lane is None or self.lane.state == "formed"

    def start(self, now: float) -> None:
        """Begin an attempt over those that still need the version."""
        context = self._context
        self.needers -= {member for member in self.needers if member not in context.roster}
        senders = self._choose_senders(now)
        if senders is None:
            self._end(self._no_holder(), now)
            return
        self.id = context.next_id()
        self.attempts += 1
        if self._started:
            self.state = TRANSFER.next(self.state, "again")
        self._started = True
        self.senders = senders
        self.needers -= set(senders)
        self.concerned = (*senders, *sorted(self.needers))
        self._ready.clear()
        self._done.clear()
        remaining = max(0.0, self.deadline - now)
        for member in self.concerned:
            self._offer(member, remaining)
        if self.needers:
            states = [state for state in map(context.roster.get, self.concerned) if state is not None]
            backend = self._backend(states)
            kept = context.idle_lane(self.concerned, backend)
            self._forms_lane = kept is None
            self.lane = kept or context.lanes.open(
                context.roster.epoch, states, backend, now, form_timeout(remaining), context.out
            )
        self._go_if_ready(now)

    def _choose_senders(self, now: float) -> tuple[Member, ...] | None:
        """A holder of the image (a target before a source, so that trainers are left alone), or all parts' owners."""
        version, roster = self.payload.version, self._context.roster
        holders = [s for s in roster if version in s.held and s.member not in self.refused]
        if holders:
            in_order = self.kind == "catch_up"
            holders.sort(
                key=lambda s: (
                    s.member == self._avoid,
                    roster.suspect(s, now),
                    s.is_source if in_order else not s.is_source,
                    s.member,
                )
            )
            self.mode = "image"
            return (holders[0].member,)
        owners = self.payload.part_owners
        if owners and all((s := roster.get(m)) is not None and version in s.parts for m in owners):
            self.mode = "parts"
            return owners
        return None

    def _offer(self, member: Member, remaining: float) -> None:
        state = self._context.roster.get(member)
        if state is None:
            return
        payload = self.payload
        known = payload.manifest_hash in state.manifests
        state.manifests.add(payload.manifest_hash)
        offer = TransferOffer(
            transfer=self.id,
            version=payload.version,
            role="send" if member in self.senders else "receive",
            mode=self.mode,
            manifest_hash=payload.manifest_hash,
            manifest=None if known else payload.manifest,
            meta=payload.meta,
            deadline_s=remaining,
        )
        self._context.out.append(Send(member, offer))

    def _backend(self, states: Sequence[MemberState]) -> Backend:
        """``nccl`` for CUDA weights when every member has a GPU of its own, as configured or by itself."""
        wanted = self._context.roster.config.backend
        if wanted != "auto":
            return wanted
        devices = [device for state in states for device in state.hello.cuda_devices[:1]]
        distinct = len(devices) == len(states) and len(set(devices)) == len(devices)
        return "nccl" if self.payload.device == "cuda" and distinct else "gloo"

    def _go_if_ready(self, now: float) -> None:
        if self.state != "offering" or len(self._ready) < len(self.concerned):
            return
        lane = self.lane
        if self.needers and (lane is None or lane.state != "formed"):
            return
        self.state = TRANSFER.next(self.state, "all_ready")
        owners: tuple[int, ...] = ()
        if lane is not None:
            self.form_s += lane.formed_s if self._forms_lane else 0.0
            owners = tuple(lane.rank(member) for member in self.senders)
        name = lane.name if lane is not None else ""
        go = TransferGo(self.id, name, owners, max(0.0, self.deadline - now))
        self._context.out.extend(Send(member, go) for member in self.concerned)

    # ------------------------------------------------------------ what members say

    def ready(self, member: Member, transfer: int, now: float) -> None:
        if transfer == self.id and self.state == "offering" and member in self.concerned:
            self._ready.add(member)
            self._go_if_ready(now)

    def lane_formed(self, lane: Lane, now: float) -> None:
        if lane is self.lane:
            self._go_if_ready(now)
        elif self._probe is not None:
            self._probe.formed(lane, now)

    def done(self, member: Member, reply: TransferDone, now: float) -> None:
        if reply.transfer != self.id or self.state != "moving" or member not in self.concerned:
            return
        self._done[member] = reply
        self.transfer_s = max(self.transfer_s, reply.transfer_s)
        self.verify_s = max(self.verify_s, reply.verify_s)
        if len(self._done) == len(self.concerned):
            self._compare(now)

    def _compare(self, now: float) -> None:
        """Everyone is done: believe only those whose digests equal the senders'."""
        payload = self.payload
        if self.mode == "parts":
            sent = {self._sent_as(member): self._sent_digest(member) for member in self.senders}
            payload.part_digests = {member: self._sent_digest(member) for member in self.senders}
            good = {member for member in self.needers if self._done[member].part_digests == sent}
            images = {self._done[member].image_digest for member in good}
            if not payload.digest and len(images) == 1:
                payload.digest = images.pop()
        else:
            digest = self._done[self.senders[0]].image_digest
            payload.digest = payload.digest or digest
            if digest != payload.digest:
                self._forget_held(self.senders[0])
            good = set(self.needers) if digest == payload.digest else set()
        self._keep({member for member in good if self._done[member].image_digest == payload.digest})
        if self.needers:
            names = sorted(str(member) for member in self.needers)
            error = errors.SyncError(f"digests differ at {', '.join(names)}", phase="verify", members=names)
            self._failed_all_alive(error, now)
        else:
            self._end(None, now)

    def _sent_as(self, sender: Member) -> int:
        return self.lane.rank(sender) if self.lane is not None else self.senders.index(sender)

    def _sent_digest(self, sender: Member) -> str:
        return next(iter(self._done[sender].part_digests.values()), "")

    def _keep(self, members: set[Member]) -> None:
        for member in members:
            state = self._context.roster.get(member)
            if state is not None:
                state.held[self.payload.version] = self.payload.digest
                self.verified.add(member)
                self.needers.discard(member)

    def member_failed(self, member: Member, transfer: int, error: errors.ReplicasError, now: float) -> None:
        """A member cannot go on with this attempt."""
        if transfer != self.id or self.over or member not in self.concerned:
            return
        if self.state == "offering":
            self.refused[member] = error
            self.why[member] = error.message
            if member in self.needers:
                self.needers.discard(member)
            else:
                self._forget_held(member)
            self._again("refused", now)
        else:
            self._failed_all_alive(error, now)

    def _forget_held(self, member: Member) -> None:
        state = self._context.roster.get(member)
        if state is not None:
            state.held.pop(self.payload.version, None)
            state.parts.discard(self.payload.version)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        if lane is self.lane and not self.over:
            self._failed_all_alive(error, now)
        elif self._probe is not None:
            self._probe.failed(lane, error, now)

    def _failed_all_alive(self, error: errors.ReplicasError, now: float) -> None:
        """Nobody was lost, and yet it failed: once more, then find out whom it is up to."""
        self.failures += 1
        frozen = self._suspects(now)
        unreachable = self._named(error)
        if frozen:
            self.exclude(frozen, now, reason="frozen", why="no sign of life")
        elif unreachable:
            self._blame(unreachable, now)
        elif self.failures == 1:
            self._again("failed", now)
        elif error.phase == "verify" and self.verified:
            self._blame(dict.fromkeys(self.needers, error.message), now)  # the sender's bytes were right for others
        elif self.failures == 2 and self.probes < MAX_PROBES and len(self.concerned) > 1:
            self._find_culprit(now)
        else:
            self.cancel()
            self._end(error, now)

    def _named(self, error: errors.ReplicasError) -> dict[Member, str]:
        """Members that a preflight names: no need to look for them."""
        if not isinstance(error, errors.Preflight):
            return {}
        return {member: error.message for member in self.concerned if member.name in error.members}

    def _find_culprit(self, now: float) -> None:
        states = [state for state in map(self._context.roster.get, self.concerned) if state is not None]
        if self.state == "moving":
            self._keep_vouched()
        self.cancel("failed")
        if not self.needers:
            self._next_attempt(now, "failed")
            return
        self.state = TRANSFER.next(self.state, "stuck")
        self.id = self._context.next_id()  # what is still said of the attempt falls on the floor
        self.probes += 1
        members = [state.member for state in states]
        probe = Probe(self._context, members, self._backend(states), now, self._probed)
        if not probe.over:
            self._probe = probe

    def _probed(self, culprits: Mapping[Member, str], now: float) -> None:
        """The pairs have been tried. Without a culprit there is one more attempt, which then decides."""
        self._probe = None
        if self.over:
            return
        if culprits:
            self.failures = 0
        self._quarantine(culprits, now)
        self._next_attempt(now, "quarantined" if culprits else "failed")

    def _blame(self, culprits: Mapping[Member, str], now: float) -> None:
        self._quarantine(culprits, now)
        self.failures = 0
        self._again("quarantined", now)

    def _quarantine(self, culprits: Mapping[Member, str], now: float) -> None:
        for member, why in culprits.items():
            self.why[member] = why
            self.refused[member] = errors.Preflight(why, phase="probe", members=[member.name])
            self.needers.discard(member)
            self._context.quarantine(member, why, now)

    # ------------------------------------------------------------ losses and time

    def lost(self, member: Member, now: float) -> None:
        """The member is gone (already out of the roster)."""
        if self.over or member not in self.concerned:
            return
        self.failures = 0
        self.needers.discard(member)
        self.verified.discard(member)
        if self._probe is not None:
            self._probe.lost(member, now)
        else:
            self._again("lost", now)

    def exclude(self, members: set[Member], now: float, *, reason: str, why: str) -> None:
        """Go on without these; they stay members and are caught up later."""
        for member in members:
            self.needers.discard(member)
            self.why[member] = why
            if member in self.senders:
                self.refused[member] = errors.PeersLost(f"{member} does not answer", members=[member.name])
        self._again(reason, now)

    def tick(self, now: float) -> None:
        """Replace the attempt when someone in it no longer gives a sign of life, or its lane does not form in time."""
        if self.over:
            return
        if self._probe is not None:
            self._probe.tick(now)
            return
        frozen = self._suspects(now)
        if frozen:
            self.exclude(frozen, now, reason="frozen", why="no sign of life")
        elif self.lane is not None and self.lane.state == "forming" and now > self.lane.deadline:
            late = sorted(m.name for m in self.lane.members if m not in self.lane.formed_by)
            message = f"the process group did not form in {self.lane.deadline - self.lane.opened_at:.1f} s; missing: "
            error = errors.DeadlineExceeded(message + ", ".join(late), phase="form", members=late)
            self._failed_all_alive(error, now)

    def store_moved(self, now: float) -> None:
        """A lane that is forming over the old store never will: form another one over the new one."""
        if self._probe is not None or (not self.over and self.lane is not None and self.lane.state == "forming"):
            self._again("store", now)

    def _suspects(self, now: float) -> set[Member]:
        roster = self._context.roster
        states = [state for state in map(roster.get, self.concerned) if state is not None]
        return {state.member for state in states if roster.suspect(state, now)}

    def cancel(self, reason: str = "failed") -> None:
        """Withdraw the present attempt from everyone in it, and kill its lane: bytes may have moved."""
        context = self._context
        if self._probe is not None:
            self._probe.abandon()
            self._probe = None
        cancel = TransferCancel(self.id)
        context.out.extend(Send(m, cancel) for m in self.concerned if m not in self._done and m in context.roster)
        if self.lane is not None:
            gone = frozenset(m for m in self.lane.members if m not in context.roster)
            context.lanes.close(self.lane, context.out, gone=gone, reason=reason)
            self.lane = None

    def _again(self, reason: str, now: float) -> None:
        """Another attempt over those that are left."""
        if self.state == "moving":
            self._keep_vouched()
        self.cancel(reason)
        self._next_attempt(now, reason)

    def _next_attempt(self, now: float, reason: str) -> None:
        if not self.needers and (self.verified or self.kind == "catch_up" or self.refused):
            self._end(None if self.verified else self._refusal(), now)
            return
        self._context.retried(reason)
        self.start(now)

    def _keep_vouched(self) -> None:
        """Keep those that are certainly right: equal to what the sender says or, if it cannot, all equal to each other."""
        received = {member: reply.image_digest for member, reply in self._done.items() if member in self.needers}
        sender = self._done.get(self.senders[0])
        vouched = sender.image_digest if sender is not None else ""
        if not vouched and len(received) == len(self.needers) and len(set(received.values())) == 1:
            vouched = next(iter(received.values()))
        self.payload.digest = self.payload.digest or vouched
        if self.payload.digest:
            self._keep({member for member, digest in received.items() if digest == self.payload.digest})

    def _refusal(self) -> errors.ReplicasError:
        if self.refused:
            return next(iter(self.refused.values()))
        return errors.PeersLost("nobody is left who needs it", version=self.payload.version, phase="transfer")

    def _no_holder(self) -> errors.ReplicasError:
        refused = next((error for member, error in self.refused.items() if member in self.senders), None)
        if refused is not None:
            return refused
        return errors.PeersLost(
            f"version {self.payload.version} was lost: nobody who held all of it is left",
            version=self.payload.version,
            phase="transfer",
            hint="publish again",
        )

    def _end(self, error: errors.ReplicasError | None, now: float) -> None:
        if self.over:
            return
        self.state = TRANSFER.next(self.state, "done" if error is None else "fail")
        self._on_end(self, error, now)

    def stop(self, *, complete: bool) -> None:
        """End it from outside, without a word to its owner: it is withdrawn from everyone who is at work on it."""
        if not self.over:
            self.cancel()
            self.state = TRANSFER.next(self.state, "done" if complete else "fail")
