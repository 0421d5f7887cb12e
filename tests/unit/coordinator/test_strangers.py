"""Where a connection comes from, which one gives way, what its request says; and by
which names a port may be spoken to.

Covers: coordinator/acceptor.py, coordinator/port_connections.py,
coordinator/websocket.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.coordinator.addresses import LOOPBACK, AllowedHosts, source_of
from replicas.coordinator.limits import BoundedConnections
from replicas.coordinator.port_connections import PortConnection, authorization_of, head_nbytes, names_of


def test_the_oldest_gives_way_and_one_source_has_half() -> None:
    crowd: BoundedConnections[str] = BoundedConnections(6)
    assert [crowd.add(f"many{number}", b"many") for number in range(5)] == [None, None, None, "many0", "many1"]
    assert [crowd.add(f"few{number}", f"{number}".encode()) for number in range(4)] == [None, None, None, "many2"]
    assert list(crowd) == ["many3", "many4", "few0", "few1", "few2", "few3"]
    assert "many2" not in crowd
    crowd.discard("many2")
    crowd.discard("many3")
    assert (crowd.oldest(), len(crowd)) == ("many4", 5)
    for one in crowd:
        crowd.discard(one)
    assert crowd.oldest() is None


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("127.0.0.1", LOOPBACK),
        ("127.8.9.1", LOOPBACK),  # anybody here may use it
        ("::1", LOOPBACK),
        ("::ffff:127.0.0.1", LOOPBACK),
        ("10.0.0.1", b"10.0.0.1"),
        ("::ffff:10.0.0.1", b"10.0.0.1"),
        ("fe80::1%eth0", b"\xfe\x80" + bytes(6)),
        ("2001:db8:1:2:3:4:5:6", bytes.fromhex("20010db800010002")),
    ],
)
def test_what_an_address_counts_for(host: str, source: bytes) -> None:
    assert source_of(host) == source


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_the_head_of_a_request(end: bytes) -> None:
    data = end.join(
        [b"GET / HTTP/1.1", b"HOST: x:1", b"authorization:  Bearer s", b"Origin: http://y", b"", b"Host: body"]
    )
    head = data[: head_nbytes(data)]
    assert head + b"Host: body" == data
    assert authorization_of(head) == b"Bearer s"
    assert names_of(head) == ["x:1", "http://y"]
    assert names_of(head.replace(b" / ", b" HTTPS://z:2/a ")) == ["z:2", "http://y"]
    assert authorization_of(b"GET / HTTP/1.1" + end + b"Host: x") == b""
    assert head_nbytes(head[:-1]) == 0


LOOPBACK_PORT = AllowedHosts("my.name", "127.0.0.1")


@pytest.mark.parametrize(
    "value",
    [
        "127.0.0.1:80",
        "localhost",
        "LOCALHOST:1",
        "a.localhost",
        "[::1]:80",
        "10.1.2.3",
        "my.name:8",
        "http://localhost:3",
    ],
)
def test_names_of_this_machine(value: str) -> None:
    assert LOOPBACK_PORT.problem([value]) is None


@pytest.mark.parametrize(
    "value", ["evil.example.com", "127.0.0.1.nip.io:80", "http://evil", "null", "", "localhost.evil"]
)
def test_names_of_others(value: str) -> None:
    assert "does not answer to the name" in str(LOOPBACK_PORT.problem(["localhost", value]))
    assert AllowedHosts("0.0.0.0", "0.0.0.0").problem([value]) is None
    assert AllowedHosts("10.0.0.1", "10.0.0.1").problem([value]) is None


class Transport(asyncio.Transport):
    """Of a connection whose end is what the test says."""

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        """It has ended."""


class Timer:
    """One that the test fires, unless it was cancelled."""

    def __init__(self, _: float, what: Callable[[], object]) -> None:
        self.what = what

    def cancel(self) -> None:
        self.what = bool


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("events", "reasons"),
    [
        ("", []),  # a spare connection, on which nothing comes
        ("request answer", ["timeout"]),  # which it does not read
        ("request answer end", []),
        ("request end answer", []),  # it closes the page while a stream of it is open
    ],
)
async def test_a_visitor_that_leaves_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, events: str, reasons: list[str]
) -> None:
    timers: list[Timer] = []

    def call_later(delay: float, what: Callable[[], object]) -> Timer:
        timers.append(Timer(delay, what))
        return timers[-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    refused: list[str] = []
    rules = SimpleNamespace(unproven=BoundedConnections(1), strangers=BoundedConnections(1), refused=refused.append)
    port: Any = SimpleNamespace(rules=rules, connections=set())
    visit = PortConnection(port, b"", 0.0)
    visit.connection_made(Transport())
    for event in events.split():
        if event == "request":
            visit._cancel_timer()
            visit._pages = asyncio.Protocol()
        elif event == "answer":
            visit.finish("http")
        else:
            visit.connection_lost(None)
    for timer in timers:
        timer.what()
    assert refused == reasons
