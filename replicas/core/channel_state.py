"""The coordinator's state of one channel: events come in, effects go out.

Theory of operation
===================

:class:`ChannelState` does no I/O: time comes in as an argument, actions go out as
:mod:`replicas.core.base.effects`, in order. The engine applies the effects of one event
before the next event, so that, for instance, a decision is on disk before any member
learns of the commit. After every event :meth:`ChannelState._advance_all` takes every
step that has become possible, so no handler needs to know which steps wait for it.

*Cost.* A channel may have thousands of members. :meth:`ChannelState._advance_all` looks
only at sets that are small when nothing is due (the roster's indices; the rounds that
may advance; the members that are not live), so that a message costs the same at any
number of members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from replicas import errors
from replicas import messages as wire
from replicas.config.structs import ChannelConfig
from replicas.core.base.effects import LOSS_WORDS, Effect, MemberJoined, MemberLost, Read
from replicas.core.base.ledger import Past
from replicas.core.draining import Drains
from replicas.core.members.hosts import Hosts, Keeping
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import GroupShape, Roster
from replicas.core.members.servers import others_of_server, refusal, server_of
from replicas.core.members.views import Views
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.links import Links
from replicas.core.operations.lanes import Lanes
from replicas.core.operations.running import Operations
from replicas.core.versions.commits import Commits
from replicas.core.versions.load_rounds import LoadRounds, ReplicaView
from replicas.core.versions.load_watches import LoadWatches
from replicas.core.versions.lockstep import Lockstep
from replicas.core.versions.manifests import Joined
from replicas.core.versions.recovery import RecordedState, Recovery
from replicas.core.versions.serving import Serving, due
from replicas.core.versions.steering import Sender, Steering
from replicas.messages import FromMember
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member
from replicas.messages.version_orders import VersionOrder


class ChannelState:
    """State of a channel: members, versions, operations. ``now``: monotonic seconds."""

    operations: Operations
    serving: Serving

    def __init__(
        self,
        config: ChannelConfig,
        groups: Mapping[str, GroupShape],
        *,
        run: str,
        term: int,
        store: Callable[[], tuple[str, int]],
        secret: bytes = b"",
        past: Past | None = None,
        here: tuple[str, wire.Beacon] | None = None,
        carry_port: int = 0,
        wall_offset_s: float = 0.0,
    ) -> None:
        """Start without members, and go on from the decisions of earlier coordinators.

        :param groups: expected replicas, ranks and lease of each group, by its name.
        :param run: name of the run, for keys in the store.
        :param term: number of this coordinator's life.
        :param store: returns the address of the store of process groups.
        :param secret: the coordinator's secret, from which those of lanes derive.
        :param past: those decisions; its ledger is not copied, and changes with this.
        :param here: boot id and beacon of this process, if it can hold members' memory.
        :param carry_port: the first port at which a carrier (a member's process that
            serves versions to other hosts) may listen; 0: any.
        :param wall_offset_s: the time since 1970, less ``now``.
        """
        past = past or Past()
        self.config = config
        self.term = term
        self._wall_offset_s = wall_offset_s
        self.out: list[Effect] = []
        self.roster = Roster(config, groups, epoch=past.epoch)
        self.roster.carry_port = carry_port
        self.hosts = Hosts(self.roster, self.out, here)
        self.keeping = Keeping(config.name, self.roster, self.hosts, self.out)
        self.lanes = Lanes(self.roster, self.out, run=run, term=term, store=store, secret=secret)
        self.links = Links(self.roster)
        shared = (self.roster, self.hosts, self.keeping, self.links, self.out)
        calls = (
            lambda *call: self.operations.broadcast(*call),
            self.lanes.pull_secret,
            self.others_wait,
            lambda: self.serving.tell_all(),
        )
        self.told = RecordedState(copy.deepcopy(past.ledger))
        self.context = ChannelContext(term, past, *shared, *calls)
        self.load_rounds = LoadRounds(config.name, self.view, self.out, past.ledger.content)
        self.serving = Serving(self.context, self.load_rounds)
        self.roster.on_held = self.load_rounds.touch
        self.lockstep = Lockstep(config, self.load_rounds, self.roster.history, self.out)
        self.commits = Commits(self.context)
        self.steering = Steering(self.context, self.serving, self.commits.recommits)
        self.operations = Operations(self.context, self.lanes)
        self.recovery = Recovery(self.context, self.commits, self.operations.matching)
        self.drains = Drains(self.context, self.commits, self.load_rounds, self.operations)
        self.marks = self.context.marks
        self.views = Views(self.roster, self.out)
        self.watches = LoadWatches(self.roster, self.load_rounds, self.lockstep, past.ledger, self.out)

    # ------------------------------------------------------------ calls of the engine

    def take_effects(self) -> list[Effect]:
        """Return the effects (actions for the engine) since the last call, in order.

        They are removed from this object.
        """
        effects, self.out[:] = list(self.out), []
        return effects

    def join(self, hello: wire.Hello, address: str, now: float) -> tuple[MemberState, MemberState | None]:
        """Add the member that a Hello describes; go on with what waited for it.

        Return its state, and the state of the earlier process of the same rank, or
        None. That process is removed as lost, as are members of older generations and
        silent targets of the same server. The new member becomes live later.

        :param address: IP address of the member, as the coordinator sees it.
        :raises errors.ReplicasError: the Hello is refused; nothing has changed.
        """
        state, older = self.roster.add(hello, address, now)
        state.server = server_of(hello) if state.is_target else None
        silent = others_of_server(state, self.roster)
        for other in silent:
            if not other.cut_at and not self.roster.is_suspect(other, now):
                raise refusal(state, other, self.config.name)
        if older is not None:
            self.lose(older.member, "fenced", now)
        for other in (*self.roster.outlived(hello), *silent):  # before insert(): the new rank must not meet them
            self.lose(other.member, "replaced", now)
        member = state.member
        self.drains.joined(state)
        self.roster.insert(state)
        if state.is_source:
            self.commits.publishes.joined(member, hello.process, self.roster.life(member))
        self.hosts.joined(state, now)
        self.serving.joined(state, self.told.ledger)
        self.steering.joined()
        if state.from_before:
            self.recovery.on_hello(state, now)
        if state.is_target:
            self.load_rounds.joined(state)
            self.lockstep.joined(state)
        self.out.append(MemberJoined(self.config.name, state.member))
        self.serving.tell(state)  # Welcome leaves out a commit that is still being recorded
        self._advance_all(now)
        return state, older

    def welcome(self, state: MemberState, received: int) -> wire.Welcome:
        """Return the Welcome (the answer to a member's Hello), for the caller to send.

        Record that the member was told the present heartbeat interval, which is in it.

        :param received: number of the last message that came from the member.
        """
        return wire.Welcome(
            term=self.term,
            settings=self.roster.welcome_settings(state),
            received=received,
            epoch=self.roster.epoch,
            address=state.address,
            replica=state.member.replica,
            latest=due(self.told.ledger, self.config, state, self.serving.canary),
            publishes=self.commits.publishes.last_number(state.member),
        )

    def lose(self, member: Member, reason: str, now: float) -> None:
        """Remove a lost member; the others go on without it, in a new epoch.

        Do nothing if the member is unknown.

        :param reason: a key of ``LOSS_WORDS`` or another text; ``left``: in good order.
        """
        state = self.roster.remove(member, in_order=reason == "left")
        if state is None:
            return
        self.keeping.lost(state)
        self.hosts.lost(state)
        state.note = LOSS_WORDS.get(reason, reason)
        self.out.append(MemberLost(self.config.name, member, reason, state.observes))
        self.watches.lost(member)
        if state.observes:
            return
        if reason == "left":
            half_loaded = state.is_target and self.load_rounds.of(member.group, member.replica).partial
            if not half_loaded:  # a rank that stops in the middle of a load has not left in order
                self.roster.history.note_left(member, state.hello.generation, now)
        elif reason != "fenced":
            self.roster.history.note_loss(member.name, now)
            if state.is_target:
                self.serving.lost(state)
        self.commits.publishes.left(member, in_order=reason == "left")
        self.commits.lost(
            state, now, in_order=reason == "left"
        )  # before its broadcast ends: the publish must know whom
        self.operations.lost(member, state.note, now)
        if state.is_target:
            self.load_rounds.lost(state, in_order=reason == "left")
            self.lockstep.lost(state)
        self._advance_all(now)

    def receive(self, member: Member, message: FromMember, now: float) -> None:
        """Handle a message of a member, and take the steps that it makes possible.

        Messages must come in the order of sending. Those of unknown members are
        ignored.
        """
        state = self.roster.get(member)
        if state is None:
            return
        state.last_seen = now
        if self._handle(state, message, now):
            state.progressed_at = now
        self._advance_all(now)

    def tick(self, now: float) -> None:
        """Lose members whose leases are over, end what is overdue; call regularly."""
        for state in self.roster.expired(now):
            self.lose(state.member, "lease", now)
        self.roster.update_patience(now)
        self.hosts.tick(now)
        self.recovery.tick(now)
        self.links.tick()
        self.operations.check_lanes(now)
        self.commits.tick(now, recovering=self.recovery.active)
        self.steering.tick(now + self._wall_offset_s, recovering=self.recovery.active)
        self.hosts.release(self.commits.latest, now)
        self.operations.tick(now)
        self._advance_all(now)

    def read(self, effect: Read, found: Joined | errors.ReplicasError, now: float) -> None:
        """Store the result of a Read effect, for which manifests were decoded; go on.

        :param found: the joined manifest, or the error of reading it.
        """
        self.commits.manifests.read(effect, found)
        self._advance_all(now)

    def order(self, order: VersionOrder, sender: Sender, now: float) -> None:
        """Check and carry out an order about versions: promote, roll back, label, ...
        Result or error are queued for ``sender``, now or after a commit: a member with
        its number of the order, or a function that a ``Reply`` calls with them."""
        self.steering.order(order, sender, now + self._wall_offset_s)
        self._advance_all(now)

    def store_moved(self, now: float) -> None:
        """Form the unfinished process groups again, over the new rendezvous store.

        Groups that have formed stay; broadcasts of versions in the others end.
        """
        self.operations.store_moved(now)
        self._advance_all(now)

    def waits(self, member: Member) -> bool:
        """Return True if a request of the member still waits for other members.

        That is an ask for a version, a report that it can load one, or an operation.
        """
        return self.load_rounds.asks(member) or self.lockstep.waits(member) or self.operations.matching.waits(member)

    def end_replica(self, group: str, replica: int, generation: int, reason: str, now: float) -> None:
        """Lose a replica's members, as its supervisor says that their processes ended.

        :param generation: this and earlier ones have ended; later members stay.
        :param reason: why, as for :meth:`lose`.
        """
        self.recovery.stop_expecting(group, replica, reason)
        for state in self.roster.replica(group, replica):
            if state.hello.generation <= generation:  # a later one may be here already
                self.lose(state.member, reason, now)

    def set_draining(self, group: str, replica: int, generation: int, now: float) -> None:
        """Drain this generation and earlier ones: they get no new work, and ReplicaIdle
        is queued once they have finished their own."""
        self.drains.start_drain(group, replica, generation)
        self.lockstep.touch((group, replica))
        self._advance_all(now)

    def start_new_life(self, group: str, replica: int, now: float) -> None:
        """Prepare for a replica's new start: expect all its ranks, end its drain."""
        self.roster.history.left.pop((group, replica), None)  # expect these ranks again
        self.drains.end(group, replica)
        self.lockstep.touch((group, replica))
        self._advance_all(now)

    # ----------------------------------------------------------- callbacks of the parts

    def others_wait(self, now: float) -> bool:
        """Return True if a publish or a join waits for the current publish to end."""
        return bool(self.commits.publishes.queue or self.roster.waiting(now))

    def view(self, group: str, replica: int) -> ReplicaView:
        """Return a target replica's present ranks that receive bytes themselves, and
        the number of such ranks in a complete replica."""
        ranks = [s for s in self.roster.replica(group, replica) if s.is_target and s.carries]
        ranks.sort(key=lambda state: state.member)
        party = next((party for party in self.config.targets if party.group == group), None)
        leader_only = party is not None and party.ranks == "leader"
        return ReplicaView(ranks, 1 if leader_only or not ranks else ranks[0].hello.world_size)

    # ------------------------------------------------------------ after each event

    def _advance_all(self, now: float) -> None:
        """Take every step that has become possible; queue messages and decisions.

        Every event ends with this call. It does nothing while members of an earlier
        coordinator are waited for.
        """
        if self.recovery.active:  # decisions need all members
            return
        self.recovery.advance(now)
        self.keeping.update_keepers(self.context.ledger.content(self.commits.latest))
        self._admit(now)
        self.commits.advance(now)
        self.serving.advance(now + self._wall_offset_s)
        self.steering.advance()
        served = self.commits.contents.served(self.serving.canary)
        served = served._replace(current=self.lockstep.advance(served.current, now))
        for key in self.load_rounds.take_due(served):
            self.load_rounds.advance(*key, served.of(key))
        self.operations.advance(now)
        self.drains.advance()
        self.watches.answer()
        self.views.send_views_if_due(now)  # last: only the newest of several epochs is sent

    def _admit(self, now: float) -> None:
        """Admit members that have joined or caught up, in a new epoch.

        A member need not catch up with a version that nobody has any more. Do nothing
        while the newest version is transferred or a collective runs.
        """
        if self.commits.main is not None or self.operations.running_collective:  # members of these must not change
            return
        missing = self.roster.missing(now)
        if missing and not self.commits.contents.obtainable(
            missing, self.commits.latest
        ):  # the version is lost: admit them as newcomers
            for state in missing:
                state.missed = 0
        self.roster.admit(now)

    # ------------------------------------------------------------ messages

    def _handle(self, state: MemberState, message: FromMember, now: float) -> bool:
        """Pass a message to the part of the channel that handles it. Return True if it
        shows progress of the member's program."""
        commits, member = self.commits, state.member
        match message:
            case wire.Progress():
                self.marks.note(member.group, member.replica, step=message.step)
            case wire.ManifestAsk():
                commits.send_manifest(state, message, now)
            case wire.ManifestPiece():
                if not commits.piece(state, message, now):
                    self.recovery.undescribed(state)
            case wire.PublishBegin() | wire.Packed() | wire.PackFailed():
                if not self.recovery.defers(state, message, now):
                    commits.publishing(state, message, now)
            case wire.Filled():
                commits.filled(state, message, now)
            case wire.TransferReady() | wire.TransferDone() | wire.TransferFailed():
                commits.transferring(member, message, now)
            case wire.Described():
                self.recovery.described(state, message)
            case wire.Resumed():
                state.resumed = True
            case wire.Located():
                self.hosts.located(state, message)
            case wire.Dropped():
                state.drop_version(message.version)
                self.hosts.release(commits.latest, now, host=state.host)
            case wire.ReceiveAsk() if state.is_target and state.carries:  # other members are never granted one
                self.load_rounds.ask(member, message)
                self.lockstep.asked(state, message)
            case wire.ReceiveCancel():
                self.load_rounds.cancel_ask(member, message.ask)
            case wire.Loaded() if message.version <= commits.latest:  # a later version cannot have been loaded
                state.load_s = message.load_s
                self.marks.note(member.group, member.replica, version=message.version)
                self.load_rounds.loaded(state, message.version)
            case wire.CanLoad() if state.is_target and state.carries and message.version <= commits.latest:
                self.lockstep.can_load(state, message)
            case wire.LoadFailed():
                version, why = min(message.version, commits.latest), text_of(message.error.message, REASON_LENGTH)
                if state.is_target and state.carries:
                    self.roster.history.unloaded.setdefault(member.replica_name, f"version {version}: {why}")
                    self.lockstep.failed(state, version, why)
                    self.serving.failed((member.group, member.replica), version, why)
                self.load_rounds.failed(state, version, why, kept=message.kept)
            case wire.VersionAsk():
                self.steering.order(message.order, (member, message.ask), now + self._wall_offset_s)
            case wire.WatchLoaded():
                self.watches.answer()
                self.watches.watch(member, message)
            case wire.OperationPost():
                step, untagged = (-1, 1) if message.step is None else (message.step, 0)
                self.marks.note(member.group, member.replica, step=step, operations=untagged)
                self.operations.matching.post(state, message, now)
            case _:
                self._report(state, message, now)
                return False
        return True

    def _report(self, state: MemberState, message: FromMember, now: float) -> None:
        """Handle a report of a member's sidecar or carrier (its transfer processes),
        which does not count as progress of its program."""
        member = state.member
        match message:
            case wire.TransferMoved():
                self.commits.transferring(member, message, now)
            case wire.CarrierUp():
                state.carrier_port, state.certificate_hash = message.port, message.certificate_hash
                for transfer in self.commits.transfers:  # pulls may wait for a carrier that listens
                    transfer.attempt.offer_pulls(now)
            case wire.LaneFormed():
                self.lanes.formed(member, message.lane)
            case wire.LaneFailed():
                error = message.error.exception()
                if isinstance(error, errors.NoCapacity):
                    error.members = (member.name,)
                lane = self.lanes.reported_failed(member, message.lane, error)
                if lane is not None:
                    if not state.is_peer:
                        known = {self.roster.address(one) for one in lane.members}
                        links = [link for link in message.links if known.issuperset(link)]
                        self.links.doubt(links, error.message, now)
                    self.operations.lane_failed(lane, error, now)
            case wire.LaneMoved():
                self.lanes.moved(member, message, now)
            case wire.OperationDone():
                self.operations.done(member, message.operation, now)
            case wire.OperationFailed():
                self.operations.failed(member, message.operation, message.error.exception(), now)
