"""At which moment of a version's way a channel is, told from what passes through the
coordinator's engine.

::

    policy   LaneForm       forming        outer   LaneForm                 forming
             PublishAdmitted packing
             an offer to map mapping
             an offer to pull, or
             OperationGo    moving                 OperationGo              moving
             1st Done       verifying              1st OperationDone        verifying
             last Done      prepared               last OperationDone       prepared
             decision       committing             OperationEnd             committing, then idle
             ReceiveGrant   loading
             PublishEnd     idle
             either of a catch-up: catching up

Over process groups nothing is mapped, and versions in parts are pulled; on one host no
lane is formed for weights, and bytes are only copied where a version comes in parts
(:func:`moments_of`).
"""  # noqa: W505  # a picture

from __future__ import annotations

from replicas.core.base.effects import Effect, Send
from replicas.core.base.ledger import Decision
from replicas.core.channel_state import ChannelState
from replicas.messages import (
    FromMember,
    LaneForm,
    OperationDone,
    OperationEnd,
    OperationGo,
    PublishAdmitted,
    PublishEnd,
    ReceiveGrant,
    TransferDone,
    TransferOffer,
)

__all__ = ["OUTER_MOMENTS", "Moments", "moments_of"]

ALWAYS = ("packing", "verifying", "prepared", "committing", "loading", "catching up", "idle")


def moments_of(transport: str, *, parts: bool) -> tuple[str, ...]:
    """Those of weights that come. ``parts``: all ranks of a source publish."""
    if transport == "group" and not parts:
        return ("forming", "moving", *ALWAYS)
    return ("mapping", *(("moving",) if parts else ()), *ALWAYS)


OUTER_MOMENTS = ("forming", "moving", "verifying", "prepared", "committing")


class Moments:
    """Follows one channel."""

    def __init__(self) -> None:
        self.now = "idle"
        """The last moment that came."""
        self._seen: object = None
        self._transfer = 0
        self._done = 0
        self._expected = 0

    def of(self, channel: ChannelState, event: Effect | FromMember) -> str:
        """The moment that begins with ``event``; empty when none does."""
        moment = self._effect(channel, event) or self._message(channel, event)
        if moment:
            self.now = moment
        return moment

    def _effect(self, channel: ChannelState, event: Effect | FromMember) -> str:
        match event:
            case Send(message=LaneForm(lane=lane)) if self._first("lane", lane):
                return "forming"
            case Send(message=PublishAdmitted(version=version)) if self._first("admitted", version):
                return "packing"
            case Send(message=TransferOffer(transfer=transfer, role="map")) if self._first("map", transfer):
                return self._moving(channel, transfer, "mapping")
            case Send(message=OperationGo(transfer=transfer) | TransferOffer(transfer=transfer, role="pull")) if (
                transfer and self._first("go", transfer)
            ):
                return self._moving(channel, transfer, "moving")
            case Send(message=OperationGo(operation=operation, participants=those, transfer=0)) if self._first(
                "go", operation
            ):
                self._transfer, self._done, self._expected = operation, 0, len(those)
                return "moving"
            case Decision():
                return "committing"
            case Send(message=ReceiveGrant(version=version)) if self._first("grant", version):
                return "loading"
            case Send(message=OperationEnd()) if self._first("end", self._transfer):
                return "committing"
            case Send(message=PublishEnd(publish=publish)) if self._first("end", publish):
                return "idle"
            case _:
                return ""

    def _moving(self, channel: ChannelState, transfer: int, moment: str) -> str:
        """A transfer of a publish, or of a catch-up."""
        main = channel.commits.main
        if main is None or main.attempt.number != transfer:
            return "catching up"
        if transfer != self._transfer:  # some may map in it, and others receive
            attempt = main.attempt
            those = attempt.tasks.keys() | attempt.plan.waiting
            self._transfer, self._done, self._expected = transfer, 0, len(those)
        return moment

    def _message(self, channel: ChannelState, event: Effect | FromMember) -> str:
        match event:
            case TransferDone(transfer=number) | OperationDone(operation=number) if number == self._transfer:
                self._done += 1
                if self._done == self._expected:
                    return "prepared"
                return "verifying" if self._done == 1 else ""
            case _:
                return ""

    def _first(self, kind: str, number: object) -> bool:
        """Whether this is the first of several equal messages to different members."""
        if self._seen == (kind, number):
            return False
        self._seen = (kind, number)
        return True
