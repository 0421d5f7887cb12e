"""The store process, which serves only the long-lived master TCPStore of a run.

Run as ``python -m replicas.coordinator.store_process --bind ADDRESS --port PORT
--control FD --parent PID``. The TCPStore serves from C++ threads, so neither the
coordinator's loop nor its GIL delays a rendezvous between sidecars. It listens on one
address only: this module binds a socket and passes it as ``master_listen_fd``, because
a TCPStore that opens its own socket listens on every address.

The control socket (inherited, a stream of JSON lines) first says when the port is bound
and when the store serves. Then it carries requests and replies, matched by ``id``: a
request has the keys under some prefixes deleted, or none; its
reply has the number of keys. When the owner closes it, this process exits; a
parent-death signal covers an owner whose forked child keeps the socket open.

The TCPStore does not authenticate: malformed input closes a connection, but idle
connections and all values are kept for ever. A store without free descriptors refuses
new clients, and a store into which a client writes without end exhausts the machine's
memory. So each reply reports both, and the owner replaces the store. Between replies
the kernel limits its memory: a client whose value does not fit loses its connection.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import resource
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from replicas.common.decoding import MALFORMED
from replicas.common.reason import Reason
from replicas.linux import inherited
from replicas.linux.processes import die_with_parent
from replicas.linux.sockets import tcp_socket, why_not

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SPARE_DESCRIPTORS = 16  # for clients that come while the owner replaces it
MEMORY_NBYTES = 128 * 2**20
"""Limit of the values in a store: handshakes and addresses, a few KB a member."""
MEMORY_MAX_NBYTES = 512 * 2**20
"""Hard limit, enforced by the kernel."""
_REACH_S = 5.0
_OTHER_PORT = "choose another [store] port, or 0 to let the kernel choose"
_HINTS = {
    errno.EADDRINUSE: _OTHER_PORT,
    errno.EACCES: _OTHER_PORT,
    errno.EADDRNOTAVAIL: "set [store] bind to an address of this machine",
}
_UNREACHED = "bring its network device up (for 127.0.0.1: ip link set lo up), or set [store] bind to another address"
STRAY_KEYS = ("exception_dump",)
"""Keys that ProcessGroupNCCL writes without a prefix; later groups abort on them."""


class Request(msgspec.Struct, frozen=True):
    """``prefixes``: the keys under them are to be deleted; none: only reply."""

    id: int
    prefixes: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """``id``: of the request, or 0 for a message that is not a reply.

    Without a request come two messages: the first when the port is bound, or cannot be,
    the second when the TCPStore serves.
    """

    id: int
    keys: int = 0
    port: int = 0
    error: str = ""
    hint: str = ""


def listen(bind: str, port: int) -> socket.socket:
    """Return a new TCP socket that listens at this address and port.

    :param bind: IP address.
    :raises OSError: the address is not of this machine, or the port is in use.
    """
    listener = tcp_socket(bind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind, port))
    listener.listen(4096)
    return listener


def check_reach(bind: str) -> None:
    """Check that ``bind`` can be reached here: connect to a temporary port of it.

    Blocks for 5 s at most. :raises OSError: its network device is down.
    """
    with listen(bind, 0) as there, socket.socket(there.family, socket.SOCK_STREAM) as here:
        here.settimeout(_REACH_S)
        here.connect(there.getsockname())


def sweep(store: TCPStore, prefixes: tuple[str, ...]) -> None:
    """Delete all keys of the store that begin with one of these prefixes and ``/``.

    Also delete :data:`STRAY_KEYS`, which NCCL process groups write without a prefix.
    """
    roots = tuple(f"{prefix}/" for prefix in prefixes)
    for key in store.list_keys():
        if key.startswith(roots) or key in STRAY_KEYS:
            store.delete_key(key)


def replacement_reason(empty_nbytes: int) -> Reason | None:
    """Return why this process is too full to continue as the store, or None.

    :param empty_nbytes: memory of this process when the store was empty.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    held = len(list(Path("/proc/self/fd").iterdir()))
    if held > limit - SPARE_DESCRIPTORS:
        return f"its process has {held} of {limit} possible descriptors open"
    grown = data_nbytes() - empty_nbytes
    return f"its values have grown to {grown >> 20} MiB" if grown > MEMORY_NBYTES else None


def data_nbytes() -> int:
    """Return the bytes of this process that count for its limit RLIMIT_DATA."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    return pages * resource.getpagesize()


def bound_memory() -> int:
    """Have the kernel limit this process's further growth.

    It may grow by :data:`MEMORY_MAX_NBYTES`; a lower limit that is set already stays.
    Return the bytes that it has now.
    """
    now = data_nbytes()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = now + MEMORY_MAX_NBYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    return now


def serve(control: socket.socket, bind: str, port: int) -> int:
    """Serve a TCPStore until ``control`` closes; return the exit code of this process.

    Blocks. ``control`` is the socket to the owner, whose requests are answered there.
    The code is 0, or 2 if the store cannot listen at ``bind`` and ``port``: the first
    message then has the error.
    """
    encode = msgspec.json.Encoder().encode
    try:
        listener = listen(bind, port)
    except OSError as exc:
        reply = Reply(
            0, error=f"cannot listen on {bind}:{port}: {why_not(exc, port)}", hint=_HINTS.get(exc.errno or 0, "")
        )
        control.sendall(encode(reply) + b"\n")
        return 2
    try:
        check_reach(bind)
    except OSError as exc:
        reason = f"{bind} cannot be reached from this machine itself: {exc.strerror or exc}"
        control.sendall(encode(Reply(0, error=reason, hint=_UNREACHED)) + b"\n")
        return 2
    port = listener.getsockname()[1]
    control.sendall(encode(Reply(0, port=port)) + b"\n")  # torch takes a second to load
    gc.disable()  # saves a tenth of torch's load time
    from torch._C._distributed_c10d import TCPStore

    gc.enable()
    store = TCPStore(
        bind,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=listener.detach(),
    )
    empty_nbytes = bound_memory()
    control.sendall(encode(Reply(0, port=port)) + b"\n")
    decoder = msgspec.json.Decoder(Request)
    with control.makefile("rb") as lines:
        for line in lines:
            try:
                request = decoder.decode(line)
            except MALFORMED as error:
                control.sendall(encode(Reply(0, error=f"malformed request: {error}")) + b"\n")
                continue
            if request.prefixes:
                sweep(store, request.prefixes)
            reply = Reply(request.id, keys=store.num_keys(), port=port, error=replacement_reason(empty_nbytes) or "")
            control.sendall(encode(reply) + b"\n")
    return 0


def main() -> int:
    """Serve the run's TCPStore until the owner closes the control socket; block.

    Bind address, port, control socket and parent are read from the command line. First
    change this process: repair its streams and signals, have the kernel kill it with
    its parent, raise its limit of open files, and ignore SIGINT and SIGTERM.

    :returns: the exit code: 0, or 2 if the store could not listen.
    """
    parser = argparse.ArgumentParser(description="The master TCPStore of a run.")
    parser.add_argument("--bind", required=True)
    for name in ("--port", "--control", "--parent"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    inherited.put_in_order()
    die_with_parent(args.parent)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each sidecar holds a connection or two
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the owner decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return serve(socket.socket(fileno=args.control), args.bind, args.port)
    except (BrokenPipeError, ConnectionResetError):
        return 0


if __name__ == "__main__":
    # end the TCPStore's threads without its destructor, which may wait
    code = main()
    sys.stdout.flush()
    os._exit(code)
