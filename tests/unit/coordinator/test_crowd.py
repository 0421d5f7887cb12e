"""Connections by source: who gives way, whose turn it is; and by which names a port may
be spoken to.

Covers: coordinator/door.py.
"""

from __future__ import annotations

import pytest

from replicas.coordinator.addresses import LOOPBACK, AllowedHosts, source_of
from replicas.coordinator.door import authorization_of, head_of
from replicas.coordinator.limits import Crowd


def crowd_of(many: int, few: int) -> Crowd[str]:
    """Of two sources that do not share a queue (the salt is another one each time)."""
    crowd: Crowd[str] = Crowd()
    other = next(
        name for name in map(str, range(100)) if crowd._queue_of(name.encode()) is not crowd._queue_of(b"many")
    )
    for number in range(many):
        crowd.add(f"many{number}", b"many")
    for number in range(few):
        crowd.add(f"few{number}", other.encode())
    return crowd


def test_the_oldest_of_the_source_that_has_most_gives_way() -> None:
    crowd = crowd_of(many=20, few=5)
    assert [crowd.pop_excess() for _ in range(15)] == [f"many{number}" for number in range(15)]
    assert len(crowd) == 10
    assert not crowd.is_mostly(b"many")
    crowd.add("another", b"many")
    assert crowd.is_mostly(b"many")
    assert "few0" in crowd


def test_everybody_is_served_in_turn() -> None:
    crowd = crowd_of(many=10, few=2)
    served = [crowd.pop_next() for _ in range(4)]
    assert {*served[:2]} == {"many0", "few0"}
    assert {*served[2:]} == {"many1", "few1"}
    assert [crowd.pop_next() for _ in range(8)] == [f"many{number}" for number in range(2, 10)]
    with pytest.raises(IndexError):
        crowd.pop_next()
    with pytest.raises(IndexError):
        crowd.pop_excess()


def test_what_is_seen_may_be_taken_out() -> None:
    crowd = crowd_of(many=3, few=2)
    for one in crowd:
        if one != "few1":
            crowd.discard(one)
    assert list(crowd) == ["few1"]


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
    head = head_of(data)
    assert head is not None
    assert authorization_of(head) == b"Bearer s"
    assert authorization_of(b"GET / HTTP/1.1" + end + b"Host: x") == b""
    assert head_of(head) is None


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
    assert LOOPBACK_PORT.problem([value]) == ""


@pytest.mark.parametrize(
    "value", ["evil.example.com", "127.0.0.1.nip.io:80", "http://evil", "null", "", "localhost.evil"]
)
def test_names_of_others(value: str) -> None:
    assert "does not answer to the name" in LOOPBACK_PORT.problem(["localhost", value])
    assert AllowedHosts("0.0.0.0", "0.0.0.0").problem([value]) == ""
    assert AllowedHosts("10.0.0.1", "10.0.0.1").problem([value]) == ""
