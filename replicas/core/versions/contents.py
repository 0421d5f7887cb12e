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
    """The contents of one channel whose payloads are known here."""

    def __init__(self, context: ChannelContext) -> None:
        self._context = context
        self._ledger, self._promoted = context.ledger, context.config.follow == "promoted"
        self._payloads: dict[int, Payload] = {}

    def of(self, version: int) -> Payload | None:
        """Return the payload of a version's content, if it is known here."""
        return self._payloads.get(self._ledger.content(version))

    def add(self, payload: Payload) -> None:
        """Keep a payload, and those that are still needed."""
        ledger = self._ledger
        needed = {payload.version, *self.wanted, *map(ledger.content, (ledger.newest, *ledger.pinned()))}
        kept = {content: known for content, known in self._payloads.items() if content in needed}
        self._payloads = kept | {payload.version: payload}

    @property
    def known(self) -> list[Payload]:
        """The payloads that are known here."""
        return list(self._payloads.values())

    @property
    def wanted(self) -> list[int]:
        """The contents that all targets are to have, the most urgent first."""
        ledger = self._ledger
        served = [ledger.current(), ledger.candidate()] if self._promoted else [ledger.newest]
        return list(dict.fromkeys(ledger.content(version) for version in served if version))

    @property
    def leased(self) -> dict[int, set[str]]:
        """The contents that members hold leases of, with these members."""
        found: dict[int, set[str]] = {}
        for lease in self._ledger.leases.values():
            if lease.holder:
                found.setdefault(self._ledger.content(lease.version), set()).add(lease.holder)
        return found

    def for_latecomers(self) -> list[Wanted]:
        """Return what members are to have: all targets, or the holder of a lease."""
        served, leased = self.wanted, self.leased.items()
        wanted = [(content, None) for content in served]
        more = [(content, frozenset(holders)) for content, holders in leased if content not in served]
        return [(self._payloads[content], whom) for content, whom in (*wanted, *more) if content in self._payloads]

    def obtainable(self, members: Iterable[MemberState], version: int) -> bool:
        """Return True if ``members`` can get a committed version."""
        content, payload = self._ledger.content(version), self.of(version)
        owners = payload.part_owners if payload is not None else ()
        return self._context.keeping.serves(content, owners, members) or self.is_held(content)

    def is_held(self, content: int) -> bool:
        """Return True if a member has the content, or a part of it."""
        roster = self._context.roster
        return bool(roster.holders.of(content)) or any(content in state.parts for state in roster)

    def newest(self, version: int) -> Newest:
        """Return a committed version with its ``meta``, if that is known here."""
        payload = self.of(version)
        return Newest(version, payload.meta if payload is not None else None)

    def served(self, canary: frozenset[tuple[str, int]]) -> Served:
        """Return the versions that targets may load.

        :param canary: replicas that load the candidate.
        """
        ledger = self._ledger
        current = self.newest(ledger.current() if self._promoted else ledger.newest)
        return Served(current, self.newest(ledger.candidate()) if canary else Newest(0), canary)
