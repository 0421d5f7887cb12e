"""The newest versions of a channel as folders, for programs that reload from disk.

``FOLDER/NAME`` is a folder like that of a Hugging Face model, ``FOLDER/latest`` a link
to the newest. Each folder is made under a hidden name and then renamed: a reader sees a
whole version or none, and ``latest`` always leads to a whole one.

Folders outlive runs, and each run counts its versions from 1. So the newest is the
folder written last, by a number in :data:`NOTE` that grows in this folder. Only folders
with such a note are ever removed, the oldest first.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from replicas import errors
from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.linux.locks import hold_exclusive
from replicas.sources.version_file import save

__all__ = ["NOTE", "Mirror", "Version"]

NOTE = "replicas.json"
"""A :class:`Version` as JSON, in each folder. Floats that JSON lacks (nan, inf) are
null, as in all JSON of this library."""
LATEST = "latest"
LOCK = ".replicas.lock"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_PART = ".part"
_ROOM = "make room for one version more than are kept, or name another folder"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

logger = Log("replicas.sources")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The note in a version's folder, which says what version it holds.

    ``version``: its number in its run. ``run``: name of that run. ``term``: number of
    the run's coordinator, higher than all earlier ones of any run. ``sequence``: number
    of the folder among all that were written beside it; from 1.
    """

    version: int
    digest: str
    meta: dict[str, Any]
    run: str = ""
    term: int = 0
    sequence: int = 0


class Mirror:
    """Writer of a folder of versions; the only one until :meth:`close` or the end of
    its ``with`` block.

    :param folder: created if missing; remains of a killed writer are removed.
    :param keep: number of versions that stay; one more while the next is written.
    :param name: of a version's folder, with ``{version}`` or keys of the publisher's
        ``meta`` in braces. A folder of this name that a mirror wrote is replaced.
    :param like: a model's folder; all its files but weights are copied beside each
        version's weights.
    :param marker: name of an empty file in each folder.
    :raises replicas.errors.UsageError: an argument is wrong, the folder cannot be made,
        or another mirror writes to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        name: str = "version-{version}",
        like: Path | None = None,
        marker: str = "",
    ) -> None:
        """Check the arguments; create and lock the folder, and remove unfinished parts.

        :param folder: gets a folder for each version. :param keep: number of versions
            that stay. :param name: pattern of their folders' names. :param like: a
            model's folder, whose other files are copied. :param marker: name of an
            empty file to add.
        """
        self._folder, self._keep, self._name, self._marker = folder, keep, name, marker
        if "{" not in name:
            raise errors.UsageError(f"name {name!r} is the same for all versions", hint='e.g. "step_{step}"')
        if marker and not _is_component(marker):
            raise errors.UsageError(f"marker {marker!r} is not a name of a file", hint='e.g. "STABLE"')
        try:
            self._beside = [] if like is None else [one for one in sorted(like.iterdir()) if _is_beside(one)]
        except OSError as error:
            text = f"like: {error.filename or like} cannot be read: {error.strerror or error}"
            raise errors.UsageError(text, hint="name the folder of a model") from error
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock_folder(self._lock, folder)
            self._remove_parts()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, so that other mirrors may write; all versions stay."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        """Return this mirror."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the mirror."""
        self.close()

    def write(self, file: int, version: Version) -> Path:
        """Write the folder of a version unless the newest folder already holds it.
        Return the folder's path.

        Point ``latest`` to it, and remove the oldest versions beyond ``keep``.

        :param file: a descriptor of ``update.path``.
        :raises replicas.errors.UsageError: the folder cannot be written, or ``meta``
            lacks a key of the name; ``latest`` then leads to the same version as
            before.
        """
        place = self._folder / self._make_name(version)
        with _writing(place):
            kept = self._read_versions()
            if self._read_latest() != place.name or place not in kept or not _is_same(kept[place], version):
                self._write(place, file, version, kept)
        older = sorted(kept.keys() - {place}, key=lambda one: (kept[one].sequence, kept[one].version), reverse=True)
        for one in older[self._keep - 1 :]:
            with contextlib.suppress(OSError):  # the version is written: the next write tries again
                one.rename(self._free_path(one.name))
        self._remove_parts()
        return place

    def _write(self, place: Path, file: int, version: Version, kept: dict[Path, Version]) -> None:
        """Write a version's folder at ``place``, and point ``latest`` to it. After an
        error ``latest`` leads to the same version as before.

        :param file: descriptor of the version's file.
        :param kept: notes of all versions in the mirror's folder, by path. One at
            ``place`` is replaced; anything else there raises UsageError.
        """
        replaces = os.path.lexists(place)
        if replaces and place not in kept:
            text = f"{place} is there already, and is not a version of a mirror"
            raise errors.UsageError(text, hint="move it away, or name the versions otherwise")
        self._remove_parts()
        try:
            part = self._fill_part(place, file, version, kept)
            self._move_in(place, part, self._swap_folders if replaces else os.rename)
        except BaseException:
            self._remove_parts()
            raise

    def _make_name(self, version: Version) -> str:
        """Return the name of a version's folder, made from the mirror's ``name``
        pattern; create nothing. Raises UsageError if ``meta`` lacks a key, or the name
        is not valid."""
        number, meta = version.version, version.meta
        try:
            name = self._name.format_map({**meta, "version": number})
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            text = f"version {number} has no name by {self._name!r}: {type(error).__name__}: {error}"
            raise errors.UsageError(text, hint=f"its meta has the keys {', '.join(meta) or 'of nothing'}") from error
        if not _is_component(name) or name == LATEST:
            raise errors.UsageError(f"version {number} would be called {name!r}", hint="give a name of one folder")
        return name

    def _fill_part(self, place: Path, file: int, version: Version, kept: dict[Path, Version]) -> Path:
        """Write the version, the files beside it and its note to a new hidden folder;
        return that folder's path.

        :param place: the folder that it becomes, for its name. :param file: descriptor
            of the version's file.
        :param kept: notes of the versions that are there; the new ``sequence`` is above
            theirs.
        :raises replicas.errors.UsageError: the version cannot be written. The caller
            removes the hidden folder after any error.
        """
        part = self._free_path(place.name)
        part.mkdir()
        for one in self._beside:
            shutil.copy2(one, part / one.name)
        said = {"replicas.version": str(version.version), "replicas.digest": version.digest}
        try:
            save(file, part / "model.safetensors", said)
        except errors.UsageError as error:  # whose hint is for other commands
            raise errors.UsageError(error.message, hint=_ROOM) from error
        sequence = 1 + max((one.sequence for one in kept.values()), default=0)
        (part / NOTE).write_bytes(msgspec.json.encode(msgspec.structs.replace(version, sequence=sequence)) + b"\n")
        if self._marker:
            (part / self._marker).touch()
        return part

    def _move_in(self, place: Path, part: Path, swap: Callable[[Path, Path], None]) -> None:
        """Move the finished folder ``part`` to ``place`` by ``swap(part, place)``, and
        point ``latest`` to it; undo both on an OSError."""
        link = self._make_link(place)
        swap(part, place)
        try:
            link.rename(self._folder / LATEST)
        except OSError:  # not a signal's exception, which may come after the rename
            swap(place, part)
            raise

    def _swap_folders(self, part: Path, place: Path) -> None:
        """Swap the names of two folders; ``latest`` leads to a whole one meanwhile.
        Where the file system cannot do that atomically, ``place`` is missing for an
        instant."""
        if _exchange_names(part, place):
            return
        # This file system (NFS) lacks that call: the name is missing for an instant, in
        # which latest leads to the same files under a second name.
        if self._read_latest() == place.name:
            twin = self._free_path(place.name)
            shutil.copytree(place, twin, copy_function=os.link)
            self._make_link(twin).rename(self._folder / LATEST)
        gone = self._free_path(place.name)
        place.rename(gone)
        part.rename(place)
        gone.rename(part)

    def _make_link(self, target: Path) -> Path:
        """Create a hidden link, with a free name, to a folder beside it; return the
        link's path."""
        link = self._free_path(LATEST)
        link.symlink_to(target.name)
        return link

    def _read_latest(self) -> str:
        """Return the name to which ``latest`` leads, or an empty text if there is
        none."""
        try:
            return str((self._folder / LATEST).readlink())
        except OSError:
            return ""

    def _read_versions(self) -> dict[Path, Version]:
        """Read the note (:class:`Version`) of each version's folder; return the notes
        by folder. Folders without a valid note are left out."""
        there = (one for one in self._folder.iterdir() if not one.name.startswith(".") and not one.is_symlink())
        return {one: note for one in there if (note := _read_note(one)) is not None}

    def _free_path(self, name: str) -> Path:
        """Return a free hidden path in the folder, of a form that :meth:`_remove_parts`
        removes; create nothing."""
        paths = (self._folder / f".{name}.{number}{_PART}" for number in itertools.count())
        return next(one for one in paths if not os.path.lexists(one))

    def _remove_parts(self) -> None:
        """Remove hidden folders and links that :meth:`write` has left, except the
        target of ``latest``. A path that cannot be removed now (NFS keeps files that a
        reader has open) is removed with a later version."""
        latest = self._read_latest()
        for one in self._folder.glob(f".*{_PART}"):
            with contextlib.suppress(OSError):
                if one.is_symlink():
                    one.unlink()
                elif one.name != latest:
                    shutil.rmtree(one)


