"""What the targets of a simulated channel have said, and which versions they load."""

from __future__ import annotations

from replicas import messages as wire
from replicas.core.base.effects import Event, LoadFailed
from replicas.core.channel_state import ChannelState
from replicas.core.members.member_state import MemberState

__all__ = ["Adoptions"]


class Adoptions:
    """Of one coordinator: what each target said to it, and whether its decisions heed
    that."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, int], set[tuple[int, int, bool]]] = {}
        """Rank, version, and whether for all ranks, of each replica."""
        self._late: set[tuple[str, int]] = set()
        """Replicas that came when the others served a version, and ask for none yet."""
        self._known: set[int] = set()

    def joined(self, state: MemberState, served: int) -> None:
        key = (state.member.group, state.member.replica)
        self._forget(state)
        if state.from_before:
            self._known.add(state.hello.adopted)
        elif served:
            self._late.add(key)

    def _forget(self, state: MemberState) -> None:
        known = self._said.setdefault((state.member.group, state.member.replica), set())
        known -= {one for one in known if one[0] == state.member.rank}

    def heard(self, state: MemberState, message: wire.FromMember) -> None:
        key = (state.member.group, state.member.replica)
        match message:
            case wire.CanLoad(version, whole):
                self._said.setdefault(key, set()).add((state.member.rank, version, whole))
            case wire.ReceiveAsk():
                self._late.discard(key)

    def happened(self, event: Event) -> None:
        if isinstance(event, LoadFailed) and event.reason.startswith("this replica did not report within"):
            self._late.add((event.group, event.replica))

    def decided(self, message: wire.LoadDecided, channel: ChannelState) -> None:
        """Every complete replica has said that it can load the version, but those that
        were left behind, or came later and want none yet."""
        if message.error is not None or message.version in self._known:
            return
        self._known.add(message.version)
        for group, replica in channel.load_rounds.replicas:
            view = channel.view(group, replica)
            if len(view.ranks) < view.expected or any(state.draining for state in view.ranks):
                continue
            if (group, replica) in self._late:
                continue
            said = [one for one in self._said.get((group, replica), ()) if one[1] == message.version]
            ranks = {rank for rank, _, _ in said}
            all_said = any(whole for _, _, whole in said) or {state.member.rank for state in view.ranks} <= ranks
            assert all_said, f"version {message.version} is loaded, and {group}/{replica} has said {said}"
