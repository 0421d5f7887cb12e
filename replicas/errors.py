"""Exceptions raised by this library, as a tree that shows what is at fault.

::

    ReplicasError
    ├── UsageError            the call or the config is wrong; a retry cannot help
    │   ├── StaleVersion      the version is not newer than the channel's latest
    │   ├── ManifestMismatch  names, shapes or dtypes differ from the manifest
    │   ├── RanksDisagree     ranks or peers called with different arguments
    │   ├── UnknownChannel    no such channel, or the group has no part in it
    │   └── BadConfig         an unusable config; lists every problem found
    ├── SyncError             an operation did not happen; tensors are unchanged
    │   ├── PeersLost         members that it needed died or left
    │   ├── DeadlineExceeded  the operation's own deadline passed
    │   ├── OutcomeUnknown    no verdict by the deadline; the next operation settles it
    │   ├── NotAdopted        no target loads the version: one of them cannot
    │   ├── Busy              every slot is in use, by a reader or a transfer
    │   └── Gone              the version, step or channel no longer exists
    ├── WorldError            the machine or the membership does not allow it
    │   ├── NoCapacity        memory (or another resource) is too small
    │   ├── Preflight         members are incompatible (backend, address, versions)
    │   ├── StoreTampered     a non-member changed the rendezvous store
    │   ├── Fenced            another process joined, or writes, with this identity
    │   ├── ArchiveError      an archive's storage fails, denies, or lacks an object
    │   └── ArchiveTampered   an object of an archive is not what was signed
    ├── Disconnected          no session with the coordinator in time
    └── InternalError         a bug in this library: please report it

An error carries data, not only text: ``channel``, ``version``, ``phase``, ``members``
(those concerned), ``hint`` (the remedy) and ``unanimous`` (whether every rank of the
replica gets this same verdict).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "ArchiveError",
    "ArchiveTampered",
    "BadConfig",
    "Busy",
    "DeadlineExceeded",
    "Disconnected",
    "Fenced",
    "Gone",
    "InternalError",
    "ManifestMismatch",
    "NoCapacity",
    "NotAdopted",
    "OutcomeUnknown",
    "PeersLost",
    "Preflight",
    "RanksDisagree",
    "ReplicasError",
    "StaleVersion",
    "StoreTampered",
    "SyncError",
    "UnknownChannel",
    "UsageError",
    "WorldError",
    "error_class",
    "kind_of",
]


class ReplicasError(Exception):
    """Base of every error that this library raises on purpose.

    :param message: what happened, naming the thing.
    :param channel: the channel concerned, if any.
    :param version: the version of the weights concerned, if any.
    :param phase: the phase of the operation in which it happened, such as ``"pack"`` or
        ``"transfer"``.
    :param members: names (``group/replica/rank``) of the members concerned.
    :param hint: the remedy, addressed to the reader.
    :param unanimous: whether every rank of the replica is given this same verdict.
    """

    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        channel: str | None = None,
        version: int | None = None,
        phase: str | None = None,
        members: Sequence[str] = (),
        hint: str | None = None,
        unanimous: bool = False,
    ) -> None:
        """Keep what happened (``message``), where (``channel``, ``version``,
        ``phase``), to which ``members``, the remedy (``hint``, by default that of the
        class), and whether all ranks of the replica get this same verdict
        (``unanimous``)."""
        super().__init__(message)
        self.message = message
        self.channel = channel
        self.version = version
        self.phase = phase
        self.members: tuple[str, ...] = tuple(members)
        self.hint: str = self.default_hint if hint is None else hint
        self.unanimous = unanimous

    def __str__(self) -> str:
        """Return the message, and the hint in parentheses if there is one."""
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to pickle the error with all its attributes, for another
        process."""
        names = ("channel", "version", "phase", "members", "hint", "unanimous")
        return functools.partial(type(self), **{name: getattr(self, name) for name in names}), (self.message,)


class UsageError(ReplicasError):
    """The call or the config is wrong. Change it; a retry cannot help."""


class StaleVersion(UsageError):
    """The published version is not newer than the newest version of its channel."""

    default_hint = "leave version=None to let the library number it"


class ManifestMismatch(UsageError):
    """The tensors differ from the channel's manifest: names, shapes or dtypes."""

    default_hint = "publish the complete set with the same names, shapes and dtypes, or pass new_manifest=True"


class RanksDisagree(UsageError):
    """Ranks of one replica, or peers of one operation, made different calls."""

    default_hint = "make the same calls in the same order, with the same arguments, on every rank"


