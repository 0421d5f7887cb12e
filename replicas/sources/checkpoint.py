"""Read checkpoints in safetensors files, as weights to publish.

The file of a version (:mod:`replicas.sources.version_file`) is read as any other
checkpoint is.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from replicas import errors
from replicas.common.decoding import MALFORMED
from replicas.core.base.dtypes import CODES, PACKED
from replicas.core.base.manifest import FileEntry, TensorSpec
from replicas.sources.version_file import Header, decode_texts, read_header
from replicas.weights.copies.tensors import torch_dtype

__all__ = ["Checkpoint", "checkpoint", "differences", "find_files", "read_specs"]

_WEIGHTS, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
_SHARD = "shard-*-model-*.safetensors"
"""Files that each rank writes by torch's
HuggingFaceStorageWriter(save_distributed=True)."""
_SHARDING = "DCP_SHARDING_INFO"
"""In the header of every file of that writer, except the consolidated ones."""
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")
_PICKLES = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of files of torch.save."""
_DAMAGED = (
    *(*MALFORMED, ValueError, KeyError, AttributeError, RuntimeError),
    errors.ManifestMismatch,  # a dtype that torch does not have
)


class Checkpoint(dict[str, torch.Tensor]):
    """A model's CPU tensors by name, as :func:`checkpoint` returns them.

    :ivar metadata: texts of the files' headers.
    :ivar aliases: names of tied tensors -> the name that owns the memory.
    """

    def __init__(self) -> None:
        """Begin without tensors; :func:`checkpoint` adds those of each file."""
        super().__init__()
        self.metadata: dict[str, str] = {}
        self.aliases: dict[str, str] = {}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


class Files(NamedTuple):
    """The files of one checkpoint.

    :ivar names: the tensors that an index gives to each file; None: all in the file.
    :ivar nbytes: bytes of all tensors by the index; None: not in the index.
    """

    names: Mapping[Path, set[str] | None]
    nbytes: Any = None


_INDEXED = msgspec.json.Decoder(_Index)
"""Made at import: see the decoders of manifests."""


def checkpoint(path: Path | str) -> Checkpoint:
    """Return the tensors of a safetensors file, or of a folder of them, to publish.

    The files are mapped, and read when the tensors are copied: do not change the files
    until the publish has returned, and replace a file rather than overwrite it.

    A folder is read as ``from_pretrained`` of transformers reads it: the file that
    ``transformers_weights`` of its config.json names; else ``model.safetensors``; else
    ``model.safetensors.index.json``, a map from names to files, which must hold exactly
    the tensors of the map; else the only ``*.safetensors`` file. Of several variants or
    formats in one folder name the file, or its index.

    Tied tensors are tied again in files of ``replicas get``, if their copies are still
    equal, and in those of safetensors' ``save_model``. The latter does not record
    whether a name was a view of a part of the kept tensor, or transposed: that name
    gets the whole tensor.

    :raises replicas.errors.UsageError: a file is missing, ambiguous or not a valid
        safetensors file; the index and its files disagree; the files hold parts of
        tensors (of torch.distributed.checkpoint); or the files are of another format:
        the hint has the command that converts them.
    """
    found, files = Checkpoint(), find_files(path)
    for one in sorted(files.names):
        with _named(one):
            _add_file(found, one, files.names[one])
    total = sum(tensor.nbytes for name, tensor in found.items() if name not in found.aliases)
    if _SHARDING in found.metadata and files.nbytes != total:
        raise _parts_error(Path(path))
    return found


def find_files(path: Path | str) -> Files:
    """Return the files that :func:`checkpoint` reads, with what an index says of them.

    Reads no tensors: an index, if there is one, and else no file.

    :param path: of a file, an index, or a folder.
    :raises replicas.errors.UsageError: a file is missing, or the choice of files is
        ambiguous.
    """
    given = Path(path)
    with _named(given):
        file = _choose_file(given) if given.is_dir() else given
    if file.suffix != ".json":
        return Files({file: None})
    with _named(file, "an index of safetensors files"):
        index = _INDEXED.decode(file.read_bytes())
    return Files(_group_by_file(index, file), (index.metadata or {}).get("total_size"))


def read_specs(files: Files) -> dict[str, TensorSpec]:
    """Return names, dtypes and shapes of all tensors in these files, by name.

    Read headers only. A tied tensor is under one name, that of its bytes in the file.

    :raises replicas.errors.UsageError: a file is not a valid safetensors file.
    """
    found: dict[str, TensorSpec] = {}
    for one in files.names:
        with _named(one), one.open("rb") as file:
            header = read_header(file.fileno())
            stand_ins = decode_texts(header.metadata, "replicas.dtypes")
            for name, entry in header.entries.items():
                found[name] = _spec(name, entry, stand_ins.get(name))
    return found


