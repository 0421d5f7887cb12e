"""The verbs by which a follower controls one inference server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from replicas import errors

if TYPE_CHECKING:
    from replicas.channel import Update

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to requests in flight during a load: they are frozen and continued with
the new weights, waited for, or aborted."""

VerifyLoad = Literal["always", "first", "never"]
"""When an engine's own tensors are compared with the version that it has loaded: each
time, after the first load of each manifest (names, shapes, dtypes), or never."""


class Refused(errors.SyncError):
    """The engine refuses this version, and its model is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity with which a server's own workers join the channel.

    :ivar channel: its name.
    :ivar replica: index of the server's replica in its group.
    :ivar world_size: ranks of the replica: the follower, rank 0, and the workers.
    :ivar join: further arguments of :func:`replicas.join` that the follower was given,
        such as ``endpoint``; those that are missing are the environment's.
    """

    channel: str
    replica: int
    world_size: int
    join: Mapping[str, Any] = field(default_factory=dict)


class GateLike(Protocol):
    """A gate in front of a server: it admits requests or holds them back."""

    @property
    def version(self) -> int:
        """The version of the last :meth:`open`, also after a :meth:`shut`; 0 before the
        first."""

    def open(self, version: int) -> None:
        """Admit requests, and record this version as the one with which the server
        answers."""

    def shut(self) -> None:
        """Admit no more requests, until the next :meth:`open`."""

    def paused(self, seconds: float) -> None:
        """Add to the gate's total the ``seconds`` for which one load has paused the
        server."""


@runtime_checkable
class DemandGate(GateLike, Protocol):
    """A gate that knows of loads before they begin, and of labels: it can tell which
    version answers a request."""

    def load(self, version: int) -> None:
        """Note that this version may answer from now on, until the next :meth:`open`.

        Its load begins. 0 means that the load was refused.
        """

    def set_labels(self, labels: Mapping[str, int]) -> None:
        """Note the version of each label of the channel."""


class Engine(Protocol):
    """The verbs by which :func:`replicas.engine.follow` loads versions into one server.

    A subclass implements ``pause``, ``load``, ``reset_caches`` and ``resume``; the
    other verbs default to a server that is already up and has no workers of its own.
    One thread calls all verbs but ``health`` and ``abort``.

    ``timeout_s`` is the number of seconds after which a verb that hangs has to raise;
    an engine that knows that its server is at work may wait longer. A verb that fails
    raises :class:`replicas.errors.SyncError`.

    :ivar name: for errors and logs, such as "vLLM 0.32.0"; known when it is up.
    :ivar url: the server's address for routers, shown as ``info["url"]``.
    :ivar workers: ranks of the replica that the server itself makes members of the
        channel, known when it is up; 0: the follower alone is a member, and
        :meth:`load` reads the follower's own update.
    :ivar pauses: whether requests wait during a load. False, as with adapters: the time
        of a load does not count as a pause.
    """

    name: str = "the engine"
    url: str = ""
    workers: int = 0
    pauses: bool = True

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server answers, and start to watch its health. The default
        does nothing.

        :raises replicas.errors.SyncError: the server is gone, or not up in time.
        :raises replicas.errors.UsageError: the server cannot be followed, such as an
            old release.
        """
        return

    def attach(self, identity: Identity, timeout_s: float) -> None:
        """Have the server's workers join the channel, as ranks 1 to ``workers``; the
        follower is rank 0. The default, for a server without workers, does nothing."""
        return

    def check(self, update: Update, timeout_s: float) -> str:
        """Return why the version does not fit the model, or an empty text if it fits or
        the engine cannot tell.

        Nothing is loaded, and the server keeps serving. The default is an empty text.
        Called when names, shapes or dtypes differ from those of the last version that
        fitted.
        """
        return ""

    def drop(self, update: Update, reason: str, timeout_s: float) -> None:
        """Release what :meth:`check` has opened: the version is not loaded, as another
        target of a channel with ``adopt_together`` cannot load it. The default does
        nothing."""
        return

    @abstractmethod
    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop the server's computation until :meth:`resume`; return when it is
        stopped.

        :param mode: before, keep the requests in flight frozen (``"keep"``), wait for
            them to end (``"wait"``), or abort them (``"abort"``).
        """

    @abstractmethod
    def load(self, update: Update, timeout_s: float) -> None:
        """Load the version as a whole, whatever state an earlier load has left; return
        when it is loaded.

        Called once more after a failure. ``update.path`` is the version as a
        safetensors file, ``update.load_into(model)`` copies it.

        :raises replicas.engine.Refused: the version does not fit, and the model is
            unchanged: the server continues with it.
        """

    @abstractmethod
    def reset_caches(self, timeout_s: float) -> None:
        """Have the server forget everything computed with the previous version:
        prefixes, keys and values of kept requests, outputs of encoders, external
        stores.

        :raises replicas.errors.SyncError: a cache cannot be reset.
        """

    @abstractmethod
    def resume(self, timeout_s: float) -> None:
        """Let the server compute again, first the requests that :meth:`pause` has
        kept."""

    def warm_up(self, timeout_s: float) -> None:
        """Have the server compute an answer, before its gate opens for the first time.
        The default does nothing."""
        return

    def version(self) -> int | None:
        """Return the number of the version that the server itself reports, or None if
        it reports none."""
        return None

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        """Compare the server's own tensors with the version.

        :returns: the names of what differs, or an empty text if nothing does; None if
            the engine cannot compare.
        """
        return None

    def health(self) -> str:
        """Return why the server is gone, or an empty text while it lives. Returns
        immediately; called on any thread."""
        return ""

    def abort(self, reason: str) -> None:
        """Make the current verb and every later one fail; called on any thread. The
        default does nothing."""
        return

    def close(self) -> None:
        """Stop the watch of :meth:`wait_until_up`. The server itself keeps running."""
        return
