"""Folders of versions: whole or not there, of a bounded number, with names of others.

Covers: sources/mirror.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas import errors
from replicas.sources import mirror
from replicas.sources.mirror import LOCK, NOTE, Mirror, Version


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


@pytest.fixture
def opened() -> Iterator[Callable[..., Mirror]]:
    """Mirrors, of which the one before is closed when the next is made."""
    before: list[Mirror] = []

    def make(folder: Path, **options: Any) -> Mirror:
        while before:
            before.pop().close()
        before.append(Mirror(folder, **options))
        return before[0]

    yield make
    for one in before:
        one.close()


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name != LOCK)


def version(number: int, digest: str = "", *, run: str = "a", term: int = 1, **meta: Any) -> Version:
    return Version(version=number, digest=digest, meta=meta, run=run, term=term)


def newest(folder: Path) -> int:
    found: int = json.loads((folder / "latest" / NOTE).read_text())["version"]
    return found


def test_a_version_becomes_a_folder_and_the_newest(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    made = opened(folder).write(file, version(7, "abc", step=70))
    assert made == folder / "version-7"
    assert (folder / "latest").resolve() == made.resolve()
    assert torch.equal(load_file(folder / "latest" / "model.safetensors")["w"], torch.ones(1000))
    told = {"version": 7, "digest": "abc", "meta": {"step": 70}, "run": "a", "term": 1, "sequence": 1}
    assert json.loads((made / NOTE).read_text()) == told
    assert names(folder) == ["latest", "version-7"]


def test_the_oldest_go_and_other_folders_stay(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    kept = opened(folder, keep=2)
    (folder / "version-of-mine").mkdir()
    for number in (8, 9, 10, 11):
        kept.write(file, version(number))
    assert names(folder) == ["latest", "version-10", "version-11", "version-of-mine"]


def test_a_run_that_counts_from_1_again_is_newer(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    kept = opened(folder, keep=2)
    for number in (11, 12):
        kept.write(file, version(number))
    kept = opened(folder, keep=2)
    for number, there in ((1, ["version-1", "version-12"]), (2, ["version-1", "version-2"])):
        made = kept.write(file, version(number, term=2))
        assert (newest(folder), names(made)) == (number, ["model.safetensors", NOTE])
        assert names(folder) == ["latest", *there]


def test_folders_of_a_release_without_sequence_are_older(
    folder: Path, file: int, opened: Callable[..., Mirror]
) -> None:
    kept = opened(folder, keep=2)
    for number in (9, 10):
        place = kept.write(file, version(number))
        (place / NOTE).write_text(json.dumps({"version": number, "digest": "", "meta": {"loss": float("nan")}}))
    kept.write(file, version(1, term=2))
    assert (newest(folder), names(folder)) == (1, ["latest", "version-1", "version-10"])


def test_only_one_mirror_writes_to_a_folder(folder: Path, file: int) -> None:
    with Mirror(folder), pytest.raises(errors.UsageError, match=f"another mirror writes to {folder}"):
        Mirror(folder)
    with Mirror(folder) as second:
        second.write(file, version(1))


def test_a_file_system_without_locks_is_said(
    folder: Path, opened: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, ...]] = []

    def fail(file: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(mirror, "hold_exclusive", fail)
    monkeypatch.setattr(mirror.logger, "warning", lambda *given: told.append(given))
    opened(folder)
    assert told[0][1:] == (folder, "No locks available")


def test_names_and_marker_are_those_that_a_framework_looks_for(
    folder: Path, file: int, opened: Callable[..., Mirror]
) -> None:
    kept = opened(folder, name="step_{step:04d}", marker="STABLE")
    made = kept.write(file, version(3, step=30))
    assert (made.name, (made / "STABLE").read_bytes()) == ("step_0030", b"")


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "without such a call"])
def test_a_version_of_the_same_name_replaces_the_folder(
    folder: Path, file: int, opened: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(mirror, "_exchange_names", lambda *_: False)
    kept = opened(folder, name="step_{step}")
    kept.write(file, version(3, "x", step=30))
    made = kept.write(file, version(4, "y", step=30))
    assert json.loads((made / NOTE).read_text())["version"] == newest(folder) == 4
    assert (folder / "latest").readlink() == Path("step_30")
    assert names(folder) == ["latest", "step_30"]
    assert not made.is_symlink()


def test_numbers_that_json_lacks_are_null(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    made = opened(folder).write(file, version(1, loss=float("nan"), norms=[float("inf"), 1.5]))
    assert b'"meta":{"loss":null,"norms":[null,1.5]}' in (made / NOTE).read_bytes()


def test_all_files_of_the_model_but_weights_are_beside(
    folder: Path, file: int, tmp_path: Path, opened: Callable[..., Mirror]
) -> None:
    like = tmp_path / "model"
    like.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (like / name).write_text(name)
    (like / "logs").mkdir()
    made = opened(folder, like=like).write(file, version(1))
    assert names(made) == ["config.json", "model.safetensors", NOTE, "tokenizer.json"]


def test_the_same_version_is_known_after_a_restart(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    def written(told: Version, **options: Any) -> bool:
        before = (folder / "latest").stat().st_ino
        opened(folder, **options).write(file, told)
        return (folder / "latest").stat().st_ino != before

    opened(folder).write(file, version(5, "abc"))
    assert not written(version(5, "abc"))
    assert written(version(5, "abc", term=2)), "of another run"
    assert written(version(5, "def", term=2))
    assert written(version(5, "def", term=2), name="v{version}"), "by another name"
    assert names(folder) == ["latest", "v5", "version-5"]


def test_what_a_killed_one_left_half_is_removed(folder: Path, file: int, opened: Callable[..., Mirror]) -> None:
    opened(folder).write(file, version(5, "abc"))
    (folder / ".version-6.0.part").mkdir()
    (folder / ".version-6.0.part" / "model.safetensors").write_text("half")
    (folder / ".latest.0.part").symlink_to("version-6")
    (folder / ".hidden").mkdir()
    opened(folder)
    assert names(folder) == [".hidden", "latest", "version-5"]


def test_what_latest_leads_to_is_never_removed(
    folder: Path, file: int, opened: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it ends while it replaces a folder, where two names cannot be swapped."""
    monkeypatch.setattr(mirror, "_exchange_names", lambda *_: False)
    kept, rename = opened(folder, name="{step}"), Path.rename
    kept.write(file, version(1, step=3))

    def end(one: Path, other: Path) -> None:
        if other.name == "3":
            raise SystemExit
        rename(one, other)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Path, "rename", end)
        kept.write(file, version(2, step=3))
    kept = opened(folder, name="{step}")
    assert newest(folder) == 1
    kept.write(file, version(2, step=3))
    assert (newest(folder), names(folder)) == (2, ["3", "latest"])


