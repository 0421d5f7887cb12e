"""Doors: descriptors of memory for processes that /proc does not lead to.

Covers: linux/locks.py, memory/beacon.py, memory/descriptor_server.py,
memory/held_memory.py.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from replicas.errors import Gone, WorldError
from replicas.linux import locks
from replicas.linux.sockets import SocketAddress
from replicas.memory import descriptor_server, held_memory
from replicas.memory.beacon import find, own_beacon
from replicas.memory.descriptor_server import DescriptorServer, fetch, is_open
from replicas.messages import Beacon, SlotPlace
from tests.support.channel.memory import Child
from tests.support.waits import eventually

CLONE_NEWNET = 0x40000000
ELSEWHERE = 1 << 22  # no pid


@pytest.fixture(scope="module")
def address() -> str:
    return str(DescriptorServer().address)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test-door", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"weights")
    yield fd
    os.close(fd)


def place_of(fd: int, address: str) -> SlotPlace:
    """As it is seen from another pid namespace: its pid is nobody here."""
    locks.flag(fd, 1)
    status = os.fstat(fd)
    return SlotPlace(ELSEWHERE, fd, status.st_ino, status.st_size, 1, door=address)


def test_a_descriptor_for_reading_passes_with_locks_of_its_own(address: str, memory: int) -> None:
    held = held_memory.hold(place_of(memory, address), 1)
    assert os.pread(held, 100, 0) == b"weights"
    assert not os.get_inheritable(held)
    assert not locks.hold_exclusive(memory)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(held, b"x")
    os.close(held)
    eventually(lambda: locks.hold_exclusive(memory), "the door's own copy of the descriptor to be closed")


def test_what_is_not_there_is_gone(address: str, memory: int) -> None:
    place = place_of(memory, address)
    for change in ({"inode": 1}, {"nbytes": 1}, {"fd": 1 << 20}, {"serial": 2}):
        with pytest.raises(Gone):
            held_memory.hold(msgspec.structs.replace(place, **change), 1)
    with pytest.raises(Gone):
        held_memory.hold(msgspec.structs.replace(place, door="replicas-door-none:secret"), 1)
    with pytest.raises(Gone):
        held_memory.hold(place, 1, wait=False)


def test_only_a_memfd_is_given_away(address: str) -> None:
    with open(__file__, "rb") as file, pytest.raises(OSError):  # noqa: PTH123  # as a user opens a file
        fetch(address, file.fileno())


def test_who_does_not_know_the_secret_gets_nothing(address: str, memory: int) -> None:
    name = SocketAddress.parse(address).name
    with pytest.raises(OSError):  # the door hangs up
        fetch(f"{name}:wrong", memory)
    os.close(fetch(address, memory))


@contextmanager
def stranger(reply: bytes, *fds: int) -> Iterator[str]:
    """Somebody else at the name of a door; its address."""
    listener = SocketAddress("replicas-door-taken").listen()

    def answer() -> None:
        one, _ = listener.accept()
        with one:
            one.send(bytes(16))
            one.recv(256)
            socket.send_fds(one, [reply], fds)

    thread = threading.Thread(target=answer)
    thread.start()
    yield "replicas-door-taken:secret"
    thread.join(30)
    listener.close()


def test_whoever_took_the_name_of_a_dead_process_proves_nothing(memory: int) -> None:
    """Its descriptor is not taken."""
    with stranger(bytes(32) + b"\1", memory) as address, pytest.raises(PermissionError, match="did not prove"):
        fetch(address, memory)
    inode = os.fstat(memory).st_ino
    same = [one for one in Path("/proc/self/fd").iterdir() if one.exists() and one.stat().st_ino == inode]
    assert len(same) == 1
    with stranger(bytes(33)) as address, pytest.raises(WorldError, match="cannot be mapped"):
        held_memory.hold(place_of(memory, address), 1)


def test_another_process_of_the_same_pid_does_not_speak_for_a_dead_one(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> int:
        raise PermissionError("of another user")

    monkeypatch.setattr(held_memory, "open_plain", unreadable)
    with pytest.raises(Gone):
        held_memory.hold(place_of(memory, "replicas-door-none:secret"), 1)


def test_a_door_that_does_not_answer_is_not_waited_for_long(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_server, "ANSWER_S", 0.05)
    listener = SocketAddress("replicas-door-frozen").listen()
    with pytest.raises(Gone):
        held_memory.hold(place_of(memory, "replicas-door-frozen:secret"), 1)
    listener.close()


def test_all_steps_of_a_door_together_are_waited_for_once(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    past = [0.0]
    monkeypatch.setattr(
        descriptor_server, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + past[0], sleep=time.sleep)
    )
    listener = SocketAddress("replicas-door-slow").listen()

    def answer() -> None:
        one, _ = listener.accept()
        with one:
            past[0] = descriptor_server.ANSWER_S  # so long it took
            one.send(bytes(16))
            with suppress(ConnectionResetError):  # the client hung up before it read all of the answer
                one.recv(1000)

    slow = threading.Thread(target=answer)
    slow.start()
    with pytest.raises(TimeoutError):
        fetch("replicas-door-slow:secret", memory)
    slow.join(30)
    listener.close()


def test_idle_strangers_are_sent_away_and_do_not_delay_others(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_server, "PATIENCE_S", 0.1)
    monkeypatch.setattr(descriptor_server, "CLIENTS", 3)
    address = str(DescriptorServer().address)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
    for one in strangers:
        one.settimeout(30)
        one.connect("\0" + SocketAddress.parse(address).name)
    assert strangers[3].recv(100) == b"", "there are too many"
    for one in strangers[:3]:
        assert len(one.recv(100)) == 16
        assert one.recv(100) == b""
        one.close()
    os.close(fetch(address, memory))
    strangers[3].close()


def test_a_beacon_is_found_through_the_door_and_its_end_is_seen(memory: int) -> None:
    """The process in the other pid namespace is killed; nothing of it is left."""

    def answer(word: str) -> str:
        return msgspec.json.encode(own_beacon()).decode()

    child = Child(answer)
    theirs = msgspec.json.decode(child.ask("beacon"), type=Beacon)
    away = msgspec.structs.replace(theirs, pid=ELSEWHERE)
    assert find([msgspec.structs.replace(away, door=""), away]) == 1
    assert find([msgspec.structs.replace(away, nonce="another")]) == -1
    assert is_open(away.door)
    child.kill()
    assert not is_open(away.door)
    assert find([away]) == -1
    assert SocketAddress.parse(away.door).name.encode() not in Path("/proc/net/unix").read_bytes()


def test_a_forked_child_neither_answers_nor_keeps_the_door(memory: int) -> None:
    def answer(word: str) -> str:
        address = own_beacon().door
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return f"{pid} {address}"

    child = Child(answer)
    pid, _, address = child.ask("fork").partition(" ")
    child.kill()
    try:
        with pytest.raises(ConnectionError):
            fetch(address, memory)
    finally:
        os.kill(int(pid), 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")
def test_another_network_namespace_has_no_such_door(address: str, memory: int) -> None:
    place = place_of(memory, address)

    def answer(word: str) -> object:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0
        return held_memory.hold(place, 1)

    child = Child(answer)
    assert child.ask("hold").startswith("Gone: version 1 in the memory of process")
    child.kill()
