"""Report that this rank can load a version; receive whether all targets load it now.

CanLoad -> :mod:`replicas.core.versions.lockstep` decides -> LoadDecided. There is at
most one open update, so at most one such wait. It has no timer: the coordinator
enforces the channel's deadline, and a new coordinator gets CanLoad again. After a long
time without a session the update is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from replicas import errors
from replicas.channel.session.hub import Hub
from replicas.channel.session.pending import Promise
from replicas.messages import CanLoad, LoadDecided

Tell = Callable[[errors.ReplicasError | None], None]


class _Wait(NamedTuple):
    """``tell`` is a weak reference, so that a dropped update is noticed."""

    said: CanLoad
    pending: Promise[None]
    tell: weakref.WeakMethod[Tell]


class LockstepWait:
    """Waits for the adoption of the open update of one rank."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._wait: _Wait | None = None

    @property
    def on(self) -> bool:
        """True if the channel has ``adopt_together``."""
        return self._hub.settings.adopt_together

    def await_decision(self, version: int, whole: bool, tell: Tell) -> Promise[None]:
        """Caller's thread: send CanLoad; return a Promise that ends with the decision.

        :param tell: a method, called just before: with None if all targets load the
            version now, else with the error.
        """
        pending: Promise[None] = self._hub.pending(f"adoption of version {version}")
        if self.on:
            self._hub.call(self._send_can_load, _Wait(CanLoad(version, whole), pending, weakref.WeakMethod(tell)))
        else:
            pending.resolve(None)
        return pending

    # ------------------------------------------------------------ session thread

    def _send_can_load(self, wait: _Wait) -> None:
        self._wait = wait
        self.new_term()
        if self._hub.over is not None:
            self.end(self._hub.over)

    def new_term(self) -> None:
        if self._wait is not None:
            self._hub.send(self._wait.said)

    def decided(self, message: LoadDecided) -> None:
        error = None if message.error is None else message.error.exception()
        setattr(self._hub.held_versions, "adopted" if error is None else "unadopted", message.version)
        if self._wait is not None and self._wait.said.version == message.version:
            self.end(error)

    def end(self, error: errors.ReplicasError | None) -> None:
        """End the wait, if there is one."""
        wait, self._wait = self._wait, None
        if wait is None:
            return
        if (tell := wait.tell()) is not None:
            tell(error)
        if error is None:
            wait.pending.resolve(None)
        else:
            wait.pending.fail(error)
