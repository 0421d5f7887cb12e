"""Refuse a second target that loads versions into one server, by members' ``url``.

Two would load versions in any order, and one would resume the server while the other
loads. Ranks and generations of one replica may share a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from replicas import errors
from replicas.core.members.member_state import MemberState
from replicas.messages import Hello
from replicas.messages.bounds import REASON_LENGTH, text_of

_PORTS: Mapping[str, int] = {"http": 80, "https": 443}
_LOCAL = ("localhost", "::1", "0.0.0.0", "::")


def others_of_server(state: MemberState, roster: Iterable[MemberState]) -> list[MemberState]:
    """Return the targets of other replicas that load versions into the newcomer's
    server.

    Return [] if its server is unknown.

    :param state: the newcomer; ``state.server`` is the key of its server, or None.
    :param roster: the channel's members.
    """
    replica, server = state.member.replica_name, state.server
    return [o for o in roster if o.server == server and o.member.replica_name != replica] if server else []


def refusal(state: MemberState, other: MemberState, channel: str) -> errors.Preflight:
    """Return (do not raise) the error for a newcomer, as another target uses its
    server.

    :param state: the newcomer.
    :param other: the member that loads into that server.
    :param channel: name of the channel.
    """
    url, theirs = (text_of(one.hello.info["url"], REASON_LENGTH) for one in (state, other))
    me, name = state.member.name, other.member.name
    text = f"{me} would load versions into {url}, and {name} loads them into the same server, {theirs}"
    hint = f'end {name} first, or give {me} a server of its own: info["url"] is its address'
    return errors.Preflight(text, channel=channel, phase="join", members=(me, name), hint=hint)


def server_of(hello: Hello) -> object:
    """Return a key of the server that a target loads into, by ``info["url"]`` of its
    Hello.

    The key is equal for all addresses of one server; None without a valid url. Names
    are not resolved. A loopback address names a server of the member's machine.
    """
    try:
        parts = urlsplit(hello.info.get("url", "").strip())
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    host = (parts.hostname or "").rstrip(".")
    host = "127.0.0.1" if host in _LOCAL else host
    machine = (hello.process.boot_id, hello.process.pid_namespace) if host.startswith("127.") else None
    return (machine, host, port, parts.path.rstrip("/"), parts.query) if host else None
