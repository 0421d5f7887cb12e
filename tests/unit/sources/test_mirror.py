"""Folders of versions: whole or not there, of a bounded number, with names of others.

Covers: sources/mirror.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas import errors
from replicas.sources import mirror
from replicas.sources.mirror import NOTE, Mirror


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "mirror"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The file of a version, whose weights are ones."""
    path = tmp_path / "version.safetensors"
    save_file({"w": torch.ones(1000)}, path, {"format": "pt"})
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a_version_becomes_a_folder_and_the_newest(folder: Path, file: int) -> None:
    made = Mirror(folder).write(file, 7, "abc", {"step": 70})
    assert made == folder / "version-7"
    assert (folder / "latest").resolve() == made.resolve()
    assert torch.equal(load_file(folder / "latest" / "model.safetensors")["w"], torch.ones(1000))
    assert json.loads((made / NOTE).read_text()) == {"version": 7, "digest": "abc", "meta": {"step": 70}}
    assert names(folder) == ["latest", "version-7"]


def test_the_oldest_go_and_other_folders_stay(folder: Path, file: int) -> None:
    kept = Mirror(folder, keep=2)
    (folder / "version-of-mine").mkdir()
    for version in (8, 9, 10, 11):
        kept.write(file, version, "", {})
    assert names(folder) == ["latest", "version-10", "version-11", "version-of-mine"]


def test_names_and_marker_are_those_that_a_framework_looks_for(folder: Path, file: int) -> None:
    kept = Mirror(folder, name="step_{step:04d}", marker="STABLE")
    made = kept.write(file, 3, "", {"step": 30})
    assert (made.name, (made / "STABLE").read_bytes()) == ("step_0030", b"")


def test_a_version_of_the_same_name_replaces_the_folder(folder: Path, file: int) -> None:
    kept = Mirror(folder, name="step_{step}")
    kept.write(file, 3, "x", {"step": 30})
    made = kept.write(file, 4, "y", {"step": 30})
    assert json.loads((made / NOTE).read_text())["version"] == 4
    assert names(folder) == ["latest", "step_30"]


def test_all_files_of_the_model_but_weights_are_beside(folder: Path, file: int, tmp_path: Path) -> None:
    like = tmp_path / "model"
    like.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (like / name).write_text(name)
    (like / "logs").mkdir()
    made = Mirror(folder, like=like).write(file, 1, "", {})
    assert names(made) == ["config.json", "model.safetensors", NOTE, "tokenizer.json"]


def test_the_same_version_is_known_after_a_restart(folder: Path, file: int) -> None:
    Mirror(folder).write(file, 5, "abc", {})
    again = Mirror(folder)
    assert again.has(5, "abc")
    assert not again.has(5, "of another run")
    assert not again.has(6, "abc")


def test_what_another_life_left_half_is_removed(folder: Path, file: int) -> None:
    Mirror(folder).write(file, 5, "abc", {})
    (folder / ".version-6.part").mkdir()
    (folder / ".version-6.part" / "model.safetensors").write_text("half")
    (folder / ".version-4.old").mkdir()
    (folder / ".hidden").mkdir()
    Mirror(folder)
    assert names(folder) == [".hidden", "latest", "version-5"]


@pytest.mark.parametrize("at", ["save", "rename"])
def test_a_failure_leaves_the_newest_as_it_was(
    folder: Path, file: int, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    kept = Mirror(folder)
    kept.write(file, 5, "abc", {})

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(*((mirror, "save", full) if at == "save" else (Path, "rename", full)))
        with pytest.raises(errors.UsageError, match="No space left on device"):
            kept.write(file, 6, "def", {})
    assert names(folder) == ["latest", "version-5"]
    assert kept.has(5, "abc")
    kept.write(file, 7, "ghi", {})
    assert kept.has(7, "ghi")


def test_a_folder_of_somebody_else_is_not_replaced(folder: Path, file: int) -> None:
    kept = Mirror(folder)
    (folder / "version-6").mkdir()
    (folder / "version-6" / "mine").touch()
    with pytest.raises(errors.UsageError, match="is no version of a mirror"):
        kept.write(file, 6, "", {})
    assert names(folder) == ["version-6"]


@pytest.mark.parametrize(
    ("name", "meta", "why"),
    [
        ("step_{step}", {}, "KeyError: 'step'"),
        ("{step}", {"step": "../x"}, "name of one folder"),
        ("{step}", {"step": "latest"}, "name of one folder"),
        ("{step", {}, "ValueError"),
    ],
)
def test_a_version_without_a_name_is_refused(
    folder: Path, file: int, name: str, meta: dict[str, Any], why: str
) -> None:
    with pytest.raises(errors.UsageError, match=why):
        Mirror(folder, name=name).write(file, 1, "", meta)
    assert names(folder) == []


@pytest.mark.parametrize("wrong", [{"name": "newest"}, {"marker": "a/b"}, {"like": Path("/nowhere")}])
def test_wrong_arguments_are_named(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match=str(next(iter(wrong.values())))):
        Mirror(folder, **wrong)
