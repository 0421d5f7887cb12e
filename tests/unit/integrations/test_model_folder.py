"""Whether a version fits a model's files, and the folder that a server reads it from.

Covers: integrations/shared/model_folder.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas import errors
from replicas.integrations.shared.model_folder import ModelFolder, Spec, describe_misfit, find_model, read_specs
from replicas.testing import FakeRun

MODEL = {
    "a.weight": Spec("bfloat16", (4, 2)),
    "b.weight": Spec("float32", (2,)),
    "lm_head.weight": Spec("bfloat16", (4, 2)),
}
GOOD = {"a.weight": Spec("bfloat16", (4, 2)), "b.weight": Spec("bfloat16", (2,))}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"lm_head.weight": Spec("bfloat16", (4, 2))}, None),
        ({"layers.0.rotary_emb.inv_freq": Spec("float32", (8,))}, None),
        ({"b.weight": Spec("bfloat16", (3,))}, "b.weight has bfloat16[3], the model float32[2]"),
        ({"b.weight": Spec("int32", (2,))}, "b.weight has int32[2], the model float32[2]"),
        ({"b.weight": Spec("float8_e4m3fn", (2,))}, "b.weight has float8_e4m3fn[2], the model float32[2]"),
        ({"c.weight": Spec("bfloat16", (2,))}, "c.weight is not in the model"),
        ({"b.weight": None}, "b.weight is missing"),
    ],
)
def test_a_misfit_is_named(changed: dict[str, Spec | None], why: str | None) -> None:
    given = {name: spec for name, spec in {**GOOD, **changed}.items() if spec is not None}
    assert describe_misfit(given, MODEL, tied=True, complete=True) == why


def test_an_output_layer_of_its_own_may_not_be_missing() -> None:
    assert describe_misfit(GOOD, MODEL, tied=False, complete=True) == "lm_head.weight is missing"


def test_a_version_that_may_lack_tensors_may_not_have_others() -> None:
    assert describe_misfit({"a.weight": GOOD["a.weight"]}, MODEL, tied=True, complete=False) is None
    assert "is not in" in str(describe_misfit({"x": GOOD["a.weight"]}, MODEL, tied=True, complete=False))


def test_of_many_misfits_the_first_are_named() -> None:
    given = {f"{number}": Spec("float32", ()) for number in range(9)}
    assert str(describe_misfit(given, {}, tied=False, complete=True)).endswith(", and 6 more")


A, B = Spec("float32", (2, 3)), Spec("float4_e2m1fn_x2", (4, 8))


def sharded(folder: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_other_formats(folder: Path) -> None:
    sharded(folder)
    for name in ("adapter_model", "consolidated", "model-3"):
        save_file({name: torch.zeros(1)}, folder / f"{name}.safetensors")
    (folder / "._model-1.safetensors").write_bytes(b"\0\5\x16\7")


def with_stale_shards(folder: Path) -> None:
    sharded(folder)
    save_file({"a": torch.zeros(2, 3)}, folder / "model.safetensors")


def ambiguous(folder: Path) -> None:
    for name in ("one", "two"):
        save_file({name: torch.zeros(1)}, folder / f"{name}.safetensors")


def pickled(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        *((sharded, {"a": A, "b": B}), (with_other_formats, {"a": A, "b": B}), (with_stale_shards, {"a": A})),
        *((ambiguous, {}), (pickled, {})),
    ],
)
def test_a_models_own_files_count_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: Callable[[Path], None], found: dict[str, Spec]
) -> None:
    layout(tmp_path)
    assert read_specs(tmp_path) == found
    assert ("comparing versions with the first one that is loaded" in caplog.text) == (not found)


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 9, b"\x02\0\0\0\0\0\0\0[]", b"\x0a\0\0\0\0\0\0\0" + b'{"a": 3}  ']
)
def test_a_malformed_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(errors.UsageError, match=r"model\.safetensors is not a valid safetensors file"):
        read_specs(tmp_path)


def test_a_model_that_is_not_here_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert find_model("nobody/has-this") is None


def test_the_folder_shows_a_versions_memory_beside_the_models_own_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.zeros(2)}, source / "model.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    folder = ModelFolder(str(source))
    with FakeRun() as run:
        trainer, server = run.join("trainer"), run.join("rollout")
        for value in (1.0, 2.0):
            trainer.publish({"a": torch.full((2,), value)}).wait()
            with server.receive().wait() as update:
                assert folder.misfit(update) is None
                shown = folder.link_version(update)
                assert {file.name for file in shown.iterdir()} == {"config.json", "model.safetensors"}
                assert load_file(shown / "model.safetensors")["a"].tolist() == [value, value]
    folder.close()
    assert not folder.path.exists()
    assert (source / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("files", "first", "copied"),
    [
        ({"embed", "lm_head"}, "embed", {"lm_head"}),  # the server's model is not tied
        ({"embed"}, "embed", set()),  # it is tied, as the trainer's
        ({"embed"}, "lm_head", {"embed"}),  # the trainer's has the other name first
        (set(), "embed", {"lm_head"}),  # its files are not known
    ],
)
def test_a_server_is_handed_each_name_that_its_model_has(
    tmp_path: Path, files: set[str], first: str, copied: set[str]
) -> None:
    source = tmp_path / "source"
    if files:
        source.mkdir()
        save_file({name: torch.zeros(4, 2) for name in files}, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({"tie_word_embeddings": len(files) < 2}))
    folder, value = ModelFolder(str(source)), torch.ones(4, 2)
    with FakeRun() as run:
        trainer, server = run.join("trainer"), run.join("rollout")
        for _ in range(2):
            value += 1
            trainer.publish({first: value, "embed": value, "lm_head": value}).wait()
            with server.receive().wait() as update:
                shown = [load_file(file) for file in sorted(folder.link_version(update).glob("*.safetensors"))]
                folder.loaded(update)
            assert [{*one} for one in shown] == [{first}, *([copied] if copied else [])]
            assert all(torch.equal(one, value) for found in shown for one in found.values())
        trainer.publish({"embed": value, "lm_head": value + 1}, new_manifest=True).wait()
        with server.receive().wait() as update:
            assert not (folder.link_version(update) / "tied.safetensors").exists()
    folder.close()


def test_a_copy_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder, value = ModelFolder("", parent=tmp_path), torch.ones(2)
    folder.close()
    with FakeRun() as run:
        run.join("trainer").publish({"a": value, "b": value}).wait()
        text = r"tied\.safetensors, the copy of 1 tied tensors, cannot be written"
        with run.join("rollout").receive().wait() as update, pytest.raises(errors.NoCapacity, match=text):
            folder._copy_tied(update)


def test_without_the_models_files_the_first_version_that_was_loaded_counts(tmp_path: Path) -> None:
    folder = ModelFolder(str(tmp_path / "elsewhere"))
    with FakeRun() as run:
        trainer, server = run.join("trainer"), run.join("rollout")
        for size, fits in ((2, True), (3, False)):
            trainer.publish({"a": torch.zeros(size)}, new_manifest=True).wait()
            with server.receive().wait() as update:
                assert (folder.misfit(update) is None) is fits
                folder.loaded(update)
    folder.close()
