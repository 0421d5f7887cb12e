"""Where a rank asks for sidecars: nobody else can be there, and nobody else is
served.

Covers: sidecar/forkserver.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import select
import signal
import socket
import threading
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import pytest

from replicas import __version__
from replicas.channel.session.loop import SessionLoop
from replicas.linux import frames
from replicas.linux.processes import command_line
from replicas.linux.rank_environment import describe_own_place
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.sidecar import wire
from replicas.sidecar.forkserver import ForkServer
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.sidecar.rank_side.forkserver_client import Forkserver, Squatted, Unusable
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied
from tests.support.machine.users import ATTACKER, needs_users, stranger
from tests.support.sidecars import kept_forkserver, start_forkserver
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

wire_attach = wire.Attach


def new_door() -> SocketAddress:
    return SocketAddress(f"replicas-test-{secrets.token_hex(8)}", secrets.token_hex(8))


@needs_users
async def test_a_forkserver_of_another_user_is_told_nothing() -> None:
    door = new_door()

    def squat(pipe: Connection) -> None:
        with door.listen() as listener:
            pipe.send("listens")
            pipe.send(listener.accept()[0].recv(1000))

    with stranger(squat) as squatter:
        assert squatter.recv() == "listens"
        with pytest.raises(Squatted, match=rf"belongs to user {ATTACKER}"):
            await Forkserver.connect(str(door), timeout_s=30.0)
        assert squatter.poll(30.0)
        assert squatter.recv() == b""


@pytest.mark.parametrize("secret", ["", "another", "\N{SNOWMAN}"])
async def test_whoever_lacks_the_secret_is_not_served(secret: str) -> None:
    """Root in another container on the same network is the same user, and sees the
    name."""
    door = new_door()
    process = start_forkserver(str(door))
    try:
        known = await Forkserver.connect(str(door), timeout_s=60.0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30.0)
            sock.connect("\0" + door.name)
            place = describe_own_place()
            frames.write_packet(sock, wire.Attach(secret), place)
            frames.close_all(place)
            assert sock.recv(100) == b""
        assert (await known.fork()).usable
        known.close()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
async def kept() -> AsyncIterator[KeptForkserver]:
    async with kept_forkserver() as found:
        yield found
    await wait_until(
        lambda: free(SocketAddress.parse(found.address)), "its name, which a dying sidecar may hold, is free"
    )


def free(door: SocketAddress) -> bool:
    try:
        door.listen().close()
    except OSError:
        return False
    return True


async def test_a_name_is_bound_before_it_is_told_and_stays_bound_between_two_forkservers(kept: KeptForkserver) -> None:
    door = SocketAddress.parse(kept.address)
    known = await Forkserver.connect(kept.address, timeout_s=60.0)
    first = kept.pid
    assert not any(part in command_line(first, 1000) for part in door)
    pidfd = os.pidfd_open(first)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30.0)[0]
    os.close(pidfd)
    with pytest.raises(OSError, match="cannot be bound: Address already in use"):
        door.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.connect("\0" + door.name)  # nobody is there to take it, and it waits
        assert peer_uid(waiting) == os.geteuid()
    known.close()
    again = await Forkserver.connect(kept.address, timeout_s=60.0)
    assert (await again.fork()).usable
    assert kept.pid != first
    again.close()


async def test_a_frozen_forkserver_is_replaced_by_its_keeper_and_its_clients_are_told(kept: KeptForkserver) -> None:
    known = await Forkserver.connect(kept.address, timeout_s=60.0)
    first = kept.pid
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(SidecarDied):
        await known.fork()
    assert not known.alive
    known.close()
    again = await Forkserver.connect(kept.address, timeout_s=60.0)
    assert kept.pid != first
    again.close()


async def test_a_rank_of_another_release_is_told_so_and_starts_one_of_its_own(
    kept: KeptForkserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's code was replaced under it, or the rank's environment has an
    older one."""
    monkeypatch.setattr(wire, "Attach", functools.partial(wire.Attach, release="0.0.7"))
    ours = f"is of release {__version__} of replicas, this rank of"
    with pytest.raises(Unusable, match=ours):
        await Forkserver.connect(kept.address, timeout_s=60.0)
    monkeypatch.undo()
    session = SessionLoop()
    monkeypatch.setattr(session, "_keep_forkserver", lambda: kept.address)
    releases = iter(["0.0.7", __version__, __version__])
    monkeypatch.setattr(wire, "Attach", lambda secret: wire_attach(secret, next(releases)))
    for address in (kept.address, str(new_door())):  # so does one whose agent is dead
        own = await session._connected(address)
        assert (await own.fork()).usable
        own.close()
    assert next(releases, None) is None
    session.loop.close()


def test_a_client_that_reads_nothing_is_dropped_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # so that it is answered without a process

    def stop(client: socket.socket) -> int:
        client.close()
        raise SystemExit

    monkeypatch.setattr(os, "fork", fork)
    door = new_door()
    with door.listen() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        server = ForkServer(lambda *_: None, listener, door.secret)

        def serve() -> None:
            with contextlib.suppress(SystemExit):
                server.run()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        deaf.settimeout(30.0)
        deaf.connect("\0" + door.name)
        place = describe_own_place()
        frames.write_packet(deaf, wire.Attach(door.secret), place)
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                frames.write_packet(deaf, wire.Fork(), place[:1])
        frames.close_all(place)
        monkeypatch.setattr("replicas.sidecar.forkserver.peer_uid", stop)  # at the next client
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            last.connect("\0" + door.name)
            serving.join(30.0)
        assert not serving.is_alive(), "it serves others"
