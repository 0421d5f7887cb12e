"""Check Host and Origin headers, to stop DNS rebinding on a loopback port.

A browser that loaded a page from some host name sends later requests to the same name,
and the owner of that name can point it at 127.0.0.1 (DNS rebinding). The page could
then read everything that a port of the visitor's machine serves without a token. Such a
request still carries the page's host name. So a port on loopback answers only requests
that name an IP address, localhost, this machine's host name, or the name in the config.
A port on any other address is not checked: this process cannot know the names by which
other machines reach it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["AllowedHosts"]


class AllowedHosts:
    """The host names that a port answers to.

    :param host: listen host as written in the config.
    :param address: the address that the socket is bound to.
    """

    def __init__(self, host: str, address: str) -> None:
        self._any = not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    def problem(self, values: Iterable[str]) -> str:
        """Error text for these values of Host and Origin; empty: allowed."""
        if self._any:
            return ""
        wrong = next((one for value in values if not self._is_ours(one := _name(value))), None)
        return (
            ""
            if wrong is None
            else (
                f"this port is for this machine, and does not answer to the name {wrong[:100]!r}: "
                "speak to it as localhost, or show the run's token"
            )
        )

    def _is_ours(self, name: str) -> bool:
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def _name(value: str) -> str:
    """The host in ``host:port`` or ``scheme://host:port``."""
    rest = value.rpartition("://")[2]
    if rest.startswith("["):
        return rest[1:].partition("]")[0].lower()
    return rest.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