class UnknownChannel(UsageError):
    """There is no such channel, or the group has no part in it.

    The message names the nearest one, or all that exist.
    """


class BadConfig(UsageError):
    """The config cannot be used. Correct every problem that the message lists.

    :param problems: every problem found, one line each, in the order of the file.
    """

    def __init__(self, problems: Sequence[str], *, source: str = "config") -> None:
        """Make the message: a title, and below it a line for each problem.

        :param problems: one line for each problem.
        :param source: the title's beginning: the config's path.
        """
        self.problems: tuple[str, ...] = tuple(problems)
        self.source = source
        count = len(self.problems)
        title = f"{source}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to pickle the error with its problems, for another process."""
        return functools.partial(BadConfig, source=self.source), (self.problems,)


class SyncError(ReplicasError):
    """The operation did not happen; the caller's tensors are unchanged.

    The next operation may succeed.
    """


class PeersLost(SyncError):
    """Members that the operation needed have died or left."""

    default_hint = "call again: the next operation runs over the members that are left"


class DeadlineExceeded(SyncError):
    """The operation's own deadline has passed."""

    default_hint = "give the operation a longer deadline, or look at which member was slow"


class OutcomeUnknown(SyncError):
    """No verdict came by the deadline: the operation may or may not have happened.

    The coordinator was lost, or had already decided when the deadline passed. Nothing
    was written here. Wait for the same Pending again: it ends as soon as the outcome is
    known, at the latest when the next operation starts. If the operation succeeded,
    this second wait writes its results.
    """

    default_hint = "wait for it again, or call the next operation, which first learns what became of this one"


class NotAdopted(SyncError):
    """No target loads the version: one of them refused it, or a newer one came first.

    The message says which. Each target keeps serving its own version.
    """

    default_hint = "go on with the version that you have, and receive the next one"


class Busy(SyncError):
    """Every slot of the arena is in use, by a reader or by an earlier transfer."""

    default_hint = "finish reading earlier updates, publish less often, or raise `slots`"


class Gone(SyncError):
    """The version, step or channel no longer exists.

    The step is done, no member holds the version, or the channel is closed. The message
    says which.
    """


class WorldError(ReplicasError):
    """The machine or the membership does not allow the call.

    The message names the remedy.
    """


class NoCapacity(WorldError):
    """Memory or another resource is too small.

    Nothing is broken; the user's own process groups still work.
    """

    default_hint = "free memory, raise the container's limit, or lower `slots`"


class Preflight(WorldError):
    """Members cannot work together: backend, address, torch or NCCL version, GPU, or
    two of them load versions into one server.

    The message names both members and what differs.
    """


class StoreTampered(WorldError):
    """A process that is not a member has changed the rendezvous store.

    The store is replaced. No member is blamed, and none is excluded.
    """

    default_hint = "bind the rendezvous store ([store] bind) to an address that only this run's machines reach"


class Fenced(WorldError):
    """A later join has this identity, mostly another process; this one is excluded.

    Or another process writes to the same archive.
    """

    default_hint = "give each process its own (group, replica, rank), or end the older one first"


class ArchiveError(WorldError):
    """The storage of an archive fails, denies, or lacks an object.

    The message names the object, and what the storage says.
    """

    default_hint = "look at the storage and its credentials; the call may be made again"


class ArchiveTampered(WorldError):
    """An object of an archive is not what the archive's key has signed.

    It is malformed, damaged, of another version, or another writer's. Nothing of it was
    shown.
    """

    default_hint = "check that key= is that of the archive's writer; restore the object, or archive a new version"


class Disconnected(ReplicasError):
    """No session with the coordinator was established, or re-established, in time."""

    default_hint = "check that the supervisor is running and that REPLICAS_ENDPOINT is its address"


class InternalError(ReplicasError):
    """A bug in this library."""

    default_hint = "please report this with the logs"


_CLASSES = {name: value for name, value in list(globals().items()) if name in __all__ and isinstance(value, type)}


def error_class(name: str) -> type[ReplicasError]:
    """Return the class of this module with this name, to make an error that another
    process has sent. Return InternalError for a name that is not such a class, and
    for BadConfig, which cannot be made of a message alone."""
    found = _CLASSES.get(name, InternalError)
    return InternalError if found is BadConfig else found


def kind_of(error: ReplicasError) -> str:
    """Return the name of the error's class if that is one of this module, else of its
    nearest base that is: other processes know only these classes."""
    return next(kind.__name__ for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind)
