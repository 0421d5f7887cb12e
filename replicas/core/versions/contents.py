"""Contents: the manifests of the bytes that members are to have, and which ones.

A *content* is named by the version with which it was published; a later version may
have the same one (:mod:`replicas.core.base.ledger`). Its payload is known here after
its publish, or when a holder has described it (:mod:`replicas.core.versions.recovery`).
"""

from __future__ import annotations

from collections.abc import Iterable

from replicas.core.members.member_state import MemberState
from replicas.core.moving.attempt import Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.versions.catch_up import Wanted
from replicas.core.versions.load_rounds import Newest, Served


class Contents:
    """The manifests and facts (*payloads*) that are known here of versions' bytes."""

    def __init__(self, context: ChannelContext) -> None:
        """Start without payloads; versions and labels are those of the ledger."""
        self._context = context
        self._ledger, self._promoted = context.ledger, context.config.follow == "promoted"
        self._payloads: dict[int, Payload] = {}

    def of(self, version: int) -> Payload | None:
        """Return the payload (manifest and facts) of a version's bytes, or None.

        None if it is not known here, as after a restart of the coordinator.
        """
        return self._payloads.get(self._ledger.content(version))

    def add(self, payload: Payload) -> None:
        """Store a payload; drop the payloads of versions that are not needed now."""
        ledger = self._ledger
        needed = {payload.version, *self.wanted, *map(ledger.content, (ledger.newest, *ledger.pinned()))}
        kept = {content: known for content, known in self._payloads.items() if content in needed}
        self._payloads = kept | {payload.version: payload}

    @property
    def known(self) -> list[Payload]:
        """The payloads (manifests and facts of versions) that are known here."""
        return list(self._payloads.values())

    @property
    def wanted(self) -> list[int]:
        """The versions whose bytes all targets are to have, the most urgent first."""
        ledger = self._ledger
        served = [ledger.current(), ledger.candidate()] if self._promoted else [ledger.newest]
        return list(dict.fromkeys(ledger.content(version) for version in served if version))

    @property
    def leased(self) -> dict[int, set[str]]:
        """The members that hold leases (promises to keep), by version of the bytes."""
        found: dict[int, set[str]] = {}
        for lease in self._ledger.leases.values():
            if lease.holder:
                found.setdefault(self._ledger.content(lease.version), set()).add(lease.holder)
        return found

    def for_latecomers(self) -> list[Wanted]:
        """Return the versions that are to be sent to members which lack them.

        Each is a payload (manifest and facts) with the names of the members that are to
        get it: those that hold a lease of the version, or None for all targets.
        """
        served, leased = self.wanted, self.leased.items()
        wanted = [(content, None) for content in served]
        more = [(content, frozenset(holders)) for content, holders in leased if content not in served]
        return [(self._payloads[content], whom) for content, whom in (*wanted, *more) if content in self._payloads]

    def obtainable(self, members: Iterable[MemberState], version: int) -> bool:
        """Return True if any of ``members`` can get a committed version's bytes.

        They can if a member holds any of them, or if the coordinator keeps the memory
        of a lost member on their host.
        """
        content, payload = self._ledger.content(version), self.of(version)
        owners = payload.part_owners if payload is not None else ()
        return self._context.keeping.serves(content, owners, members) or self.is_held(content)

    def is_held(self, content: int) -> bool:
        """Return True if a member has all or a part of the bytes.

        :param content: the version with which these were published.
        """
        roster = self._context.roster
        return bool(roster.holders.of(content)) or any(content in state.parts for state in roster)

    def newest(self, version: int) -> Newest:
        """Return a version with its publisher's ``meta``, None if that is unknown."""
        payload = self.of(version)
        return Newest(version, payload.meta if payload is not None else None)

    def served(self, canary: frozenset[tuple[str, int]]) -> Served:
        """Return the versions that targets may load: the current one, and a candidate.

        :param canary: replicas that load the candidate; without any, there is none.
        """
        ledger = self._ledger
        current = self.newest(ledger.current() if self._promoted else ledger.newest)
        return Served(current, self.newest(ledger.candidate()) if canary else Newest(0), canary)
