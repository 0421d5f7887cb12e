"""A client's way to a control port: TLS requirements, and the token that it shows.

:func:`way_to` chooses it by the endpoint, the token and the environment, before any
byte is sent:

=============================== ================= ====================================
the token names                 ``CA_FILE`` set   the way
=============================== ================= ====================================
a key's hash                    either            TLS 1.3 with that very key
nothing                         yes               TLS 1.3, by the CA and the host's name
``plain``                       either            plain: the operator has said so
nothing, endpoint on loopback   no                plain: only this machine can listen
nothing, endpoint elsewhere     no                none; UsageError says what to do
=============================== ================= ====================================

A key is checked *within* the handshake, by the context itself
(:class:`ssl.SSLContext` calls ``do_handshake`` of its own classes). So no library that
uses the context can send a request, which has the token, to a port with another key, or
fall back to a plain connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple

from replicas import environ, errors
from replicas.trust.certificate import key_hash
from replicas.trust.tokens import PLAIN, JoinToken

_HINT = "take the token that `replicas token` shows on the run's machine; it names the key"


class WrongKey(ssl.SSLCertVerificationError):
    """The control port's key is not the key that the token names."""


class Way(NamedTuple):
    """How a client reaches one control port: address, TLS settings, and token.

    :ivar context: the TLS context, for ``ssl`` arguments; None for a plain connection.
    :ivar host: the host name that TLS sends and checks.
    :ivar headers: the headers with the token.
    """

    endpoint: str
    context: ssl.SSLContext | None
    host: str
    headers: dict[str, str]

    def url(self, path: str, scheme: str = "ws") -> str:
        """Return the URL of ``path`` at the endpoint: ``wss://`` with TLS.

        :param scheme: ``"ws"`` or ``"http"``; TLS adds an ``s``.
        """
        return f"{scheme}{'s' if self.context is not None else ''}://{self.endpoint}{path}"

    def refusal(self, error: BaseException) -> errors.UsageError | None:
        """Return (do not raise) the error to raise to the user for an error of TLS.

        Return None if ``error`` is of another kind: the caller may connect again.

        :param error: of an attempt to connect.
        """
        if isinstance(error, WrongKey):
            return errors.UsageError(str(error.strerror), hint=_HINT)
        if isinstance(error, ssl.SSLCertVerificationError):
            why = getattr(error, "verify_message", "") or error
            return errors.UsageError(
                f"the certificate of the control port at {self.endpoint} cannot be verified: {why}",
                hint=f"{environ.CA_FILE} must name the CA that has signed it, and the endpoint the host in it",
            )
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return errors.UsageError(
                f"{self.endpoint} does not speak TLS 1.3 ({error.reason or error}): the token was not sent to it",
                hint=f"check that it is the control port of the run, without a proxy before it; {_HINT}",
            )
        return None


def way_to(endpoint: str, token: str, environment: Mapping[str, str] | None = None) -> Way:
    """Return how to reach the control port at ``endpoint`` with this join token.

    It opens no connection.

    :param token: empty for pages that need no token.
    :param environment: instead of ``os.environ``.
    :raises replicas.errors.UsageError: the port is not on loopback, and neither token
        nor environment identify its key; or the token is malformed, or the CA's file
        cannot be used.
    """
    source = os.environ if environment is None else environment
    host = split(endpoint)[0]
    key, secret = JoinToken.parse(token)
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    authority = source.get(environ.CA_FILE)
    if key == PLAIN:
        return Way(endpoint, None, host, headers)
    if key:
        return Way(endpoint, _pinned(endpoint, key), host, headers)
    if authority:
        return Way(endpoint, _by_authority(authority), host, headers)
    if is_local(host):
        return Way(endpoint, None, host, headers)
    what = "the token names no key" if token else "no token given"
    raise errors.UsageError(
        f"{what}, so the control port at {endpoint} cannot be verified; nothing was sent to it",
        hint=f"{_HINT}; or name its CA in {environ.CA_FILE}; or begin the token with R1{PLAIN}. where the network "
        'itself protects it and the run has tls = "off"',
    )


def split(endpoint: str) -> tuple[str, int]:
    """Return ``(host, port)`` of ``host:port`` or ``[ipv6]:port``, without brackets.

    :raises ValueError: the port is not a number.
    """
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Return True if a host is a loopback address, or the name ``localhost``."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _pinned(endpoint: str, key: str) -> ssl.SSLContext:
    """Return a client's TLS context whose handshake fails unless the port has this key.

    :param endpoint: for the error. :param key: hash of the key, from the token.
    """
    context = _client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def check(certificate: bytes | None) -> None:
        """Raise WrongKey unless the certificate (in DER) has the key."""
        found = ""
        with contextlib.suppress(ValueError):  # it is not a control port
            found = key_hash(certificate) if certificate else ""
        if not hmac.compare_digest(found, key):
            text = (
                f"the control port at {endpoint} has another key than the token names "
                f"({found[:16] or 'none'}..., not {key[:16]}...): the token was not sent to it"
            )
            raise WrongKey(1, text)

    class PinnedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            """Do the handshake; raise WrongKey unless the port has the key."""
            super().do_handshake()
            check(self.getpeercert(binary_form=True))

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            """Do the handshake; raise WrongKey unless the port has the key."""
            super().do_handshake(block)
            check(self.getpeercert(binary_form=True))

    context.sslobject_class = PinnedObject
    context.sslsocket_class = PinnedSocket
    return context


def _by_authority(path: str) -> ssl.SSLContext:
    """Return a client's TLS context that accepts certificates signed by a CA.

    :param path: file with the CA's certificate.
    :raises replicas.errors.UsageError: the file cannot be used.
    """
    context = _client_context()
    try:
        context.load_verify_locations(path)
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror or error
        raise errors.UsageError(
            f"{environ.CA_FILE}={path} cannot be used: {why}", hint="it must name certificates in PEM"
        ) from error
    return context


def _client_context() -> ssl.SSLContext:
    """Return a client's context for TLS 1.3 that trusts no certificate yet."""
    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    found: ssl.SSLContext = context
    return found
