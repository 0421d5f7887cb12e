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
        """The version of the last :meth:`open`, also after a :meth:`shut`; 0 before."""

    def open(self, version: int) -> None:
        """Admit requests from now on.

        Record ``version`` as the one that the server serves.
        """

    def shut(self) -> None:
        """Admit no more requests until the next :meth:`open`.

        Do not wait for admitted ones.
        """

    def paused(self, seconds: float) -> None:
        """Add ``seconds``, for which a load has paused the server, to a total for
        metrics.

        It changes nothing else: requests are not held back by this call.
        """


@runtime_checkable
class DemandGate(GateLike, Protocol):
    """A gate that knows of loads before they begin, and of labels: it can tell which
    version answers a request."""

    def load(self, version: int) -> None:
        """Record that the load of ``version`` begins: from now on answers may be of it,
        too.

        That holds until the next :meth:`open`. 0 ends it, as the load was refused.
        """

    def set_labels(self, labels: Mapping[str, int]) -> None:
        """Replace the channel's labels, by which requests may demand a version.

        :param labels: the version that each label points to. Called about twice a
            second while the follower waits for a version, mostly with the same ones.
        """


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
        """Wait until the server answers.

        Then start to watch its health, until :meth:`close`.

        The default does nothing.

        :raises replicas.errors.SyncError: the server is gone, or not up within
            ``timeout_s``.
        :raises replicas.errors.UsageError: the server cannot be followed, such as an
            old release.
        """
        return

    def attach(self, identity: Identity, timeout_s: float) -> None:
        """Have the server's workers join the channel, and wait for that; called once.

        They are ranks 1 to ``workers`` of the follower's replica, in which it is rank
        0. The default, for a server without workers, does nothing.

        :param identity: channel, replica and coordinator to join.
        :raises replicas.errors.SyncError: they have not joined within ``timeout_s``.
        """
        return

    def check(self, update: Update, timeout_s: float) -> str:
        """Return why the version does not fit the model, or an empty text.

        The text is empty, too, if the engine cannot tell, and by default. Nothing is
        loaded, and the server keeps serving. Called when names, shapes or dtypes differ
        from those of the last version that was loaded.
        """
        return ""

    def drop(self, update: Update, reason: str, timeout_s: float) -> None:
        """Release what :meth:`check` has opened for a version that is not loaded after
        all.

        Called if another target of a channel with ``adopt_together`` cannot load the
        version. The default does nothing.

        :param reason: why it is not loaded, as text.
        """
        return

    @abstractmethod
    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop the server's computation until :meth:`resume`.

        Return when it is stopped.

        :param mode: what becomes of requests in flight: they are frozen (``"keep"``),
            waited for (``"wait"``), or aborted (``"abort"``).
        :raises replicas.errors.SyncError: it is not stopped within ``timeout_s``.
        """

    @abstractmethod
    def load(self, update: Update, timeout_s: float) -> None:
        """Load the version into the paused server as a whole; return when it is loaded.

        After a failure it is called once more for the same version: it must then write
        every tensor, whatever the first call has left.

        :param update: open during the call. ``update.path`` is the version as a
            safetensors file, ``update.load_into(model)`` copies it.
        :param timeout_s: when it runs out, raise SyncError; the model may be half
            written. Stop the load, or have the next call wait for its end.
        :raises replicas.engine.Refused: the version does not fit, and the model is
            unchanged: the server continues with it.
        :raises replicas.errors.SyncError: any other failure.
        """

    @abstractmethod
    def reset_caches(self, timeout_s: float) -> None:
        """Have the paused server forget all that was computed with the previous
        version.

        That is prefixes, keys and values of kept requests, outputs of encoders, and
        external stores. Called after each load.

        :raises replicas.errors.SyncError: a cache cannot be reset.
        """

    @abstractmethod
    def resume(self, timeout_s: float) -> None:
        """Let the paused server compute again, first the requests that :meth:`pause`
        kept.

        Also called after a refused load. It is not called after another failure.

        :raises replicas.errors.SyncError: the server does not confirm within
            ``timeout_s``.
        """

    def warm_up(self, timeout_s: float) -> None:
        """Have the server compute an answer, and wait for it, before its gate first
        opens.

        The server has resumed by then. The default does nothing.

        :raises replicas.errors.SyncError: the server is gone; the gate stays shut.
        """
        return

    def version(self) -> int | None:
        """Return the version number that the server itself reports, or None if it
        reports none.

        The default is None. Called before and after each load.
        """
        return None

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        """Compare the tensors in the server with the version, after a load, while it is
        paused.

        The default is None.

        :returns: the names of what differs, or an empty text if nothing does; None if
            the engine cannot compare.
        """
        return None

    def health(self) -> str:
        """Return why the server is gone, or an empty text while it lives.

        Called several times a second, on any thread: return immediately. The default is
        empty.
        """
        return ""

    def abort(self, reason: str) -> None:
        """Make the verb that runs now, and every later one, raise SyncError.

        Called on a thread of the follower, once. The default does nothing.

        :param reason: why, for the error.
        """
        return

    def close(self) -> None:
        """End what :meth:`wait_until_up` has started, such as threads; the last call.

        The server itself keeps running. The default does nothing.
        """
        return
