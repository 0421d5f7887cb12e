"""The address at which a carrier listens, how pullers connect to it, and error texts.

A carrier listens only at its member's address as the coordinator sees it. A puller
connects from its own such address, so bytes take the interfaces that the run uses. With
a fixed port the carriers of one machine take the first free ports from it on; a warning
names another program that has one of them.

The scope of a link-local IPv6 address (``%eth0``) is valid only on the machine that
announced it. So an own address gets the interface that has it, and another machine's
address the interface by which this machine reaches the coordinator.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time

from replicas.common.foreign import one_line
from replicas.linux.interfaces import interface_of
from replicas.linux.processes import descriptors, process_name, processes
from replicas.linux.sockets import listeners
from replicas.messages.bounds import CARRY_PORTS as PORTS

NAME = "replicas-carry"
"""Name of a carrier's process."""
REMEDY = (
    "open the TCP ports of carriers between these machines (cluster.carry_port fixes them), and let each join by an "
    "address that the others reach"
)
_NOT_OURS = (
    "the coordinator must be reached by an address that the other members can use too, not through a tunnel or "
    "address translation"
)
_APPEARS_S = 0.1
"""A program that has bound a port listens at it after at most this time."""
_Address = tuple[str, int] | tuple[str, int, int, int]


def address_text(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, backlog: int) -> tuple[socket.socket, str]:
    """Listen at ``host``; return the socket and a warning ("" without one).

    The warning names a program, not a carrier, that has one of the ports.

    :param port: the first port to try, before up to 63 others; 0 means any.
    :param backlog: most connections that wait to be accepted.
    :raises OSError: no socket listens. ``strerror`` names the address and the remedy.
    """
    warning = ""
    for number in range(port, min(port + PORTS, 1 << 16)) if port else (0,):
        try:
            return _listen(host, number, backlog), warning
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, _why_not(error, host, number)) from error
        if not warning and (other := _other_program(host, number)):
            warning = (
                f"port {number} of {host}, for transfers between hosts, is taken by {other}; trying the next ports. "
                f"End that program, or set cluster.carry_port so that the {PORTS} ports from it on are free, best "
                "below 32768"
            )
    text = f"none of the {PORTS} ports from {port} on is free at {host}: set another cluster.carry_port"
    raise OSError(errno.EADDRINUSE, f"{warning}. {text}" if warning else text)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at exactly this address and port.

    :param backlog: most connections that wait to be accepted.
    :raises OSError: the port is in use, or the address is not this machine's, or is
        unspecified (``0.0.0.0``); no socket is left open.
    """
    family, address = _resolved(host, port)
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise OSError(errno.EADDRNOTAVAIL, "other hosts cannot connect to an unspecified address")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def bind_socket(host: str, port: int, source: str) -> tuple[socket.socket, _Address]:
    """Return (unconnected socket, address to connect to).

    The socket is bound to ``source``, if that is given and of the same IP version.

    :raises OSError: ``source`` is not on this machine, or ``host`` is not an address.
    """
    family, there = _resolved(host, port, interface_of(source))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if source:
            like, here = _resolved(source, 0)
            if like == family:
                sock.bind(here)
    except BaseException:
        sock.close()
        raise
    return sock, there


def unreached(error: OSError, host: str, port: int, source: str) -> str:
    """Return the text for a connection that failed: both ends, the reason, the remedy.

    :param source: the address that it came from; empty for any.
    """
    interface = interface_of(source)
    here = f" from {source}" + (f" ({interface})" if interface and not source.endswith(interface) else "")
    return f"{address_text(host, port)} cannot be reached{here if source else ''}: {_reason(error, source)}; {REMEDY}"


def _reason(error: OSError, source: str) -> str:
    """Return why a connection from ``source`` failed, as text."""
    match error.errno:
        case errno.ECONNREFUSED:
            return "connection refused: no program listens there, or a firewall refuses it"
        case errno.EHOSTUNREACH | errno.ENETUNREACH:
            return f"{os.strerror(error.errno)}: no interface leads there"
        case errno.EADDRNOTAVAIL:
            return f"{source or 'an address'} is not an address of this machine, or has no free port"
    if isinstance(error, TimeoutError):
        return "no answer in time: packets are lost on the way, as behind a firewall"
    return error.strerror or str(error) or type(error).__name__


def _why_not(error: OSError, host: str, port: int) -> str:
    """Return why a carrier cannot listen at this address, as text."""
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the transfer process (carrier) cannot listen at {host}, which is not an address of this machine: {_NOT_OURS}"
    text = f"the transfer process (carrier) cannot listen at {address_text(host, port)}: {error.strerror or error}"
    return f"{text}; set cluster.carry_port to 1024 or more" if error.errno == errno.EACCES else text


def _resolved(host: str, port: int, link: str = "") -> tuple[socket.AddressFamily, _Address]:
    """Return (family, socket address) of an IP address, valid on this machine.

    :param link: name of the interface through which to reach a link-local IPv6 address
        that is not this machine's; else the one after ``%`` in ``host`` counts.
    :raises OSError: ``host`` is not an IP address, or its interface does not exist.
    """
    text, _, scope = host.partition("%")
    try:
        found = ipaddress.ip_address(text)
    except ValueError as error:
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from error
    if not 0 <= port < 1 << 16:  # from another member
        raise OSError(errno.EADDRNOTAVAIL, f"{port} is not a valid port")
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.version == 4:
        return socket.AF_INET, (str(found), port)
    name = (interface_of(host) or link or scope) if found.is_link_local else ""
    return socket.AF_INET6, (str(found), port, 0, socket.if_nametoindex(name) if name else 0)


def _other_program(host: str, port: int) -> str:
    """Return which program has the port, as text for a warning; "" if a carrier has it.

    Blocks for up to 0.1 s, until the program listens. Looks into ``/proc``.
    """
    deadline = time.monotonic() + _APPEARS_S
    here = {ipaddress.ip_address(_resolved(host, 0)[1][0]), ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)}
    while True:
        found = [one for one in listeners() if one[0].port == port and ipaddress.ip_address(one[0].address) in here]
        if found or time.monotonic() > deadline:
            break
        time.sleep(_APPEARS_S / 4)
    if not found:
        return "a connection"
    (listener, uid), *_ = found
    for pid in processes():
        if f"socket:[{listener.inode}]" in descriptors(pid):
            name = one_line(process_name(pid))
            return "" if name == NAME else f"{name or 'a program'} (process {pid})"
    return f"a program of user {uid}" if uid != os.geteuid() else ""
