"""The archive of a channel, and an archive as its source: keys that make groups.

Versions are written to an archive, and published from one, by a replica like any other:
of a group that these keys add to those of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from replicas.config import values as forms
from replicas.config.tables import AsKey, read
from replicas.config.values import Form, Place


def _text_like(pattern: str, type: str, range: str) -> Form:
    """Return a form of texts that match a pattern.

    :param type: their kind, and :param range: an example, for messages.
    """

    def read(place: Place, value: object) -> Any:
        """Return the text, or UNSET after adding a problem to ``place``."""
        fits = isinstance(value, str) and re.fullmatch(pattern, value)
        return value if fits else place.problem(f"expected a {type}, such as {range}")

    return Form(read, type, f"such as {range}")


_url = _text_like(
    r"[a-z][a-z0-9+.-]*://(?![^/]*:[^/]*@)[^\s?#]+", "URL without credentials", '"s3://bucket/run" or "file:///folder"'
)
_public_key = _text_like("ed25519:[0-9a-f]{64}", "public key", '"ed25519:" and 64 digits, which the writer logs')
_File = Annotated[Path, forms.path("file")]


class ArchiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An archive, to which a replica of the group NAME-archive writes the versions."""

    to: Annotated[str, _url]
    """The URL of the archive; the channel has a folder of its own below it."""
    key: Annotated[_File | None, AsKey(default='"archive.pem" in the state folder')] = None
    """The file of the private key that signs the archive, made if it does not exist. It
    must be the same on each node, and in each run that continues the archive.
    """
    chain: Annotated[int, forms.whole(1)] = 20
    """Number of versions that share a whole one, at most."""
    keep: Annotated[int, forms.whole(0)] = 0
    """Number of newest versions that stay, beside those with labels and leases; 0 for
    all.
    """
    grace_s: Annotated[float, forms.duration(zero=True)] = 600.0
    """Data stay for this time after their last version was deleted, for readers in the
    middle of it.
    """
    env_file: _File | None = None
    """A file of NAME=value lines with the storage's credentials."""


class ArchiveSource(msgspec.Struct, frozen=True, kw_only=True):
    """An archive whose versions are published, by the group NAME-from-archive."""

    archive: Annotated[str, _url]
    """The URL of the channel in the archive."""
    key: Annotated[str, _public_key]
    """The public key of the archive's writer."""
    env_file: _File | None = None
    """A file of NAME=value lines with the storage's credentials."""


def with_groups(place: Place, mapping: Mapping[str, Any], state_dir: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the content of a file with the groups that archives need, and their names.

    What cannot be read stays as it is, for the reader of the whole file.

    :param place: the root. :param state_dir: folder of the default key.
    """
    groups, channels = mapping.get("groups"), mapping.get("channels")
    if not (isinstance(groups, Mapping) and isinstance(channels, Mapping)):
        return dict(mapping), frozenset()
    made, found = dict[str, Any](), dict[str, Any]()
    for name, channel in channels.items():
        found[name] = channel
        for group, role, item, table in _needed(place, str(name), channel, state_dir):
            here = place.at("channels", str(name), "archive" if role == "targets" else "sources")
            if group in groups:
                here.problem(f'makes the group "{group}", which the file has, too; name that one otherwise')
            others = [one for one in found[name].get(role, ()) if one is not item]
            found[name] = {**found[name], role: [*others, group]}
            made[group] = table
    return {**mapping, "groups": {**groups, **made}, "channels": found}, frozenset(made)


def _needed(place: Place, name: str, channel: Any, state_dir: Path) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield each group that a channel's archives need: its name, its role, the item of
    the role that it replaces (None: it is one more), and its table."""
    scratch = Place(place.base)
    channel = channel if isinstance(channel, Mapping) else {}
    if "archive" in channel and (to := read(scratch, channel["archive"], ArchiveConfig)) and not scratch.problems:
        words = ["--chain", str(to.chain), "--keep", str(to.keep), "--grace", f"{to.grace_s:g}s"]
        words += ["--key", str(to.key or state_dir / "archive.pem")]
        yield f"{name}-archive", "targets", None, _table(["archive", name, to.to, *words], to.env_file)
    sources = channel.get("sources", ())
    for item in sources if isinstance(sources, list | tuple) else ():
        if isinstance(item, Mapping) and "archive" in item:
            one = read(scratch, item, ArchiveSource)
            if not scratch.problems:
                words = ["relay", one.archive, name, "--archive-key", one.key]
                yield f"{name}-from-archive", "sources", item, _table(words, one.env_file)


def _table(words: list[str], env_file: Path | None) -> dict[str, Any]:
    """Return the table of a group that executes a command of ``replicas``.

    The storage may fail for 30 days before the replica is restarted.
    """
    health = dict.fromkeys(("start_timeout", "progress_timeout", "load_deadline"), "30d")
    rules = {"on_failure": "replica", "min_ready": 0, "drain_timeout": "10s", "stop_timeout": "1m", "health": health}
    rules |= {} if env_file is None else {"env_file": str(env_file)}
    return {"launcher": "exec", "command": ["-m", "replicas", *words], "resources": {"gpus": 0}, **rules}
