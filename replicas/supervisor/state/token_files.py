"""The files of a run's tokens: for members, for commands, and for the next start.

::

    <state_dir>/token            the present join token of members, which they read
    <state_dir>/operator-token   the token of operators, for this user's commands
    <state_dir>/tokens.json      present and previous secrets of both roles

All have the mode 0600 and are replaced atomically, so a reader always gets a valid
token. A change is on disk before it is in force, and the file that others read comes
last: after a failed write the old tokens are valid. The files are removed at the end of
the run; a resumed run keeps them. If the config names a file for a role, its secret
comes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from replicas import errors
from replicas.common.decoding import MALFORMED
from replicas.linux import private
from replicas.messages import arguments
from replicas.telemetry.events import TokenChange, TokenChanged
from replicas.trust.tokens import OPERATOR_FILE, ROLES, JoinToken, Role, SavedTokens, Tokens, another_key


class TokenFiles:
    """The files of a run's join tokens, for the process that has the state folder."""

    def __init__(self, folder: Path) -> None:
        """Store the paths of the files in ``folder``; read and write nothing."""
        self._path = folder / "tokens.json"
        self._files: dict[Role, Path] = {"member": folder / "token", "operator": folder / OPERATOR_FILE}
        self._given: dict[Role, tuple[Path, JoinToken]] = {}
        self.changes: list[TokenChanged] = []
        """Changes made by :meth:`open`."""

    def open(self, known: str | None, given: Mapping[Role, Path]) -> Tokens:
        """Return the valid tokens of a run: restored, new, or from the config's files.

        Write nothing. What was made or rotated is in :attr:`changes`.

        :param known: the members' token of a resumed run; None for a new run.
        :param given: files of the config, by role.
        :raises replicas.errors.UsageError: a file cannot be read, or holds no token.
        """
        restored = self._restored() if known is not None else None
        tokens = restored or Tokens(known and JoinToken.parse(known).secret)
        if restored is None:
            self._note("made", *(role for role in ROLES if known is None or role != "member"))
        self._given = {role: (path, read_given(role, path)) for role, path in given.items()}
        for role, (_, token) in self._given.items():
            if token.secret != tokens.secret(role):
                tokens.rotate(role, token.secret)
                if known is None:
                    tokens.revoke_old(role)  # no member has the random one
                else:
                    self._note("rotated", role)
        return tokens

    def _note(self, change: TokenChange, *roles: Role) -> None:
        """Add an event for a change of each role to :attr:`changes`."""
        self.changes += [TokenChanged(role=role, change=change) for role in roles]

    def _restored(self) -> Tokens | None:
        """Return the tokens of ``tokens.json``, or None without a valid file."""
        try:
            return Tokens.restored(msgspec.json.decode(private.read(self._path), type=SavedTokens))
        except (FileNotFoundError, *MALFORMED):  # an earlier release wrote no such file
            return None

    def check(self, key: str) -> None:
        """Check the tokens from the config's files against the control port's key.

        :param key: hash of the port's key.
        :raises replicas.errors.UsageError: a file's token names another key.
        """
        for path, token in self._given.values():
            if token.key not in ("", key):
                raise another_key(f"the token in {path}")

    def rotate(self, tokens: Tokens, role: Role) -> None:
        """Replace the role's token in ``tokens``, and write nothing.

        The new one is random, or that of the config's file. The old one stays valid.

        :raises replicas.errors.UsageError: the file still has the present token, has
            none, or its token is of another control port.
        """
        if role not in self._given:
            tokens.rotate(role)
            return
        path = self._given[role][0]
        token = read_given(role, path)
        if token.secret == tokens.secret(role):
            raise errors.UsageError(
                f"the {role} token in {path} is in use already", hint="put a new token into the file first, then rotate"
            )
        if token.key not in ("", tokens.key):
            raise another_key(f"the token in {path}")
        tokens.rotate(role, token.secret)

    def write(self, tokens: Tokens, *, last: Role = "member") -> None:
        """Write all files of tokens, ``tokens.json`` first, with a sync of each.

        :param last: the role whose file is written last, because its token changes: if
            an earlier write fails, the file keeps the old token, which is valid.
        :raises OSError: writing failed.
        """
        private.replace(self._path, msgspec.json.encode(tokens.saved()), sync=True)
        for role in sorted(ROLES, key=last.__eq__):
            private.replace(self._files[role], tokens.text(role).encode(), sync=True)

    def change(self, tokens: Tokens, role: Role, change: Callable[[Tokens], None]) -> None:
        """Change the tokens of a role: on disk, and then in force.

        After an OSError, no token has changed: the token in the role's file stays
        valid, however often the change is tried again.

        :param tokens: the tokens in force, which are changed in place.
        :param change: changes a copy of them.
        """
        changed = tokens.copy()
        change(changed)
        self.write(changed, last=role)
        tokens.replace_by(changed)

    def remove(self) -> None:
        """Remove all files of tokens that are in the folder."""
        for path in (self._path, *self._files.values()):
            private.remove(path)


def read_given(role: Role, path: Path) -> JoinToken:
    """Return the token in a file that the config names for the role.

    :raises replicas.errors.UsageError: the file cannot be read, or has no token.
    """
    name = "token_file" if role == "member" else f"{role}_token_file"
    try:
        text = arguments.token(f"control.{name} {path}: the token", path.read_text("ascii").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UsageError(f"control.{name} {path} cannot be read: {error}") from error
    return JoinToken.parse(text)
