"""What a port with TLS makes of a connection's first bytes, and TLS without I/O.

Covers: coordinator/greeting.py.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from replicas import errors
from replicas.coordinator.greeting import HELLO_NBYTES, Greeting, first_bytes
from replicas.trust import tls as tls_module
from replicas.trust.certificate import KEY_FILE, PortKey, make_pem
from replicas.trust.tls import SecureConnection, Tls
from replicas.trust.way import WrongKey, way_to


@pytest.fixture(scope="module")
def port() -> PortKey:
    return PortKey.of_pem(make_pem())


def client_of(port: PortKey, key: str = "") -> Tls:
    context = way_to("10.0.0.5:1", f"R1{key or port.hash}.secret", {}).context
    assert context is not None
    return Tls(context, "10.0.0.5")


def hello(port: PortKey) -> bytes:
    client = client_of(port)
    client.handshake()
    return client.outgoing()


def shake_hands(client: Tls, greeting: Greeting) -> None:
    client.handshake()
    client.feed(greeting.take(client.outgoing()))
    client.handshake()
    greeting.take(client.outgoing())


def test_first_bytes(port: PortKey) -> None:
    whole = hello(port)
    assert first_bytes(whole) == "hello"
    assert {first_bytes(whole[:end]) for end in range(1, len(whole))} == {"more"}
    assert first_bytes(b"GET / HTTP/1.1\r\n\r\n") == first_bytes(b"G") == "plain"
    assert first_bytes(b"\x80\x2e\x01") == first_bytes(b"\x16\x02") == first_bytes(b"\x17\x03\x03") == "malformed"
    assert first_bytes(b"\x16\x03\x01\x00\x02\x01\x00") == "malformed"
    assert first_bytes(b"\x16\x03\x01\x00\x04\x02\x00\x00\x00") == "malformed"  # a ServerHello
    assert first_bytes(b"\x16\x03\x01\x00\x04\x01\x00\x00\x00") == "hello"
    assert first_bytes(b"\x16\x03\x01" + (HELLO_NBYTES + 1).to_bytes(2)) == "oversized"
    assert first_bytes(b"\x16\x03\x01\x00\x04\x01\x01\x00\x00") == "oversized"  # in several records


def test_a_handshake_and_what_follows(port: PortKey) -> None:
    client, greeting = client_of(port), Greeting(port.context)
    shake_hands(client, greeting)
    assert client.done
    assert greeting.tls.done
    client.write(b"x" * 40_000)
    data = client.outgoing()
    greeting.take(data[:20_000])
    assert 0 < len(greeting.content) < 20_000
    greeting.take(data[20_000:])
    assert greeting.content == b"x" * 40_000
    client.end()
    with pytest.raises(EOFError):
        greeting.take(client.outgoing())


def test_a_client_does_not_go_on_with_another_key(port: PortKey) -> None:
    client, greeting = client_of(port, "f" * 64), Greeting(port.context)
    client.handshake()
    client.feed(greeting.take(client.outgoing()))
    with pytest.raises(WrongKey, match=r"10.0.0.5:1 has another key than the token names \(.*not ffff"):
        client.handshake()
    assert not client.done


def test_no_older_tls_on_either_side(port: PortKey) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    old, greeting = Tls(context, "x"), Greeting(port.context)
    old.handshake()
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        greeting.take(old.outgoing())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    client, older = client_of(port), Greeting(server)
    client.handshake()
    with pytest.raises(ssl.SSLError):
        older.take(client.outgoing())
    client.feed(older.tls.outgoing())
    with pytest.raises(ssl.SSLError):
        client.handshake()


def test_a_handshake_of_too_many_bytes(port: PortKey) -> None:
    greeting = Greeting(port.context)
    greeting.take(hello(port))
    with pytest.raises(ssl.SSLError):
        for _ in range(2 * HELLO_NBYTES // 6 + 1):
            greeting.take(b"\x14\x03\x03\x00\x01\x01")  # TLS 1.3 ignores it


def test_a_replayed_hello_leads_nowhere(port: PortKey) -> None:
    """What another client sent, up to its first request, gives no content a second
    time."""
    client, greeting = client_of(port), Greeting(port.context)
    client.handshake()
    heard = [client.outgoing()]
    client.feed(greeting.take(heard[0]))
    client.handshake()
    client.write(b"GET / HTTP/1.1\r\n\r\n")
    heard.append(client.outgoing())
    greeting.take(heard[1])
    assert greeting.content.startswith(b"GET")
    replayed = Greeting(port.context)
    replayed.take(heard[0])
    with pytest.raises(ssl.SSLError):
        replayed.take(heard[1])
    assert replayed.content == b""


def test_the_key_of_a_folder_stays(tmp_path: Path) -> None:
    first = PortKey.of_folder(tmp_path / "state")
    path = tmp_path / "state" / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert PortKey.of_folder(tmp_path / "state").hash == first.hash
    assert PortKey.configured(path).hash == first.hash
    path.write_text("nonsense")
    with pytest.raises(errors.UsageError, match=r"key.pem cannot be used.*\(remove "):
        PortKey.of_folder(tmp_path / "state")
    with pytest.raises(errors.UsageError, match=r"control.certificate .*key.pem, with its key in it, cannot be used"):
        PortKey.configured(path)


# ------------------------------------------------------------ over a transport


class Below(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.ended = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = self.ended or "aborted"


class Above(asyncio.Protocol):
    """A protocol that keeps what comes, and pauses after each part if it is told to."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.pausing = False
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if self.pausing:
            self.transport.pause_reading()

    def eof_received(self) -> None:
        self.ended = True


