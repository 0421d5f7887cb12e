"""One inference server, as its follower sees it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    """The engine does not take this version, and is as it was before."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """As what a server's own workers join the channel.

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
    """What lets requests in to a server, and keeps them out."""

    @property
    def version(self) -> int:
        """The version that was let in last; 0: none yet."""

    def open(self, version: int) -> None:
        """Requests may come; the server answers with this version."""

    def shut(self) -> None:
        """No request may come."""

    def paused(self, seconds: float) -> None:
        """The server was paused for so long for a load."""


class Engine(Protocol):
    """The verbs by which :func:`replicas.engine.follow` loads versions into one server.

    A class that inherits from this one writes ``pause``, ``load``, ``reset_caches``
    and ``resume``; for the others it has what fits a server without workers of its own
    that is up already. One thread calls all verbs, but for ``health`` and ``abort``.

    Times ``timeout_s`` are seconds after which a verb that hangs is to raise; an engine
    that can tell that its server is at work may let it go on. A verb that fails raises
    :class:`replicas.errors.SyncError`.

    :ivar name: for errors and logs, such as "vLLM 0.32.0"; known when it is up.
    :ivar url: the server's address for routers, shown as ``info["url"]``.
    :ivar workers: ranks of the replica that the server itself makes members of the
        channel, known when it is up; 0: the follower alone is a member, and
        :meth:`load` reads the follower's own update.
    :ivar pauses: False: it goes on serving during a load, as with adapters; the time of
        a load is no pause then.
    """

    name: str = "the engine"
    url: str = ""
    workers: int = 0
    pauses: bool = True

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server answers; then begin to watch it.

        :raises replicas.errors.SyncError: it is gone, or not up in time.
        :raises replicas.errors.UsageError: it cannot be followed, such as an old
            release.
        """
        return

    def attach(self, identity: Identity, timeout_s: float) -> None:
        """Have the server's workers join the channel, as ranks 1 to ``workers``."""
        return

    def check(self, update: Update, timeout_s: float) -> str:
        """Why the version does not fit the model; empty: it does, or is not known to.

        Nothing is loaded, and the server goes on serving. Called when names, shapes or
        dtypes are others than those of the last version that fitted.
        """
        return ""

    def drop(self, update: Update, reason: str, timeout_s: float) -> None:
        """The version that was checked is not loaded, as another target of a channel
        with ``adopt_together`` does not; end what :meth:`check` has opened."""
        return

    @abstractmethod
    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Let the server compute nothing until :meth:`resume`."""

    @abstractmethod
    def load(self, update: Update, timeout_s: float) -> None:
        """Load the version as a whole, whatever an earlier load has left.

        It is called once more after a failure. ``update.path`` is the version as a
        safetensors file, ``update.load_into(model)`` copies it.

        :raises replicas.engine.Refused: the version does not fit, and the model is as
            before: the server goes on with that.
        """

    @abstractmethod
    def reset_caches(self, timeout_s: float) -> None:
        """Forget all that was computed with the version before: prefixes, keys and
        values of requests that were kept, outputs of encoders, external stores.

        :raises replicas.errors.SyncError: something cannot be forgotten.
        """

    @abstractmethod
    def resume(self, timeout_s: float) -> None:
        """Let the server compute again."""

    def warm_up(self, timeout_s: float) -> None:
        """Have the server compute an answer, before its gate opens for the first
        time."""
        return

    def version(self) -> int | None:
        """The version that the server says it has; None: it does not say."""
        return None

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        """Compare the server's own tensors with the version.

        :returns: what differs, by its name; empty: nothing; None: it cannot be told.
        """
        return None

    def health(self) -> str:
        """Why the server is gone; empty: it lives. At once, on any thread."""
        return ""

    def abort(self, reason: str) -> None:
        """Break the verb under way, and every later one; on any thread."""
        return

    def close(self) -> None:
        """End what :meth:`wait_until_up` began. The server itself goes on."""
        return
