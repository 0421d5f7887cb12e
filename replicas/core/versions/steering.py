"""Steering: check orders about versions, and carry them out.

Promote, reject and roll back change what targets load; labels and leases change what is
kept; scores are recorded, and may decide about a candidate. Each order is checked
against the ledger first: an error names what is there, and nothing has changed. The
answer follows the decision, which is on disk then.

*Kept.* Each member is told which contents it must not evict: those of labels and
leases, and of ``previous`` if there is room. One slot is left for the version that is
served, whatever it is then, one for the version that comes next, and with ``follow =
"promoted"`` one for a candidate. What does not fit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from replicas import errors
from replicas import messages as wire
from replicas.common.sizes import list_text, size_text
from replicas.core.base.effects import Reply, What
from replicas.core.base.ledger import OWN_LABELS, PREVIOUS, Ledger, Score
from replicas.core.members.member_state import MemberState
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.versions.recommits import Recommits
from replicas.core.versions.serving import Serving
from replicas.messages import version_orders as orders
from replicas.messages.identity import Member
from replicas.messages.version_orders import SCORES_MAX, Steered, VersionOrder

SHOWN = 6
"""The newest versions that an error names."""
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9._-]*\Z")
LABELS_MAX = LEASES_MAX = 64
_NOTHING = wire.Labels({}, ())
Tell = Callable[[Steered | errors.ReplicasError], None]
Sender = tuple[Member, int] | Tell
"""Who sent an order: a member, with its number of it; or whom to tell the outcome."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """An order, its sender (None: a person), the time since 1970, and the reply."""

    order: VersionOrder
    member: Member | None
    wall: float
    reply: Tell


class Steering:
    """Carries out orders about the versions of one channel."""

    def __init__(self, context: ChannelContext, serving: Serving, recommits: Recommits) -> None:
        """Start without orders.

        :param serving: carries out promotions and rejections.
        :param recommits: give older content a new number, for rollbacks.
        """
        self._context, self._serving, self._recommits = context, serving, recommits
        self._ledger, self._name = context.ledger, context.config.name
        self._seen = (-1, 0)
        self._told = _NOTHING
        self._newcomers = False

    # ------------------------------------------------------------ orders

    def order(self, order: VersionOrder, sender: Sender, wall: float) -> None:
        """Check and carry out an order; its sender is told the outcome, now or later.

        :param sender: a member, with its number of the order, or a function to be
            called.
        :param wall: seconds since 1970.
        """
        member = sender[0] if isinstance(sender, tuple) else None

        def reply(outcome: Steered | errors.ReplicasError) -> None:
            """Queue the outcome of the order to its sender."""
            if not isinstance(sender, tuple):
                self._context.out.append(Reply(sender, outcome))
            elif isinstance(outcome, Steered):
                self._context.send(sender[0], wire.VersionAnswer(sender[1], outcome))
            else:
                self._context.send(sender[0], wire.VersionAnswer(sender[1], error=wire.WireError.of(outcome)))

        try:
            self._carry_out(_Asked(order, member, wall, reply))
        except errors.ReplicasError as error:
            error.channel = error.channel or self._name
            reply(error)

    def _carry_out(self, asked: _Asked) -> None:
        """Check an order and take its decisions.

        :param asked: the order, with its sender, who gets the reply.
        :raises errors.ReplicasError: it cannot be carried out; nothing has changed.
        """
        match asked.order:
            case orders.Promote(version=text):
                self._promote(asked, self._find(text))
            case orders.Rollback(to=text):
                self._roll_back(asked, self._find(text))
            case orders.Reject(version=text, why=why):
                version = self._find(text)
                if version != self._ledger.candidate():
                    text = f"version {version} is not the candidate: {self._state_of(version)}"
                    raise errors.UsageError(text, hint="only a candidate can be rejected; roll back a served version")
                self._serving.reject(version, why or "by an order")
                asked.reply(Steered(channel=self._name, version=version))
            case orders.Hold():
                self._hold(asked, asked.order)
            case orders.Release(name=name):
                self._release(asked, name)
            case orders.Label():
                self._label(asked, asked.order)
            case orders.Score():
                self._score(asked, asked.order)

    def _promote(self, asked: _Asked, version: int) -> None:
        """Serve a version: by its own number, or by a new one if a newer was served.

        :param asked: the order, with its sender, who gets the reply.
        :raises errors.UsageError: it is served already, was rejected, or nothing is
            promoted on this channel.
        :raises errors.Busy: it needs a new number, and another such order is under way.
        """
        if self._context.config.follow == "newest":
            text = f"channel {self._name} serves each committed version: there is nothing to promote"
            raise errors.UsageError(text, hint=f'set channels.{self._name}.follow = "promoted"')
        self._check_servable(version)
        if version >= self._serving.exposed:
            self._serving.promote(version, "by an order")
            asked.reply(Steered(channel=self._name, version=version))
        else:
            self._recommit(asked, version, "promoted")

    def _roll_back(self, asked: _Asked, version: int) -> None:
        """Commit an older version's content again; then the candidate is rejected.

        :param asked: the order's sender, who gets the reply at the end.
        :raises errors.ReplicasError: the version is served already, was rejected or is
            gone, or another such order is under way; nothing has changed.
        """
        self._check_servable(version)
        self._recommit(asked, version, "rolled_back", self._ledger.candidate())

    def _recommit(self, asked: _Asked, version: int, what: What, candidate: int = 0) -> None:
        """Commit the version's content again under a new number, then reply.

        Then ``candidate``, unless 0 or promoted meanwhile, is rejected.

        :param what: the kind of decision to report.
        :raises errors.ReplicasError: another such order is under way, or no member
            holds the content; nothing has changed.
        """

        def ended(error: errors.ReplicasError | None) -> None:
            """Report the end of the recommit, and reply to the order."""
            if error is None:
                self._serving.report(what, number, value=version)
                if candidate and self._ledger.labels.get(PREVIOUS) != candidate:
                    self._serving.reject(candidate, f"rolled back to version {version}")
                asked.reply(Steered(channel=self._name, version=number, content_of=version))
            else:
                asked.reply(error)

        number = self._recommits.begin(version, ended)

    def _check_servable(self, version: int) -> None:
        """Raise UsageError for a version that is served now, or was rejected."""
        if self._ledger.content(version) == self._ledger.content(self._ledger.current()):
            raise errors.UsageError(f"channel {self._name} serves version {version} already", hint=self._there())
        if why := self._ledger.why_rejected(version):
            raise errors.UsageError(
                f"version {version} was rejected: {why}", hint="publish it again, or choose another"
            )

    def _hold(self, asked: _Asked, order: orders.Hold) -> None:
        """Make or renew a lease: a promise to keep a version's bytes.

        :param asked: the order's sender, who gets the reply.
        :raises errors.ReplicasError: the name is taken, or there is no room.
        """
        version, ledger = self._find(order.version), self._ledger
        name = order.name or next(name for n in range(1, LEASES_MAX + 2) if (name := f"lease-{n}") not in ledger.leases)
        known = ledger.leases.get(name)
        holder = str(asked.member) if asked.member is not None else ""
        if known is not None and (known.version, known.holder) != (version, holder):
            text = f"the lease name {name} is in use: it keeps version {known.version} for {known.holder or 'a person'}"
            raise errors.UsageError(text, hint="release it first, or choose another name")
        if known is None and len(ledger.leases) >= LEASES_MAX:
            raise errors.NoCapacity(f"channel {self._name} has {LEASES_MAX} leases, the limit", hint="release some")
        self._check_room(version)
        seconds = order.seconds or 0.0
        self._context.decide("hold", version, name=name, value=seconds, why=holder, at=asked.wall)
        self._serving.report("held", version, name=name, value=seconds)
        until = asked.wall + seconds if seconds else None
        asked.reply(Steered(channel=self._name, version=version, name=name, until=until))

    def _release(self, asked: _Asked, name: str) -> None:
        """End a lease by its name, and reply; raise UsageError for an unknown one."""
        lease = self._ledger.leases.get(name)
        if lease is None:
            there = f"its leases are {list_text(sorted(self._ledger.leases))}" if self._ledger.leases else "it has none"
            raise errors.UsageError(f"channel {self._name} has no lease {name!r}: {there}", hint="")
        self._end_lease(name, "by an order")
        asked.reply(Steered(channel=self._name, version=lease.version, name=name))

    def _end_lease(self, name: str, why: str) -> None:
        """Decide that the lease ends, and emit the event with the reason."""
        version = self._ledger.leases[name].version
        self._context.decide("release", version, name=name)
        self._serving.report("released", version, name=name, why=why)

    def _label(self, asked: _Asked, order: orders.Label) -> None:
        """Set, move or remove a label of the user's, and reply to its sender.

        :raises errors.ReplicasError: the label is invalid or taken, or there is no
            room.
        """
        label, ledger = order.label, self._ledger
        if label in OWN_LABELS or not _LABEL.match(label):
            text = f"{label!r} cannot be used as a label"
            hint = f"a letter, then letters, digits, '.', '_' and '-'; {list_text(OWN_LABELS)} are set by the run"
            raise errors.UsageError(text, hint=hint)
        known = ledger.labels.get(label, 0)
        version = self._find(order.version) if order.version else 0
        if not version and not known:
            raise errors.UsageError(f"channel {self._name} has no label {label!r}", hint=self._there())
        if version and known not in (0, version) and not order.move:
            raise errors.UsageError(f"label {label!r} points to version {known}", hint="--move or move=True moves it")
        if version and not known and len(ledger.labels) >= LABELS_MAX:
            raise errors.NoCapacity(f"channel {self._name} has {LABELS_MAX} labels, the limit", hint="remove some")
        if version:
            self._check_room(version, without=label)
        self._context.decide("label", version, name=label)
        self._serving.report("labelled", version or known, name=label, value=float(bool(version)))
        asked.reply(Steered(channel=self._name, version=version or known, name=label))

    def _score(self, asked: _Asked, order: orders.Score) -> None:
        """Record scores of a version, and reply to the order's sender.

        Promote or reject the candidate if these decide.

        :raises errors.ReplicasError: the version is unknown, or would have too many
            scores; none is recorded.
        """
        version = self._find(order.version, held=False)
        scores = self._ledger.versions[version].scores
        if len(scores.keys() | order.scores.keys()) > SCORES_MAX:
            raise errors.NoCapacity(f"version {version} has {len(scores)} of {SCORES_MAX} scores", hint="reuse a name")
        for name, value in order.scores.items():
            mean = scores[name].with_report(value) if name in scores else Score(value)
            self._context.decide("score", version, name=name, value=mean.value, count=mean.count)
            self._serving.report("scored", version, name=name, value=value)
        for name in order.scores:
            self._serving.scored(version, name)
        asked.reply(Steered(channel=self._name, version=version))

    # ------------------------------------------------------------ what is there

    def _find(self, text: str, *, held: bool = True) -> int:
        """Return the number of the version that a number or a label names.

        :param held: a member must hold its content.
        :raises errors.UsageError: there is no such label or version.
        :raises errors.Gone: its content is gone.
        """
        ledger, number = self._ledger, int(text) if text.isascii() and text.isdigit() else 0
        if not number:
            number = ledger.labels.get(text, 0)
            if not number and text == PREVIOUS:
                raise errors.UsageError(f"channel {self._name} has not served a version before this one", hint="")
            if not number:
                raise errors.UsageError(f"channel {self._name} has no label {text!r}", hint=self._there())
        if number not in ledger.versions:
            raise errors.UsageError(f"channel {self._name} has no version {number}", hint=self._there())
        if held and not self._context.roster.holders.of(ledger.content(number)):
            raise errors.Gone(f"no replica has version {number} of {self._name}", version=number, hint=self._there())
        return number

    def _there(self) -> str:
        """Return the versions that members hold, with labels, as a hint for errors."""
        holders = self._context.roster.holders
        held = [number for number, known in sorted(self._ledger.versions.items()) if holders.of(known.content)]
        words = [f"{number}{self._labels_text(number)}" for number in held]
        return (
            f"{self._name} has version{'' if len(words) == 1 else 's'} {', '.join(words[-SHOWN:])}"
            if words
            else "it has none"
        )

    def _labels_text(self, version: int) -> str:
        """Return the version's labels as text, such as " (current)", or ""."""
        labels = self._ledger.labels_of(version)
        return f" ({', '.join(labels)})" if labels else ""

    def _state_of(self, version: int) -> str:
        """Return as text what became of a version that is not the candidate."""
        why = self._ledger.why_rejected(version)
        return f"it was rejected ({why})" if why else f"its label is{self._labels_text(version) or ' none'}"

    def _fixed(self, ledger: Ledger, *without: str) -> dict[int, str]:
        """Return the contents that labels and leases keep, each with the name of its
        label or "lease ...".

        A content is named by the version with which its bytes were published. The
        labels ``candidate`` and ``previous``, which move on their own, are left out.

        :param ledger: the labels and leases.
        :param without: labels to ignore.
        """
        fixed = {ledger.content(version): label for label, version in ledger.labels.items()
                 if label not in (*without, *OWN_LABELS[1:])}  # fmt: skip
        return {ledger.content(lease.version): f"lease {name}" for name, lease in ledger.leases.items()} | fixed

    @property
    def _room(self) -> int:
        """How many versions' bytes may be kept for long, beside slots for new ones, and
        one for that which is served."""
        config = self._context.config
        return config.slots - (3 if config.follow == "promoted" else 2)

    def _check_room(self, version: int, without: str = "") -> None:
        """Raise NoCapacity if a version's content cannot be kept beside the others.

        :param without: a label to ignore, as it is moved.
        """
        ledger, content = self._ledger, self._ledger.content(version)
        fixed = self._fixed(ledger, without, OWN_LABELS[0])  # another version will be the current one
        if content in fixed or len(fixed) < self._room:
            return
        kept = list_text([f"version {number} ({why})" for number, why in sorted(fixed.items())])
        size = size_text(ledger.versions[version].commit.nbytes)
        text = f"channel {self._name} can keep {max(0, self._room)} versions beside those that are served and come next"
        text += f"{f', and keeps {kept}' if kept else ''}; version {version} needs {size} more"
        raise errors.NoCapacity(text, hint=f"release one, or raise channels.{self._name}.slots", version=version)

    # ------------------------------------------------------------ what members keep

    def joined(self) -> None:
        """Record that a member has joined: :meth:`advance` sends it what to keep."""
        self._newcomers = True

    def _message(self) -> wire.Labels:
        """Return the message that tells members the labels and the contents to keep."""
        ledger, config = self._ledger, self._context.config
        fixed, waiting = self._fixed(ledger), self._recommits.waiting
        # a slot is left for the publish that the recommit waits for
        kept = {*fixed, ledger.content(ledger.candidate()) if waiting is None else waiting.content} - {0}
        if config.follow == "newest" and ledger.labels.keys() <= {*OWN_LABELS} and not (ledger.leases or waiting):
            return _NOTHING  # nothing is steered: newest versions are kept anyway
        if previous := ledger.labels.get(PREVIOUS):
            kept |= {ledger.content(previous)} if len(kept) < config.slots - 1 else set()
        return wire.Labels(dict(ledger.labels), tuple(sorted(kept)))

    def tick(self, wall: float, *, recovering: bool) -> None:
        """End leases whose time is over, or whose holder is lost.

        :param wall: seconds since 1970.
        :param recovering: lost holders may still come back.
        """
        for name, lease in list(self._ledger.leases.items()):
            if lease.until and wall >= lease.until:
                self._end_lease(name, "its time has ended")
            elif lease.holder and not recovering and lease.holder not in map(str, self._members()):
                self._end_lease(name, "its holder has left or died")

    def advance(self) -> None:
        """Commit the current content again if targets may serve a rejected version.

        Tell members what to keep, those to which something is new.
        """
        if self._serving.must_go_back and self._recommits.waiting is None and self._ledger.current():
            self._go_back()
        waiting = self._recommits.waiting
        seen = self._ledger.changes, waiting.number if waiting is not None else 0
        if self._seen != seen:
            self._seen, message = seen, self._message()
            self._newcomers = self._newcomers or message != self._told
            self._told = message
        if self._newcomers:
            self._newcomers = False
            for state in self._context.roster:
                self._tell(state)

    def _members(self) -> list[Member]:
        """Return the channel's members."""
        return [state.member for state in self._context.roster]

    def _tell(self, state: MemberState) -> None:
        """Queue the present labels and kept contents to a member that lacks them."""
        if (state.labels or _NOTHING) != self._told:
            state.labels = self._told
            self._context.send(state.member, self._told)

    def _go_back(self) -> None:
        """Commit the current content again: a target may serve a rejected version.

        Do nothing if no member holds that content.
        """
        current = self._ledger.current()
        if self._context.roster.holders.of(self._ledger.content(current)):

            def ended(error: errors.ReplicasError | None) -> None:
                """Report the rollback if it was committed."""
                if error is None:
                    self._serving.report("rolled_back", number, value=current)

            number = self._recommits.begin(current, ended)
