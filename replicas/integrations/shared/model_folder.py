"""A folder that an inference server loads as a model, whose weights are a version's
memory.

Engines that load from a disk are given a folder: configuration and tokenizer are links
to the files of the model's own folder, and ``model.safetensors`` is a link to the slot
that holds the version. Only tied tensors are copied to a disk: the slot has each of
them under one name, and ``tied.safetensors`` has copies for the other names in the
model's own files. The server has to be on this machine, with the same user and the same
view of ``/proc``.

Some engines ignore unknown tensors, keep the old values of missing tensors, or accept
wrong shapes (SGLang on a CPU does all three). So names, shapes and kinds of dtypes are
compared here, before a server is told of a version: with the headers of the model's
safetensors files (those that :func:`replicas.sources.checkpoint` reads of the folder),
or with the first loaded version.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from replicas import errors
from replicas.common.reason import Reason
from replicas.core.base.manifest import Manifest
from replicas.sources.checkpoint import find_files
from replicas.sources.checkpoint import read_specs as specs_of

if TYPE_CHECKING:
    import torch

    from replicas.channel import Update

__all__ = ["ModelFolder", "ModelSpecs", "Spec", "describe_misfit", "find_model", "read_specs", "read_tensor"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
FLOATS = {"float64", "float32", "float16", "bfloat16"}
DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Buffers of old checkpoints, which servers compute themselves."""
HEAD = "lm_head.weight"
NAMED = 3
"""Number of tensors named in an error."""

logger = logging.getLogger("replicas.integrations")


class Spec(NamedTuple):
    """Dtype (torch's name) and shape of a tensor of a version or a checkpoint."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return the spec as ``float32[2, 3]``."""
        return f"{self.dtype}{list(self.shape)}"

    def fits(self, other: Spec) -> bool:
        """Return True if a tensor of this spec can be copied into one of ``other``:
        shapes are equal, and dtypes of one kind (floats of 16 bits or more are
        cast)."""
        return self.shape == other.shape and _kind(self.dtype) == _kind(other.dtype)


def _kind(dtype: str) -> str:
    """Return the kind of a dtype of torch: "float", "float8" or "integer"."""
    if dtype in FLOATS:
        return "float"
    return "float8" if dtype.startswith("float8") else "integer"


def find_model(model: str) -> Path | None:
    """Return the folder of a model, given as a path or as the name of a model of the
    Hugging Face hub; None if it is not on this machine. Nothing is downloaded."""
    if model and (folder := Path(model)).is_dir():
        return folder
    with contextlib.suppress(ImportError, OSError, ValueError):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    return None


def read_specs(folder: Path) -> dict[str, Spec]:
    """Return names, dtypes and shapes from the headers of a model's safetensors files.

    Return an empty dict, and log a warning, if the folder has none, or has several and
    no index that says which of them make the model.

    :raises replicas.errors.UsageError: a file is malformed.
    """
    try:
        files = find_files(folder)
    except errors.UsageError as error:
        logger.warning("comparing versions with the first one that is loaded, not with the model's files: %s", error)
        return {}
    return {name: Spec(spec.dtype, spec.shape) for name, spec in specs_of(files).items()}


def describe_misfit(
    given: Mapping[str, Spec], expected: Mapping[str, Spec], *, tied: bool, complete: bool
) -> Reason | None:
    """Return which tensors do not fit a model and why, in a clause, or None if all fit.

    :param given: the tensors of a version. :param expected: those of the model.
    :param tied: whether the output layer shares the embedding's weight, so that its own
        may be missing or extra.
    :param complete: whether missing tensors are an error.
    """
    problems = [
        (name, f"has {spec}, the model {expected[name]}")
        for name, spec in given.items()
        if name in expected and not spec.fits(expected[name])
    ]
    unknown = [name for name in given if name not in expected and not _is_optional(name, tied)]
    problems += [(name, "is not in the model") for name in unknown]
    if complete:
        missing = [name for name in expected if name not in given and not _is_optional(name, tied)]
        problems += [(name, "is missing") for name in missing]
    return _named(problems) or None


def _is_optional(name: str, tied: bool) -> bool:
    """Return True if the tensor of this name may be missing in a version or in the
    model: servers compute it, or (with ``tied``) it shares the embedding's weight."""
    return name.endswith(DERIVED) or (tied and name.endswith(HEAD))


def _named(problems: Iterable[tuple[str, str]]) -> str:
    """Return a text: the first three of these problems, and how many more there are;
    empty if there is none.

    :param problems: pairs (tensor's name, what is wrong with it, as a verb phrase).
    """
    texts = [f"{name} {what}" for name, what in problems]
    more = f", and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more


