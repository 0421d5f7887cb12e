"""What connects to a carrier, or answers in its place, and is nobody: it learns and
changes nothing, and real pulls go on.

Covers: carry/greeting.py, carry/tls.py, carry/serve.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from replicas.carry import dialler, greeting, pull, serve, tls
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.greeting import UnknownSecret
from replicas.carry.holders import Holder
from replicas.carry.pull import Failed
from replicas.carry.serve import ASK, RANGE
from replicas.trust.certificate import certificate_hash, context_of
from tests.support.carrying import (
    NUMBER,
    OFFSET,
    SECRET,
    Certificate,
    FalseHost,
    Host,
    Threads,
    a_pull,
    begin,
    digests,
    hosts,
    run,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.slow
HELLO_NBYTES, ANSWER_NBYTES, PROOF_NBYTES = 32, 48, 32
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64),
    "half a greeting": greeting.MAGIC + b"\0" * 12,
    "another transfer": greeting.MAGIC + b"\0" * 24 + b"\0" * 32,
    "half a handshake": bytes.fromhex("16030100c8010000c40303"),
    "a handshake of noise": b"\x16\x03\x01\x02\x00" + os.urandom(512),
    "noise": random.Random(3).randbytes(4096),
}


@pytest.fixture
def sealed() -> Iterator[Threads]:
    found = Threads(encrypt=True)
    yield found
    found.end()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(BLOCK_NBYTES + 12345)


def all_of(sock: socket.socket) -> bytes:
    """What comes until the end, however the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            found += part
    return found


def dial(host: Host) -> socket.socket:
    sock = socket.create_connection(host.listener.getsockname()[:2], 10)
    sock.settimeout(10)
    return sock


# ------------------------------------------------------------ who connects


