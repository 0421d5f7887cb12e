"""What the kernel says of connections: bytes that others have, for how long nothing has
moved, and who holds it up.

Covers: sidecar/traffic.py, sidecar/wire.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from replicas.sidecar.traffic import SHARE, TRIES, Traffic, _Connection, _holds_up
from replicas.sidecar.wire import Moved
from tests.support.waits import eventually


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def look(traffic: Traffic) -> Moved:
    moved = traffic.progress()
    assert moved is not None
    return moved


def test_bytes_count_once_they_are_acknowledged_and_only_those_of_the_request() -> None:
    traffic = Traffic()
    assert traffic.progress() is None
    with connection() as (one, other):
        one.sendall(b"x" * 5000)
        other.recv(5000, socket.MSG_WAITALL)
        with traffic.of_request():
            one.sendall(b"x" * 1000)
            eventually(lambda: look(traffic).sent == 1000, "the bytes are acknowledged")
            assert look(traffic).received == 1000
        assert traffic.progress() is None


class Clock:
    """Stands in for the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_how_long_nothing_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("replicas.sidecar.traffic.time", clock)
    traffic = Traffic()
    with connection() as (one, _), traffic.of_request():
        look(traffic)
        clock.now += 0.1
        assert look(traffic).still_s == pytest.approx(0.1)
        one.sendall(b"x")
        eventually(lambda: look(traffic).sent == 1, "it is acknowledged")
        assert look(traffic).still_s == 0.0
        clock.now += 0.1
        assert look(traffic).still_s == pytest.approx(0.1)


@pytest.mark.slow
def test_a_reader_who_does_not_read_is_no_broken_network() -> None:
    traffic = Traffic()
    with connection() as (one, _), traffic.of_request():
        one.setblocking(False)
        for _ in range(1000):
            try:
                one.send(b"x" * 65536)
            except BlockingIOError:
                break
        eventually(lambda: look(traffic).still_s > 1.0, "nothing moves any more")
        assert look(traffic).held_up == ()


BEFORE = _Connection("10.0.0.2", 100, 0, queued=True, tries=0, limited_s=1.0, rtt_s=0.01)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (BEFORE, False),
        (BEFORE._replace(tries=TRIES), True),
        (BEFORE._replace(tries=TRIES, queued=False), False),
        (BEFORE._replace(limited_s=1.0 + SHARE + 0.1), True),
        (BEFORE._replace(limited_s=1.0 + SHARE - 0.1), False),
    ],
)
def test_who_holds_it_up(now: _Connection, expected: bool) -> None:
    assert _holds_up(now, BEFORE, 1.0) == expected
    assert _holds_up(now, None, 1.0) == (expected and now.tries > 0)
