"""Where carriers listen and connect: IPv4, IPv6, fixed ports, and why they cannot.

Covers: carry/endpoint.py, linux/interfaces.py.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import pytest

from replicas.carry import endpoint
from replicas.linux import interfaces
from replicas.linux.interfaces import interface_of
from tests.support.carrying import Host, Threads, a_pull, digests, run

TABLE = """\
fe800000000000000000000000000007 02 40 20 80     eth0
fe800000000000000000000000000007 03 40 20 80   eth0.5
fd000000000000000000000000000002 02 40 00 82     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def link_local() -> str:
    """An own address of one link, without its scope; empty: there is none."""
    found = [str(address) for address, _ in interfaces._ipv6() if address.is_link_local]
    return next(iter(found), "")


HOSTS = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback"))]


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many free ports, below those that the kernel gives out."""
    for first in range(20_000, 32_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    stack.enter_context(socket.create_server((host, port), family=family))
            except OSError:
                continue
        return first
    raise AssertionError


# ------------------------------------------------------------ interfaces


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("fe80::7%eth0", "eth0"),
        ("fe80::7%eth0.5", "eth0.5"),
        ("fe80::7%ens3", "eth0"),  # as another machine calls it
        ("fe80::7", "eth0"),
        ("fd00::2", "eth0"),
        ("::1", "lo"),
        ("fd00::3", ""),
        ("127.0.0.1", "lo"),
        ("203.0.113.9", ""),
        ("a.name", ""),
    ],
)
def test_the_interface_that_has_an_address(tmp_path: Path, address: str, name: str) -> None:
    (tmp_path / "if_inet6").write_text(TABLE)
    with mock.patch.object(interfaces, "_INET6", tmp_path / "if_inet6"):
        assert interface_of(address) == name


def test_a_kernel_without_ipv6_has_no_such_interface(tmp_path: Path) -> None:
    with mock.patch.object(interfaces, "_INET6", tmp_path / "none"):
        assert interface_of("::1") == ""


# ------------------------------------------------------------ listening and connecting


def connect(host: str, port: int, source: str) -> socket.socket:
    sock, there = endpoint.bind_socket(host, port, source)
    sock.settimeout(5.0)
    sock.connect(there)
    return sock


@pytest.mark.parametrize("host", HOSTS)
def test_both_ends_have_the_addresses_of_their_members(host: str) -> None:
    listener, warning = endpoint.listen(host, 0, 8)
    with listener:
        port = listener.getsockname()[1]
        with connect(host, port, host) as sock:
            assert sock.getsockname()[0] == sock.getpeername()[0] == listener.getsockname()[0] == host
        with connect(host, port, "") as sock:
            assert sock.getpeername()[1] == port
    assert not warning


def test_an_address_of_another_family_is_no_source() -> None:
    listener, _ = endpoint.listen("127.0.0.1", 0, 8)
    with listener, connect("127.0.0.1", listener.getsockname()[1], "::1") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address")
def test_the_scope_is_that_of_this_machine() -> None:
    told = f"{link_local()}%elsewhere0"  # as the coordinator's machine calls its link
    listener, _ = endpoint.listen(told, 0, 8)
    with listener, connect(told, listener.getsockname()[1], told) as sock:
        here = socket.if_nametoindex(interface_of(link_local()))
        assert sock.getpeername()[3] == sock.getsockname()[3] == listener.getsockname()[3] == here


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address")
@pytest.mark.parametrize("told", ["fe80::abcd", "fe80::abcd%elsewhere0"])
def test_another_machine_of_the_link_is_reached_by_the_own_interface(told: str) -> None:
    sock, there = endpoint.bind_socket(told, 7100, link_local())
    with sock:
        assert there == ("fe80::abcd", 7100, 0, socket.if_nametoindex(interface_of(link_local())))
        assert sock.getsockname()[0] == link_local()


def test_an_ipv4_address_in_ipv6_is_that_address() -> None:
    listener, _ = endpoint.listen("::ffff:127.0.0.1", 0, 8)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "203.0.113.9", "a.name"])
def test_only_an_address_of_this_machine_is_listened_at(host: str) -> None:
    with pytest.raises(OSError, match="not an address of this machine: the coordinator must be reached by") as caught:
        endpoint.listen(host, 0, 8)
    assert host in str(caught.value.strerror)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_pull_by_any_family(host: str, encrypt: bool) -> None:
    threads, data = Threads(encrypt=encrypt), bytes(range(256)) * 20_000
    there = Host(threads, "trainer/0/0", host)
    there.serves(data)
    one, memory = a_pull(threads, len(data), source=host)
    run(one, threads, there.holder)
    assert bytes(memory[-len(data) :]) == data
    assert digests(data)
    there.close()
    threads.end()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65_536), ("127.0.0.1", -1), ("a.name", 1), ("", 1)])
def test_what_is_no_address_is_an_error_as_others_are(host: str, port: int) -> None:
    with pytest.raises(OSError, match=r"not a valid port|does not appear"):
        endpoint.bind_socket(host, port, "")


# ------------------------------------------------------------ fixed ports


@pytest.mark.parametrize("host", HOSTS)
def test_a_port_of_another_program_is_named_and_the_next_one_used(host: str) -> None:
    first = free_ports(3, host)
    other = socket.create_server((host, first), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    with closing(other):
        listener, warning = endpoint.listen(host, first, 8)
        with listener:
            assert listener.getsockname()[1] == first + 1
    assert f"port {first} of {host}, for transfers between hosts, is taken by " in warning
    assert "(process " in warning
    assert "set cluster.carry_port so that the 64 ports" in warning


def test_a_port_of_another_carrier_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(3)
    monkeypatch.setattr(endpoint, "process_name", lambda pid: endpoint.NAME)
    with ExitStack() as stack:
        for number in range(3):
            listener, warning = endpoint.listen("127.0.0.1", first, 8)
            stack.enter_context(listener)
            assert (listener.getsockname()[1], warning) == (first + number, "")


def test_all_ports_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PORTS", 2)
    first = free_ports(2)
    with ExitStack() as stack:
        for port in (first, first + 1):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(OSError, match=f"none of the 2 ports from {first} on is free at 127.0.0.1") as caught:
            endpoint.listen("127.0.0.1", first, 8)
    assert caught.value.errno == errno.EADDRINUSE
    assert "is taken by" in str(caught.value.strerror)


# ------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connection refused: no program listens there, or a fi"),
        (TimeoutError("timed out"), "no answer in time: packets are lost on the way, as behind a firewall"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "no answer in time"),
        (OSError(errno.EHOSTUNREACH, "x"), "No route to host: no interface leads there"),
        (OSError(errno.ENETUNREACH, "x"), "Network is unreachable: no interface leads there"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "127.0.0.1 is not an address of this machine, or has no free port"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError("whatever"), "whatever"),
    ],
)
def test_why_a_holder_cannot_be_reached(error: OSError, reason: str) -> None:
    text = endpoint.unreached(error, "fd00::2", 7100, "127.0.0.1")
    assert text.startswith(f"[fd00::2]:7100 cannot be reached from 127.0.0.1 (lo): {reason}")
    assert "open the TCP ports of carriers between these machines (cluster.carry_port fixes them)" in text


def test_a_source_that_is_not_known_is_not_named() -> None:
    text = endpoint.unreached(TimeoutError(), "10.0.0.1", 7100, "")
    assert text.startswith("10.0.0.1:7100 cannot be reached: no answer in time")
    assert "from 203.0.113.9: " in endpoint.unreached(TimeoutError(), "10.0.0.1", 7100, "203.0.113.9")
