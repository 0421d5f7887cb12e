"""A forkserver's watcher in the shim: when it starts one, and when it gives up."""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicas.linux.processes import Child
from replicas.linux.sockets import SocketAddress
from replicas.supervisor.shim.starting import TRIES, ForkserverWatcher


class Scene:
    """A watcher, its socket, and those who connect to it."""

    def __init__(self, spawn: Callable[[int], Child], *, ahead: bool = False) -> None:
        self.selector = selectors.DefaultSelector()
        self.watcher = ForkserverWatcher(spawn, self.selector, ahead=ahead)
        address = SocketAddress(f"replicas-test-{secrets.token_hex(8)}", "secret")
        self.listener = address.listen()
        self.watcher.begin(self.listener)
        self._name = f"\0{address.name}"
        self._clients: list[socket.socket] = []

    def connect(self) -> None:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(self._name)
        self._clients.append(client)

    def accept(self) -> None:
        """In place of a forkserver."""
        self.listener.accept()[0].close()

    def turn(self) -> bool:
        """One turn of the shim's loop, without a wait; whether anything happened."""
        ready = self.selector.select(0)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def ready(self) -> None:
        """Wait for the end of the ready pipe."""
        for key, _ in self.selector.select(30.0):
            key.data()

    def close(self) -> None:
        for one in (*self._clients, self.listener):
            one.close()
        self.selector.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def no_leaks() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


class Spawner:
    """Starts processes that end at once. ``limit``: how many there may be."""

    def __init__(self, limit: int = 100) -> None:
        self.children: list[Child] = []
        self._limit = limit

    def __call__(self, ready: int) -> Child:
        if len(self.children) == self._limit:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.children.append(Child(subprocess.Popen(["true"], pass_fds=(ready,))))
        return self.children[-1]

    def reap(self) -> int:
        """The exit code of the newest one."""
        return self.children[-1].popen.wait(30.0)


def test_one_is_started_when_a_rank_connects_and_not_before(no_leaks: None) -> None:
    spawner = Spawner()
    scene = Scene(spawner)
    assert not scene.turn()
    assert (scene.watcher.pid, scene.watcher.wakes) == (0, [])
    scene.connect()
    assert scene.turn()
    first = scene.watcher.pid
    assert first
    scene.ready()
    assert not scene.turn(), "the socket is the forkserver's now"
    scene.accept()
    # It dies, and nobody waits for another one.
    assert scene.watcher.ended(spawner.reap()) == ""
    (due,) = scene.watcher.wakes
    assert scene.watcher.on_time(due) == ""
    assert not scene.turn()
    assert (scene.watcher.pid, scene.watcher.wakes) == (0, [])
    scene.connect()
    assert scene.turn()
    assert scene.watcher.pid not in (0, first)
    scene.ready()
    assert scene.watcher.ended(spawner.reap()) == ""
    scene.close()


def test_none_is_started_once_the_node_is_being_stopped(no_leaks: None) -> None:
    scene = Scene(Spawner())
    scene.connect()
    ready = scene.selector.select(0)
    scene.watcher.stop()  # in the same turn of the loop
    for key, _ in ready:
        key.data()
    assert not scene.turn()
    assert scene.watcher.pid == 0
    scene.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_one_that_cannot_be_started_again_is_tried_again_and_given_up(
    no_leaks: None, capfd: pytest.CaptureFixture[str], ahead: bool
) -> None:
    """A machine that is out of processes for a moment costs no replica."""
    spawner = Spawner(limit=1)
    scene = Scene(spawner, ahead=ahead)
    scene.connect()  # and nobody ever accepts it
    assert ahead or scene.turn()
    watcher = scene.watcher
    assert watcher.pid == spawner.children[0].pid
    scene.ready()
    reason, tried = watcher.ended(spawner.reap()), 0
    while not reason:
        (due,) = watcher.wakes
        assert watcher.on_time(due - 0.01) == ""
        reason = watcher.on_time(due)
        assert scene.turn() != ahead
        reason, tried = reason or watcher.on_time(due), tried + 1
    assert tried == TRIES - 1
    assert f"{TRIES} times" in reason
    assert (watcher.wakes, watcher.pid) == ([], 0)
    scene.close()
    assert capfd.readouterr().err.count("cannot be started: ") == TRIES - 1
