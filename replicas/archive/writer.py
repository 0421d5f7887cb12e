"""Write the versions of a channel to an archive.

    key = ArchiveKey.of_file(path)
    writer = Writer("s3://bucket/run", "policy", run="grpo", key=key)
    with channel.receive().wait() as update:
        version = Version.of(update)     # a copy: the update may end
    writer.write(version)

:mod:`replicas.archive.format` has the objects and their order. A writer keeps the bytes
of the last version and of the last whole, to compare with. All calls block.

A writer continues the archive that is there, if it is of the same run, channel and key.
If that run was started again, and counts its versions from 1, they follow the older
ones with numbers of their own: ``shift`` more than in the run. From then on the writer
before it, if it still lives, is refused at its next version: ``latest`` is not the
object any longer that it knows. If the storage fails without saying whether it has
written ``latest``, the writer looks.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from replicas import errors
from replicas.archive.deltas import encode_delta
from replicas.archive.format import (
    DATA,
    ENTRIES,
    FORMAT,
    LATEST,
    Entry,
    Latest,
    Link,
    Range,
    name_of,
    number_of,
    pack_manifest,
    seal,
    sha256_of,
    unseal,
)
from replicas.archive.keys import ArchiveKey, verifier
from replicas.archive.plan import Due, Rules, doomed, is_whole_due
from replicas.archive.store import Archive, Missing, Overtaken, Store, Tag
from replicas.carry.blocks import combined
from replicas.channel.versions.update import Update
from replicas.common.logs import Log
from replicas.core.base.ledger import OWN_LABELS
from replicas.core.base.manifest import Manifest
from replicas.core.versions.steps import number_in
from replicas.messages import Meta
from replicas.messages.bounds import is_name
from replicas.weights.copies.copy_pool import helpers_for, run_all
from replicas.weights.copies.digest import digest_blocks

logger = Log("replicas.archive")


@dataclass(frozen=True, eq=False)
class Version:
    """A version to write.

    :ivar image: its image: header and tensors, as at ``update.path``. The writer keeps
        it for comparisons: its bytes must not change.
    :ivar digest: of the tensors, as in the receipt; empty if unknown.
    :ivar step: the training step. :ivar at: seconds since 1970.
    """

    version: int
    image: memoryview
    manifest: Manifest
    digest: str = ""
    meta: Meta = field(default_factory=dict)
    content_of: int = 0
    step: float | None = None
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, update: Update) -> Version:
        """Copy an open update of a channel, which may end then.

        Its training step is ``meta["step"]``, if that is a number.

        :raises replicas.errors.ManifestMismatch: safetensors lacks a dtype of it.
        """
        with Path(update.path_to_copy).open("rb") as file:
            image = memoryview(mmap.mmap(-1, os.fstat(file.fileno()).st_size))
            file.readinto(image)  # a regular file, whose reads are whole
        meta = update.meta
        facts = update.version, image, update.manifest, update.digest, meta, update.content_of
        return cls(*facts, step=number_in(meta, "step"))

    @cached_property
    def data(self) -> memoryview:
        """The bytes of the tensors."""
        return self.image[self.manifest.data_offset :]


class Facts(NamedTuple):
    """Labels, scores and leases of a run's versions, which may change later.

    ``labels``: the version of each label. ``scores``: by version. ``held``: versions
    that leases keep.
    """

    labels: Mapping[str, int] = {}
    scores: Mapping[int, Mapping[str, float]] = {}
    held: Collection[int] = ()

    def shifted(self, shift: int) -> Facts:
        """Return a copy in which the numbers of versions are higher by ``shift``."""
        labels = {label: number + shift for label, number in self.labels.items()}
        scores = {number + shift: found for number, found in self.scores.items()}
        return Facts(labels, scores, {number + shift for number in self.held})


class _Known(NamedTuple):
    """The versions that a writer compares with: the last one, and the last whole.

    ``deltas``: sizes of the deltas against the whole so far.
    """

    last: Version
    base: Version
    whole: Range
    deltas: tuple[int, ...] = ()


class Writer:
    """The writer of one channel's archive. For one thread at a time.

    :param archive: its URL, or a store of obstore; see
        :class:`~replicas.archive.store.Store`.
    :param run: name of the run.
    :param rules: when a whole is written, and what is deleted; default: nothing.
    :param owner: a text that this writer and its earlier lives have in common, and no
        other writer. An error of a writer that has taken over names the owner of that.
    :ivar close: ends its thread.
    :raises replicas.errors.UsageError: the archive is another run's, channel's or
        key's; or the URL is not valid.
    :raises replicas.errors.ArchiveError: the storage fails or denies.
    """

    def __init__(
        self, archive: Archive, channel: str, *, run: str, key: ArchiveKey, rules: Rules = Rules(), owner: str = ""
    ) -> None:
        """Read ``latest``; write nothing."""
        if not is_name(channel) or channel in (".", ".."):
            raise errors.UsageError(f"{channel!r} cannot be the name of a folder", hint="name the channel otherwise")
        self._store = Store(archive, channel, make=True)
        self.close = self._store.close
        self._key, self._verify, self._rules = key, verifier(key.public), rules
        name = f"{socket.gethostname()} process {os.getpid()} {owner}-{secrets.token_hex(4)}"
        self._origin: dict[str, Any] = {"format": FORMAT, "run": run, "channel": channel, "writer": name}
        self._known: _Known | None = None
        self._entries: dict[str, Entry] | None = None
        self._data: set[str] = set()
        self._due: Due = {}
        self._latest, self._tag = self._read_latest()
        self._shift = 0 if self._latest is None else self._latest.shift
        self._began = False
        logger.info("archive %s: readers' key=%r", self._store.text, key.public)

    @property
    def newest(self) -> int:
        """The newest version in the archive, as the run numbers it; 0 without any."""
        return 0 if self._latest is None else self._latest.newest.version - self._shift

    def write(self, version: Version, facts: Facts = Facts()) -> Link:
        """Write a version, and delete what is not kept; return the link of its entry.

        The newest version of the archive is not written again.

        :param facts: what the run says of its versions. Those of labels and leases are
            kept.
        :raises replicas.errors.StaleVersion: this writer has written a newer one, or
            another one of this number.
        :raises replicas.errors.UsageError: its bytes do not have its digest.
        :raises replicas.errors.Fenced: another writer has taken the archive over.
        :raises replicas.errors.ArchiveError: the storage fails; call it again.
        """
        blocks, latest = digest_blocks(version.data), self._latest
        digest, newest = combined(blocks), None if latest is None else latest.newest
        if version.digest not in ("", digest):
            text = f"version {version.version} has digest {digest}, not {version.digest}"
            raise errors.UsageError(text, hint="give its own image, unchanged")
        if latest is not None and newest is not None and self.newest >= version.version:
            if (self.newest, latest.digest) == (version.version, digest):
                self._began = True
                return newest
            if self._began:
                text = f"version {version.version} is not newer than version {self.newest} of {self._store.text}"
                raise errors.StaleVersion(text, hint="write versions in their order")
            # The run counts from 1 again. Entries of killed writers, which `latest`
            # never named, keep their numbers.
            self._shift = max([newest.version, *map(number_of, self._store.list_names(ENTRIES))])
        self._began = True
        number, facts = version.version + self._shift, facts.shifted(self._shift)
        known, places = self._write_data(version)
        labels = tuple(label for label, labelled in facts.labels.items() if labelled == number)
        places |= {"nbytes": version.data.nbytes, "blocks": tuple(one.hex() for one in blocks), "labels": labels}
        places |= {"tensors": pack_manifest(version.manifest), "scores": dict(facts.scores.get(number, {}))}
        told: dict[str, Any] = {"content_of": version.content_of and version.content_of + self._shift}
        told |= {"digest": digest, "step": version.step, "meta": version.meta, "at": version.at, "shift": self._shift}
        entry = Entry(**self._origin, **places, **told, version=number, before=newest)
        sealed = seal(entry, self._key.sign)
        sha256 = sha256_of(sealed)
        link = Link(version=number, entry=name_of(ENTRIES, number, sha256, "json"), sha256=sha256)
        self._store.put(link.entry, sealed)
        self._put_latest(link, digest, facts)
        self._known = known
        if self._rules.keep:
            self._delete(link.entry, entry, facts)
        return link

    def describe(self, facts: Facts) -> None:
        """Write labels and scores into ``latest``, if they have changed.

        Call it after :meth:`write`, which learns how the run numbers its versions.

        :raises replicas.errors.Fenced, replicas.errors.ArchiveError: as :meth:`write`.
        """
        facts = facts.shifted(self._shift)
        if (latest := self._latest) is not None and self._described(facts) != (latest.labels, latest.scores):
            self._put_latest(latest.newest, latest.digest, facts)

    def _described(self, facts: Facts) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
        """Return the labels and scores for ``latest``.

        Among the labels are those that an earlier start of the run has given, unless
        this one has given them, too.
        """
        before = {} if self._latest is None else self._latest.labels
        earlier = {one: number for one, number in before.items() if number <= self._shift and one not in OWN_LABELS}
        scores = {str(number): dict(found) for number, found in facts.scores.items() if found}
        return earlier | dict(facts.labels), scores

    def _write_data(self, version: Version) -> tuple[_Known, dict[str, Any]]:
        """Write the data objects of a version.

        :returns: what to compare the next version with; ``whole``, ``from_whole`` and
            ``from_before`` of the entry.
        """
        known, nbytes = self._known, version.image.nbytes
        step = joined = None
        if known is not None and known.last.manifest.hash == version.manifest.hash:
            run = partial(run_all, helpers=helpers_for(nbytes, 2))  # half the cores: ranks need them, too
            how = version.data, version.manifest.regions, run
            step = encode_delta(known.last.data, *how)
            joined = step if known.base is known.last else encode_delta(known.base.data, *how)
            if 2 * len(step) > nbytes:
                step = None
        if known is None or joined is None or is_whole_due(self._rules, known.deltas, len(joined), nbytes):
            whole = self._put(version, "safetensors", version.image)[0]
            before = None if step is None else self._put(version, "delta", step)[0]
            return _Known(version, version, whole), {"whole": whole, "from_before": before}
        found = self._put(version, "delta", *([joined] if step is None or step is joined else [step, joined]))
        known = known._replace(last=version, deltas=(*known.deltas, len(joined)))
        before = None if step is None else found[0]
        return known, {"whole": known.whole, "from_whole": found[-1], "from_before": before}

    def _put(self, version: Version, suffix: str, *parts: bytes | memoryview) -> list[Range]:
        """Write one data object of all parts; return the range of each."""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        name = name_of(DATA, version.version + self._shift, sha256_of(data), suffix)
        self._store.put(name, data)
        places = zip(accumulate(map(len, parts), initial=0), parts, strict=False)
        return [Range(object=name, start=at, nbytes=len(one), sha256=sha256_of(one)) for at, one in places]

    def _put_latest(self, newest: Link, digest: str, facts: Facts) -> None:
        """Write ``latest``, unless another writer has.

        :raises replicas.errors.Fenced: another one has.
        """
        (labels, scores), before = self._described(facts), 0.0 if self._latest is None else self._latest.at
        origin = self._origin | {"at": max(time.time(), before + 0.001), "digest": digest, "shift": self._shift}
        latest = Latest(**origin, newest=newest, labels=labels, scores=scores)
        try:
            self._tag = self._store.put(LATEST, seal(latest, self._key.sign), self._tag, new=self._tag is None)
        except errors.ArchiveError as error:
            found, tag = self._read_latest()
            if found is None or found.writer != latest.writer:
                if found is None and isinstance(error, Overtaken):
                    error.hint = "if latest was deleted, restart the writer, which begins a new archive"
                if found is None or not isinstance(error, Overtaken):
                    raise
                text = f"{self._store.text} is written by {found.writer}, too: version {found.newest.version}"
                raise errors.Fenced(text, hint="end one of the two writers") from error
            self._tag = tag  # that of this call, or of an earlier one, whose answer was lost
            if found != latest:
                # An earlier call has written `found`, and could not know: begin again.
                self._known, self._entries = (self._known, self._entries) if found == self._latest else (None, None)
                self._latest = found
                raise
        self._latest = latest

    def _read_latest(self) -> tuple[Latest | None, Tag | None]:
        """Return ``latest`` and its tag; (None, None) if there is none.

        :raises replicas.errors.UsageError: it is another run's, channel's or key's.
        """
        text, hint = self._store.text, "archive to another URL, or as the run, and with the key, that began this one"
        try:
            data, tag = self._store.read(LATEST)
            latest = unseal(data, Latest, self._verify, LATEST)
        except Missing:
            return None, None
        except errors.ArchiveTampered as error:
            raise errors.UsageError(f"{text} is not this writer's: {error.message}", hint=hint) from error
        if (latest.run, latest.channel) != (self._origin["run"], self._origin["channel"]):
            raise errors.UsageError(f"{text} holds {latest.channel} of run {latest.run}, by {latest.writer}", hint=hint)
        return latest, tag

    def _delete(self, name: str, entry: Entry, facts: Facts) -> None:
        """Delete what is not kept; a failure is logged, and the next call tries again.

        The first call lists what there is. So it also finds what killed writers left.

        :param name: of the newest entry.
        """
        try:
            if self._entries is None:
                self._data, names = set(self._store.list_names(DATA)), self._store.list_names(ENTRIES)
                if entry.before is not None and entry.before.entry not in names:  # their data would be deleted
                    raise errors.ArchiveError(f"{ENTRIES} are not listed yet: {entry.before.entry} is missing", hint="")
                self._entries = {one: unseal(self._store.read(one)[0], Entry, self._verify, one) for one in names}
            self._entries.pop(name, None)  # it is the last one
            self._entries[name], self._data = entry, self._data | entry.objects
            pinned = {*facts.held, *(() if self._latest is None else self._latest.labels.values())}
            gone, over, self._due = doomed(self._entries, self._data, pinned, self._rules, self._due, time.monotonic())
            self._store.delete([*sorted(gone), *sorted(over)])
            self._data -= over
            self._entries = {one: known for one, known in self._entries.items() if one not in gone}
        except (errors.ArchiveError, errors.ArchiveTampered) as error:
            logger.warning("archive %s: old versions are not deleted yet: %s", self._store.text, error)
