"""Checkpoints in safetensors files: as weights to publish, and made of a version.

A slot is a valid safetensors file, so a version becomes a checkpoint by a copy of its
bytes behind a header that also says where it comes from; and the file of a version is
read as any other checkpoint is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from replicas import errors
from replicas.core.base.manifest import ALIGNMENT_NBYTES, CODES
from replicas.weights.copies.digest import digest_of
from replicas.weights.copies.tensors import torch_dtype

__all__ = ["Checkpoint", "checkpoint", "differences", "digest", "save"]

_DTYPES = {"F8_E8M0": "float8_e8m0fnu"} | CODES
"""Of torch by those of safetensors; its releases before 0.7 lack the first."""
_STEP_NBYTES = 64 << 20
_HEADER_NBYTES = 100 << 20
"""As much as safetensors itself reads."""
_INDEX = ".safetensors.index.json"
_DAMAGED = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError),
    errors.ManifestMismatch,  # a dtype that torch does not have
)


class Checkpoint(dict[str, torch.Tensor]):
    """What :func:`checkpoint` returns: CPU tensors by name.

    :ivar metadata: texts of the files' headers.
    :ivar aliases: names of tensors that are others' memory, and those others' names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metadata: dict[str, str] = {}
        self.aliases: dict[str, str] = {}


def checkpoint(path: Path | str) -> Checkpoint:
    """The tensors of a safetensors file, or of a folder of them, to be published.

    They are mapped, and read when they are copied: keep the files as they are until the
    publish has returned, and replace a file rather than overwrite it. A folder is that
    of a Hugging Face model: the files that its index names, or without an index all.
    Tied tensors of a version that was saved by ``replicas get`` are tied again.

    :raises replicas.errors.UsageError: a file is missing, or is no safetensors file,
        named; or two files have a tensor of the same name.
    """
    given, found = Path(path), Checkpoint()
    with _named(given):
        for one in _files(given):
            with _named(one):
                _add(found, one)
    return found


def _files(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    indices = sorted(given.glob(f"*{_INDEX}"))
    if indices:
        named = {str(name) for one in indices for name in json.loads(one.read_bytes())["weight_map"].values()}
        return [given / name for name in sorted(named)]
    files = sorted(given.glob("*.safetensors"))
    if not files:
        raise errors.UsageError(f"{given} has no *.safetensors file", hint="name a safetensors file, or its folder")
    return files


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of a file say which."""
    try:
        yield
    except OSError as error:
        raise errors.UsageError(f"{path} cannot be read: {error.strerror or error}", hint="") from error
    except _DAMAGED as error:
        text = f"{path} is no whole safetensors file: {str(error) or type(error).__name__}"
        raise errors.UsageError(text, hint="name a file that safetensors wrote, or a folder of them") from error


def _add(found: Checkpoint, path: Path) -> None:
    with path.open("rb") as file:
        header, start = _header(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata = header.pop("__metadata__", {})
    found.metadata |= metadata
    dtypes = json.loads(metadata.get("replicas.dtypes", "{}"))
    for name, entry in header.items():
        if name in found:
            raise errors.UsageError(
                f"tensor {name!r} is in {path} and in a file before it", hint="name one of the files"
            )
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= nbytes - start:
            raise ValueError(f"tensor {name!r} lies outside of it")
        found[name] = _tensor(data, start + first, end - first, entry, dtypes.get(name))
    for alias, name in json.loads(metadata.get("replicas.aliases", "{}")).items():
        found[alias] = found[name]
        found.aliases[alias] = name


def _tensor(data: mmap.mmap, start: int, nbytes: int, entry: Mapping[str, Any], raw: str | None) -> torch.Tensor:
    """``raw``: the dtype, where safetensors has no name for it and has bytes."""
    if raw is None and entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known")
    dtype = torch_dtype(raw or _DTYPES[entry["dtype"]])
    shape = entry["shape"][:-1] if raw else entry["shape"]
    if prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes are not {entry['dtype']}{shape}")
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=nbytes)
    if start % dtype.itemsize:  # of a file that pads nothing
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _header(fd: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data starts."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(_HEADER_NBYTES, os.fstat(fd).st_size - 8):
        raise ValueError("it has no header")
    found = json.loads(os.pread(fd, length, 8))
    if not isinstance(found, dict):
        raise ValueError("its header is no JSON object")
    return found, 8 + length


def save(version: int, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the file of a version to ``path``, whole or not at all, and durably.

    Until it is whole the file has no name where the file system allows that, and no
    reader sees a part of it: an end of this process leaves nothing behind.

    :param version: a descriptor of ``update.path``.
    :param metadata: texts that are added to the header.
    :raises replicas.errors.UsageError: the file cannot be written.
    """
    header, start = _header(version)
    header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % ALIGNMENT_NBYTES)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write(folder, path.name, len(body).to_bytes(8, "little") + body, version, start)
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        hint = "name a file in a folder that exists and has room, with -o"
        raise errors.UsageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


def _write(folder: int, name: str, header: bytes, version: int, start: int) -> None:
    beside = f".{name}.{os.getpid()}.part"
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except FileNotFoundError:
        pass
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
        while sent := os.sendfile(file, version, start, _STEP_NBYTES):
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
    """The digest of the file of a version, as in the publisher's receipt."""
    start = _header(version)[1]
    nbytes = os.fstat(version).st_size
    with mmap.mmap(version, nbytes, access=mmap.ACCESS_READ) as data, memoryview(data) as view, view[start:] as part:
        return digest_of(part)


def differences(
    one: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    first: str = "the first",
    second: str = "the second",
) -> list[str]:
    """What differs between two sets of tensors, a line for each name, bit by bit.

    :param first: what the lines call ``one``. :param second: and ``other``.
    """
    found = [f"{name}: only in {first}" for name in one.keys() - other.keys()]
    found += [f"{name}: only in {second}" for name in other.keys() - one.keys()]
    for name in one.keys() & other.keys():
        ours, theirs = one[name], other[name]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            found.append(f"{name}: {_kind(ours)}, {_kind(theirs)}")
        elif not torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            found.append(f"{name}: values differ")
    return sorted(found)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
