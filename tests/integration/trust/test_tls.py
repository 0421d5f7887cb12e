"""A control port with TLS: members that join it by their token alone, and everything
that is refused: wrong keys, old tokens, people between, and handshakes gone wrong.

Covers: trust/certificate.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

import replicas
from replicas import errors
from replicas import messages as wire
from replicas.control.client import Client as CliClient
from replicas.coordinator import Coordinator, acceptor, server
from replicas.trust.certificate import PortKey, make_pem
from replicas.trust.tokens import JoinToken
from replicas.trust.way import way_to
from tests.support.channel.members import Client
from tests.support.channels import POLICY, ChannelWorld
from tests.support.machine.proxy import Proxy
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

CHANNELS = {"policy": POLICY}
WEIGHTS = {"w": torch.arange(100_000.0)}


async def page(_: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * 500_000)


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Coordinator]:
    async with Coordinator(CHANNELS, tls="on", routes=[Route("/page", page)], live=lambda: True) as running:
        yield running


@pytest.fixture
async def coordinator(shared: Coordinator) -> Coordinator:
    shared.engine.refusals.clear()
    return shared


async def counted(coordinator: Coordinator, reason: str, times: int = 1) -> None:
    await wait_until(
        lambda: coordinator.refused()[reason] == times, f"{times} x {reason} in {coordinator.engine.refusals}"
    )


def context_of(coordinator: Coordinator) -> ssl.SSLContext:
    context = way_to(coordinator.endpoint, coordinator.token, {}).context
    assert context is not None
    return context


async def plain(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = endpoint.split(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def join(endpoint: str, token: str, **more: Any) -> replicas.Channel:
    where: dict[str, Any] = {"endpoint": endpoint, "token": token, "timeout": 10, **more}
    return await asyncio.to_thread(lambda: replicas.join("policy", **{"group": "trainer", **where}))


async def refusal(endpoint: str, token: str) -> errors.UsageError:
    """The error of somebody who joins, which comes at once."""
    began = time.monotonic()
    with pytest.raises(errors.UsageError) as caught:
        await join(endpoint, token)
    assert time.monotonic() - began < 5
    return caught.value


# ------------------------------------------------------------ in order


async def test_weights_pass_and_members_notice_nothing(coordinator: Coordinator) -> None:
    assert coordinator.token.startswith("R1")
    async with contextlib.aclosing(ChannelWorld(coordinator, "policy")) as world:
        trainer, rollout = await world.trainer_and_rollouts()
        receipt = await asyncio.to_thread(lambda: trainer.publish(WEIGHTS).wait(20))

        def received() -> Any:
            with rollout.receive().wait(20) as update:
                return update.version, dict(update)["w"].clone()

        version, tensor = await asyncio.to_thread(received)
        assert version == receipt.version
        assert torch.equal(tensor, WEIGHTS["w"])
    assert coordinator.engine.refusals == {}


async def test_a_library_that_is_given_the_context_is_as_safe(coordinator: Coordinator) -> None:
    way = way_to(coordinator.endpoint, coordinator.tokens.text("operator"), {})
    async with connect(way.url("/session"), ssl=way.context, additional_headers=way.headers) as socket:
        await socket.send(wire.encode(wire.MemberFrame(0, 0, Client.hello_of("rollout"))))
        answer = await socket.recv()
        assert isinstance(answer, bytes)
        assert isinstance(wire.decode_server_frame(answer).body, wire.Welcome)
    wrong = way_to(coordinator.endpoint, f"R1{'0' * 64}.hunter2", {})
    with pytest.raises(ssl.SSLCertVerificationError, match="has another key than the token names"):
        await connect(wrong.url("/session"), ssl=wrong.context, additional_headers=wrong.headers)


async def test_pages_of_any_size_and_a_reader_that_is_slow(coordinator: Coordinator) -> None:
    host, port = coordinator.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context_of(coordinator), limit=1024)
    writer.write(b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.2)  # the answer fills all buffers meanwhile
    assert len(await ended(reader)) == 500_000
    writer.close()


async def test_a_probe_is_answered_at_once(coordinator: Coordinator) -> None:
    host, port = coordinator.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context_of(coordinator))
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await ended(reader)).endswith(b"\r\n\r\nok\n")
    writer.close()


async def test_a_certificate_of_ones_own_with_its_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CA a bare secret does, and the certificate must be of the host."""
    authority, certificate, key = signed_by_a_ca(tmp_path)
    monkeypatch.setenv("REPLICAS_CA_FILE", str(authority))
    async with Coordinator(CHANNELS, tls="on", certificate=certificate, key=key, token="secret") as coordinator:
        assert JoinToken.parse(coordinator.token) == (PortKey.configured(certificate, key).hash, "secret")
        for token in ("secret", coordinator.token):
            await asyncio.to_thread((await join(coordinator.endpoint, token)).close)
        error = await refusal(coordinator.endpoint.replace("127.0.0.1", "localhost"), "secret")
        assert "Hostname mismatch, certificate is not valid for 'localhost'" in error.message
        assert "REPLICAS_CA_FILE must name the CA" in error.hint
    async with Coordinator(CHANNELS, tls="on", token="secret") as other:
        error = await refusal(other.endpoint, "secret")
        assert "the certificate of the control port" in error.message
        assert "self-signed certificate" in error.message


