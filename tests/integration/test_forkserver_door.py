"""Where a rank asks for sidecars: nobody else can be there, and nobody else is
served."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from replicas.linux.processes import children
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.sidecar import wire
from replicas.sidecar.rank_side.client import Forkserver, SidecarDied
from tests.support.runs import eventually
from tests.support.shims import ShimUnderTest, shim
from tests.support.sidecars import start_forkserver
from tests.support.users import ATTACKER, needs_users, stranger

pytestmark = pytest.mark.anyio


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
        with pytest.raises(
            SidecarDied, match=rf"is of user {ATTACKER}, and this rank runs as user 0: nothing was sent"
        ):
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
            own = os.pidfd_open(os.getpid())
            wire.write_packet(sock, wire.Attach(secret), [own])
            os.close(own)
            assert sock.recv(100) == b""
        assert (await known.fork()).usable
        await known.aclose()
    finally:
        process.kill()
        process.communicate()


def arguments(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def forkserver_of(run: ShimUnderTest, besides: int = 0) -> int:
    def look() -> int:
        for pid in children(run.popen.pid):
            if pid != besides and b"sidecar.forkserver" in arguments(pid):
                return pid
        return 0

    return int(eventually(look, "a forkserver", timeout_s=60.0))


async def test_a_name_is_bound_before_it_is_told_and_stays_bound_between_two_forkservers(tmp_path: Path) -> None:
    door = new_door()
    env = {**os.environ, "REPLICAS_FORKSERVER": str(door)}
    with shim(tmp_path, "import signal; signal.pause()", forkserver=str(door), env=env) as run:
        run.wait_for("started")
        known = await Forkserver.connect(str(door), timeout_s=60.0)
        first = forkserver_of(run)
        shown = arguments(first) + arguments(run.popen.pid)
        assert not any(part.encode() in shown for part in door)
        pidfd = os.pidfd_open(first)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 30.0)[0]
        os.close(pidfd)
        with pytest.raises(OSError, match="cannot be bound: Address already in use"):
            door.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.connect("\0" + door.name)  # nobody is there to take it, and it waits
            assert peer_uid(waiting) == os.geteuid()
        await known.aclose()
        again = await Forkserver.connect(str(door), timeout_s=60.0)
        assert (await again.fork()).usable
        assert forkserver_of(run, first) != first
        await again.aclose()
        run.send({"type": "stop", "timeout_s": 5.0})
        assert run.gone() == 0
    with door.listen():
        pass


async def test_a_frozen_forkserver_is_killed_and_not_whoever_bound_its_socket(tmp_path: Path) -> None:
    """The socket tells who bound it: the shim."""
    door = new_door()
    env = {**os.environ, "REPLICAS_FORKSERVER": str(door)}
    with shim(tmp_path, "import signal; signal.pause()", forkserver=str(door), env=env) as run:
        run.wait_for("started")
        known = await Forkserver.connect(str(door), timeout_s=60.0)
        first = forkserver_of(run)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(SidecarDied):
            await known.fork(timeout_s=0.5)
        await known.aclose()
        again = await Forkserver.connect(str(door), timeout_s=60.0)
        assert run.popen.poll() is None
        await again.aclose()
