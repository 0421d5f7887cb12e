"""The messages of a transfer to its members: offer, go and cancel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from replicas import errors
from replicas.core.effects import Send
from replicas.core.ground import Ground
from replicas.core.members.member_state import MemberState
from replicas.core.moving.lanes import Lane
from replicas.core.moving.paths import TransferPlan
from replicas.core.moving.payload import Payload
from replicas.messages import SlotPlace, TransferCancel, TransferGo, TransferOffer
from replicas.messages.identity import Member

__all__ = ["Offers"]


class Offers:
    """The messages of one transfer. Equal messages are one object, encoded once."""

    def __init__(self, ground: Ground, payload: Payload) -> None:
        self._ground = ground
        self._payload = payload

    def offer(self, plan: TransferPlan, transfer: int, remaining_s: float) -> None:
        """Send each member of attempt ``transfer`` its role."""
        # of a part, only the bytes taken from it are digested
        digest = self._payload.digest if plan.mode == "image" else ""
        send, receive, place = (
            self._alike(plan, transfer, role, remaining_s, digest) for role in ("send", "receive", "map")
        )
        for member in plan.senders:
            self._send(member, send)
        waiting = Counter(self._ground.roster.host(member) for member in plan.waiting)
        for member in plan.receivers:
            self._send(member, receive, sharing=1 + waiting[self._ground.roster.host(member)])
        readers = Counter(plan.maps.values())
        for member, lender in plan.maps.items():
            self._send(member, place, self._place(lender), sharing=readers[lender])

    def _alike(
        self,
        plan: TransferPlan,
        transfer: int,
        role: Literal["send", "receive", "map"],
        remaining_s: float,
        digest: str,
    ) -> list[TransferOffer]:
        """Return the offer in a list, which holds the last variant made of it."""
        payload = self._payload
        offer = TransferOffer(
            transfer=transfer,
            version=payload.version,
            role=role,
            mode=plan.mode,
            manifest_hash=payload.manifest_hash,
            meta=payload.meta,
            deadline_s=remaining_s,
            digest=digest,
            streaming=role == "send" and payload.filling is not None,
        )
        return [offer]

    def _send(
        self, member: Member, last: list[TransferOffer], place: SlotPlace | None = None, *, sharing: int = 1
    ) -> None:
        if member not in self._ground.roster:
            return
        if (last[0].place, last[0].sharing) != (place, sharing):
            last[0] = msgspec.structs.replace(last[0], place=place, sharing=sharing)
        self._ground.send(member, last[0])

    def go(self, plan: TransferPlan, go: TransferGo, lane: Lane | None) -> None:
        """Tell the members, all ready now, to move the bytes."""
        for member in (*plan.senders, *plan.receivers):
            places = tuple(self._part(plan, number) for number in plan.local.get(member, ()))
            own = msgspec.structs.replace(go, places=places) if places else go
            if lane is not None and member not in lane.members:
                own = msgspec.structs.replace(own, lane="", routes=())
            self._ground.send(member, own)

    def withdraw(self, transfer: int, members: Iterable[Member]) -> None:
        """Cancel attempt ``transfer`` at these members."""
        ground, cancel = self._ground, TransferCancel(transfer)
        ground.out.extend(Send(member, cancel) for member in sorted(members) if member in ground.roster)

    def lender(self, member: Member) -> MemberState | None:
        """Return the member, or its stand-in if it is lost."""
        return self._ground.roster.get(member) or self._ground.keeping.get(member)

    def _place(self, member: Member) -> SlotPlace | None:
        state = self.lender(member)
        return state.places.get(self._payload.version) if state is not None else None

    def _part(self, plan: TransferPlan, number: int) -> SlotPlace:
        place = self._place(plan.owners[number])
        if place is None:
            raise errors.InternalError(f"part {number} of version {self._payload.version} lies nowhere")
        return msgspec.structs.replace(place, part=number)