def test_neither_end_speaks_with_a_stranger(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(threads, len(data), os.urandom(greeting.SECRET_NBYTES))
        with pytest.raises(Failed, match=f"trainer/0/0: {host.holder.address} does not know the secret"):
            run(one, threads, host.holder)
        assert memory[OFFSET:] == bytes(len(data))
        host.server.withdraw(NUMBER, "over")
        with pytest.raises(Failed, match="does not know the secret"):
            run(a_pull(threads, len(data))[0], threads, host.holder)


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_learns_nothing(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes, what: str) -> None:
    monkeypatch.setattr(serve, "PROOF_S", 0.4)
    with hosts(threads, "trainer/0/0") as (host,), closing(dial(host)) as sock:
        host.serves(data)
        sock.sendall(GARBAGE[what])
        assert len(all_of(sock)) <= ANSWER_NBYTES  # a nonce and a proof of nothing, or an alert
        assert run(a_pull(threads, len(data))[0], threads, host.holder) == combined(digests(data))


def test_a_byte_now_and_then_gains_no_time(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(serve, "PROOF_S", 0.5)
    drips = {"greeting": greeting.MAGIC + b"\0" * 56, "handshake": b"\x16\x03\x01\x02\x00" + b"\x01" * 512}
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        for drip in drips.values():
            with closing(dial(host)) as sock:
                began = time.monotonic()
                with contextlib.suppress(ConnectionError):
                    for byte in drip:
                        sock.sendall(bytes((byte,)))
                        if select.select([sock], [], [], 0.05)[0]:  # slower than any real puller
                            break
                assert len(all_of(sock)) <= ANSWER_NBYTES  # until it is closed
                assert time.monotonic() - began < 2.0


def test_a_greeting_that_was_heard_is_of_no_use_again(data: bytes) -> None:
    """Nor is the server's own proof, or the one of another transfer."""
    threads = Threads()
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        heard = Recorder(host.holder)
        threads.start(heard.relay)
        greeting.prove_as_puller(heard.dial(), NUMBER, SECRET, b"", time.monotonic() + 30.0)
        hello, proof = heard.said(HELLO_NBYTES), heard.said(PROOF_NBYTES)
        for second in (proof, None, b"\0" * PROOF_NBYTES):
            with closing(dial(host)) as sock:
                sock.sendall(hello)
                answer = greeting.read_exactly(sock, ANSWER_NBYTES)
                sock.sendall(second if second is not None else answer[greeting.NONCE_NBYTES :])
                with contextlib.suppress(ConnectionError):
                    sock.sendall(ASK.pack(RANGE, 0, 1))
                assert all_of(sock) == b""
        heard.close()
    threads.end()


class Recorder:
    """A man in the middle, who passes bytes on and keeps what the puller says."""

    def __init__(self, holder: Holder, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._holder, self._change = holder, change
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.holder = Holder(holder.name, "127.0.0.1", self.listener.getsockname()[1], holder.certificate_hash)
        self._heard = bytearray()
        self._more = threading.Condition()
        self._sockets: list[socket.socket] = [self.listener]

    def dial(self) -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname())
        self._sockets.append(sock)
        return sock

    def relay(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                puller, _ = self.listener.accept()
                server = socket.create_connection((self._holder.host, self._holder.port))
                self._sockets += [puller, server]
                for pair in ((puller, server), (server, puller)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        from_puller = source.getsockname() == self.listener.getsockname()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if from_puller:
                    with self._more:
                        self._heard += data
                        self._more.notify_all()
                else:
                    data = self._change(data)
                sink.sendall(data)
        for sock in (source, sink):
            tls.hang_up(sock)

    def said(self, nbytes: int) -> bytes:
        with self._more:
            assert self._more.wait_for(lambda: len(self._heard) >= nbytes, 10)
            found = bytes(self._heard[:nbytes])
            del self._heard[:nbytes]
            return found

    def close(self) -> None:
        for sock in self._sockets:
            tls.hang_up(sock)
            sock.close()


def test_a_flood_takes_neither_the_place_of_a_puller_nor_threads(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(serve, "UNPROVEN", 8)
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        over, most = threading.Event(), 0

        def flood() -> None:
            nonlocal most
            kept: list[socket.socket] = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    sock = dial(host)
                    sock.sendall(random.choice([*GARBAGE.values()])[:20])
                    kept.append(sock)
                most = max(most, threads.alive())
                if len(kept) > 200:
                    kept.pop(0).close()
            for sock in kept:
                sock.close()

        flooding = threading.Thread(target=flood)
        flooding.start()
        for _ in range(3):
            one, memory = a_pull(threads, len(data))
            assert run(one, threads, host.holder) == combined(digests(data))
            assert memory[OFFSET:] == data
        over.set()
        flooding.join(30)
        assert most <= 2 * serve.UNPROVEN + pull.MOST + 2


def test_who_names_a_transfer_of_ours_is_the_last_to_go(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(serve, "UNPROVEN", 3)
    threads = Threads()
    with hosts(threads, "trainer/0/0") as (host,), contextlib.ExitStack() as stack:
        host.serves(data)
        slow = stack.enter_context(dial(host))
        slow.sendall(greeting._HELLO.pack(greeting.MAGIC, NUMBER, bytes(greeting.NONCE_NBYTES)))
        hello_answer = greeting.read_exactly(slow, ANSWER_NBYTES)
        others = [stack.enter_context(dial(host)) for _ in range(6)]
        for sock in others[:4]:
            assert all_of(sock) == b""
        proof = greeting._proof(
            SECRET,
            b"puller",
            greeting._HELLO.pack(greeting.MAGIC, NUMBER, bytes(greeting.NONCE_NBYTES)),
            hello_answer[: greeting.NONCE_NBYTES],
            b"",
        )
        slow.sendall(proof + ASK.pack(RANGE, 0, 1))
        assert greeting.read_exactly(slow, 5)[4:] == data[:1]
    threads.end()


def test_a_puller_that_is_cut_at_the_door_comes_again(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(pull, "AGAIN_S", 0.01)
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        accept, cut = host.server.accept, 0

        def cut_some() -> None:
            nonlocal cut
            if cut < 3:
                cut += 1
                host.listener.accept()[0].close()
            else:
                accept()

        monkeypatch.setattr(host.server, "accept", cut_some)
        assert run(a_pull(threads, len(data))[0], threads, host.holder) == combined(digests(data))
        monkeypatch.setattr(host.server, "accept", lambda: host.listener.accept()[0].close())
        with pytest.raises(Failed, match=f"trainer/0/0: {host.holder.address} (closed|broke) the connection"):
            run(a_pull(threads, len(data))[0], threads, host.holder)


# ------------------------------------------------------------ who answers


def test_who_answers_without_the_secret_is_told_nothing_more(threads: Threads, data: bytes) -> None:
    """Not if it sends the puller's own words back either."""
    false = FalseHost(threads)
    heard: list[bytes] = []

    def reflect() -> None:
        for _ in range(2):
            with contextlib.suppress(OSError):
                sock, _ = false.listener.accept()
                with false.certificate.wrap(sock) if false.certificate is not None else sock as known:
                    hello = greeting.read_exactly(known, HELLO_NBYTES)
                    known.sendall((hello + hello)[:ANSWER_NBYTES])
                    heard.append(all_of(known))

    threads.start(reflect)
    with closing(false.listener), pytest.raises(Failed, match="does not know the secret"):
        run(a_pull(threads, len(data))[0], threads, false.holder)
    threads.end()
    assert set(heard) == {b""}


def test_another_certificate_is_sent_nothing(sealed: Threads, data: bytes) -> None:
    false = FalseHost(sealed, known=False)
    heard: list[bytes] = []

    def listen() -> None:
        for _ in range(2):
            with contextlib.suppress(OSError):
                sock, _ = false.listener.accept()
                assert false.certificate is not None
                with false.certificate.wrap(sock) as known:
                    heard.append(all_of(known))

    sealed.start(listen)
    with (
        closing(false.listener),
        pytest.raises(Failed, match=r"shows another certificate .* another program answers there"),
    ):
        run(a_pull(sealed, len(data))[0], sealed, false.holder)
    sealed.end()
    assert set(heard) == {b""}


def test_a_man_in_the_middle_hears_and_changes_nothing(sealed: Threads, data: bytes) -> None:
    """He hears noise; a byte that he changes breaks the connection."""
    with hosts(sealed, "trainer/0/0") as (host,):
        host.serves(data)
        between = Recorder(host.holder)
        sealed.start(between.relay)
        assert run(a_pull(sealed, len(data))[0], sealed, between.holder) == combined(digests(data))
        heard = bytes(between._heard)
        assert SECRET[:8] not in heard
        assert greeting.MAGIC not in heard
        between.close()
        changing = Recorder(host.holder, lambda one: bytes((*one[:-1], one[-1] ^ 1)) if len(one) > 5000 else one)
        sealed.start(changing.relay)
        one, memory = a_pull(sealed, len(data))
        with pytest.raises(Failed, match="broke the connection"):
            run(one, sealed, changing.holder)
        assert all(memory[at] in (0, data[at - OFFSET]) for at in range(OFFSET, OFFSET + len(data), 4001))
        changing.close()


def test_in_plain_a_man_in_the_middle_changes_nothing_that_is_kept(data: bytes) -> None:
    """He is a holder that forges: found by the publisher's digests."""
    threads = Threads()
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (host, other):
        host.serves(data)
        other.serves(data)
        changing = Recorder(host.holder, lambda one: bytes((*one[:-1], one[-1] ^ 1)) if len(one) > 5000 else one)
        threads.start(changing.relay)
        one, memory = a_pull(threads, len(data))
        digest = combined(digests(data))
        assert run(one, threads, changing.holder, other.holder, digest=digest) == digest
        assert memory[OFFSET:] == data
        assert one.received.again
        changing.close()
    threads.end()


# ------------------------------------------------------------ plain or not


def test_what_is_encrypted_is_not_served_in_plain(sealed: Threads, data: bytes) -> None:
    with hosts(sealed, "trainer/0/0") as (host,):
        host.serves(data)
        plain = Threads()
        one, memory = a_pull(plain, len(data))
        with pytest.raises(Failed, match="does not know the secret"):
            run(one, plain, host.holder)
        assert memory[OFFSET:] == bytes(len(data))
        host.server.offer(NUMBER, host.serves(data), SECRET)  # and what is not, not in TLS
        with pytest.raises(Failed, match="does not know the secret"):
            run(a_pull(sealed, len(data))[0], sealed, host.holder)
        plain.end()


def test_a_puller_never_falls_back(sealed: Threads, data: bytes) -> None:
    plain = Threads()
    with hosts(plain, "trainer/0/0") as (host,):
        host.serves(data)
        with pytest.raises(Failed, match=f"{host.holder.address} announced no certificate, but the channel is encr"):
            run(a_pull(sealed, len(data))[0], sealed, host.holder)
        holder = Holder("trainer/0/0", host.holder.host, host.holder.port, Certificate().hash)
        with pytest.raises(Failed, match=f"{host.holder.address} (closed|broke) the connection"):
            run(a_pull(sealed, len(data))[0], sealed, holder)
    plain.end()


def test_an_older_tls_is_not_spoken(sealed: Threads) -> None:
    with hosts(sealed, "trainer/0/0") as (host,), closing(dial(host)) as sock:
        context = tls.client_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(sock)


def test_a_proof_is_of_one_connection_only() -> None:
    here, there = socket.socketpair()
    found: list[BaseException] = []

    def serve_it() -> None:
        try:
            greeting.prove_as_server(there, lambda transfer: SECRET, b"a certificate", time.monotonic() + 30.0)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=serve_it)
    thread.start()
    with here, there:
        with pytest.raises(UnknownSecret):
            greeting.prove_as_puller(here, NUMBER, SECRET, b"another one", time.monotonic() + 30.0)
        here.close()
        thread.join(10)
    assert len(found) == 1


def test_a_connection_that_is_hung_up_never_goes_on_in_plain() -> None:
    """As it would after ``SSLSocket.shutdown``, which takes the TLS away."""
    certificate, pair = Certificate(), socket.socketpair()
    raw = pair[0].dup()
    server: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: server.append(certificate.wrap(pair[0])))
    thread.start()
    client = tls.wrap(pair[1], tls.client_context())
    tls.do_handshake(client, certificate.hash)
    thread.join(10)
    (sock,) = server
    tls.hang_up(sock)
    with contextlib.suppress(OSError):
        sock.sendall(SECRET)
    assert sock.version() == "TLSv1.3"
    with raw, client, sock:
        assert SECRET not in all_of(client)


def test_the_hash_is_that_of_the_certificate() -> None:
    one, other = Certificate(), Certificate()
    assert one.hash != other.hash
    assert one.hash == certificate_hash(one.pem)
    assert len(bytes.fromhex(one.hash)) == 32
    assert context_of(one.pem).minimum_version == ssl.TLSVersion.TLSv1_3


def test_a_pull_that_is_stopped_in_a_handshake_ends_at_once(sealed: Threads, data: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        one, _ = a_pull(sealed, len(data))
        holder = Holder("trainer/0/0", "127.0.0.1", listener.getsockname()[1], Certificate().hash)
        pulling = begin(one, sealed, holder)
        eventually(lambda: len(one._dialler._sockets) == 2, "both connections")
        began = time.monotonic()
        one.stop("it is not needed any more")
        with pytest.raises(Failed, match=r"^: it is not needed any more$"):
            pulling.result(10)
        assert time.monotonic() - began < dialler.GREET_S / 2


def test_a_process_without_threads_turns_away(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)

        def refuse(function: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

        started = host.server._started
        monkeypatch.setattr(host.server, "_started", refuse)
        with closing(dial(host)) as sock:
            assert all_of(sock) == b""
        monkeypatch.setattr(host.server, "_started", started)
        assert run(a_pull(threads, len(data))[0], threads, host.holder) == combined(digests(data))
