"""Checkpoints: what their files give, what is refused, and files that are whole or not
there.

Covers: sources/checkpoint.py.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replicas import errors
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.sources import checkpoint
from replicas.sources.checkpoint import differences, digest, save
from replicas.weights.copies.digest import digest_of

RAW = "float8_e5m2fnuz"
"""A dtype that safetensors has no name for."""


def image(folder: Path) -> Path:
    """The file of a version: tied tensors, an empty one, and a dtype of no name."""
    specs = TensorSpec("b", "int8", (3,)), TensorSpec("a", "int64", (2,)), TensorSpec("c", RAW, (2, 2))
    manifest = Manifest((*specs, TensorSpec("none", "float32", (0, 7))), (("d", "a"),))
    path = folder / "slot"
    data = torch.tensor([4, 5]).numpy().tobytes() + bytes([1, 2, 3]) + bytes([9, 8, 7, 6])
    path.write_bytes(manifest.header + data)
    return path


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[int]:
    fd = os.open(image(tmp_path), os.O_RDONLY)
    yield fd
    os.close(fd)


def raw(header: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def test_the_file_of_a_version_has_its_tensors_and_ties(tmp_path: Path) -> None:
    found = checkpoint(image(tmp_path))
    assert found["a"].tolist() == [4, 5]
    assert found["b"].tolist() == [1, 2, 3]
    assert (found["c"].dtype, found["c"].shape) == (getattr(torch, RAW), (2, 2))
    assert found["c"].view(torch.uint8).tolist() == [[9, 8], [7, 6]]
    assert found["none"].shape == (0, 7)
    assert found["d"].data_ptr() == found["a"].data_ptr()
    assert found.aliases == {"d": "a"}


def test_a_saved_version_is_the_same_with_more_in_its_header(tmp_path: Path, slot: int) -> None:
    path = tmp_path / "saved"
    path.write_text("what was there before")
    save(slot, path, {"replicas.version": "7"})
    found, before = checkpoint(path), checkpoint(tmp_path / "slot")
    assert found.metadata == before.metadata | {"replicas.version": "7"}
    assert differences(found, before) == []
    assert {one.name for one in tmp_path.iterdir()} == {"saved", "slot"}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        assert start % 4096 == 0
        assert digest(file.fileno()) == digest(slot) == digest_of(path.read_bytes()[start:])


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("step", ["sendfile", "fsync", "rename"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, slot: int, monkeypatch: pytest.MonkeyPatch, step: str, unnamed: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "saved"
    path.write_text("before")
    if not unnamed:
        monkeypatch.setattr(os, "open", without_unnamed(os.open))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(errors.UsageError, match="No space left") as caught:
            save(slot, path, {})
    assert str(path) in str(caught.value)
    assert path.read_text() == "before"
    assert {one.name for one in tmp_path.iterdir()} == {"saved", "slot"}
    save(slot, path, {})
    assert differences(checkpoint(path), checkpoint(tmp_path / "slot")) == []


def without_unnamed(real: Callable[..., int]) -> Callable[..., int]:
    """``os.open`` of a file system that has no files without a name."""

    def opened(path: str, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **options)

    return opened


def test_a_folder_is_read_by_its_index_if_it_has_one(tmp_path: Path) -> None:
    for name in ("one", "two", "copy"):
        save_file({"copy" if name == "copy" else name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert set(checkpoint(tmp_path)) == {"one", "two", "copy"}
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(checkpoint(tmp_path)) == {"one", "two"}


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(errors.UsageError, match=r"tensor 'w' is in .*two\.safetensors and in a file before it"):
        checkpoint(tmp_path)


def test_a_file_without_padding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    value = torch.tensor([1.5, 2.5])
    for spaces in range(4):
        path.write_bytes(raw(json.dumps({"w": entry}).encode() + b" " * spaces, value.numpy().tobytes()))
        assert checkpoint(path)["w"].tolist() == [1.5, 2.5]


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (1 << 40).to_bytes(8, "little") + b"{}",
        raw(b"no json"),
        raw(b"[]"),
        raw(b"[" * 100_000),
        raw({"w": GOOD}, b"1234567"),
        raw({"w": {**GOOD, "data_offsets": [-8, 0]}}, bytes(8)),
        raw({"w": {**GOOD, "data_offsets": [8, 0]}}, bytes(8)),
        raw({"w": {**GOOD, "data_offsets": [0]}}, bytes(8)),
        raw({"w": {**GOOD, "data_offsets": "ab"}}, bytes(8)),
        raw({"w": {**GOOD, "shape": [3]}}, bytes(8)),
        raw({"w": {**GOOD, "shape": [-2, -1]}}, bytes(8)),
        raw({"w": {**GOOD, "shape": None}}, bytes(8)),
        raw({"w": {**GOOD, "dtype": "F6"}}, bytes(8)),
        raw({"w": {**GOOD, "dtype": []}}, bytes(8)),
        raw({"w": 5}, bytes(8)),
        raw({"__metadata__": 5, "w": GOOD}, bytes(8)),
        raw({"__metadata__": {"replicas.aliases": '{"a": "b"}'}, "w": GOOD}, bytes(8)),
        raw({"__metadata__": {"replicas.dtypes": '{"w": "none"}'}, "w": GOOD}, bytes(8)),
    ],
)
def test_a_file_that_is_damaged_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(errors.UsageError, match="damaged"):
        checkpoint(path)


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match=r"no \*\.safetensors file"):
        checkpoint(tmp_path)
    with pytest.raises(errors.UsageError, match="nothing cannot be read: No such file"):
        checkpoint(tmp_path / "nothing")


def test_differences_are_of_bits() -> None:
    one = {
        "nan": torch.tensor([float("nan")]),
        "zero": torch.tensor([0.0]),
        "scalar": torch.tensor(3),
        "x": torch.ones(1),
    }
    other = {**one, "zero": torch.tensor([-0.0]), "x": torch.ones(1, 1), "y": torch.ones(1)}
    assert differences(one, one) == []
    assert differences(one, other, "A", "B") == ["x: float32[1], float32[1, 1]", "y: only in B", "zero: values differ"]
