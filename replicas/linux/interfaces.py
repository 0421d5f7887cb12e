"""Network interfaces: find the interface of an address.

A link-local address of IPv6 (``fe80::...``) is valid on one link only, and each machine
has its own names of links: the address ``fe80::1%eth0`` of a peer may be
``fe80::1%ens3`` on the peer's machine.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from replicas.linux.files import kernel_lines

_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/self/net/if_inet6")


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with ``address``; "" if none.

    If several have it (two VLANs may have one link-local address), prefer the interface
    that the address names after ``%``. Also "" if ``address`` is not an IP address.
    """
    text, _, named = address.partition("%")
    try:
        wanted = ipaddress.ip_address(text)
    except ValueError:
        return ""
    found = [name for one, name in (_ipv6() if wanted.version == 6 else _ipv4()) if one == wanted]
    return named if named in found else next(iter(found), "")


def _ipv6() -> Iterator[tuple[ipaddress.IPv6Address, str]]:
    """Yield (address, interface name) for each IPv6 address of this machine."""
    try:
        lines = kernel_lines(_INET6)
    except OSError:  # the kernel has no IPv6
        return
    for number, *_, name in map(str.split, filter(None, lines)):
        yield ipaddress.IPv6Address(bytes.fromhex(number)), name


def _ipv4() -> Iterator[tuple[ipaddress.IPv4Address, str]]:
    """Yield (address, interface name) for the first IPv4 address of each interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            yield ipaddress.IPv4Address(answer[20:24]), name
