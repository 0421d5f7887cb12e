"""Write the file of a version, and read the headers of safetensors files.

A slot is a valid safetensors file, so a version becomes a checkpoint by a copy of its
bytes behind a header that adds its origin. A slot has a tied tensor once, and its other
names in metadata that other readers ignore: they would miss these weights. So the file
has a copy for each name.

Headers are checked as safetensors checks them: a gap, an overlap, or bytes behind the
last tensor are refused.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from replicas import errors
from replicas.common.outputs import resolve_output
from replicas.core.base.manifest import ALIGNMENT_NBYTES, FileEntry
from replicas.weights.copies.digest import digest_of

__all__ = ["Header", "decode_texts", "digest", "read_header", "save"]

_STEP_NBYTES = 64 << 20
_HEADER_NBYTES = 100 << 20
"""The longest header that safetensors itself reads."""


class Header(NamedTuple):
    """Header of a safetensors file. ``start``: offset of the data in the file, in
    bytes."""

    metadata: dict[str, str]
    entries: dict[str, FileEntry]
    start: int


# made at import: see the decoders of manifests
_RAW, _TEXTS = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(dict[str, str] | None)
_ENTRY = msgspec.json.Decoder(FileEntry)


def read_header(fd: int) -> Header:
    """Read and check the header of the safetensors file that ``fd`` has open, without
    changing the file position of ``fd``.

    :raises ValueError, msgspec.DecodeError: the header is not valid; safetensors would
        refuse the file, too.
    """
    length, room = int.from_bytes(os.pread(fd, 8, 0), "little"), os.fstat(fd).st_size - 8
    if not 2 <= length <= min(_HEADER_NBYTES, room):
        raise ValueError("it does not have a header")
    raw = _RAW.decode(os.pread(fd, length, 8))
    metadata = _TEXTS.decode(raw.pop("__metadata__", b"null")) or {}
    entries = {name: _ENTRY.decode(one) for name, one in raw.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, end = entry.data_offsets
        if first != position or end < first:
            raise ValueError(f"tensor {name!r} does not begin where the one before it ends")
        position = end
    if position != room - length:
        raise ValueError(f"its tensors have {position} bytes, and it has {room - length}")
    return Header(metadata, entries, 8 + length)


def decode_texts(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    """Decode a JSON object of texts, which is the value of ``key`` in a header's
    metadata; return an empty dict if the key is missing.

    :raises msgspec.DecodeError, msgspec.ValidationError: the value is no such object.
    """
    return _TEXTS.decode(metadata.get(key, "null")) or {}


def save(version: int, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the file of a version to ``path``: whole or not at all, and durably.

    A tied tensor is written under each of its names, each with its own bytes.

    Replace a regular file; follow a link; refuse a device or a pipe, which cannot hold
    a whole file.

    Until it is complete the file has no name where the file system allows that, so no
    reader sees a part of it, and nothing stays behind if this process dies.

    :param version: a descriptor of ``update.path``.
    :param metadata: texts that are added to the header.
    :raises replicas.errors.UsageError: the file cannot be written; an earlier one at
        ``path`` stays.
    """
    header = read_header(version)
    entries, spans = _lay_out(header)
    body = msgspec.json.encode({"__metadata__": {**header.metadata, **metadata}, **entries})
    body += b" " * (-(8 + len(body)) % ALIGNMENT_NBYTES)
    try:
        target = resolve_output(path)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write(folder, target.name, len(body).to_bytes(8, "little") + body, version, spans)
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        hint = "name a file in a folder that exists and has room, with -o"
        raise errors.UsageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


def _lay_out(header: Header) -> tuple[dict[str, FileEntry], list[tuple[int, int]]]:
    """Return the header entries of the file to write, by all names of the tensors, and
    the byte ranges of the version's file to copy, as (start, end) in order.

    A tied tensor has a copy for each name, right behind it: so all stay aligned to
    their items, as in a slot.
    """
    aliases = decode_texts(header.metadata, "replicas.aliases")
    named = header.entries | {alias: header.entries[name] for alias, name in aliases.items()}
    entries: dict[str, FileEntry] = {}
    spans: list[tuple[int, int]] = []
    position = 0
    for name, entry in sorted(named.items(), key=lambda item: item[1].data_offsets):
        first, end = entry.data_offsets
        entries[name] = msgspec.structs.replace(entry, data_offsets=(position, position + end - first))
        position += end - first
        first, end = header.start + first, header.start + end
        if spans and spans[-1][1] == first:
            first, _ = spans.pop()
        spans.append((first, end))
    return entries, spans


def _write(folder: int, name: str, header: bytes, version: int, spans: Iterable[tuple[int, int]]) -> None:
    """Write header and byte ranges to a new file, sync it, and rename it to ``name``,
    over a file of that name. On an error nothing is left.

    :param folder: descriptor of the folder. :param version: descriptor of the file to
        copy from. :param spans: (start, end) in it, in bytes.
    """
    beside = f".{name}.{os.getpid()}.part"
    try:
        file, unnamed = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=folder), True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        file, unnamed = (
            os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=folder),
            False,
        )
    try:
        view = memoryview(header)
        while view:
            view = view[os.write(file, view) :]
        for start, end in spans:
            while sent := os.sendfile(file, version, start, min(_STEP_NBYTES, end - start)):
                start += sent
        os.fsync(file)
        if unnamed:
            os.link(f"/proc/self/fd/{file}", beside, dst_dir_fd=folder, follow_symlinks=True)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise
    finally:
        os.close(file)


def digest(version: int) -> str:
    """Return the digest of a version's tensors, computed from their bytes, in the form
    of the publisher's receipt.

    :param version: a descriptor of the version's file, whose header is left out; the
        file position stays.
    """
    start = read_header(version).start
    nbytes = os.fstat(version).st_size
    with mmap.mmap(version, nbytes, access=mmap.ACCESS_READ) as data, memoryview(data) as view, view[start:] as part:
        return digest_of(part)
