"""The secrets of a run: join tokens as text, their roles, and their rotation. Pure.

A *join token* is one text that a process needs to take part. It names the key of the
control port, so that joining needs no other set-up and no trust in the network:

================== ==============================================================
``R1HASH.SECRET``  the port speaks TLS, and ``HASH`` is that of its public key
``R1plain.SECRET`` the operator has switched TLS off, in words (``tls = "off"``)
``SECRET``         on loopback, or with a certificate that a CA has signed
================== ==============================================================

``HASH`` is the SHA-256, in hexadecimal, of the key's SubjectPublicKeyInfo, so a
certificate that is renewed with the same key leaves tokens valid. Only ``SECRET`` goes
over the wire.

A *member's* secret admits to sessions, but not to orders or output; an *operator's*
admits to all. Each role has two valid secrets, the present and the previous one, so
that a rotation disconnects no client. Digests of earlier secrets are kept, to answer
"replaced" instead of "wrong".
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import msgspec

from replicas import errors

Role = Literal["member", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

PLAIN = "plain"
"""In place of the hash if the control port does not speak TLS."""
OPERATOR_FILE = "operator-token"
"""File of the operators' token in a state folder; the members' file is ``token``."""
_HASH = re.compile(r"[0-9a-f]{64}")
_MARK = "R1"
_SECRET_NBYTES = 24
_RETIRED = 16


def new_secret() -> str:
    """Return a new random secret, as text for URLs."""
    return secrets.token_urlsafe(_SECRET_NBYTES)


class JoinToken(NamedTuple):
    """A join token in parts.

    :ivar key: the hash of the control port's key, :data:`PLAIN`, or empty.
    """

    key: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Split a token into its parts; a text without ``R1`` is a bare secret.

        :raises replicas.errors.UsageError: it begins with ``R1`` and has no hash. The
            message does not show the token.
        """
        key, dot, secret = text.partition(".")
        if not dot or not key.startswith(_MARK):
            return cls("", text)
        key = key.removeprefix(_MARK)
        if key != PLAIN and not _HASH.fullmatch(key):
            raise errors.UsageError(
                f'the token begins with "{_MARK}", as a join token does, but names no key',
                hint="copy all of it: replicas token shows it",
            )
        return cls(key, secret)

    def __str__(self) -> str:
        """Return the whole token as text, or the bare secret if it names no key."""
        return f"{_MARK}{self.key}.{self.secret}" if self.key else self.secret


def another_key(what: str) -> errors.UsageError:
    """Return (do not raise) the error for a token that names another port's key.

    :param what: the variable or file that has the token, for the message.
    """
    return errors.UsageError(
        f"{what} was made for another key than the control port has",
        hint="set control.certificate and control.key to those that it was made for, or give only the part after its dot",
    )


class SavedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of a run as saved in its state folder, the present one first."""

    member: tuple[str, ...]
    operator: tuple[str, ...]
    retired: tuple[str, ...] = ()


class Tokens:
    """The valid secrets of a run, by role (member, operator): two at most for each.

    :param member: the members' secret; default: a new one.
    :param operator: the operators' secret; default: a new one.
    """

    def __init__(self, member: str | None = None, operator: str | None = None) -> None:
        """Begin with one valid secret for each role, the given or a new random one."""
        self._secrets: dict[Role, list[str]] = {
            "member": [member if member is not None else new_secret()],
            "operator": [operator if operator is not None else new_secret()],
        }
        self._retired: list[str] = []
        self._watched: dict[object, tuple[str, Callable[[], None]]] = {}
        self.key = ""
        """Key in join tokens: a hash, :data:`PLAIN`, or empty on loopback."""

    @classmethod
    def restored(cls, saved: SavedTokens) -> Tokens:
        """Return tokens with the secrets that :meth:`saved` has returned.

        They have no :attr:`key` yet, and watch no connections.
        """
        made = cls(saved.member[0], saved.operator[0])
        made._secrets = {"member": [*saved.member[:2]], "operator": [*saved.operator[:2]]}
        made._retired = [*saved.retired]
        return made

    def saved(self) -> SavedTokens:
        """Return the secrets in the form to be saved, without writing a file."""
        return SavedTokens(
            member=tuple(self._secrets["member"]),
            operator=tuple(self._secrets["operator"]),
            retired=tuple(self._retired),
        )

    def copy(self) -> Tokens:
        """Return a copy of the secrets, which the caller may change and save.

        :meth:`replace_by` then takes the copy over. Connections that are
        :meth:`watched` stay with this object.
        """
        made = Tokens.restored(self.saved())
        made.key = self.key
        return made

    def replace_by(self, changed: Tokens) -> None:
        """Take over the secrets of ``changed``, a changed copy; drop the present ones.

        Also call the ``end`` of each :meth:`watched` connection whose secret is no
        longer valid. :attr:`key` stays.
        """
        old = [one for role in ROLES for one in self._secrets[role] if one not in changed._secrets[role]]
        self._secrets = {role: [*changed._secrets[role]] for role in ROLES}
        self._retired = [*changed._retired]
        self._end_users_of(old)

    def text(self, role: Role) -> str:
        """Return the present join token of a role, which names :attr:`key` if set."""
        return str(JoinToken(self.key, self._secrets[role][0]))

    def secret(self, role: Role) -> str:
        """Return the present secret of a role: the part of its token that is sent."""
        return self._secrets[role][0]

    def both_valid(self, role: Role) -> bool:
        """Return True if the role's previous token is valid beside the present one."""
        return len(self._secrets[role]) > 1

    # ------------------------------------------------------------ who asks

    def role_of(self, headers: Mapping[str, str]) -> Role | None:
        """Return the role whose secret these headers show, or None for no valid one.

        :param headers: of a request; read under the name ``authorization``.
        """
        return self.role(headers.get("authorization", "").encode())

    def role(self, authorization: bytes) -> Role | None:
        """Return the role whose secret the header shows, or None if it is not valid.

        :param authorization: the header's value, ``Bearer SECRET`` or with a whole
            token.
        """
        given = _secret_of(authorization)
        found: Role | None = None
        for role in ROLES:
            for secret in self._secrets[role]:
                if hmac.compare_digest(given, secret.encode()):
                    found = role  # operator, if both roles have the same secret
        return found

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Return why a request that :meth:`role_of` rejects is refused, for its sender.

        It is "missing token", "old token: ..." for a retired one, or "wrong token".
        """
        authorization = headers.get("authorization", "")
        if not authorization:
            return "missing token"
        if _digest(_secret_of(authorization.encode())) in self._retired:
            return "old token: it was replaced by a newer one"
        return "wrong token"

    # ------------------------------------------------------------ rotation

    def rotate(self, role: Role, secret: str | None = None) -> None:
        """Make a new secret the present one of a role; the caller saves it.

        The present one until now becomes the previous one, and stays valid. The
        previous one until now becomes invalid, and the :meth:`watched` connections that
        use it are ended.

        :param secret: the new secret; default: a random one.
        :raises replicas.errors.UsageError: the secret is valid for the role already;
            nothing was changed.
        """
        present = self._secrets[role]
        secret = new_secret() if secret is None else secret
        if secret in present:
            raise errors.UsageError(f"rotate: this {role} token is in use already", hint="make another token")
        self._secrets[role] = [secret, present[0]]
        self._retire(present[1:])

    def revoke_old(self, role: Role) -> None:
        """Make the previous token of a role invalid; end the connections that use it.

        The present one stays. Without a previous one do nothing.
        """
        old = self._secrets[role][1:]
        del self._secrets[role][1:]
        self._retire(old)

    def _retire(self, old: list[str]) -> None:
        """Keep the digests of secrets that are no longer valid, the last 16.

        Also end the connections that use them.

        :param old: the secrets.
        """
        self._retired = [*self._retired, *(_digest(one.encode()) for one in old)][-_RETIRED:]
        self._end_users_of(old)

    def _end_users_of(self, old: list[str]) -> None:
        """Call the ``end`` of each :meth:`watched` connection that uses an old secret.

        :param old: the secrets.
        """
        for secret, end in [*self._watched.values()]:
            if secret in old:
                end()

    @contextmanager
    def watched(self, headers: Mapping[str, str], end: Callable[[], None]) -> Iterator[None]:
        """Context manager: call ``end`` if the token in ``headers`` becomes invalid.

        Only a change within the block counts: the token may have been invalid before.

        :param headers: of the request that opened the connection.
        :param end: ends the connection. Called on the thread that retires the token, in
            :meth:`rotate`, :meth:`revoke_old` or :meth:`replace_by`.
        """
        key = object()
        self._watched[key] = _secret_of(headers.get("authorization", "").encode()).decode("latin-1"), end
        try:
            yield
        finally:
            del self._watched[key]


def _secret_of(authorization: bytes) -> bytes:
    """Return the secret in an Authorization header's value; do not check it.

    The value is ``Bearer SECRET``, or ``Bearer`` and a whole token (``R1HASH.SECRET``),
    of which the part after the dot is returned. Return ``b""`` for any other scheme.
    """
    kind, _, given = authorization.partition(b" ")
    if kind.lower() != b"bearer":
        return b""
    given = given.strip()
    mark, dot, secret = given.partition(b".")
    return secret if dot and mark.startswith(_MARK.encode()) else given  # people paste the whole token


def _digest(secret: bytes) -> str:
    """Return the SHA-256 of a secret in hexadecimal."""
    return hashlib.sha256(secret).hexdigest()
