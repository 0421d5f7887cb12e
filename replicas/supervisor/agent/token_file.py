"""The file in which the ranks of a node read the run's token."""

from __future__ import annotations

from pathlib import Path

from replicas.common.logs import Log
from replicas.linux import private

log = Log("replicas.agent")


class TokenFile:
    """The token of a node, kept at this path (mode 0600).

    A disk that does not take it is no reason to serve no longer: two tokens are valid
    at a time, so the file's is of use for a while, and is replaced when it can be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = self._written = ""
        self._problem = ""

    def keep(self, token: str) -> None:
        """Write it, now or at a later :meth:`look`."""
        self._token = token
        self.look()

    def look(self) -> None:
        """Write what is not written yet; call it each second."""
        if self._token == self._written:
            return
        try:
            private.make_folder(self.path.parent)
            private.replace(self.path, self._token.encode())
        except OSError as error:
            words = error.strerror or str(error)
            if words != self._problem:
                log.error("the token cannot be written to %s: %s; it is tried again", self.path, words)
            self._problem = words
            return
        if self._problem:
            log.warning("the token is written to %s again", self.path)
        self._written, self._problem = self._token, ""
