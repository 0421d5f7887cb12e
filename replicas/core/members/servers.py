"""Which target loads versions into which server, by the ``url`` that members give.

Two followers of one server would load its versions in any order, and one would resume
it while the other loads. So the second one is refused. Ranks of one replica may share a
server: a later generation of a replica follows the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from replicas import errors
from replicas.core.members.member_state import MemberState
from replicas.messages import Hello
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member

_PORTS: Mapping[str, int] = {"http": 80, "https": 443}


class Servers:
    """The servers of one channel, with the targets that load versions into them."""

    def __init__(self) -> None:
        self._followers: dict[object, dict[Member, MemberState]] = {}

    def insert(self, state: MemberState) -> None:
        if state.is_target and (server := server_of(state.hello)) is not None:
            self._followers.setdefault(server, {})[state.member] = state

    def remove(self, state: MemberState) -> None:
        followers = self._followers.get(server := server_of(state.hello), {})
        if followers.pop(state.member, None) is not None and not followers:
            del self._followers[server]

    def others(self, state: MemberState) -> list[MemberState]:
        """Return members of other replicas that follow the newcomer's server."""
        if not state.is_target:
            return []
        replica = state.member.replica_name
        followers = self._followers.get(server_of(state.hello), {}).values()
        return [other for other in followers if other.member.replica_name != replica]


def refusal(state: MemberState, other: MemberState, channel: str) -> errors.Preflight:
    """Return the error of a newcomer whose server has a follower already."""
    url, theirs = (text_of(one.hello.info["url"], REASON_LENGTH) for one in (state, other))
    also = f" (as {theirs})" if theirs != url else ""
    me, name = state.member.name, other.member.name
    return errors.Preflight(
        f"{me} would load versions into {url}, and {name} loads them into the same server{also}",
        channel=channel,
        phase="join",
        members=(me, name),
        hint=f'end {name} first, or give {me} a server of its own: info["url"] is its address',
    )


def server_of(hello: Hello) -> object:
    """Return what two addresses of one server have in common, None without one.

    Names are not resolved. A loopback address counts for the member's machine alone.
    """
    url = hello.info.get("url", "").strip()
    here = hello.process.boot_id, hello.process.pid_namespace
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        host = ""
    if not host:
        return (here, url) if url else None
    try:
        address = ip_address(host)
        host = "localhost" if str(address) in ("127.0.0.1", "::1") or address.is_unspecified else str(address)
        is_local = host == "localhost" or address.is_loopback
    except ValueError:
        is_local = host == "localhost"
    return (here if is_local else None, host, port, parts.path.rstrip("/"), parts.query)
