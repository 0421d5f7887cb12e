"""Simulated members round a real ChannelState: virtual time, one message at a time, in
any interleaving.

Each simulated member behaves as a rank does (it answers offers, forms lanes, keeps
slots, loads what it is granted), but without bytes. Messages in both directions lie in
queues, and the test decides which queue moves on.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from replicas import errors
from replicas import messages as wire
from replicas.carry.dialler import GREET_S, SILENT_S
from replicas.carry.holders import LEFT_S, TRY_S
from replicas.config.structs import ChannelConfig, ChannelRole
from replicas.core.base.effects import Event, Keep, LetGo, MemberLost, Read, ReplaceStore, Reply, Send, SweepStore
from replicas.core.base.ledger import Decision, Ledger, Past
from replicas.core.base.manifest import PartManifest, TensorSpec
from replicas.core.channel_state import ChannelState
from replicas.core.members.roster import GroupShape
from replicas.core.versions.fetching import pieces
from replicas.core.versions.manifests import read
from replicas.messages.identity import Member, ProcessIdentity
from replicas.telemetry.tally import Tally
from tests.support.channel.adoptions import Adoptions

NBYTES = 16
"""Of a version."""
COORDINATOR = 99_999
"""Its pid."""
MANIFEST = PartManifest(tensors=(TensorSpec("weight", "float32", (4,)),), aliases=(), pieces=None)


class Hop(NamedTuple):
    """From one address to the next one of a chain. ``rate``: bytes a second."""

    before: str
    behind: str
    rate: float


def channel_config(**changes: object) -> ChannelConfig:
    fields: dict[str, object] = {
        "name": "policy",
        "sources": (ChannelRole("trainer", "leader"),),
        "targets": (ChannelRole("rollout", "all"),),
    }
    return ChannelConfig(**{**fields, **changes})  # type: ignore[arg-type]  # the test names valid fields


def peer_config(ranks: str = "leader", **changes: object) -> ChannelConfig:
    party = ChannelRole("peer", ranks)  # type: ignore[arg-type]  # the test names valid ranks
    return channel_config(name="outer", sources=(), targets=(), peers=(party,), **changes)


@dataclass
class OpenPublish:
    """One without a verdict yet."""

    asked: int | None
    version: int = 0
    packed: bool = False
    streaming: bool = False
    manifest: PartManifest | None = None


@dataclass(eq=False)
class SimMember:
    """A rank.

    ``pid``: by which others of its ``machine`` find its memory; ``unmappable``: it
    cannot open theirs. With slots on GPUs (``staging = "device"``) those with one GPU
    find it, and copy what they find. ``mute``: it takes messages and never answers.
    ``stuck``: it gets ready and then moves no byte, and its sidecar says so unless it
    is ``quiet``. ``breaks``: its process groups form, and fail as soon as bytes move.
    ``loads``: as soon as it is granted a version, else when it looks at it; less than
    ``at_least`` it refuses. ``granted``: versions, in order, without those that it gave
    back.
    """

    member: Member
    world: World
    hello: wire.Hello
    pid: int = 0
    machine: str = ""
    address: str = "127.0.0.1"
    unmappable: bool = False
    outbox: deque[wire.FromMember] = field(default_factory=deque)
    inbox: deque[wire.FromCoordinator] = field(default_factory=deque)
    held: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)
    incoming: dict[int, wire.TransferOffer] = field(default_factory=dict)
    granted: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    """Versions that came over a lane."""
    verdicts: dict[int, wire.PublishEnd] = field(default_factory=dict)
    ends: dict[int, wire.OperationEnd] = field(default_factory=dict)
    goes: list[wire.OperationGo] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    publishes: int = 0
    asks: int = 0
    posts: int = 0
    asked: bool = False
    mute: bool = False
    stuck: bool = False
    quiet: bool = False
    at_work: dict[str, tuple[float, wire.OperationGo]] = field(default_factory=dict)
    """Since when it has been at work in a lane, and at what."""
    loads: bool = True
    unlooked: int = 0
    at_least: int = 0
    declined: int = 0
    refused: int = 0
    refuse: wire.WireError | None = None
    bad_digest: bool = False
    bad_bytes: bool = False
    """Blocks that it pulls come wrong the first time."""
    forges: bool = False
    """What others pull from it is wrong."""
    breaks: bool = False
    epoch: int = 0
    assigned: int = 0
    open: dict[int, OpenPublish] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    candidate: int = 0
    """It can load this version, and waits for the others (``adopt_together``)."""
    whole: bool = False
    """It says so for all ranks of its replica."""
    loaded: int = 0
    adopted: list[int] = field(default_factory=list)
    told_no: list[int] = field(default_factory=list)
    contents: dict[int, int] = field(default_factory=dict)
    """By version, the older one whose bytes it has."""
    kept: tuple[int, ...] = ()
    """What it is told not to evict."""
    answers: dict[int, wire.VersionAnswer] = field(default_factory=dict)
    unadopted: list[int] = field(default_factory=list)
    """Versions that it has refused."""
    seen: list[wire.FromCoordinator] = field(default_factory=list)
    serving: dict[int, wire.TransferOffer] = field(default_factory=dict)
    """What its carrier serves, by transfer; what it pulls, too."""
    pulling: dict[int, tuple[float, wire.TransferOffer]] = field(default_factory=dict)
    """Since when it pulls what."""

    # ---------------------------------------------------------- what the user does

    def publish(self, version: int | None = None, deadline_s: float = 60.0) -> int:
        self.publishes += 1
        self.outbox.append(wire.PublishBegin(self.publishes, version, deadline_s))
        self.open[self.publishes] = OpenPublish(version)
        return self.publishes

    def pack(self, publish: int, *, manifest: PartManifest | None = MANIFEST) -> None:
        if publish in self.open:
            self.open[publish].packed, self.open[publish].manifest = True, manifest
        if manifest is None:
            self.outbox.append(wire.Packed(publish, "", "cpu", 0.0, 0.0))
            return
        self.manifests[manifest.hash] = manifest.encode()
        kind = "digest" if manifest.pieces is None else "part"
        self.outbox.append(wire.Packed(publish, manifest.hash, "cpu", 0.0, 0.1, kind))

    def stream(self, publish: int) -> None:
        """Begin to fill the slot, and have it sent meanwhile."""
        self.open[publish].streaming = True
        self.manifests[MANIFEST.hash] = MANIFEST.encode()
        self.outbox.append(wire.Packed(publish, MANIFEST.hash, "cpu", 0.0, 0.0, streaming=True))

    def fill(self, publish: int) -> None:
        """The slot is full."""
        known = self.open[publish]
        known.packed, known.manifest, version = True, MANIFEST, known.version
        place = self.place(version)
        assert place is not None
        self.published.add(version)
        self.outbox.append(wire.Filled(publish, 0.1, f"digest-{version}", 0.01, place))

    def ask(self, at_least: int = 0) -> None:
        if not self.asked and not self.candidate:
            self.asked, self.at_least, self.declined = True, at_least, 0
            self.ask_again()

    def give_up(self) -> None:
        """Ask no more."""
        if self.asked:
            self.asked = False
            self.outbox.append(wire.ReceiveCancel(self.asks))

    def look(self) -> None:
        """Load what it was granted; or say that it can."""
        if self.unlooked and self.world.config.adopt_together:
            self.candidate, self.unlooked = self.unlooked, 0
            self.outbox.append(wire.CanLoad(self.candidate, self.whole))
        elif self.unlooked:
            self._load(self.unlooked)
            self.unlooked = 0

    def _load(self, version: int) -> None:
        self.loaded = version
        self.outbox.append(wire.Loaded(version, 0.0))

    def keep_own(self, why: str) -> None:
        """Load nothing of what it was granted, and go on with what it has."""
        version, self.unlooked, self.candidate = self.unlooked or self.candidate, 0, 0
        self.granted.remove(version)
        self.unadopted.append(version)
        self.refused = version
        self.outbox.append(wire.LoadFailed(version, wire.WireError("ManifestMismatch", why), kept=True))

    def give_back(self) -> None:
        """Ask for a newer version in place of the one that it was granted and has not
        looked at."""
        if self.unlooked:
            self.granted.remove(self.unlooked)
            self.unlooked = 0
            self.ask()

    def post(
        self, kind: str, *, root: str = "", step: int | None = None, shape: tuple[int, ...] = (2,), **more: object
    ) -> int:
        self.posts += 1
        segments = () if kind == "barrier" else (wire.Segment("float32", shape),)
        fields: dict[str, object] = {"deadline_s": 60.0, "segments": segments, **more}
        self.outbox.append(wire.OperationPost(post=self.posts, kind=kind, root=root, step=step, **fields))  # type: ignore[arg-type]  # by name
        return self.posts

    def receipt(self, publish: int) -> wire.ReceiptData:
        """That of its publish, which has succeeded."""
        found = self.verdicts[publish].receipt
        assert found is not None, self.verdicts[publish]
        return found

    def error(self, publish: int) -> wire.WireError:
        """That of its publish, which has failed."""
        found = self.verdicts[publish].error
        assert found is not None, self.verdicts[publish]
        return found

    # ---------------------------------------------------------- a new coordinator

    def announce(self) -> None:
        """Say again what is under way."""
        for number, publish in self.open.items():
            resumed = publish.version > 0
            version = publish.version if resumed else publish.asked
            self.outbox.append(wire.PublishBegin(number, version, 60.0, resumed=resumed))
            if publish.packed:
                self.pack(number, manifest=publish.manifest)
        if self.candidate:
            self.outbox.append(wire.CanLoad(self.candidate, self.whole))
        if self.asked:
            self.ask_again()
        self.outbox.append(wire.Resumed())

    def ask_again(self) -> None:
        self.asks += 1
        after = max(self.declined, self.refused, *self.granted, 0)
        self.outbox.append(wire.ReceiveAsk(self.asks, after, self.at_least))

    # ---------------------------------------------------------- what its library does

    @property
    def gpu(self) -> str:
        """Where its slots are; empty: in host memory."""
        return self.hello.cuda_devices[0] if self.world.config.staging == "device" else ""

    def place(self, version: int) -> wire.SlotPlace | None:
        """Where its slot of ``version`` lies."""
        return wire.SlotPlace(self.pid, 3, version, 16, version, device=self.gpu) if self.machine else None

    def handle(self, message: wire.FromCoordinator) -> None:
        self.seen.append(message)
        match message:
            case wire.PublishEnd():
                assert message.publish not in self.verdicts or self.verdicts[message.publish] == message
                self.verdicts[message.publish] = message
                ended = self.open.pop(message.publish, None)
                early = ended is not None and ended.streaming and not ended.packed
                assert message.receipt is None or not early, "committed before it was packed"
            case wire.PublishAdmitted():
                known = self.open.get(message.publish)
                if known is not None:
                    assert known.version in (0, message.version), "another number"
                    known.version = message.version
            case wire.View():
                assert message.epoch > self.epoch, "an epoch went backwards"
                self.epoch = message.epoch
            case wire.Assigned():
                self.assigned = message.version
            case wire.Describe():
                held = message.version in self.held
                digest, image = (f"digest-{message.version}", MANIFEST.whole.hash) if held else ("", "")
                self.manifests[MANIFEST.whole.hash] = MANIFEST.whole.encode()
                self.outbox.append(wire.Described(message.version, digest, image, {}, "cpu"))
            case wire.ManifestAsk():
                self.outbox.extend(pieces(message, self.manifests.get(message.manifest_hash)))
            case wire.Commit():
                if message.version in self.commits:
                    return
                assert not self.commits or message.version > self.commits[-1], "a commit went backwards"
                self.commits.append(message.version)
                if message.content:
                    self.contents[message.version] = message.content
                if self.machine:
                    self._drop_older(message.version)
            case wire.Discard():
                self.held.discard(message.version)
                self.published.discard(message.version)
            case wire.ReceiveGrant() if message.ask != self.asks or not self.asked:
                return  # it was asked for, or given up, before that was heard
            case wire.ReceiveGrant():
                assert self.content(message.version) in self.held, f"granted {message.version}, holds {self.held}"
                assert message.version > max(self.granted, default=0)
                if message.version < self.at_least:
                    self.declined = message.version  # another rank has begun with it
                    self.asked = True
                    self.ask_again()
                    return
                self.granted.append(message.version)
                self.asked = False
                self.unlooked = message.version
                if self.loads:
                    self.look()
            case wire.LoadDecided(version, error):
                (self.adopted if error is None else self.told_no).append(version)
                if version == self.candidate and error is None:
                    self._load(version)
                elif version == self.candidate and error is not None:
                    self.keep_own(error.message)
                self.candidate *= version != self.candidate
            case wire.Labels():
                self.kept = message.kept
            case wire.VersionAnswer():
                self.answers[message.ask] = message
            case wire.OperationEnd():
                assert message.post not in self.ends, "two verdicts"
                self.ends[message.post] = message
            case _ if not self.mute:
                self._answer(message)

    def _drop_older(self, version: int) -> None:
        """What is mapped is let go of as soon as nobody needs it; a source has two
        slots."""
        needed = {self.content(version), self.content(self.assigned), *self.kept}
        for old in [old for old in self.held if old < version and old not in needed]:
            self.held.discard(old)
            self.outbox.append(wire.Dropped(old))
        for old in sorted(self.published - needed)[:-2]:
            self.published.discard(old)
            self.outbox.append(wire.Dropped(old))

    def content(self, version: int) -> int:
        return self.contents.get(version, version)

    def _answer(self, message: wire.FromCoordinator) -> None:
        match message:
            case wire.Locate():
                here = {f"nonce-{sim.pid}" for sim in self.world.members.values() if sim.machine == self.machine}
                here |= {f"nonce-{COORDINATOR}"} if self.machine == self.world.machine else set()
                found = (index for index, beacon in enumerate(message.beacons) if beacon.nonce in here)
                self.outbox.append(wire.Located(next(found, -1)))
            case wire.TransferOffer(role="map"):
                self._map(message)
            case wire.LaneAhead() if self.pulls_first:
                self.outbox.append(wire.CarrierUp(self.port))
            case wire.TransferOffer(role="serve"):
                if not self.pulls_first:
                    self.outbox.append(wire.CarrierUp(self.port))
                if message.version in self.held | self.published or message.streaming:
                    self.serving[message.transfer] = message
                else:
                    error = wire.WireError("Gone", "it is not held any more")
                    self.outbox.append(wire.TransferFailed(message.transfer, error))
            case wire.TransferOffer(role="pull") if self.refuse is not None:
                self.outbox.append(wire.TransferFailed(message.transfer, self.refuse))
            case wire.TransferOffer(role="pull"):
                self.outbox.append(wire.TransferReady(message.transfer))
                self.serving[message.transfer] = message
                self.pulling[message.transfer] = self.world.now, message
            case wire.LaneForm():
                cut = self.world.cuts_between(message.group.addresses)
                if self.world.tampering:
                    error = wire.WireError(
                        "StoreTampered", "a process other than a member writes into the rendezvous store"
                    )
                    self.outbox.append(wire.LaneFailed(message.lane, error))
                elif self.world.refused_by_store:
                    error = wire.WireError("SyncError", "the store cannot be reached")
                    self.outbox.append(wire.LaneFailed(message.lane, error))
                elif cut:
                    error = wire.WireError(
                        "Preflight", f"{message.group.names} cannot reach each other", members=message.group.names
                    )
                    self.outbox.append(wire.LaneFailed(message.lane, error, cut))
                else:
                    self.outbox.append(wire.LaneFormed(message.lane))
            case wire.TransferOffer():
                if self.refuse is not None and message.role == "receive":
                    self.outbox.append(wire.TransferFailed(message.transfer, self.refuse))
                else:
                    self.incoming[message.transfer] = message
                    self.outbox.append(wire.TransferReady(message.transfer))
            case wire.OperationGo() if self.breaks or self.world.broken(message.lane):
                self.goes.append(message)
                error = wire.WireError("SyncError", "connection reset", phase="transfer")
                self.outbox.append(wire.OperationFailed(message.operation, error))
                if self.incoming.pop(message.transfer, None):
                    self.outbox.append(wire.TransferFailed(message.transfer, error))
            case wire.OperationGo(transfer=number) if number and (
                self.stuck or self.world.blocked_in(message.lane) or self.world.slow_hop(message.lane)
            ):
                self.at_work[message.lane] = (self.world.now, message)
            case wire.OperationGo(transfer=number) if number:
                self._transfer(self.incoming.pop(number), message)
            case wire.LaneDrop():
                self.at_work.pop(message.lane, None)
            case wire.TransferCancel():
                self.incoming.pop(message.transfer, None)
                self.serving.pop(message.transfer, None)
                self.pulling.pop(message.transfer, None)
                self.at_work = {
                    lane: work for lane, work in self.at_work.items() if work[1].transfer != message.transfer
                }
            case wire.OperationGo():
                self.goes.append(message)
                if not self.stuck:
                    self.outbox.append(wire.OperationDone(message.operation))

    @property
    def port(self) -> int:
        """Where its carrier listens."""
        return 10_000 + self.pid

    @property
    def pulls_first(self) -> bool:
        """Whether its carrier is started before it is needed."""
        return self.world.config.transport != "group" and self.world.config.staging == "host"

    def pull_on(self, frozen: tuple[SimMember, ...] = ()) -> bool:
        """Go on with what it pulls, as far as its holders have it; True: one ended."""
        if self.stuck or self.mute:
            return False
        before = len(self.outbox)
        for number, (since, offer) in list(self.pulling.items()):
            cut: dict[str, str] = {}
            givers: list[SimMember] = []
            for pull in offer.pulls:
                found = self._giver(number, pull, since, frozen, cut)
                if isinstance(found, SimMember):
                    givers.append(found)
                elif found is None:
                    del self.pulling[number]
                    self.serving.pop(number, None)
                    why = "; ".join(f"{name}: {text}" for name, text in cut.items()) or "no holder serves it"
                    error = wire.WireError("SyncError", why, phase="transfer")
                    self.outbox.append(wire.TransferFailed(number, error, cut))
                    break
            if len(givers) == len(offer.pulls):
                self._pull_from(givers, number, offer, since, cut)
        return len(self.outbox) > before

    def _giver(
        self, number: int, pull: wire.PartPull, since: float, frozen: tuple[SimMember, ...], why: dict[str, str]
    ) -> SimMember | Literal["later"] | None:
        """The holder that it pulls from now; "later": its carrier waits a moment.

        The first one that works, as long as it is not slow: a slow one is left for the
        next one after a while, and the best goes on when all are slow.
        """
        elapsed_s, tried_s = self.world.now - since, 0.0
        slow: dict[str, tuple[float, SimMember]] = {}
        best: SimMember | None = None
        for holder in pull.holders:
            giver = self.world.at_port(holder.port)
            if giver is not None and giver not in frozen and giver.is_told_of(number):
                return "later"
            if giver in frozen:
                tried_s += GREET_S
                if elapsed_s < tried_s:
                    return "later"
                why[holder.name] = "did not answer"
                continue
            if giver is None or number not in giver.serving:
                continue  # its host refuses the connection
            if self.world.cuts_between((giver.address, self.address)):
                tried_s += self.world.connect_s / len(pull.holders)
                if elapsed_s < tried_s:
                    return "later"
                why[holder.name] = "timed out"
                continue
            if frozenset((giver.address, self.address)) in self.world.holes:
                tried_s += SILENT_S
                if elapsed_s < tried_s:
                    return "later"
                why[holder.name] = "was silent for too long"
                continue
            rate, tried_s = self._rate_from(giver, number), tried_s + TRY_S
            if rate * LEFT_S >= NBYTES or elapsed_s < tried_s:
                best = giver
                break
            slow[holder.name] = rate, giver
        if best is None and slow:
            _, best = max(slow.values(), key=lambda one: one[0])
        why.update({name: f"it gave {rate:g} bytes/s" for name, (rate, giver) in slow.items() if giver is not best})
        return best

    def _rate_from(self, giver: SimMember, number: int) -> float:
        """Bytes a second from it, which may be pulling itself."""
        link = self.world.rate_between(giver, self) or math.inf
        since, offer = giver.pulling.get(number, (0.0, None))
        if offer is None:
            return link
        return 0.0 if giver.stuck or giver.mute else min(link, giver.pull_rate(number, offer, since))

    def pull_rate(self, number: int, offer: wire.TransferOffer, since: float) -> float:
        """Bytes a second of what it pulls."""
        givers = [self._giver(number, pull, since, (), {}) for pull in offer.pulls]
        rates = (self._rate_from(one, number) if isinstance(one, SimMember) else 0.0 for one in givers)
        return min(rates, default=0.0)

    def has_all(self, number: int, version: int) -> bool:
        """Of what it serves, which it keeps until it is told that it is over."""
        streams = self.serving[number].streaming and version not in self.published
        return number not in self.pulling and not streams

    def is_told_of(self, transfer: int) -> bool:
        """Whether it is about to be told to serve, or to pull."""
        return any(isinstance(message, wire.TransferOffer) and message.transfer == transfer for message in self.inbox)

    def _pull_from(
        self, givers: list[SimMember], number: int, offer: wire.TransferOffer, since: float, cut: dict[str, str]
    ) -> None:
        """At the rate of the links; who is still pulling gives what it has."""
        version = offer.version
        elapsed_s, rates = self.world.now - since, [self.world.rate_between(giver, self) for giver in givers]
        slow = any(rate and elapsed_s * rate < NBYTES for rate in rates)
        if all(giver.has_all(number, version) for giver in givers) and not slow:
            del self.pulling[number]
            self.held.add(version)
            self.received.append(version)
            broken = self.bad_digest or (self.bad_bytes and not offer.digest) or any(one.forges for one in givers)
            digest = "broken" if broken else f"digest-{version}"
            nbytes = {giver.member.name: NBYTES // len(givers) for giver in givers}
            wrong = {givers[0].member.name: "block 0"} if self.bad_bytes and offer.digest else {}
            place = self.place(version)
            self.outbox.append(wire.TransferDone(number, digest, 0.1, 0.0, place, nbytes, cut, wrong))

    def tell_pace(self) -> None:
        """What its sidecars say about once a second, if they are at work; over slow
        links bytes arrive in the end."""
        for number, (since, offer) in self.pulling.items():
            rate = 0.0 if self.stuck else min(NBYTES, self.pull_rate(number, offer, since))
            if not self.quiet:
                self.outbox.append(wire.TransferMoved(number, min(NBYTES, int((self.world.now - since) * rate))))
        for lane, (since, go) in list(self.at_work.items()):
            elapsed, hop = self.world.now - since, self.world.slow_hop(lane)
            blocked = [link for link in self.world.blocked_in(lane) if self.address in link]
            held_up = tuple(address for link in blocked for address in link if address != self.address)
            if hop is None or self.stuck or self.world.blocked_in(lane):
                message = wire.LaneMoved(lane, elapsed, 0.001, held_up)
            elif int(elapsed * hop.rate) >= NBYTES and go.transfer in self.incoming:
                del self.at_work[lane]
                self._transfer(self.incoming.pop(go.transfer), go)
                continue
            else:
                held_up = (hop.behind,) if hop.before == self.address else ()
                message = wire.LaneMoved(lane, 0.0, 0.001, held_up)
            if not self.quiet:
                self.outbox.append(message)

    def _transfer(self, offer: wire.TransferOffer, go: wire.OperationGo) -> None:
        digest = "broken" if self.bad_digest and offer.role == "receive" else f"digest-{offer.version}"
        if offer.role == "receive":
            self.held.add(offer.version)
            self.received.append(offer.version)
        self.outbox.append(wire.OperationDone(go.operation))
        self.outbox.append(wire.TransferDone(go.transfer, digest, 0.1, 0.01, self.place(offer.version)))

    def _map(self, offer: wire.TransferOffer) -> None:
        """Open the place: what is there must be that version, on this machine."""
        assert offer.place is not None
        assert offer.place.device == self.gpu, "it lies on another GPU"
        lender = self.world.lends(offer.place, self.machine)
        if self.unmappable:
            error = wire.WireError("WorldError", "permission denied")
        elif not lender:
            error = wire.WireError("Gone", "it is not there")
        elif self.refuse is not None:
            error = self.refuse
        elif self.stuck:
            return
        else:
            self.held.add(offer.version)
            place, digest = self.place(offer.version), offer.digest
            if self.gpu:
                digest = "broken" if self.bad_digest else f"digest-{offer.version}"
            self.outbox.append(wire.TransferDone(offer.transfer, digest, 0.001, 0.0, place))
            return
        self.outbox.append(wire.TransferFailed(offer.transfer, error))


class World:
    """A channel and its members. Time is :attr:`now`. ``member_type``: what a joining
    member is simulated by.

    ``machine``: where the coordinator can keep the memory of others; empty: nowhere.
    """

    member_type: type[SimMember] = SimMember

    def __init__(
        self, config: ChannelConfig | None = None, groups: dict[str, GroupShape] | None = None, *, machine: str = ""
    ) -> None:
        self.config = config or channel_config()
        self.groups = groups or {}
        self.now = 1000.0
        self.store = ("127.0.0.1", 1)
        self.machine = machine
        self._here = ("boot", wire.Beacon(COORDINATOR, 3, f"nonce-{COORDINATOR}", 0)) if machine else None
        self.kept: dict[Member, int] = {}
        """Versions in the coordinator's hands, by whose they are."""
        self.state = ChannelState(
            self.config, self.groups, run="run", term=1, store=lambda: self.store, here=self._here
        )
        self.members: dict[Member, SimMember] = {}
        self.decisions: list[Decision] = []
        self.aborted: set[int] = set()
        self.admitted: dict[int, set[tuple[str, int]]] = defaultdict(set)
        """Publishes by version: by whom, and which of its. The number of one that was
        never packed may be used again after a restart."""
        self.ledger = Ledger()
        """What the decision log amounts to."""
        self.replies: dict[int, object] = {}
        """Outcomes of orders, by their number."""
        self.log_lost = False
        self.events: list[Event] = []
        self.tally = Tally()
        self.swept: list[str] = []
        self.replaced: list[tuple[str, int]] = []
        """Addresses of stores that were to be replaced."""
        self.refused_by_store = False
        """Nobody can reach it."""
        self.tampering = False
        """Somebody else writes into the store: what forms says so."""
        self.bad_pairs: set[frozenset[str]] = set()
        """Names of members between which no lane works: it forms, and no operation with
        both of them succeeds."""
        self.cuts: set[frozenset[str]] = set()
        """Pairs of addresses between which no byte goes any more: who is at work in a
        lane does not fail, and nothing moves."""
        self.connect_s = 0.0
        """For so long a member tries to connect to its holders over cut links."""
        self.rates: dict[frozenset[str], float] = {}
        """Bytes a second of slow links, by their addresses; a version has
        :data:`NBYTES`."""
        self.holes: set[frozenset[str]] = set()
        """Those between which groups form and connections are made, and nothing
        moves."""
        self.adoptions = Adoptions()
        self.terms = itertools.count(2)
        self._nonces = itertools.count(1)
        self._lanes: dict[str, dict[Member, int]] = {}

    def at_port(self, port: int) -> SimMember | None:
        """The member whose carrier listens there."""
        return next((sim for sim in self.members.values() if sim.port == port), None)

    def rate_between(self, one: SimMember, other: SimMember) -> float:
        return self.rates.get(frozenset((one.address, other.address)), 0.0)

    def lends(self, place: wire.SlotPlace, machine: str) -> bool:
        """Whether a reader on ``machine`` finds the version there: in a living process
        of it."""
        if place.pid == COORDINATOR:
            return machine == self.machine and place.serial in self.kept.values()
        known = (sim for sim in self.members.values() if sim.pid == place.pid and sim.machine == machine)
        found = next(known, None)
        return found is not None and place.serial in (found.held | found.published)

    def _keep(self, effect: Keep) -> None:
        place = None
        if self.lends(effect.place, self.machine):
            self.kept[effect.owner] = effect.version
            place = msgspec.structs.replace(effect.place, pid=COORDINATOR)
        self.state.keeping.kept(effect.owner, effect.version, place)

    def broken(self, lane: str) -> bool:
        """Whether two members of the lane cannot reach each other."""
        names = {member.name for member in self._lanes.get(lane, {})}
        return any(pair <= names for pair in self.bad_pairs)

    def slow_hop(self, lane: str) -> Hop | None:
        """The slowest link between two neighbours of a lane, which is a chain."""
        sims = [self.members.get(member) for member in self._lanes.get(lane, {})]
        chain = [sim.address for sim in sims if sim is not None]
        hops = [Hop(one, other, self.rates.get(frozenset((one, other)), 0.0)) for one, other in pairwise(chain)]
        return min((hop for hop in hops if hop.rate), key=lambda hop: hop.rate, default=None)

    def blocked_in(self, lane: str) -> list[frozenset[str]]:
        """Links between members of a lane over which nothing moves."""
        there = {sim.address for member in self._lanes.get(lane, {}) if (sim := self.members.get(member)) is not None}
        return [link for link in self.cuts | self.holes if link <= there]

    def cuts_between(self, addresses: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Links between these that are cut."""
        return tuple(sorted((min(cut), max(cut)) for cut in self.cuts if cut <= set(addresses)))

    def restart(self, *, keep_log: bool = True) -> list[SimMember]:
        """The coordinator ends, and another one starts. Members are without a session
        until :meth:`rejoin`."""
        if not keep_log:
            self.log_lost = True
            self.aborted.clear()
            self.ledger = Ledger()
        self.state = ChannelState(
            self.config,
            self.groups,
            run="run",
            term=next(self.terms),
            store=lambda: self.store,
            past=Past(copy.deepcopy(self.ledger)),
            here=self._here,
        )
        self.kept.clear()
        self.adoptions = Adoptions()
        sims, self.members = list(self.members.values()), {}
        for sim in sims:
            sim.inbox.clear()
            sim.outbox.clear()
            sim.incoming.clear()
            sim.serving.clear()
            sim.pulling.clear()
        return sims

    def expect(self) -> None:
        """The new coordinator is told who was a member, and what had been committed, as
        far as the events go."""
        name = self.config.name
        self.state.recovery.expect(self.tally.members.get(name, ()), self.tally.commits.get(name, ()))

    def rejoin(self, sim: SimMember) -> None:
        """The member's session comes back: it says what it knows, and what is under
        way."""
        latest = sim.commits[-1] if sim.commits else 0
        loaded = sim.loaded if self.config.adopt_together else max(sim.granted, default=0)
        hello = msgspec.structs.replace(
            sim.hello,
            resume_term=1,
            held=tuple(
                wire.HeldVersion(version, f"digest-{version}", place=sim.place(version)) for version in sorted(sim.held)
            ),
            loaded=loaded,
            epoch=sim.epoch,
            latest=latest,
            latest_digest=f"digest-{sim.content(latest)}" if latest else "",
            latest_content=sim.contents.get(latest, 0),
            assigned=sim.assigned if sim.assigned > loaded else 0,
            adopted=max(sim.adopted, default=0),
            unadopted=max((*sim.unadopted, *sim.told_no), default=0),
            publishes=sim.publishes,
        )
        served = self.state.lockstep.served
        state, older = self.state.join(hello, sim.address, self.now)
        self.adoptions.joined(state, served)
        if older is not None:
            self.members.pop(older.member, None)
        self.members[sim.member] = sim
        self._collect()
        sim.announce()

    def join(
        self,
        name: str,
        *,
        world_size: int = 1,
        generation: int = 1,
        machine: str = "",
        address: str = "127.0.0.1",
        **changes: object,
    ) -> SimMember:
        """``machine``: where its memory can be shared; empty: nowhere. Each join is of
        a process of its own, unless ``changes`` have another."""
        group, replica, rank = name.split("/")
        nonce = next(self._nonces)
        changes.setdefault("process", ProcessIdentity(nonce, 1, "boot", 1))
        if machine:
            changes.setdefault("beacon", wire.Beacon(nonce, 3, f"nonce-{nonce}", 0))
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            run="run",
            channel=self.config.name,
            group=group,
            replica=int(replica),
            rank=int(rank),
            world_size=world_size,
            incarnation=f"n{nonce}",
            generation=generation,
            **changes,  # type: ignore[arg-type]  # the test names valid fields
        )
        return self._add(hello, nonce, machine, address)

    def _add(self, hello: wire.Hello, nonce: int, machine: str, address: str) -> SimMember:
        served = self.state.lockstep.served
        state, older = self.state.join(hello, address, self.now)
        self.adoptions.joined(state, served)
        if older is not None:
            self.members.pop(older.member, None)
        sim = self.member_type(state.member, self, hello, nonce, machine)
        sim.address = address
        sim.publishes = self.state.welcome(state, 0).publishes
        self.members[state.member] = sim
        self._collect()
        return sim

    def lose(self, sim: SimMember, reason: str = "exited") -> None:
        self.members.pop(sim.member, None)
        self.state.lose(sim.member, reason, self.now)
        self._collect()

    def _collect(self) -> None:
        reads: list[Read] = []
        for effect in self.state.take_effects():
            if isinstance(effect, Decision):
                self.ledger.apply(effect)
                self.state.told.recorded(effect)
            match effect:
                case Read():
                    reads.append(effect)
                case Send():
                    if isinstance(effect.message, wire.LaneForm):
                        self._lanes.setdefault(effect.message.lane, {})[effect.member] = effect.message.group.rank
                    if isinstance(effect.message, wire.ReceiveGrant) and self.config.follow == "promoted":
                        key, served = (effect.member.group, effect.member.replica), self.state.context.ledger.current()
                        assert effect.message.version <= served or key in self.state.serving.canary
                    if isinstance(effect.message, wire.LoadDecided):
                        self.adoptions.decided(effect.message, self.state)
                    if isinstance(effect.message, wire.PublishAdmitted):
                        self.admitted[effect.message.version].add((effect.member.incarnation, effect.message.publish))
                    if effect.member in self.members:
                        self.members[effect.member].inbox.append(effect.message)
                case Decision(kind="abort", version=version):
                    forgotten = self.log_lost and version > self._newest_known()
                    if not forgotten or all(old.version != version for old in self.decisions):
                        self.aborted.add(version)  # else its number is used a second time
                case Decision(kind="commit"):
                    assert effect.version not in self.aborted
                    again = [old for old in self.decisions if old.version == effect.version]
                    if again and again[0].digest != effect.digest and self.log_lost:
                        assert effect.version > self._newest_known(), "another content, and somebody knew it"
                        self.decisions.remove(again.pop())
                    if again:  # learned from a member by a coordinator that has lost its log
                        assert again[0].digest == effect.digest
                        continue
                    assert effect.version > self._newest_known()
                    self.decisions.append(effect)
                case Decision():
                    pass
                case Reply():
                    effect.tell(effect.outcome)
                case SweepStore():
                    self.swept.append(effect.prefix)
                case ReplaceStore(host, port):
                    self.replaced.append((host, port))
                case Keep():
                    self._keep(effect)
                case LetGo():
                    self.kept.pop(effect.owner, None)
                case event:
                    self.events.append(event)
                    self.adoptions.happened(event)
                    self.tally.count(event)
                    if isinstance(event, MemberLost):
                        self.members.pop(event.member, None)

        for one in reads:
            self._read(one)

    def _read(self, effect: Read) -> None:
        """As the shell does, but at once."""
        try:
            self.state.read(effect, read(effect), self.now)
        except errors.ReplicasError as error:
            self.state.read(effect, error, self.now)
        self._collect()

    def _newest_known(self) -> int:
        """The newest commit that anybody can know of: what died with a lost log and
        with all who had seen it is gone."""
        if not self.log_lost:
            return max((decision.version for decision in self.decisions), default=0)
        return max((sim.commits[-1] for sim in self.members.values() if sim.commits), default=0)

    def up(self, sim: SimMember) -> bool:
        """Deliver one message of the member to the coordinator."""
        if not sim.outbox or sim.member not in self.members:
            return False
        message = sim.outbox[0]
        if isinstance(message, wire.Packed):
            if self.state.recovery.active and self.state.commits.publishes.get(sim.member, message.publish) is None:
                return False  # it has no number yet, and is not packed before it has one
            message = self._numbered(sim, message)
        sim.outbox.popleft()
        if isinstance(message, wire.Bye):
            self.lose(sim, "left")
            return True
        if (known := self.state.roster.get(sim.member)) is not None:
            self.adoptions.heard(known, message)
        self.state.receive(sim.member, message, self.now)
        self._collect()
        return True

    def say_all(self, sim: SimMember) -> None:
        """Deliver all that the member says, also of its manifest when it is asked for
        it; and nothing else to it."""
        while self.up(sim):
            asks = [message for message in sim.inbox if isinstance(message, wire.ManifestAsk)]
            for ask in asks:
                sim.inbox.remove(ask)
                sim.handle(ask)

    def _numbered(self, sim: SimMember, packed: wire.Packed) -> wire.Packed:
        """A test may have it packed before it is admitted: now its number is known, by
        which digests are told apart."""
        known = self.state.commits.publishes.get(sim.member, packed.publish)
        if known is None or not packed.digest:
            return packed
        sim.published.add(known.version)
        digest = f"{packed.digest}-{known.version}"
        digest += f"-{sim.member.rank}" if packed.digest == "part" else ""
        return msgspec.structs.replace(packed, digest=digest, place=sim.place(known.version))

    def down(self, sim: SimMember) -> bool:
        """Deliver one message of the coordinator to the member."""
        if not sim.inbox:
            return False
        sim.handle(sim.inbox.popleft())
        return True

    def run_to(self, kind: type[wire.FromCoordinator]) -> None:
        """Deliver until messages of this kind are next for all who get messages."""
        moved = True
        while moved:
            moved = False
            for sim in list(self.members.values()):
                while self.up(sim) or (sim.inbox and not isinstance(sim.inbox[0], kind) and self.down(sim)):
                    moved = True

    def run(self, frozen: tuple[SimMember, ...] = ()) -> None:
        """Deliver until nothing moves."""
        moved = True
        while moved:
            moved = False
            for sim in [sim for sim in self.members.values() if sim not in frozen]:
                while self.down(sim) or self.up(sim):
                    moved = True
                moved |= sim.pull_on(frozen)

    def advance(self, seconds: float, *, heartbeats: bool = True, frozen: tuple[SimMember, ...] = ()) -> None:
        """Let time pass in small steps, with heartbeats of everyone that is not
        frozen."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if heartbeats:
                for member, sim in self.members.items():
                    if sim not in frozen:
                        self.state.roster.note_heard(member, self.now)
                        sim.tell_pace()
            self.run(frozen)
            self.state.tick(self.now)
            self._collect()
            self.run(frozen)
