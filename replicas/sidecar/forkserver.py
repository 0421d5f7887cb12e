"""Forkserver: a process with torch loaded that forks sidecars in milliseconds.

``python -m replicas.sidecar.forkserver --listener N [--parent PID]``

Theory of operation
===================

The process loads torch once, without touching CUDA, stays single-threaded, and forks a
sidecar for each request. It serves every process of the same user that connects to its
inherited socket and presents its secret
(:class:`replicas.linux.sockets.SocketAddress`): all ranks of a node, or the one rank
that keeps it (:mod:`replicas.sidecar.kept_forkserver`). A sidecar gets the environment,
output and cgroup of its rank (:mod:`replicas.linux.rank_environment`). The forkserver
never blocks on a client: a client that does not read its messages is dropped.

No sidecar outlives its owner. The forkserver kills a client's sidecars when the
client's connection ends or its process (pidfd) is dead; the sidecars watch both, too;
and the kernel kills them when the forkserver dies, and that when its keeper dies.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hmac
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from replicas import __version__, environ
from replicas.common.logs import end_process
from replicas.linux import frames, inherited, rank_environment
from replicas.linux.processes import die_with_parent, name_process, send_signal
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.sidecar import wire


class _Client:
    """A connected rank, with which its sidecars end."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a client's connection, and make it non-blocking."""
        sock.setblocking(False)
        self.sock = sock
        self.place: list[int] = []
        """Its pidfd, output and environment; empty until it presents the secret."""


class ShimForks(Protocol):
    """Forks shims (parents of ranks) from this process, a group's template."""

    def problem(self) -> tuple[str, bool]:
        """Return why no shim can be forked, or "", and whether a new template could."""

    def fork(self, control: int, place: list[int], others: dict[str, int]) -> int:
        """Fork a shim with these descriptors, which stay open here; return its pid.

        :param control: its socket to the agent, which asked for it.
        :param place: the agent's pidfd, the shim's output, and its environment (memfd).
        :param others: further descriptors for it, by name.
        :raises OSError: the system allows no process.
        """


