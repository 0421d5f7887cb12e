"""By which names a port may be spoken to: what keeps a web page from reading it through
a name of its own.

A browser that has loaded a page from a name will ask that name again, and its owner can
let it point at 127.0.0.1 (DNS rebinding): the page then reads whatever a port of the
visitor's own machine tells everybody. The request still names the page's host. So a
port that listens on loopback only is spoken to by an address, by localhost, the
machine's own name, or the name in its config. A port for other machines has names that
nobody here knows, and is not asked about.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["AllowedHosts"]


class AllowedHosts:
    """:param host: what the port listens on, as the config has it. :param address: what
    became of it."""

    def __init__(self, host: str, address: str) -> None:
        self._any = not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    def problem(self, values: Iterable[str]) -> str:
        """Why nobody is served who says these (values of Host and Origin); empty: he
        is."""
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
