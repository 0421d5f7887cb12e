"""Where a carrier listens, how another one gets there, and why it does not, in words.

A carrier listens at its member's address alone: the one by which the coordinator sees
the member. A puller connects from its own such address, so bytes take the interfaces
that the run uses. With a fixed port the carriers of one machine take the next free ones
behind it; a port that another program has is named.

The scope of a link-local IPv6 address (``%eth0``) is a name of the machine that told
the address. Here the interface that has the address counts, and for another machine's
address the one by which this machine reaches the coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from pathlib import Path

from replicas.common.foreign import one_line
from replicas.linux.interfaces import interface_of
from replicas.linux.processes import processes
from replicas.linux.sockets import listeners
from replicas.messages.bounds import CARRY_PORTS as PORTS

NAME = "replicas-carry"
"""Of the process of a carrier."""
REMEDY = (
    "open the TCP ports of carriers between these machines (cluster.carry_port fixes them), and let each join by an "
    "address that the others reach"
)
_NOT_OURS = (
    "the coordinator must be reached by an address that the other members can use too, not through a tunnel or "
    "address translation"
)
_APPEARS_S = 0.1
"""In which whoever has bound a port listens at it."""
_Address = tuple[str, int] | tuple[str, int, int, int]


def shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, backlog: int) -> tuple[socket.socket, str]:
    """Listen at ``host``; return the socket, and what to warn of.

    :param port: the first one to try; 0: any.
    :raises OSError: it cannot; its ``strerror`` names the address and the remedy.
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
                f"port {number} of {host}, which is for carriers, is taken by {other}: the next free one is used. "
                f"End that program, or set cluster.carry_port so that the {PORTS} ports from it on are free, best "
                "below 32768"
            )
    text = f"none of the {PORTS} ports from {port} on is free at {host}: set another cluster.carry_port"
    raise OSError(errno.EADDRINUSE, f"{warning}. {text}" if warning else text)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family, address = _resolved(host, port)
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise OSError(errno.EADDRNOTAVAIL, "every address is none to tell others")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def prepare(host: str, port: int, source: str) -> tuple[socket.socket, _Address]:
    """A socket at the address ``source`` (empty: any), and where to connect it to.

    :raises OSError: the source is none of this machine, or the other one is no address.
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
    """Why there is no connection: both ends, the reason, and what to do."""
    interface = interface_of(source)
    here = f" from {source}" + (f" ({interface})" if interface and not source.endswith(interface) else "")
    return f"{shown(host, port)} cannot be reached{here if source else ''}: {_reason(error, source)}; {REMEDY}"


def _reason(error: OSError, source: str) -> str:
    match error.errno:
        case errno.ECONNREFUSED:
            return "connection refused: nobody listens there any more, or a firewall refuses it"
        case errno.EHOSTUNREACH | errno.ENETUNREACH:
            return f"{os.strerror(error.errno)}: no interface leads there"
        case errno.EADDRNOTAVAIL:
            return f"{source or 'an address'} is no address of this machine, or it has no free port"
    if isinstance(error, TimeoutError):
        return "no answer in time: packets are lost on the way, as behind a firewall"
    return error.strerror or str(error) or type(error).__name__


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"a carrier cannot listen at {host}, which is no address of this machine: {_NOT_OURS}"
    text = f"a carrier cannot listen at {shown(host, port)}: {error.strerror or error}"
    return f"{text}; set cluster.carry_port to 1024 or more" if error.errno == errno.EACCES else text


def _resolved(host: str, port: int, link: str = "") -> tuple[socket.AddressFamily, _Address]:
    """The family and address of an IP address, with a scope that holds here.

    :param link: the interface that leads to another machine's link-local address.
    :raises OSError: it is none, or is on no interface of this machine.
    """
    text, _, scope = host.partition("%")
    try:
        found = ipaddress.ip_address(text)
    except ValueError as error:
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from error
    if not 0 <= port < 1 << 16:  # another member's word
        raise OSError(errno.EADDRNOTAVAIL, f"{port} is no port")
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.version == 4:
        return socket.AF_INET, (str(found), port)
    name = (interface_of(host) or link or scope) if found.is_link_local else ""
    return socket.AF_INET6, (str(found), port, 0, socket.if_nametoindex(name) if name else 0)


def _other_program(host: str, port: int) -> str:
    """The program at the port, in words; empty: a carrier, or nobody knows."""
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
        if _has_socket(pid, listener.inode):
            name = _name(pid)
            return "" if name == NAME else f"{name or 'a program'} (process {pid})"
    return f"a program of user {uid}" if uid != os.geteuid() else ""


def _has_socket(pid: int, inode: int) -> bool:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path) == f"socket:[{inode}]":  # noqa: PTH115  # hundreds of them
                    return True
    return False


def _name(pid: int) -> str:
    try:
        return one_line(Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip())
    except OSError:
        return ""
