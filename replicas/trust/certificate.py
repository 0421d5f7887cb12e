"""The key, certificate and TLS settings of a control port or a carrier.

A configured certificate is used as it is. Otherwise the port has a self-signed one,
which only proves that the port has the key: clients know the key by its hash in the
join token. The key is on an elliptic curve (P-256), with handshakes of a quarter of a
millisecond.

Only TLS 1.3 is spoken: it has no renegotiation, and no older version to fall back to.
No session is resumed, so there is no early data that could be replayed.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from replicas import errors
from replicas.linux import private

KEY_FILE = "key.pem"
"""The port's own key and certificate, in a run's state folder."""
_NO_END = datetime.datetime(9999, 12, 31, 23, 59, 59)
_BEGIN = datetime.datetime(2020, 1, 1)
_NAME = "replicas"


def key_hash(certificate: bytes) -> str:
    """Return the SHA-256, in hexadecimal, of a certificate's public key.

    The hash is of the key's SubjectPublicKeyInfo, not of the certificate. A join token
    contains that of the control port's key; a client compares it with the hash of the
    key that the port shows in the TLS handshake.

    :param certificate: in DER.
    :raises ValueError: it is malformed, or its key is of an unknown kind.
    """
    from cryptography import x509  # takes 50 ms, which a run on loopback need not spend
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
        return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()
    except Exception as error:  # unknown peers may send any certificate, and each kind has its own error
        raise ValueError(f"the certificate cannot be read: {error}") from error


def make_pem() -> bytes:
    """Return a new private key and its self-signed certificate, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_NO_END)
        .sign(key, hashes.SHA256())
    )
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return key.private_bytes(pem, form, no_password) + certificate.public_bytes(pem)


class PortKey:
    """The TLS key and certificate of one control port, ready for its server.

    :ivar hash: hash of the key, as in join tokens.
    :ivar context: TLS context of the server.
    """

    def __init__(self, context: ssl.SSLContext, hash_: str) -> None:
        """Keep a server's TLS context and the hash of its key.

        :param hash_: as join tokens contain it: see :func:`key_hash`.
        """
        self.context = context
        self.hash = hash_

    @classmethod
    def configured(cls, certificate: Path, key: Path | None = None) -> PortKey:
        """Read PEM files that the operator has configured, and return their port key.

        :param key: file of the private key; default: it is in the certificate's file.
        :raises replicas.errors.UsageError: they cannot be read, or do not match.
        """
        try:
            pem = certificate.read_text("ascii")
            return cls(_context(certificate, key), key_hash(ssl.PEM_cert_to_DER_cert(_first(pem))))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            both = f"{certificate} and the key {key}" if key is not None else f"{certificate}, with its key in it,"
            raise errors.UsageError(
                f"control.certificate {both} cannot be used: {getattr(error, 'reason', None) or error}",
                hint="name PEM files: the certificate with its intermediate ones, and its key without a password",
            ) from error

    @classmethod
    def of_folder(cls, folder: Path) -> PortKey:
        """Return the port key saved in a folder; if there is none, make one there.

        The file is ``key.pem``, readable by this user only; a missing folder is made,
        too. The caller must hold the folder's lock.

        :raises replicas.errors.UsageError: it cannot be made or used.
        """
        path = folder / KEY_FILE
        try:
            try:
                pem = private.read(path)
            except FileNotFoundError:
                private.make_folder(folder)
                pem = make_pem()
                private.replace(path, pem)
            return cls.of_pem(pem)
        except (OSError, ValueError) as error:
            hint = getattr(error, "hint", "") or f"remove {path}: tokens then name another key"
            raise errors.UsageError(f"the control port's key in {path} cannot be used: {error}", hint=hint) from error

    @classmethod
    def of_pem(cls, pem: bytes) -> PortKey:
        """Return the port key of a private key and its certificate in PEM.

        Writes no file.

        :raises ValueError, ssl.SSLError: they cannot be used.
        """
        return cls(context_of(pem), key_hash(_der(pem)))


def context_of(pem: bytes) -> ssl.SSLContext:
    """Return a server's TLS context for a private key and its certificate in PEM.

    :raises ValueError, ssl.SSLError: they cannot be used.
    """
    with _as_file(pem) as path:
        return _context(path)


def certificate_hash(pem: bytes) -> str:
    """Return the SHA-256, in hexadecimal, of the first certificate in a PEM text.

    The hash is of its DER form.

    :raises ValueError: there is no certificate.
    """
    return hashlib.sha256(_der(pem)).hexdigest()


def _der(pem: bytes) -> bytes:
    """Return the first certificate of the PEM as DER; raise ValueError without one."""
    return ssl.PEM_cert_to_DER_cert(_first(pem.decode("ascii")))


def _context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """Return a server's TLS 1.3 context for a certificate and key in PEM files.

    :param key: file of the private key; None: it is in the certificate's file.
    :raises OSError, ValueError: they cannot be used, or the key has a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _no_password() -> str:
    """Raise ValueError instead of returning a password, as none is configured.

    OpenSSL calls this if the private key in a file is encrypted.
    """
    raise ValueError("the key has a password")


def _first(pem: str) -> str:
    """Return the first certificate of a PEM text; raise ValueError without one."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = pem.partition(begin)
    body, ended, _ = rest.partition(end)
    if not found or not ended:
        raise ValueError("it has no certificate")
    return begin + body + end


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    """Context manager: yield the path of a file in memory (memfd) with this data.

    The path is valid in the block. OpenSSL reads keys from files only.
    """
    descriptor = os.memfd_create("replicas-key")
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
