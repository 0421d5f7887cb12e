"""Checks of addresses: the source of a connection, the names that a port answers to.

A browser that loaded a page from some host name sends later requests to the same name,
and the owner of that name can point it at 127.0.0.1 (DNS rebinding). The page could
then read everything that a port of the visitor's machine serves without a token. Such a
request still carries the page's host name. So a port on loopback answers only requests
that name an IP address, localhost, this machine's host name, or the name in the config.
A port on any other address is not checked: this process cannot know the names by which
other machines reach it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from replicas import errors
from replicas.common.reason import Reason
from replicas.config.values import ip_address
from replicas.linux.sockets import tcp_socket
from replicas.messages import Hello
from replicas.messages.identity import ProcessIdentity

LOOPBACK = b"loopback"
_MAPPED = bytes(10) + b"\xff\xff"
_SITE = 8
"""Bytes of an IPv6 address that identify a site, which assigns the others freely."""


def source_of(host: str) -> bytes:
    """Return the key by which connections from the IP address ``host`` are counted.

    Addresses with one key share limits: all of loopback, and each /64 of IPv6.
    """
    if ":" not in host:
        return LOOPBACK if host.startswith("127.") else host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(_MAPPED):  # an IPv4 address on an IPv6 socket
        return source_of(socket.inet_ntoa(packed[12:]))
    return LOOPBACK if packed == bytes(15) + b"\1" else packed[:_SITE]  # ::1


def check_reach(hello: Hello, here: ProcessIdentity, address: str, seen_as: str, store: str) -> None:
    """Check that a joining member can reach the store, which its process groups need.

    Connects nowhere; an observer passes, as it has no process groups.

    :param hello: the member's first message. :param here: this process.
    :param address: the member's address, as seen from here.
    :param seen_as: the local address that the member connected to, for the hint.
    :param store: the address that the store listens on.
    :raises replicas.errors.Preflight: the member comes from another machine, and the
        store listens on loopback.
    """
    if hello.observe or not _is_loopback(store) or _is_loopback(address):
        return
    process = hello.process
    if (process.boot_id, process.pid_namespace) == (here.boot_id, here.pid_namespace) or _is_ours(address):
        return
    name = hello.member.name
    raise errors.Preflight(
        f"{name} joins from {address}, and the store listens on {store}, which only this machine reaches",
        channel=hello.channel,
        phase="join",
        members=(name,),
        hint=f'set bind = "{seen_as}" in [store] (store_bind= of an embedded Coordinator)',
    )


class AllowedHosts:
    """The host names that a port answers to: any, unless it listens on loopback."""

    def __init__(self, host: str, address: str) -> None:
        """Allow every name, or on loopback only names of this machine and ``host``.

        :param host: listen host as written in the config.
        :param address: the address that the socket is bound to.
        """
        self._any = not _is_loopback(address)
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    def problem(self, values: Iterable[str]) -> Reason | None:
        """Return why a request is refused for its host names, or None if it is allowed.

        :param values: the host names: values of its headers Host and Origin.
        """
        for name in map(_name, () if self._any else values):
            # no browser page can own an IP address
            if name not in self._names and not name.endswith(".localhost") and ip_address(name) is None:
                return (
                    f"this port is for this machine, and does not answer to the name {name[:100]!r}: "
                    "speak to it as localhost, or show the run's token"
                )
        return None


def _name(value: str) -> str:
    """Return the host in a header's value, in lower case and without port or scheme.

    :param value: ``host:port`` or ``scheme://host:port``.
    """
    rest = value.rpartition("://")[2]
    if rest.startswith("["):
        return rest[1:].partition("]")[0].lower()
    return rest.partition(":")[0].lower().rstrip(".")


def _is_loopback(address: str) -> bool:
    """Return True for a loopback address, and for a text that is not an IP address.

    Such a text is the path of a Unix socket.
    """
    found = ip_address(address.partition("%")[0])
    return found is None or found.is_loopback  # a Unix socket has no IP address


def _is_ours(address: str) -> bool:
    """Return True if an interface of this machine (network namespace) has the address.

    Tries to bind a socket to it, which is closed again.
    """
    with tcp_socket(address) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