@pytest.mark.parametrize("at", ["save", "symlink_to", "rename"])
@pytest.mark.parametrize("name", ["version-{version}", "model-{step}"])
def test_a_failure_leaves_the_newest_as_it_was(
    folder: Path, file: int, opened: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch, at: str, name: str
) -> None:
    kept = opened(folder, name=name)
    kept.write(file, version(5, "abc", step=1))
    before, rename = names(folder), Path.rename

    def full(one: Path, other: Path | str) -> None:
        if at != "rename" or Path(other).name == "latest":
            raise OSError(28, "No space left on device", str(folder))
        rename(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(*((mirror, "save", _full) if at == "save" else (Path, at, full)))
        with pytest.raises(errors.UsageError, match="No space left on device") as found:
            kept.write(file, version(6, "def", step=1))
    assert found.value.hint.startswith("make room")
    assert (newest(folder), names(folder)) == (5, before)
    kept.write(file, version(7, "ghi", step=1))
    assert newest(folder) == 7


def _full(*given: object) -> None:
    """As :func:`replicas.sources.version_file.save` says it."""
    raise errors.UsageError("it cannot be written: No space left on device", hint="give -o")


def test_a_folder_that_stays_delays_no_version(
    folder: Path, file: int, opened: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, while a reader has it open."""

    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    kept = opened(folder, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        for number in (1, 2, 3):
            kept.write(file, version(number))
    assert names(folder) == [".version-1.0.part", ".version-2.0.part", "latest", "version-3"]
    kept.write(file, version(4))
    assert names(folder) == ["latest", "version-4"]


@pytest.mark.parametrize("link", [False, True])
def test_what_somebody_else_made_is_not_replaced(
    folder: Path, file: int, opened: Callable[..., Mirror], link: bool
) -> None:
    kept = opened(folder)
    mine = kept.write(file, version(1)) if link else folder / "mine"
    mine.mkdir(exist_ok=True)
    (folder / "version-6").symlink_to(mine.name) if link else mine.rename(folder / "version-6")
    before = names(folder)
    with pytest.raises(errors.UsageError, match="is not a version of a mirror"):
        kept.write(file, version(6))
    assert names(folder) == before


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
    folder: Path, file: int, opened: Callable[..., Mirror], name: str, meta: dict[str, Any], why: str
) -> None:
    with pytest.raises(errors.UsageError, match=why):
        opened(folder, name=name).write(file, version(1, **meta))
    assert names(folder) == []


def test_a_model_that_is_not_there_is_no_lack_of_room(folder: Path, file: int, tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", tmp_path / "version.safetensors"):
        with pytest.raises(errors.UsageError, match=f"like: {wrong} cannot be read: No") as caught:
            Mirror(folder, like=wrong)
        assert caught.value.hint == "name the folder of a model"
        assert not folder.exists()


@pytest.mark.parametrize("wrong", [{"name": "newest"}, {"marker": "a/b"}, {"like": Path("/nowhere")}])
def test_wrong_arguments_are_named(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match=str(next(iter(wrong.values())))):
        Mirror(folder, **wrong)
