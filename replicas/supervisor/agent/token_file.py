"""The file in which the ranks of a node read the run's token."""

from __future__ import annotations

from pathlib import Path

from replicas.common.logs import Log
from replicas.linux import private

log = Log("replicas.agent")


class TokenFile:
    """The file in which the ranks of a node read the run's token (mode 0600).

    An error of the disk does not end the agent: two tokens are valid at a time, so the
    old one in the file works for a while. Writing is tried again each second.
    """

    def __init__(self, path: Path) -> None:
        """Store the path of the file; write nothing before :meth:`set_token`."""
        self.path = path
        self._token = self._written = ""
        self._problem = ""

    def set_token(self, token: str) -> None:
        """Keep a new token (the ranks' secret to join), and write it to the file.

        After an error, :meth:`write_if_changed` tries again.
        """
        self._token = token
        self.write_if_changed()

    def write_if_changed(self) -> None:
        """Write the token to the file, unless it is there. To be called each second.

        An error is logged, and does not raise.
        """
        if self._token == self._written:
            return
        try:
            private.make_folder(self.path.parent)
            private.replace(self.path, self._token.encode())
        except OSError as error:
            words = error.strerror or str(error)
            if words != self._problem:
                log.error("trying again to write the run's token to %s, which failed: %s", self.path, words)
            self._problem = words
            return
        if self._problem:
            log.warning("the run's token is written to %s again", self.path)
        self._written, self._problem = self._token, ""
