"""What a shim tells its agent: the state of its part, and answers. Standard library."""

from __future__ import annotations

import os
import socket
from typing import Any

from replicas import __version__
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec, note, plain
from replicas.supervisor.wire.part_state import LogLoss, PartState, first_state


class Teller:
    """The state of a part, sent at each change.

    :ivar state: as last changed; :meth:`pong` sends it again if it found no room.
    :ivar control: the connection to the agent; None: that is gone.
    """

    def __init__(self, control: socket.socket, spec: PartSpec) -> None:
        self.control: socket.socket | None = control
        self.state = first_state(spec, os.getpid())._replace(release=__version__)
        self._told = False

    def now(self, **changes: Any) -> None:
        """Change the state, and send all of it."""
        self.state = self.state._replace(**changes)
        self._told = self.send(state_message(self.state))

    def lost(self, loss: LogLoss) -> None:
        """Count lines that a log has lost."""
        losses = {(one.where, one.reason): one for one in self.state.losses}
        known = losses.get((loss.where, loss.reason))
        losses[loss.where, loss.reason] = loss._replace(lines=loss.lines + (known.lines if known else 0))
        self.now(losses=tuple(losses.values()))

    def pong(self) -> None:
        """Answer a ping."""
        if self._told:
            self.send({"type": "pong"})
        else:
            self.now()

    def send(self, message: orders.Message) -> bool:
        """Send without waiting; False: the agent is gone, or has no room for it."""
        if self.control is None:
            return False
        try:
            return orders.send(self.control, message)
        except OSError as error:  # e.g. this process has no descriptor left
            note(f"the agent cannot be told {message['type']!r}: {error.strerror}")
            return False


def state_message(state: PartState) -> orders.Message:
    return {"type": "state", "state": plain(state)}