def _exchange_names(one: Path, other: Path) -> bool:
    """Swap the names of two paths atomically. Return False if the system cannot."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    if swap is None:
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _lock_folder(file: int, folder: Path) -> None:
    """Lock the folder exclusively, by a descriptor of its lock file; only warn if the
    file system cannot lock.

    :raises replicas.errors.UsageError: another mirror has the lock.
    """
    try:
        if hold_exclusive(file):
            return
    except OSError as error:
        logger.warning("cannot lock %s (%s): make sure that no other mirror writes to it", folder, error.strerror)
        return
    raise errors.UsageError(f"another mirror writes to {folder}", hint="end that one first, or name another folder")


def _read_note(folder: Path) -> Version | None:
    """Read the note (:class:`Version`) of a folder; return None if it has no valid
    note."""
    try:
        return msgspec.convert(json.loads((folder / NOTE).read_bytes()), Version)  # msgspec's own reader takes no nan
    except (OSError, ValueError, *MALFORMED):
        return None


def _is_same(note: Version, version: Version) -> bool:
    """Return True if a folder's note describes this version; ``sequence`` may
    differ."""
    return msgspec.structs.replace(note, sequence=version.sequence) == version


def _is_beside(path: Path) -> bool:
    """Return True if a file of the model's folder is copied beside each version: all
    regular files are, except files of weights."""
    return path.is_file() and not path.name.endswith(_WEIGHTS)


def _is_component(name: str) -> bool:
    """Return True for a valid, visible name of one file or folder, without "/"."""
    return (
        bool(name)
        and not name.startswith(".")
        and "/" not in name
        and "\0" not in name
        and len(os.fsencode(name)) < 200
    )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context manager: an OSError in the block is raised as UsageError, with the
    path."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise errors.UsageError(text, hint=_ROOM) from error
