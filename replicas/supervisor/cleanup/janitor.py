"""The janitor: clean up a run when the supervisor and a shim are both dead.

A shim ends its processes when the supervisor is gone, and the supervisor sweeps what a
dead shim has left. The janitor, one for each run, covers the death of both: ranks then
die of their parent-death signal, but the processes that they had started do not.

The supervisor (:mod:`replicas.supervisor.cleanup.containment`) tells it of each shim
before that has started anything, and of the shim's end. The janitor does nothing until
the supervisor is gone, which it sees by a pidfd or by the end of the control socket.
Then each shim has ``SHIMS_S`` to end by itself. All processes that were started under a
shim that is gone are killed, by its control group or by its mark; then the run's
control groups and its Unix socket are removed. The janitor holds the run's lock
meanwhile, so that the next supervisor waits for it.

The janitor ignores SIGTERM, SIGINT and SIGHUP: a signal that ends a whole session or
process tree must not end it first. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from replicas.linux import inherited
from replicas.linux.processes import send_signal, start_time
from replicas.linux.sockets import is_own, listens
from replicas.supervisor.cleanup.sweeping import Sweep
from replicas.supervisor.shim import orders
from replicas.supervisor.shim.orders import note

__all__ = ["SHIMS_S", "WatchedShim", "clean_up", "main", "remove_socket"]

SHIMS_S = 3.5
"""How long shims may take to end after the supervisor (they need up to 3 s)."""
_SWEEP_S = 5.0


class WatchedShim:
    """One shim: its pidfd, or None when it is gone."""

    def __init__(self, message: orders.Message) -> None:
        self.nonce = str(message["nonce"])
        self.cgroup = Path(message["cgroup"]) if message["cgroup"] else None
        pid = int(message["pid"])
        if pid < 1:
            raise ValueError(f"{pid} is no pid")
        try:
            self.pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self.pidfd = None
        if start_time(pid) != message["start"]:
            self.forget()

    def forget(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _listen(control: socket.socket, parent: int) -> tuple[dict[str, WatchedShim], Path | None, bool]:
    """Keep a record of the shims until the supervisor is gone.

    :return: the shims, the run's control group, and whether to clean up.
    """
    watched: dict[str, WatchedShim] = {}
    run: Path | None = None
    poll = select.poll()
    poll.register(control, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):  # the control socket says so too, after what was sent before
        poll.register(os.pidfd_open(parent), select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if control.fileno() not in ready:
            return watched, run, True  # all that it said has been read
        try:
            message = orders.receive(control)
            if message is None:
                return watched, run, True
            kind = message["type"]
            with orders.reading(kind):
                if kind == "watch":
                    watched[message["nonce"]] = WatchedShim(message)
                elif kind == "forget":
                    gone = watched.pop(message["nonce"], None)
                    if gone is not None:
                        gone.forget()
                elif kind == "run":
                    run = Path(message["cgroup"])
                elif kind == "done":
                    return watched, run, False
                else:
                    raise orders.Malformed(f"unknown order {kind!r}")
        except orders.Malformed as error:
            note(f"what the supervisor said is no message: {error}")


def clean_up(watched: Sequence[WatchedShim], run: Path | None, shims_s: float = SHIMS_S) -> bool:
    """End all processes under these shims, which have ``shims_s`` to end by themselves.

    :return: False: something survives.
    """
    deadline = time.monotonic() + shims_s
    left = list(watched)
    swept = True
    while left:
        poll = select.poll()
        alive = {shim.pidfd: shim for shim in left if shim.pidfd is not None}
        for fd in alive:
            poll.register(fd, select.POLLIN)
        if alive:
            for fd, _ in poll.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                alive.pop(fd).forget()
            if time.monotonic() >= deadline:
                for fd in alive:
                    send_signal(fd, signal.SIGKILL)
                deadline = time.monotonic() + shims_s
        if gone := [shim for shim in left if shim.pidfd is None]:
            groups = [shim.cgroup for shim in gone if shim.cgroup is not None]
            swept = not Sweep((shim.nonce for shim in gone), groups=groups).run(_SWEEP_S) and swept
        left = [shim for shim in left if shim.pidfd is not None]
    return (run is None or not Sweep((), groups=[run]).run(_SWEEP_S)) and swept


def remove_socket(path: Path) -> None:
    """Remove the dead supervisor's socket; a file, or a socket in use, stays."""
    with contextlib.suppress(OSError):  # it is in a folder that is gone, or is not ours: then it stays
        if is_own(path) and not listens(path):
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="replicas.supervisor.cleanup.janitor", description="started by the supervisor"
    )
    parser.add_argument("--control", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    parser.add_argument("--lock", type=int, help="descriptor of the run's lock, held as long as the janitor lives")
    parser.add_argument("--socket", type=Path, help="the run's Unix socket, of no use without the supervisor")
    options = parser.parse_args(arguments)
    inherited.put_in_order()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    for descriptor in (options.control, options.lock):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    watched, run, needed = _listen(socket.socket(fileno=options.control), options.parent)
    if not needed:
        return 0
    swept = clean_up(list(watched.values()), run)
    if options.socket is not None:
        remove_socket(options.socket)
    return 0 if swept else 1


if __name__ == "__main__":
    sys.exit(main())