def signed_by_a_ca(folder: Path) -> tuple[Path, Path, Path]:
    """Files of a CA's certificate, of one that it has signed for 127.0.0.1, and of
    that one's key."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("ca", "port")]
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = []
    for number in range(2):
        builder = x509.CertificateBuilder().subject_name(names[number]).issuer_name(names[0])
        builder = builder.public_key(keys[number].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=9))
        builder = builder.add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key())
        builder = builder.add_extension(issuer, critical=False)
        subject = x509.SubjectKeyIdentifier.from_public_key(keys[number].public_key())
        builder = builder.add_extension(subject, critical=False)
        if number:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    contents = (*made, keys[1].private_bytes(serialization.Encoding.PEM, form, bare))
    paths = (folder / "ca.pem", folder / "port.pem", folder / "port.key")
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


# ------------------------------------------------------------ refused by members


async def test_a_token_of_another_run(coordinator: Coordinator) -> None:
    token = str(JoinToken("0" * 64, coordinator.tokens.secret("member")))
    error = await refusal(coordinator.endpoint, token)
    assert f"the control port at {coordinator.endpoint} has another key than the token names" in error.message
    assert "the token was not sent to it" in error.message
    assert "replicas token" in error.hint
    await counted(coordinator, "tls")  # the handshake, which it does not end


class Between:
    """Somebody between a member and the port, who ends TLS with a key of their own, or
    answers without; ``heard``: what members sent to them."""

    def __init__(self, target: str, context: ssl.SSLContext | None, onward: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._onward = onward
        self.heard = b""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.split(":")
        _, onward = await asyncio.open_connection(host, int(port), ssl=self._onward)
        try:
            while data := await reader.read(4096):
                self.heard += data
                if self._context is None:
                    writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        except OSError:
            pass  # the member has left
        finally:
            onward.close()
            writer.close()


@pytest.mark.parametrize("has_tls", [True, False], ids=["with a key of its own", "without TLS"])
async def test_somebody_between_hears_no_token(coordinator: Coordinator, has_tls: bool) -> None:
    context = PortKey.of_pem(make_pem()).context if has_tls else None
    between = Between(coordinator.endpoint, context, context_of(coordinator))
    async with between.listening() as endpoint:
        error = await refusal(endpoint, coordinator.token)
        words = "has another key than the token names" if has_tls else "does not speak TLS 1.3"
        assert words in error.message
        with pytest.raises(errors.UsageError, match=words):
            await asyncio.to_thread(CliClient(endpoint, token=coordinator.token).status)
    secret = coordinator.tokens.secret("member").encode()
    assert secret not in between.heard
    assert b"Bearer" not in between.heard
    assert not has_tls or between.heard == b""


async def test_a_member_comes_back_once_nobody_is_between_any_more(coordinator: Coordinator) -> None:
    """A wrong key ends a member that joins, and only delays one that was in."""
    context = PortKey.of_pem(make_pem()).context
    between = Between(coordinator.endpoint, context, context_of(coordinator))
    target = coordinator.endpoint
    async with Proxy(lambda: target) as proxy:
        member = await join(proxy.endpoint, coordinator.token)
        try:
            async with between.listening() as endpoint:
                target = endpoint
                before = proxy.connections
                proxy.cut()
                await wait_until(lambda: proxy.connections > before + 1, "two tries")
            target = coordinator.endpoint
            proxy.cut()
            await asyncio.to_thread(lambda: member.publish(WEIGHTS).wait(20))
        finally:
            await asyncio.to_thread(member.close)
    assert between.heard == b""


# ------------------------------------------------------------ refused by the port


@pytest.mark.parametrize("secure", [True, False], ids=["plain to TLS", "TLS to plain"])
async def test_one_with_tls_and_one_without(secure: bool) -> None:
    async with Coordinator(CHANNELS, tls="on" if secure else "off") as coordinator:
        if secure:
            reader, writer = await plain(coordinator.endpoint)
            writer.write(b"GET /session HTTP/1.1\r\n")
            answer = await ended(reader)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"this port speaks TLS 1.3: ask it by https://" in answer
        else:
            error = await refusal(coordinator.endpoint, f"R1{'0' * 64}.hunter2")
            assert f"{coordinator.endpoint} does not speak TLS 1.3" in error.message
        await counted(coordinator, "tls")


async def test_an_older_tls(coordinator: Coordinator) -> None:
    host, port = coordinator.endpoint.split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):  # of TLS, or a reset: asyncio sends no alert
        await asyncio.open_connection(host, int(port), ssl=context)
    await counted(coordinator, "tls")


@pytest.mark.parametrize("leaves", ["connected", "after the handshake", "by the port"])
async def test_a_connection_that_asks_for_nothing_is_not_refused(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """A browser's spare connection, a probe that looks at the certificate."""
    monkeypatch.setattr(acceptor, "REQUEST_TIMEOUT_S", 0.3)
    host, port = coordinator.endpoint.split(":")
    context = None if leaves == "connected" else context_of(coordinator)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    if leaves == "by the port":
        assert await ended(reader) == b""
    writer.close()
    assert coordinator._server is not None
    visits = coordinator._server.connections
    await wait_until(lambda: not visits and not waiting(coordinator), "the end of the connection")
    assert not any(coordinator.refused().values())


