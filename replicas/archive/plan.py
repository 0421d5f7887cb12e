"""Decide when to write a whole, which objects to read, and which to delete. No I/O.

*When.* Deltas from a whole grow with each version, as more elements have changed since.
A whole is due when all of them together would take more bytes than it. If they grow
evenly, that is where the bytes for each version are fewest: a sum of growing parts that
equals what it saves. And it is due after ``chain`` versions, or in place of a delta of
half its size, so that what a new reader reads stays close to one whole.

*What.* A reader that has nothing reads a whole, and the delta from it. A reader that
has an older version walks back over the entries to that version, if the deltas on the
way take fewer bytes. Each entry on the way proves the one before it by its digest.

*Deletion.* Kept are the newest versions, those of labels and leases, and all data that
an entry of these needs. Entries of others are deleted at once, data ``grace_s`` seconds
after the first time that no entry needed it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from replicas import errors
from replicas.archive.format import Entry, Link, Range

Due = Mapping[str, float]
"""When data objects that no entry needs may be deleted."""
WALK_MAX = 64
"""Deltas that a reader applies to get from one version to another, at most."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a writer: when it writes a whole, and which versions it deletes.

    :ivar chain: versions that share a whole, at most.
    :ivar keep: newest versions that stay; 0: all.
    :ivar grace_s: how long data stays after its last entry, for readers in the middle.
    """

    chain: int = 20
    keep: int = 0
    grace_s: float = 600.0


def is_whole_due(rules: Rules, deltas_nbytes: Sequence[int], next_nbytes: int, whole_nbytes: int) -> bool:
    """Return True if a version is to be written as a whole.

    :param deltas_nbytes: sizes of the deltas that were written against the last whole.
    :param next_nbytes: size of the one that would be written now.
    """
    too_many = len(deltas_nbytes) + 2 > rules.chain
    return too_many or 2 * next_nbytes > whole_nbytes or sum(deltas_nbytes) + next_nbytes > whole_nbytes


def route_to(newest: Entry, held: Link | None, read: Callable[[Link], Entry]) -> tuple[Range | None, tuple[Range, ...]]:
    """Return what to read for the version of an entry: (whole, deltas), in this order.

    Without a whole the deltas are for the version that is held.

    :param held: the entry of the older version that the reader has; None: nothing. Then
        the result has two ranges at most.
    :param read: returns the entry of a link, whose SHA-256 was compared. If it raises
        ArchiveError (the entry was deleted), the result is that of ``held=None``.
    :raises replicas.errors.ArchiveTampered: the version was made of another one than
        the one that is held.
    """
    deltas = () if newest.from_whole is None else (newest.from_whole,)
    left_nbytes = newest.whole.nbytes + sum(one.nbytes for one in deltas)
    path: tuple[Range, ...] = ()
    entry = newest
    while held is not None and entry.before is not None and entry.from_before is not None:
        link, path, left_nbytes = entry.before, (entry.from_before, *path), left_nbytes - entry.from_before.nbytes
        if link.version < held.version or len(path) > WALK_MAX or left_nbytes < 0:
            break
        if link.version == held.version:
            if link.sha256 != held.sha256:
                raise errors.ArchiveTampered(f"version {entry.version} follows another {link.version} than was read")
            return None, path
        try:
            entry = read(link)
        except errors.ArchiveError:
            break
    return newest.whole, deltas


def doomed(
    entries: Mapping[str, Entry], data: Iterable[str], pinned: Collection[int], rules: Rules, due: Due, now: float
) -> tuple[set[str], set[str], Due]:
    """Return (entries to delete, data objects to delete, ``due`` for the next call).

    :param entries: all entries, by name; that of the newest version is the last one.
        Those that no other one links to were deleted before as their successors were,
        or are of killed writers, which ``latest`` never named: they do not count.
    :param data: names of all data objects.
    :param pinned: versions of labels and leases.
    :param due: after a restart of the writer {}: then data stays for longer.
    :param now: seconds, of the clock of the last call.
    """
    linked = {one.before.entry for one in entries.values() if one.before is not None} | {*list(entries)[-1:]}
    newest = sorted(entries.keys() & linked, key=lambda name: entries[name].version, reverse=True)
    kept = {*newest[: rules.keep or None], *(name for name in entries if entries[name].version in pinned)}
    unneeded = set(data).difference(*(entries[name].objects for name in kept))
    due = {name: due.get(name, now + rules.grace_s) for name in unneeded}
    return entries.keys() - kept, {name for name, until in due.items() if until <= now}, due