def connected(port: PortKey) -> tuple[Tls, SecureConnection, Below, Above]:
    client, greeting, above, below = client_of(port), Greeting(port.context), Above(), Below()
    shake_hands(client, greeting)
    connection = SecureConnection(above, greeting.tls)
    connection.connection_made(below)
    return client, connection, below, above


@pytest.mark.anyio
async def test_what_has_come_waits_while_the_protocol_pauses(port: PortKey) -> None:
    client, connection, below, above = connected(port)
    above.pausing = True
    for number in range(3):
        client.write(b"%d" % number)
    connection.data_received(client.outgoing())
    assert above.parts == [b"0"]
    assert not below.reading
    for number in range(1, 3):
        connection.transport.resume_reading()
        await asyncio.sleep(0)
        assert above.parts[-1] == b"%d" % number
    assert len(above.parts) == 3


@pytest.mark.anyio
async def test_a_large_answer_and_the_end(port: PortKey) -> None:
    client, connection, below, above = connected(port)
    connection.transport.write(b"y" * 100_000)
    connection.transport.writelines([b"a", b"", b"z"])
    client.feed(below.written)
    got = b""
    while part := client.read():
        got += part
    assert got == b"y" * 100_000 + b"az"
    assert connection.transport.get_extra_info("sslcontext")
    client.end()
    connection.data_received(client.outgoing())
    assert above.ended
    assert below.ended == "closed"
    connection.transport.write(b"nobody hears it")


@pytest.mark.anyio
async def test_bytes_that_were_changed_on_the_way_end_it(port: PortKey) -> None:
    client, connection, below, above = connected(port)
    client.write(b"true")
    data = bytearray(client.outgoing())
    data[-1] ^= 1
    connection.data_received(bytes(data))
    assert above.parts == []
    assert below.ended == "closed"


@pytest.mark.anyio
async def test_bytes_without_content_end_it(port: PortKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "EMPTY_NBYTES", 1000)
    client, connection, below, above = connected(port)
    client.write(bytes(2000))
    data = client.outgoing()
    for begin in range(0, 900, 100):
        connection.data_received(data[begin : begin + 100])
    assert below.ended == ""
    connection.data_received(data[900:1200])
    assert below.ended == "aborted"
    assert above.parts == []