class ModelSpecs:
    """The expected tensors of a server's model, as far as they are known here.

    :param model: path or name of the model with which the server was started.
    :param complete: False: versions may lack tensors of the model.
    :raises replicas.errors.UsageError: the model's files are malformed.
    """

    def __init__(self, model: str, *, complete: bool = True) -> None:
        """Read the headers of the model's files, if they are found on this machine.

        :param model: path or name of the model with which the server was started.
        :param complete: whether versions must have all tensors of the model.
        """
        self._source = find_model(model)
        self._complete = complete
        self._expected = {} if self._source is None else read_specs(self._source)
        self._tied = self._source is not None and _is_tied(self._source)

    def misfit(self, update: Update) -> Reason | None:
        """Return why the version does not fit the model, or None if it fits or the
        model's tensors are not known yet. Only names, dtypes and shapes are
        compared."""
        if not self._expected:
            return None
        return describe_misfit(_specs(update), self._expected, tied=self._tied, complete=self._complete)

    def loaded(self, update: Update) -> None:
        """Record that a version was loaded: from now on its names, shapes and dtypes
        are those expected of later versions, unless the model's own files gave them."""
        self._expected = self._expected or _specs(update)


class ModelFolder(ModelSpecs):
    """The folder that one server loads; its weights are those of the version that was
    linked last. :meth:`close` removes it.

    :param parent: folder in which it is made; default: the temporary folder.
    """

    def __init__(self, model: str, *, complete: bool = True, parent: Path | None = None) -> None:
        """Create the folder on disk, with links to the model's files except its
        weights.

        :param model: path or name of the model with which the server was started.
        :param complete: whether versions must have all tensors of the model.
        :param parent: folder in which it is made; default: the temporary folder.
        """
        super().__init__(model, complete=complete)
        self.path = Path(tempfile.mkdtemp(prefix="replicas-model-", dir=parent))
        if self._source is not None:
            for file in self._source.iterdir():
                if file.is_file() and not file.name.endswith(WEIGHTS):
                    (self.path / file.name).symlink_to(file.absolute())

    def link_version(self, update: Update) -> Path:
        """Replace the link ``model.safetensors`` by one to the version's memory, which
        is valid while the update (the version, held for reading) is open; also replace
        the copies of tied tensors. Return the folder.

        :raises replicas.errors.NoCapacity: the copies cannot be written; the link is
            replaced already.
        """
        link = self.path / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(update.path)
        self._copy_tied(update)
        return self.path

    def _copy_tied(self, update: Update) -> None:
        """Replace ``tied.safetensors``, a file of copies of tied tensors: the version's
        memory has each of them only once, under its first name.

        The copies have the other names: those that the model's own files have, or all
        of them if the names in the model's files are not known.

        :raises replicas.errors.NoCapacity: the copy cannot be written.
        """
        import torch

        file, manifest = self.path / "tied.safetensors", update.manifest
        file.unlink(missing_ok=True)
        names = [alias for alias, _ in manifest.aliases if not self._expected or alias in self._expected]
        if not names:
            return
        copies = Manifest(tuple(replace(manifest.tensors[manifest.index[name]], name=name) for name in names))
        tensors = update.tensors()
        try:
            with file.open("xb") as opened:
                opened.write(copies.header)
                for _, name in sorted(zip(copies.offsets, names, strict=True)):
                    opened.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            text = f"{file}, the copy of {len(names)} tied tensors, cannot be written: {error.strerror}"
            raise errors.NoCapacity(text, phase="load", hint="make room there, or set TMPDIR") from error

    def close(self) -> None:
        """Remove the folder from the disk, not the model's own files to which it
        links."""
        shutil.rmtree(self.path, ignore_errors=True)


def read_tensor(
    path: str, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...], _: None, device: int | str
) -> torch.Tensor:
    """Read one tensor out of a version's memory into new memory on ``device``. A
    server's processes call this function by its name.

    :param path: path of the memory.
    :param offset: offset of the tensor in the memory, in bytes.
    :param nbytes: size of the tensor, in bytes.
    :param dtype: torch's name of the dtype, without ``torch.``.
    :param _: not used; it makes ``device`` the seventh argument.
    :param device: None in the follower's request; each process of the server replaces
        the seventh argument by its own device before the call.
    """
    import torch

    data = bytearray(nbytes)  # writable, and owned by the tensor
    with Path(path).open("rb") as file:
        file.seek(offset)
        file.readinto(data)
    number = getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=number) if data else torch.empty(0, dtype=number)
    return flat.view(shape).to(device)


def _specs(update: Update) -> dict[str, Spec]:
    """Return the specs of a version's tensors by all their names: a tied one has
    several."""
    found = {spec.name: Spec(spec.dtype, spec.shape) for spec in update.manifest.tensors}
    return found | {alias: found[target] for alias, target in update.manifest.aliases}


def _is_tied(folder: Path) -> bool:
    """Return True if a model's config ties the output layer to the embedding."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or {}
        return bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return False
