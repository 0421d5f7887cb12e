"""The key of an archive: its writer signs with it, readers get the public one.

An Ed25519 key (RFC 8032). The private one is a file (PEM, PKCS 8) that only its owner
can read. The public one is a text, ``ed25519:`` and 64 hexadecimal digits, for
``replicas.follow(..., key=...)``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from replicas import errors
from replicas.archive.format import Verify
from replicas.linux import private

_PREFIX = "ed25519:"


class ArchiveKey:
    """A private key. :ivar public: the text that readers are given."""

    def __init__(self, pem: bytes) -> None:
        """Read a private key in PEM; raise ValueError if it is of another kind."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key = load_pem_private_key(pem, None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("it is not an Ed25519 key")
        self.sign = key.sign
        self.public: str = _PREFIX + key.public_key().public_bytes_raw().hex()

    @classmethod
    def of_file(cls, path: Path) -> ArchiveKey:
        """Return the key in a file; if there is no such file, make one with a new key.

        Its folder is made, too. Only this user can read them. The public key is
        written beside it, to a file with ``.pub`` behind its name.

        :raises replicas.errors.UsageError: it cannot be made or used.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                return cls(private.read(path))
            private.make_folder(path.parent)
            private.replace(path, make_pem(), sync=True)  # a key that is lost ends its archive
            key = cls(private.read(path))
            path.with_name(f"{path.name}.pub").write_text(f"{key.public}\n")
            return key
        except (OSError, ValueError, TypeError) as error:  # TypeError: it has a password
            hint = getattr(error, "hint", "") or "name a PEM file with an Ed25519 key without a password"
            raise errors.UsageError(f"the archive's key {path} cannot be used: {error}", hint=hint) from error


def make_pem() -> bytes:
    """Return a new private key in PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, form, no_password)


def verifier(public: str) -> Verify:
    """Return the function that checks signatures of a public key, given as text.

    :raises replicas.errors.UsageError: it is not valid.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public.removeprefix(_PREFIX))).verify
    except ValueError as error:
        hint = f"give {_PREFIX} and 64 digits, as the archive's writer logs it, and keeps it in FILE.pub"
        raise errors.UsageError(f"{public!r} is not a public key", hint=hint) from error