def waiting(coordinator: Coordinator) -> int:
    assert coordinator._server is not None
    assert coordinator._server._acceptor is not None
    return coordinator._server._acceptor.waiting


def hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("part", ["a byte", "half a hello", "a hello"])
async def test_a_slow_handshake(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.3)
    data = hello()
    reader, writer = await plain(coordinator.endpoint)
    writer.write(data[: {"a byte": 1, "half a hello": len(data) // 2, "a hello": len(data)}[part]])
    assert bool(await ended(reader)) == (part == "a hello")  # the port's part, and then nothing
    writer.close()
    await counted(coordinator, "timeout")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x50\x00" + bytes(0x5000),
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff" + bytes(100),
        b"\x16\x03\x01\x00\x04\x01\x00\x00\x00",
        b"\x80\x80\x01\x03\x01",
        b"\x17\x03\x03\x00\x10" + bytes(16),
    ],
    ids=["a huge record", "a huge hello", "an empty hello", "SSL 2", "content"],
)
async def test_what_is_no_handshake(coordinator: Coordinator, data: bytes) -> None:
    reader, writer = await plain(coordinator.endpoint)
    writer.write(data)
    assert await ended(reader) == b""
    writer.close()
    await counted(coordinator, "tls")


async def test_a_huge_request_head_over_tls(coordinator: Coordinator) -> None:
    host, port = coordinator.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context_of(coordinator))
    writer.write(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000)
    assert (await ended(reader)).startswith(b"HTTP/1.1 431")
    writer.close()
    await counted(coordinator, "oversized")


