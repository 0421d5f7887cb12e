"""Handshakes with a key that the token names, without a network; and the key of a
folder."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from replicas import errors
from replicas.trust.certificate import KEY_FILE, PortKey, make_pem
from replicas.trust.way import WrongKey, way_to


@pytest.fixture(scope="module")
def port() -> PortKey:
    return PortKey.of_pem(make_pem())


class Pair:
    """Both sides of a connection; ``server``: the context of that side."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(down, up, server_hostname="10.0.0.5")
        self.server = server.wrap_bio(up, down, server_side=True)

    def shake_hands(self) -> None:
        for side in (self.client, self.server) * 2:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def client_of(port: PortKey, key: str = "") -> ssl.SSLContext:
    context = way_to("10.0.0.5:1", f"R1{key or port.hash}.secret", {}).context
    assert context is not None
    return context


def test_a_client_goes_on_with_the_key_that_its_token_names(port: PortKey) -> None:
    pair = Pair(port.context, client_of(port))
    pair.shake_hands()
    pair.client.write(b"hello")
    assert pair.server.read(5) == b"hello"
    assert pair.server.version() == "TLSv1.3"


def test_a_client_does_not_go_on_with_another_key(port: PortKey) -> None:
    pair = Pair(port.context, client_of(port, "f" * 64))
    with pytest.raises(WrongKey, match=r"10.0.0.5:1 .*not ffff"):
        pair.shake_hands()


def test_no_older_tls_on_either_side(port: PortKey) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        Pair(port.context, client).shake_hands()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        Pair(server, client_of(port)).shake_hands()


def test_the_key_of_a_folder_stays(tmp_path: Path) -> None:
    first = PortKey.of_folder(tmp_path / "state")
    path = tmp_path / "state" / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert PortKey.of_folder(tmp_path / "state").hash == first.hash
    assert PortKey.configured(path).hash == first.hash
    path.write_text("nonsense")
    with pytest.raises(errors.UsageError, match=r"key.pem cannot be used.*\(remove "):
        PortKey.of_folder(tmp_path / "state")
    with pytest.raises(errors.UsageError, match=r"control.certificate .*key.pem"):
        PortKey.configured(path)