def _choose_file(folder: Path) -> Path:
    """Return the file, or the index, that holds the weights of a folder.

    :raises replicas.errors.UsageError: there is none, or the choice is ambiguous.
    """
    if any(folder.glob(_SHARD)):  # transformers reads these; a consolidated checkpoint has the same index
        if not (folder / _INDEX).is_file():
            raise _parts_error(folder)
        return folder / _INDEX
    for name in (_read_config(folder / "config.json"), _WEIGHTS, _INDEX):
        if name and (folder / name).is_file():
            return folder / name
    files = sorted(one for one in folder.glob(f"*{_SUFFIX}") if not one.name.startswith("."))  # macOS has ._*
    if len(files) == 1:
        return files[0]
    there = sorted(one.name for one in (files or folder.iterdir()))
    text = f"{folder} has neither {_WEIGHTS} nor {_INDEX}"
    hint = _find_conversion(folder) or "name one of its files, or the index of several"
    raise errors.UsageError(f"{text}; it has {', '.join(there[:20]) or 'no files'}", hint=hint)


def _read_config(path: Path) -> str:
    """Return the file of weights that a config.json names (``transformers_weights``).

    Return an empty text if it names none, or if there is no config.json.

    :param path: of config.json. The returned name is relative to its folder.
    :raises replicas.errors.UsageError: config.json cannot be read, or the file that it
        names is missing.
    """
    if not path.is_file():
        return ""
    with _named(path, "the config of a model"):
        found = json.loads(path.read_bytes()).get("transformers_weights")  # some have Infinity, which msgspec rejects
    if found and not (path.parent / found).is_file():
        raise errors.UsageError(f"{path} names {found}, which is missing", hint="download or save the model again")
    return found or ""


def _group_by_file(index: _Index, path: Path) -> Mapping[Path, set[str]]:
    """Return the names of the tensors in each file of an index, by the file's path.

    :param path: path of the index itself.
    :raises replicas.errors.UsageError: a file is missing.
    """
    found: dict[Path, set[str]] = defaultdict(set)
    for name, file in index.weight_map.items():
        found[path.parent / file].add(name)
    if missing := sorted(one.name for one in found if not one.is_file()):
        text = f"{path} names {', '.join(missing[:20])}, which {'is' if len(missing) == 1 else 'are'} missing"
        raise errors.UsageError(text, hint="download or save the model again")
    return found


@contextlib.contextmanager
def _named(path: Path, kind: str = "a valid safetensors file") -> Iterator[None]:
    """Context manager: an error of reading a file in the block is raised as UsageError.

    :param kind: what the file at ``path`` should have been, for the error.
    """
    try:
        yield
    except OSError as error:
        raise errors.UsageError(f"{path} cannot be read: {error.strerror or error}", hint="") from error
    except _DAMAGED as error:
        hint = _find_conversion(path) or "name a file that safetensors wrote, or a folder of them"
        text = f"{path} is not {kind}: {str(error) or type(error).__name__}"
        raise errors.UsageError(text, hint=hint) from error