async def test_handshakes_of_many_lock_nobody_out(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert coordinator._server is not None
    monkeypatch.setattr(coordinator._server.rules.unproven, "most", 16)  # of one source, half of that
    member = await join(coordinator.endpoint, coordinator.token)
    connections = [await plain(coordinator.endpoint) for _ in range(30)]
    data = hello()
    for _, writer in connections:
        writer.write(data)
    await counted(coordinator, "too_many", 22)
    other = await join(coordinator.endpoint, coordinator.token, group="rollout")
    await asyncio.to_thread(lambda: member.publish(WEIGHTS).wait(20))
    for one in (member, other):
        await asyncio.to_thread(one.close)
    for _, writer in connections:
        writer.close()


async def test_an_old_token_says_so_and_what_showed_it_ends(coordinator: Coordinator) -> None:
    tokens, first = coordinator.tokens, coordinator.token
    member = await join(coordinator.endpoint, first)
    tokens.rotate("member")
    assert coordinator.token != first
    other = await join(coordinator.endpoint, first, group="rollout")  # two are valid at a time
    await asyncio.to_thread(other.close)
    tokens.revoke_old("member")
    error = await refusal(coordinator.endpoint, first)
    assert "does not accept the token (old token: it was replaced by a newer one)" in error.message

    def publish() -> None:
        member.publish(WEIGHTS).wait(20)

    with pytest.raises(errors.UsageError, match="old token"):
        await asyncio.to_thread(publish)
    assert coordinator.refused()["token"] >= 2


async def test_a_member_reads_the_new_token_as_it_reconnects(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(coordinator.token)
    monkeypatch.setenv("REPLICAS_TOKEN_FILE", str(file))
    member = await asyncio.to_thread(
        lambda: replicas.join("policy", endpoint=coordinator.endpoint, group="trainer", timeout=10)
    )
    coordinator.tokens.rotate("member")
    file.write_text(coordinator.token)
    coordinator.tokens.revoke_old("member")  # and with it the connection
    await asyncio.to_thread(lambda: member.publish(WEIGHTS).wait(20))
    await asyncio.to_thread(member.close)


def test_off_loopback_tls_is_on_unless_it_is_off_in_words(tmp_path: Path) -> None:
    made = Coordinator(CHANNELS, host="10.255.255.1", token="secret", state_dir=tmp_path)
    made._decisions.close()
    again = Coordinator(CHANNELS, host="10.255.255.1", token=made.token, state_dir=tmp_path)
    assert made.tls
    assert made.token == again.token
    assert JoinToken.parse(made.token).secret == "secret"
    assert Coordinator(CHANNELS, host="10.255.255.1", token="secret", tls="off").token == "R1plain.secret"
    assert Coordinator(CHANNELS, token="secret").token == "secret"
    with pytest.raises(errors.UsageError, match="another key"):
        Coordinator(CHANNELS, host="10.255.255.1", token=made.token)
    with pytest.raises(errors.UsageError, match='tls must be "auto", "on" or "off"'):
        Coordinator(CHANNELS, tls="yes")  # type: ignore[arg-type]  # a mistake


class Records:
    """A client's TLS, of which each write is a record, sent when it is told to."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.way = way_to(coordinator.endpoint, coordinator.token, {})
        self._from, self._to = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = context_of(coordinator)
        self._tls = context.wrap_bio(self._from, self._to, server_hostname=self.way.host)

    async def open(self) -> None:
        self._reader, self._writer = await plain(self.coordinator.endpoint)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._exchange()
        self.send()

    def write(self, parts: Iterable[bytes]) -> None:
        for one in parts:
            self._tls.write(one)

    def send(self) -> None:
        self._writer.write(self._to.read())

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                await self._exchange()

    async def _exchange(self) -> None:
        self.send()
        self._from.write(await asyncio.wait_for(self._reader.read(1 << 16), 30))

    def close(self) -> None:
        self._writer.close()


async def test_frames_in_several_tls_records_are_read_whole(coordinator: Coordinator) -> None:
    """As of a member that comes back, and sends again what was not acknowledged: the
    server finds several records at once."""
    tls = Records(coordinator)
    await tls.open()
    protocol = ClientProtocol(parse_uri(tls.way.url("/session")))
    request = protocol.connect()
    request.headers.update(tls.way.headers)
    protocol.send_request(request)
    tls.write(protocol.data_to_send())
    tls.send()
    while protocol.state is not State.OPEN:
        protocol.receive_data(await tls.read())
        protocol.events_received()
        assert protocol.handshake_exc is None
    sent = [bytes([number]) * 100 for number in range(8)]
    for one in sent:
        protocol.send_ping(one)
    tls.write(protocol.data_to_send())
    tls.send()
    pongs: list[bytes] = []
    while len(pongs) < len(sent):
        protocol.receive_data(await tls.read())
        found = protocol.events_received()
        assert protocol.state is State.OPEN, protocol.close_rcvd
        pongs += [bytes(one.data) for one in found if isinstance(one, Frame) and one.opcode is Opcode.PONG]
    assert pongs == sent
    tls.close()
