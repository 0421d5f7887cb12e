"""The newest versions of a channel as folders, for programs that reload from disk.

``FOLDER/NAME`` is a folder like that of a Hugging Face model, ``FOLDER/latest`` a link
to the newest. Each is made beside its place and renamed, so a reader sees a whole one
or none. Only folders with :data:`NOTE` in them are ever removed, the oldest first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from replicas import errors
from replicas.sources.checkpoint import save

__all__ = ["NOTE", "Mirror"]

NOTE = "replicas.json"
"""What version a folder has: number, digest and ``meta``."""
LATEST = "latest"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_PART, _OLD = ".part", ".old"


class _Kept(NamedTuple):
    version: int
    path: Path


class Mirror:
    """A folder of versions, of which it is the only writer.

    :param folder: made if it is not there; what another life of this left half is
        removed.
    :param keep: number of versions that stay; one more while the next is written.
    :param name: of a version's folder, with ``{version}`` or keys of the publisher's
        ``meta`` in braces.
    :param like: a model's folder, of which all files but weights are copied beside
        each version's weights.
    :param marker: name of an empty file in each folder.
    :raises replicas.errors.UsageError: an argument is wrong, or the folder cannot be
        made.
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
        self._folder, self._keep, self._name, self._marker = folder, keep, name, marker
        if "{" not in name:
            raise errors.UsageError(f"name {name!r} is the same for all versions", hint='e.g. "step_{step}"')
        if marker and not _is_component(marker):
            raise errors.UsageError(f"marker {marker!r} is no name of a file", hint='e.g. "STABLE"')
        with _writing(folder):
            self._beside = [] if like is None else [one for one in sorted(like.iterdir()) if _is_beside(one)]
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".*"):
                if left.name.endswith((_PART, _OLD)):
                    _remove(left)

    def has(self, version: int, digest: str) -> bool:
        """Return True if the newest folder is of this version."""
        note = _note(self._folder / LATEST)
        return note is not None and (note["version"], note["digest"]) == (version, digest)

    def write(self, file: int, version: int, digest: str, meta: Mapping[str, Any]) -> Path:
        """Make the folder of a version the newest; return it.

        :param file: a descriptor of ``update.path``.
        :raises replicas.errors.UsageError: it cannot be written, or ``meta`` lacks a
            key of the name; the newest folder is as before.
        """
        place = self._folder / self._named(version, meta)
        part = self._folder / f".{place.name}{_PART}"
        with _writing(part):
            _remove(part)
            part.mkdir()
            try:
                for one in self._beside:
                    shutil.copy2(one, part / one.name)
                save(file, part / "model.safetensors", {"replicas.version": str(version), "replicas.digest": digest})
                note = {"version": version, "digest": digest, "meta": dict(meta)}
                (part / NOTE).write_text(json.dumps(note) + "\n")
                if self._marker:
                    (part / self._marker).touch()
                if place.exists():
                    self._retire(place)
                part.rename(place)
            except BaseException:
                _remove(part)
                raise
            self._point_to(place)
            for old in self._versions()[self._keep :]:
                self._retire(old.path)
        return place

    def _named(self, version: int, meta: Mapping[str, Any]) -> str:
        try:
            name = self._name.format_map({**meta, "version": version})
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            text = f"version {version} has no name by {self._name!r}: {type(error).__name__}: {error}"
            raise errors.UsageError(text, hint=f"its meta has the keys {', '.join(meta) or 'of nothing'}") from error
        if not _is_component(name) or name == LATEST:
            raise errors.UsageError(f"version {version} would be called {name!r}", hint="give a name of one folder")
        return name

    def _point_to(self, place: Path) -> None:
        link = self._folder / f".{LATEST}{_PART}"
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)
        link.rename(self._folder / LATEST)

    def _versions(self) -> list[_Kept]:
        """The newest first."""
        found = [_Kept(note["version"], one) for one in self._folder.iterdir() if (note := _note(one)) is not None]
        return sorted((one for one in found if not one.path.is_symlink()), reverse=True)

    def _retire(self, place: Path) -> None:
        """Remove a folder: under its name no reader ever sees a part of it."""
        old = place.with_name(f".{place.name}{_OLD}")
        _remove(old)
        if _note(place) is None:
            raise FileExistsError(17, "it is there already, and is no version of a mirror", str(place))
        place.rename(old)
        _remove(old)


def _note(folder: Path) -> dict[str, Any] | None:
    """None: it is not the folder of a version."""
    try:
        found = json.loads((folder / NOTE).read_text())
        return {"version": int(found["version"]), "digest": str(found["digest"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_beside(path: Path) -> bool:
    return path.is_file() and not path.name.endswith(_WEIGHTS)


def _is_component(name: str) -> bool:
    return (
        bool(name)
        and not name.startswith(".")
        and "/" not in name
        and "\0" not in name
        and len(os.fsencode(name)) < 200
    )


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise errors.UsageError(text, hint="name a folder with room in it") from error