def _find_conversion(path: Path) -> str:
    """Return a hint for an error: the command that converts a file or folder written by
    torch itself. Return an empty text for other files; convert nothing."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".distcp" or (path.is_dir() and (folder / ".metadata").exists()):
        module = "torch.distributed.checkpoint.format_utils"
        line = shlex.join(["python", "-m", module, "dcp_to_torch", str(folder), f"{folder.absolute()}.pt"])
        return f"torch.distributed.checkpoint wrote it: make one file of it, and name that: {line}"
    if path.is_dir():
        files = next((found for one in _PICKLED if (found := sorted(path.glob(one)))), [])
        target = path / _WEIGHTS
    else:
        with path.open("rb") as file:
            files = [path] if file.read(4).startswith(_PICKLES) else []
        target = path.with_suffix(_SUFFIX)
    if not files:
        return ""
    code = (
        "import torch; from safetensors.torch import save_file; save_file({name: tensor.contiguous().clone() "
        f"for file in {_literal([str(one) for one in files])} "
        'for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items()}, '
        f"{_literal(str(target))})"
    )
    return f"torch.save wrote it: convert it, or its part with the weights: {shlex.join(['python', '-c', code])}"


def _literal(value: object) -> str:
    """Return a string or list as Python source without single quotes.

    For code that a hint quotes in a shell command.
    """
    return json.dumps(value, ensure_ascii=False)  # without the quotes that a shell would take


def _parts_error(path: Path) -> errors.UsageError:
    """Return the UsageError for files with parts of tensors; its hint has the command
    that joins the parts."""
    folder = path if path.is_dir() else path.parent
    code = (
        "import os; from torch.distributed.checkpoint import HuggingFaceStorageReader as Reader; "
        "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files; "
        f"given, target = {_literal(str(folder))}, {_literal(str(folder / 'consolidated'))}; "
        "os.makedirs(target, exist_ok=True); names = Reader(given).read_metadata().state_dict_metadata; "
        "consolidate_safetensors_files(given, target, dict.fromkeys(names, 1))"
    )
    text = (
        f"{path} may hold parts of tensors: torch.distributed.checkpoint wrote it ({_SHARDING}), and no index fits it"
    )
    hint = (
        "save it by HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True); of the shard-* files "
        f"of all ranks make whole ones: {shlex.join(['python', '-c', code])}"
    )
    return errors.UsageError(text, hint=hint)


def _add_file(found: Checkpoint, path: Path, promised: set[str] | None) -> None:
    """Map a file; add its tensors, tied names and header texts to ``found``.

    :param promised: names that an index gives to the file; None: no index was read.
    :raises replicas.errors.UsageError: a name came before, or the index disagrees.
    """
    with path.open("rb") as file:
        header = read_header(file.fileno())
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    ties, stand_ins = _read_ties(header), decode_texts(header.metadata, "replicas.dtypes")
    names = header.entries.keys() | ties.keys()
    if twice := sorted(names & found.keys()):
        text = f"tensor {twice[0]!r} is in {path} and in a file before it"
        raise errors.UsageError(text, hint="save the model again, or name one of the files")
    if promised is not None and (wrong := sorted(promised - names | header.entries.keys() - promised)):
        which = "names a tensor that its file lacks" if wrong[0] in promised else "does not name a tensor of its file"
        hint = "save the model again, or name the file alone"
        raise errors.UsageError(f"the index {which}: {wrong[0]!r} of {path}", hint=hint)
    for name, entry in header.entries.items():
        found[name] = _tensor(data, header.start, name, entry, stand_ins.get(name))
    for alias, name in ties.items():
        if alias not in header.entries or _is_same(found[alias], found[name]):  # a copy may have been changed since
            found[alias], found.aliases[alias] = found[name], name
    found.metadata |= header.metadata


def _read_ties(header: Header) -> dict[str, str]:
    """Return, for the header of a file, tied names -> the name that has their data.

    :func:`checkpoint` gives a tied name the tensor of that other name.
    """
    removed = {
        name: kept
        for name, kept in header.metadata.items()
        if kept in header.entries
        and name not in header.entries
        and name != "format"
        and not name.startswith("replicas.")
    }  # by safetensors' save_model
    return removed | decode_texts(header.metadata, "replicas.aliases")


def _spec(name: str, entry: FileEntry, stand_in: str | None) -> TensorSpec:
    """Return name, dtype and shape of a tensor of a file, as torch has them.

    :param entry: the tensor's entry in the file's header.
    :param stand_in: the real dtype of a tensor that a file of an old release stores as
        bytes (U8), as that release had no code for the dtype; None for other tensors.
    :raises ValueError: torch does not have the dtype, or rows are not whole bytes.
    """
    known, shape, packed = stand_in or CODES.get(entry.dtype), entry.shape, PACKED.get(entry.dtype, 1)
    if known is None:
        raise ValueError(f"tensor {name!r} has dtype {entry.dtype}, which torch does not have")
    if stand_in:
        shape = shape[:-1]
    elif packed > 1:
        if not shape or shape[-1] % packed:
            raise ValueError(f"tensor {name!r} is {entry.dtype}{list(shape)}, whose rows are not whole bytes")
        shape = (*shape[:-1], shape[-1] // packed)
    return TensorSpec(name, known, shape)


def _tensor(data: mmap.mmap, start: int, name: str, entry: FileEntry, stand_in: str | None) -> torch.Tensor:
    """Return a tensor of a mapped file: a view of ``data``, or a copy if unaligned
    there.

    :param data: the mapped file. :param start: offset of the tensors' data in it, in
        bytes.
    :param entry: the tensor's entry in the file's header.
    :param stand_in: the real dtype of a tensor that a file of an old release stores as
        bytes (U8); None for other tensors.
    :raises ValueError: the length of the bytes does not fit dtype and shape.
    """
    (first, end), spec = entry.data_offsets, _spec(name, entry, stand_in)
    dtype, shape = torch_dtype(spec.dtype), spec.shape
    if prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"tensor {name!r} has {end - first} bytes, which are not {entry.dtype}{list(entry.shape)}")
    if first == end:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, offset=start + first, count=end - first)
    if (start + first) % dtype.itemsize:  # of a file that pads nothing
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def differences(
    one: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    first: str = "the first",
    second: str = "the second",
) -> list[str]:
    """Compare two sets of tensors bit by bit; return a line for each name that differs,
    sorted; empty if none does.

    :param first: name of ``one`` in the lines. :param second: name of ``other``.
    """
    found = [f"{name}: only in {first}" for name in one.keys() - other.keys()]
    found += [f"{name}: only in {second}" for name in other.keys() - one.keys()]
    for name in one.keys() & other.keys():
        ours, theirs = one[name], other[name]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            found.append(f"{name}: {_kind(ours)} in {first}, {_kind(theirs)} in {second}")
        elif not _is_same(ours, theirs):
            found.append(f"{name}: values differ")
    return sorted(found)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both tensors are equal bit by bit, in dtype and in shape."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _kind(tensor: torch.Tensor) -> str:
    """Return dtype and shape as a text: ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
