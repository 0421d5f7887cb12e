"""Forkserver: a process with torch loaded that forks sidecars in milliseconds.

``python -m replicas.sidecar.forkserver (--listener N | --fd N) [--parent PID] [...]``

Theory of operation
===================

The process loads torch once, without touching CUDA, stays single-threaded, and forks a
sidecar for each request. With ``--listener`` it serves every process of the same user
that connects to this inherited socket and presents its secret
(:class:`replicas.linux.sockets.SocketAddress`): all ranks of a node. A sidecar gets the
environment, output and cgroup of its rank (:mod:`replicas.linux.rank_environment`). A
death signal ends the forkserver with its parent. With ``--fd`` it serves only its
starter, at the other end of that socket, and ends with it. It never blocks on a client:
a client that does not read its messages is dropped.

No sidecar outlives its owner. The forkserver kills a client's sidecars when the
client's connection ends or its process (pidfd) is dead; the sidecars watch both, too;
and the kernel kills them when the forkserver dies.

The starter of the forkserver binds the listening socket and keeps it longer than any
forkserver. So no other process can take the name, and clients can always connect, also
between two forkservers, and wait for their first answer. ``--ready`` is a pipe that
gets one byte when torch is loaded; until then the starter watches the forkserver, and
replaces it if it freezes.
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

from replicas import __version__, environ
from replicas.common.logs import end_process
from replicas.linux import frames, inherited, rank_environment
from replicas.linux.processes import die_with_parent, name_process, send_signal
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.sidecar import wire


class _Client:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pidfd = -1
        self.place: list[int] = []
        """Descriptors of its output and environment; empty to keep this process's."""
        self.children: set[int] = set()


class ForkServer:
    """The forkserver's loop. A forked child calls ``run_sidecar(channel, pidfd)``.

    :param listener: socket for all processes of this user that know the ``secret``.
    """

    def __init__(
        self,
        run_sidecar: Callable[[socket.socket, int], None],
        listener: socket.socket | None = None,
        secret: str = "",
    ) -> None:
        self._run_sidecar = run_sidecar
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._clients: set[_Client] = set()
        self._children: dict[int, tuple[int, _Client]] = {}
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until there is neither a listener nor a client."""
        while self._listener is not None or self._clients:
            for key, _ in self._selector.select():
                if key.fileobj in self._selector.get_map():
                    key.data()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except ConnectionError:  # the client closed the connection before
            return
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return
        self.add(sock)

    def add(self, sock: socket.socket) -> None:
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        fds: list[int] = []
        try:
            data, fds = frames.read_packet(client.sock)
            request = wire.decode_forkserver_request(data) if data else None
            match request, fds:
                case wire.Attach(secret=secret, release=release), _ if release != __version__ and self._is_ours(secret):
                    frames.write_packet(client.sock, wire.OtherRelease(__version__))
                    self._drop(client)
                case wire.Attach(secret=secret), [pidfd, *rest] if (
                    client.pidfd < 0 and len(rest) in (0, 2) and self._is_ours(secret)
                ):
                    self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._drop(client))
                    client.pidfd, client.place = pidfd, rest  # owned from now on: register() may have failed
                    fds = []
                    fds = [os.pidfd_open(os.getpid())]
                    frames.write_packet(client.sock, wire.Attached(), fds)
                case wire.Fork(id=number), [channel] if client.pidfd >= 0:
                    self._fork(client, number, channel)
                case _:
                    self._drop(client)
        except OSError:  # the client is gone, or sent a malformed message
            self._drop(client)
        finally:
            frames.close_all(fds)

    def _is_ours(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def _fork(self, client: _Client, number: int, channel: int) -> None:
        server = os.getpid()
        try:
            with naming_limits():
                child = os.fork()
        except OSError as error:
            frames.write_packet(client.sock, wire.ForkFailed(number, str(error)))
            return
        if child == 0:
            self._become_sidecar(server, channel, client)
        pidfd = os.pidfd_open(child)
        self._children[pidfd] = (child, client)
        client.children.add(pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd))
        frames.write_packet(client.sock, wire.Forked(number, child), [pidfd])

    def _become_sidecar(self, server: int, channel: int, client: _Client) -> None:
        code = 1
        try:
            die_with_parent(server)
            name_process("replica-spare")
            if client.place:
                rank_environment.join_place(client.pidfd, *client.place)
                _set_variables()
            self._forget_everything(keep={0, 1, 2, channel, client.pidfd})
            self._run_sidecar(socket.socket(fileno=channel), client.pidfd)
            code = 0
        except BaseException as error:  # noqa: BLE001  # a child must never return into the server's loop
            print(f"sidecar {os.getpid()} failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            end_process(code)

    def _forget_everything(self, keep: set[int]) -> None:
        """Close all inherited descriptors but ``keep``; detach our objects first."""
        for client in self._clients:
            client.sock.detach()
        if self._listener is not None:
            self._listener.detach()
        self._selector.close()
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in keep:
                with contextlib.suppress(OSError):  # the listing's own descriptor
                    os.close(fd)

    def _drop(self, client: _Client) -> None:
        """Close a client's connection, and kill its sidecars."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        for pidfd in client.children:
            send_signal(pidfd, signal.SIGKILL)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
            frames.close_all([client.pidfd, *client.place])

    def _reap(self, pidfd: int) -> None:
        child, client = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        client.children.discard(pidfd)
        os.waitpid(child, 0)
        os.close(pidfd)


def _set_variables() -> None:
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="replicas.sidecar.forkserver", description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listener", type=int, help="inherited SOCK_SEQPACKET socket that listens")
    where.add_argument("--fd", type=int, help="inherited SOCK_SEQPACKET socket of the one client")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid whose death ends this process")
    parser.add_argument("--ready", type=int, help="inherited pipe that gets a byte as soon as torch is loaded")
    options = parser.parse_args(argv)
    inherited.put_in_order()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the supervisor stops its processes in order
    name_process("replica-forksrv")
    if options.listener is not None:
        die_with_parent(options.parent)
    _set_variables()
    gc.disable()  # saves a tenth of torch's load time
    from replicas.sidecar import process  # loads torch; the socket listens already

    gc.enable()
    if options.listener is not None:
        secret = SocketAddress.parse(environ.read().forkserver or "").secret
        server = ForkServer(process.run, socket.socket(fileno=options.listener), secret)
    else:
        server = ForkServer(process.run)
        server.add(socket.socket(fileno=options.fd))
    gc.collect()
    gc.freeze()
    if options.ready is not None:
        with contextlib.suppress(BrokenPipeError):  # the starter is dead, and this process will be
            os.write(options.ready, b"1")
        os.close(options.ready)
    server.run()


if __name__ == "__main__":
    main()
