"""Checkpoints: what their files give, what is refused, and files that are whole or not
there.

Covers: sources/checkpoint.py, sources/version_file.py.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file, save_model

from replicas import errors
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.sources import checkpoint
from replicas.sources.checkpoint import differences
from replicas.sources.version_file import digest, save
from replicas.weights.copies.digest import digest_of


def image(folder: Path) -> Path:
    """The file of a version: tied tensors, an empty one, and one of half bytes."""
    specs = TensorSpec("b", "int8", (3,)), TensorSpec("a", "int64", (2,)), TensorSpec("c", "float4_e2m1fn_x2", (2, 2))
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
    assert (found["c"].dtype, found["c"].shape) == (torch.float4_e2m1fn_x2, (2, 2))
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
        assert digest(file.fileno()) == digest_of(path.read_bytes()[start:])


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_finds_each_name_of_a_tied_tensor(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["float64", "float32", "bfloat16", "uint8", "float8_e4m3fn"]
    specs = [
        TensorSpec(f"t{number}", rng.choice(kinds), (rng.randint(0, 3), rng.randint(1, 5)))
        for number in range(rng.randint(1, 6))
    ]
    aliases = tuple((f"a{number}", rng.choice(specs).name) for number in range(rng.randint(0, 5)))
    manifest = Manifest(tuple(specs), aliases)
    (tmp_path / "slot").write_bytes(manifest.header + rng.randbytes(manifest.data_nbytes))
    with (tmp_path / "slot").open("rb") as file:
        save(file.fileno(), tmp_path / "saved", {})
        version = digest(file.fileno())
    before, found, theirs = checkpoint(tmp_path / "slot"), checkpoint(tmp_path / "saved"), load_file(tmp_path / "saved")
    assert differences(theirs, before) == differences(found, before) == []
    assert found.aliases == before.aliases == dict(aliases)
    assert all(found[alias].data_ptr() == found[name].data_ptr() for alias, name in aliases if found[name].numel())
    if not aliases:
        with (tmp_path / "saved").open("rb") as file:
            assert digest(file.fileno()) == version


def test_a_copy_that_was_changed_is_not_tied_again(tmp_path: Path, slot: int) -> None:
    save(slot, tmp_path / "saved", {})
    with safe_open(tmp_path / "saved", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "saved")
    tensors["d"] += 1
    save_file(tensors, tmp_path / "changed", metadata)
    found = checkpoint(tmp_path / "changed")
    assert (found["a"].tolist(), found["d"].tolist(), found.aliases) == ([4, 5], [5, 6], {})
    tensors["d"] = torch.zeros(3)
    save_file(tensors, tmp_path / "changed", metadata)
    assert checkpoint(tmp_path / "changed")["d"].tolist() == [0, 0, 0]


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


@pytest.mark.parametrize("way", ["device", "pipe", "pipe of a shell", "folder"])
def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, slot: int, way: str) -> None:
    path, ends = tmp_path / "there", os.pipe()
    if way == "device":
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3)) if os.geteuid() == 0 else pytest.skip("root only")
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    else:
        path = Path(f"/dev/fd/{ends[1]}")
    kind = stat.S_IFMT(path.stat().st_mode)
    with pytest.raises(errors.UsageError, match="cannot be written: it is not a regular file"):
        save(slot, path, {})
    assert stat.S_IFMT(path.stat().st_mode) == kind
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, slot: int, dangling: bool) -> None:
    folder, link = tmp_path / "elsewhere", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("elsewhere/file")
    if not dangling:
        (folder / "file").write_text("before")
    save(slot, link, {})
    assert link.readlink() == Path("elsewhere/file")
    assert [one.name for one in folder.iterdir()] == ["file"]
    assert differences(checkpoint(folder / "file"), checkpoint(tmp_path / "slot")) == []


def test_a_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old"
    metadata = {"format": "pt", "replicas.dtypes": '{"c":"float8_e5m2fnuz"}'}
    path.write_bytes(
        raw({"__metadata__": metadata, "c": {"dtype": "U8", "shape": [2, 1], "data_offsets": [0, 2]}}, b"ab")
    )
    found = checkpoint(path)["c"]
    assert (found.dtype, found.shape, found.view(torch.uint8).tolist()) == (torch.float8_e5m2fnuz, (2,), [97, 98])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(3, 4, bias=False)
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(4, 3)})
        self.lm_head.weight = self.model["embed_tokens"].weight  # type: ignore[assignment]


def test_ties_that_save_model_records_are_tied_again(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "model.safetensors"
    save_model(model, str(path), {"note": "embed", "format": "lm_head.weight"})
    found = checkpoint(path)
    assert found.aliases == {"model.embed_tokens.weight": "lm_head.weight"}
    assert differences(found, model.state_dict()) == []
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    model.load_state_dict(found)


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


def entry(**other: object) -> dict[str, object]:
    return {**GOOD, **other}


def nested(depth: int) -> bytes:
    return b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":' + b"[" * depth + b"]" * depth + b"}}"


FORMAT = {
    "as mlx 0.32.4 writes it": raw({"__metadata__": None, "w": GOOD}, bytes(8)),
    "no metadata": raw({"w": GOOD}, bytes(8)),
    "empty metadata": raw({"__metadata__": {}, "w": GOOD}, bytes(8)),
    "a number in the metadata": raw({"__metadata__": {"a": 1}, "w": GOOD}, bytes(8)),
    "null in the metadata": raw({"__metadata__": {"a": None}, "w": GOOD}, bytes(8)),
    "a list as metadata": raw({"__metadata__": [], "w": GOOD}, bytes(8)),
    "padded": raw(json.dumps({"w": GOOD}).encode() + b" \n\t ", bytes(8)),
    "padded in front": raw(b" " + json.dumps({"w": GOOD}).encode(), bytes(8)),
    "padded with nothing": raw(json.dumps({"w": GOOD}).encode() + b"\0", bytes(8)),
    "two objects": raw(json.dumps({"w": GOOD}).encode() + b"{}", bytes(8)),
    "nothing in it": raw({}),
    "no elements": raw({"w": entry(shape=[0, 7], data_offsets=[0, 0])}),
    "a scalar": raw({"w": entry(shape=[], data_offsets=[0, 4])}, bytes(4)),
    "more keys": raw({"w": entry(extra={"a": [1]})}, bytes(8)),
    "one name twice": raw(b'{"w":%b,"w":%b}' % ((json.dumps(GOOD).encode(),) * 2), bytes(8)),
    "no order": raw({"w": entry(data_offsets=[8, 16]), "v": GOOD}, bytes(16)),
    "no name": raw({"": GOOD}, bytes(8)),
    "no ASCII": raw(json.dumps({"\u00e9\U0001f600": GOOD}, ensure_ascii=False).encode(), bytes(8)),
    "a gap": raw({"w": GOOD, "v": entry(data_offsets=[12, 20])}, bytes(20)),
    "a gap in front": raw({"w": entry(data_offsets=[4, 12])}, bytes(12)),
    "an overlap": raw({"w": GOOD, "v": entry(data_offsets=[4, 12])}, bytes(12)),
    "the same bytes": raw({"w": GOOD, "v": GOOD}, bytes(8)),
    "an empty one in the middle": raw({"w": GOOD, "v": entry(shape=[0], data_offsets=[3, 3])}, bytes(8)),
    "more bytes": raw({"w": GOOD}, bytes(12)),
    "fewer bytes": raw({"w": GOOD}, bytes(7)),
    "a float in the shape": raw({"w": entry(shape=[2.0])}, bytes(8)),
    "true in the shape": raw({"w": entry(shape=[True, 2])}, bytes(8)),
    "a negative shape": raw({"w": entry(shape=[-2, -1])}, bytes(8)),
    "three offsets": raw({"w": entry(data_offsets=[0, 8, 9])}, bytes(8)),
    "no shape": raw({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "a byte order mark": raw(b"\xef\xbb\xbf" + json.dumps({"w": GOOD}).encode(), bytes(8)),
    "UTF-16": raw(json.dumps({"w": GOOD}).encode("utf-16-le"), bytes(8)),
    "Latin 1": raw(b'{"\xe9":%b}' % json.dumps(GOOD).encode(), bytes(8)),
    "half a character": raw(b'{"\\ud800":%b}' % json.dumps(GOOD).encode(), bytes(8)),
    "NaN": raw({"w": entry(x=float("nan"))}, bytes(8)),
    "lower case": raw({"w": entry(dtype="f32")}, bytes(8)),
    "deep": raw(nested(100), bytes(8)),
    "too deep": raw(nested(10_000), bytes(8)),
    "half bytes": raw({"w": entry(dtype="F4", shape=[4, 4])}, bytes(8)),
    "half a byte": raw({"w": entry(dtype="F4", shape=[3], data_offsets=[0, 1])}, bytes(1)),
    "rows of half bytes": raw({"w": entry(dtype="F4", shape=[2, 3], data_offsets=[0, 3])}, bytes(3)),
    "6 bits": raw({"w": entry(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])}, bytes(3)),
}


@pytest.mark.parametrize("content", FORMAT.values(), ids=FORMAT)
def test_a_file_is_read_or_refused_as_safetensors_does(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    try:
        theirs = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
    except (SafetensorError, KeyError):
        with pytest.raises(errors.UsageError, match="given is not a valid safetensors file: "):
            checkpoint(path)
        return
    found = checkpoint(path)
    assert differences(found, theirs) == []
    assert found.metadata == (metadata or {})


def test_differences_are_of_bits() -> None:
    one = {
        "nan": torch.tensor([float("nan")]),
        "zero": torch.tensor([0.0]),
        "scalar": torch.tensor(3),
        "x": torch.ones(1),
    }
    other = {**one, "zero": torch.tensor([-0.0]), "x": torch.ones(1, 1), "y": torch.ones(1)}
    assert differences(one, one) == []
    assert differences(one, other, "A", "B") == [
        "x: float32[1] in A, float32[1, 1] in B",
        "y: only in B",
        "zero: values differ",
    ]
