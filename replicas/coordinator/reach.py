"""Refuse members that cannot reach the store, because it listens on loopback only.

Without this check their process groups would fail later.
"""

from __future__ import annotations

import ipaddress
import socket

from replicas import errors
from replicas.messages import Hello
from replicas.messages.identity import ProcessIdentity

__all__ = ["check_reach"]


def check_reach(hello: Hello, here: ProcessIdentity, address: str, seen_as: str, store: str) -> None:
    """Check that the member can reach the store.

    :param here: this process. :param address: the member's address, as seen from here.
    :param seen_as: the local address that the member connected to.
    :param store: the address that the store listens on.
    :raises replicas.errors.Preflight: the member comes from another machine, and the
        store listens on loopback.
    """
    if hello.observe or not _is_loopback(store) or _is_loopback(address):
        return
    process = hello.process
    if (process.boot_id, process.pid_namespace) == (here.boot_id, here.pid_namespace) or _is_ours(address):
        return
    name = f"{hello.group}/{hello.replica}/{hello.rank}"
    raise errors.Preflight(
        f"{name} joins from {address}, and the store listens on {store}, which only this machine reaches",
        channel=hello.channel,
        phase="join",
        members=(name,),
        hint=f'set bind = "{seen_as}" in [store] (store_bind= of an embedded Coordinator)',
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # the address of a Unix socket
        return True


def _is_ours(address: str) -> bool:
    """Whether an interface of this machine (or network namespace) has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