class ForkServer:
    """The forkserver's loop: forks sidecars (helper processes) for ranks that connect.

    A forked child calls ``run_sidecar(channel, pidfd)``. With ``shims``, it is a
    group's template, which forks shims for the agent.

    :param listener: socket for all processes of this user that know the ``secret``.
    """

    def __init__(
        self,
        run_sidecar: Callable[[socket.socket, int], None] | None,
        listener: socket.socket,
        secret: str,
        shims: ShimForks | None = None,
    ) -> None:
        """Register the listening socket with a selector.

        Accept nothing before :meth:`run`.

        :param run_sidecar: called in each forked child, as ``run_sidecar(channel,
            pidfd)``: its socket to the rank, and a pidfd of the rank; never returns.
        :param listener: socket at which processes of this user connect.
        :param secret: that they must show.
        :param shims: forks shims, if this process is a group's template; else None.
        """
        self._run_sidecar, self._shims = run_sidecar, shims
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._clients: set[_Client] = set()
        self._children: dict[int, _Client] = {}
        """The owner of each child, by the child's pidfd."""
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> NoReturn:
        """Serve all clients, one event after another, until the process is killed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj in self._selector.get_map():
                    key.data()

    def _accept(self) -> None:
        """Accept one client of this user; close the connection of another user."""
        try:
            sock, _ = self._listener.accept()
        except ConnectionError:  # the client closed the connection before
            return
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        """Handle a client's packet: Attach (its first, with the secret) or Fork.

        Reply to it. Drop the client, and so kill its sidecars, at its end, after an
        error, and after a wrong packet, secret or release.
        """
        fds: list[int] = []
        try:
            data, fds = frames.read_packet(client.sock)
            request = wire.decode_forkserver_request(data) if data else None
            match request, fds:
                case wire.Attach(secret=secret, release=release), _ if release != __version__ and self._is_ours(secret):
                    frames.write_packet(client.sock, wire.OtherRelease(__version__))
                    self._drop(client)
                case wire.Attach(secret=secret), [pidfd, _, _] if not client.place and self._is_ours(secret):
                    self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._drop(client))
                    client.place, fds = fds, []  # owned from now on: register() may have failed
                    frames.write_packet(client.sock, wire.Attached())
                case wire.Fork(), [channel] if client.place and self._run_sidecar is not None:
                    self._fork(client, channel)
                case wire.ForkShim(others=names), [_, *others] if client.place and len(names) == len(others):
                    taken, fds = fds, []  # the child closes or uses them
                    self._fork_shim(client, taken, names)
                case _:
                    self._drop(client)
        except OSError:  # the client is gone, or sent a malformed message
            self._drop(client)
        finally:
            frames.close_all(fds)

    def _is_ours(self, secret: str) -> bool:
        """Return True if the secret is that of this forkserver."""
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def _fork(self, client: _Client, channel: int) -> None:
        """Fork a sidecar that serves ``channel``, and reply its pid and pidfd.

        If the system allows no process, reply ForkFailed.

        :param client: the rank that asked, whose sidecar is killed with it.
        :param channel: descriptor of the sidecar's socket to the rank; the caller
            closes it.
        """
        server = os.getpid()
        try:
            with naming_limits():
                child = os.fork()
        except OSError as error:
            frames.write_packet(client.sock, wire.ForkFailed(str(error)))
            return
        if child == 0:
            self._become_sidecar(server, channel, client)
        pidfd = os.pidfd_open(child)
        self._children[pidfd] = client
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd))
        frames.write_packet(client.sock, wire.Forked(child), [pidfd])

    def _fork_shim(self, client: _Client, fds: list[int], names: tuple[str, ...]) -> None:
        """Fork a shim, and reply its pid and pidfd, or ForkFailed with the reason.

        If files have changed, exit after that reply: the keeper starts another process.

        :param client: the agent that asked, with its pidfd, output and environment.
        :param fds: the shim's control socket, and one for each of ``names``; closed
            here.
        """
        assert self._shims is not None
        why, stale = self._shims.problem()
        try:
            if not why:
                pid = self._shims.fork(fds[0], client.place, dict(zip(names, fds[1:], strict=True)))
        except OSError as error:
            why = str(error)
        frames.close_all(fds)
        if why:
            frames.write_packet(client.sock, wire.ForkFailed(why))
            if stale:
                sys.exit(f"replicas: ending this template: {why}")
            return
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = client
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd))
        try:
            frames.write_packet(client.sock, wire.Forked(pid), [pidfd])
        except OSError:  # the agent will start another
            send_signal(pidfd, signal.SIGKILL)
            raise

    def _become_sidecar(self, server: int, channel: int, client: _Client) -> None:
        """Run the sidecar in the forked child, and end the process; never return.

        :param server: pid of the forkserver, with which the child dies.
        :param channel: descriptor of the socket to the rank.
        :param client: the rank, whose environment and output the child takes over.
        """
        code = 1
        try:
            die_with_parent(server)
            name_process("replica-spare")
            rank_environment.join_place(*client.place)
            _set_variables()
            pidfd = client.place[0]
            self._forget_everything(keep={0, 1, 2, channel, pidfd})
            assert self._run_sidecar is not None
            self._run_sidecar(socket.socket(fileno=channel), pidfd)
            code = 0
        except BaseException as error:  # noqa: BLE001  # a child must never return into the server's loop
            print(f"replicas: helper process {os.getpid()} failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            end_process(code)

    def _forget_everything(self, keep: set[int]) -> None:
        """In a forked child: close all inherited descriptors but ``keep``.

        The server's own socket objects are detached before, so that they close none
        later.
        """
        for client in self._clients:
            client.sock.detach()
        self._listener.detach()
        self._selector.close()
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in keep:
                with contextlib.suppress(OSError):  # the listing's own descriptor
                    os.close(fd)

    def _drop(self, client: _Client) -> None:
        """Close a client's connection and pidfd, and send its sidecars SIGKILL.

        Does nothing for a client that was dropped. A template's shims get no signal:
        they end by themselves.
        """
        if client not in self._clients:
            return
        self._clients.remove(client)
        for pidfd, owner in self._children.items():
            if owner is client and self._shims is None:
                send_signal(pidfd, signal.SIGKILL)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.place:
            self._selector.unregister(client.place[0])
            frames.close_all(client.place)

    def _reap(self, pidfd: int) -> None:
        """Forget a child that has ended; collect its status, close its ``pidfd``.

        If it was a shim, send its owner, if still connected, the exit code (Ended).
        """
        owner = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        if self._shims is not None and owner in self._clients and found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            with contextlib.suppress(OSError):  # the agent does not read, or is gone
                frames.write_packet(owner.sock, wire.Ended(code))


def _set_variables() -> None:
    """Set variables of this process: one thread for math libraries, a quiet torch."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main(argv: list[str] | None = None) -> None:
    """Run a forkserver as this process: load torch, then fork sidecars until killed.

    :param argv: the command line's arguments; default: those of this process.
    """
    parser = argparse.ArgumentParser(prog="replicas.sidecar.forkserver", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--listener", type=int, required=True, help="inherited SOCK_SEQPACKET socket that listens")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid whose death ends this process")
    options = parser.parse_args(argv)
    inherited.put_in_order()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the supervisor stops its processes in order
    name_process("replica-forksrv")
    die_with_parent(options.parent)
    _set_variables()
    gc.disable()  # saves a tenth of torch's load time
    from replicas.sidecar import process  # loads torch; the socket listens already

    gc.enable()
    secret = SocketAddress.parse(environ.read().forkserver or "").secret
    server = ForkServer(process.run, socket.socket(fileno=options.listener), secret)
    gc.collect()
    gc.freeze()
    server.run()


if __name__ == "__main__":
    main()
