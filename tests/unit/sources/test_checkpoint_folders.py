"""Folders of checkpoints: read as transformers reads them, or refused by name.

Covers: sources/checkpoint.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replicas import errors
from replicas.sources import checkpoint
from replicas.sources.checkpoint import differences

INDEX = "model.safetensors.index.json"
ALONE = "ignore:torch.distributed is disabled:UserWarning"
"""Said by torch.distributed.checkpoint in one process."""
TWO = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def write(path: Path, metadata: dict[str, str] | None = None, /, **numbers: int) -> None:
    """A file of tensors, each of its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.full((2, 3), float(number)) for name, number in numbers.items()}, path, metadata)


def number_of(found: Mapping[str, torch.Tensor], name: str) -> float:
    return float(found[name][0, 0])


def write_index(folder: Path, weight_map: Mapping[str, str], name: str = INDEX, total_size: int = 0) -> None:
    text = json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map})
    (folder / name).write_text(text)


def sharded(folder: Path) -> None:
    write(folder / TWO["a"], a=1)
    write(folder / TWO["b"], b=2)
    write_index(folder, TWO)


def single(folder: Path) -> None:
    write(folder / "model.safetensors", a=3, b=4)


def with_stale_index(folder: Path) -> None:
    sharded(folder)
    single(folder)


def with_index_without_shards(folder: Path) -> None:
    single(folder)
    write_index(folder, TWO)


def of_mistral(folder: Path) -> None:
    """Both of its formats, whose names differ."""
    sharded(folder)
    write(folder / "consolidated.safetensors", a=1, layers=2)
    write_index(folder, {"layers": "consolidated.safetensors"}, "consolidated.safetensors.index.json")


def with_adapter(folder: Path) -> None:
    single(folder)
    write(folder / "adapter_model.safetensors", lora=7)


def sharded_with_adapter(folder: Path) -> None:
    sharded(folder)
    write(folder / "adapter_model.safetensors", lora=7)


def with_variants(folder: Path) -> None:
    single(folder)
    write(folder / "model.fp16.safetensors", a=5, b=6)


def sharded_with_variants(folder: Path) -> None:
    sharded(folder)
    write(folder / "model.fp16-00001-of-00001.safetensors", a=5, b=6)
    names = dict.fromkeys(TWO, "model.fp16-00001-of-00001.safetensors")
    write_index(folder, names, "model.safetensors.index.fp16.json")


def numbered_with_gaps(folder: Path) -> None:
    names = {"a": "model-00001-of-00009.safetensors", "b": "model-00007-of-00009.safetensors"}
    for name, file in names.items():
        write(folder / file, **{name: 8})
    write_index(folder, names)


def from_macos(folder: Path) -> None:
    sharded(folder)
    for one in list(folder.iterdir()):
        (folder / f"._{one.name}").write_bytes(b"\0\5\x16\7\0\2")


def of_a_hub(folder: Path) -> None:
    """The snapshot of a revision: links to files of other names."""
    blobs = folder.parent.parent / "blobs"
    write(blobs / "1f0c", a=1)
    write(blobs / "2b6d", b=2)
    write_index(blobs, TWO, "3e9a")
    folder.mkdir(parents=True)
    for name, blob in {TWO["a"]: "1f0c", TWO["b"]: "2b6d", INDEX: "3e9a"}.items():
        (folder / name).symlink_to(f"../../blobs/{blob}")


def of_links(folder: Path) -> None:
    single(folder.parent / "elsewhere")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere" / "model.safetensors")


def pickled_as_well(folder: Path) -> None:
    single(folder)
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


def named_by_the_config(folder: Path) -> None:
    single(folder)
    write(folder / "other.safetensors", a=9)
    (folder / "config.json").write_text(
        '{"time_step_limit": [0.0, Infinity], "transformers_weights": "other.safetensors"}'
    )


def named_by_the_config_as_an_index(folder: Path) -> None:
    with_stale_index(folder)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": INDEX}))


LIKE_TRANSFORMERS = (
    *(sharded, single, with_stale_index, with_index_without_shards, of_mistral, with_adapter, sharded_with_adapter),
    *(with_variants, sharded_with_variants, numbered_with_gaps, from_macos, of_a_hub, of_links, pickled_as_well),
    *(named_by_the_config, named_by_the_config_as_an_index),
)


def read_by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """What its ``from_pretrained`` loads of a folder."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files, load_state_dict

    config = folder / "config.json"
    files, _ = _get_resolved_checkpoint_files(
        str(folder),
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=False,
        transformers_explicit_filename=json.loads(config.read_text())["transformers_weights"]
        if config.exists()
        else None,
    )
    assert files
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_state_dict(file)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LIKE_TRANSFORMERS, ids=lambda layout: layout.__name__)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, layout: Callable[[Path], None]) -> None:
    folder = tmp_path / "snapshots" / "abc"
    layout(folder)
    found = checkpoint(folder)
    assert found
    assert differences(found, read_by_transformers(folder)) == []


@pytest.mark.slow
def test_a_model_that_transformers_has_saved_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, tie_word_embeddings=True))
    for name, size in {"one": "1GB", "many": "1KB"}.items():
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        found = checkpoint(tmp_path / name)
        assert "lm_head.weight" not in found
        assert differences(found, read_by_transformers_alone(tmp_path / name)) == []
        assert differences(found, {name: one for name, one in model.state_dict().items() if name in found}) == []
    assert (tmp_path / "many" / INDEX).exists()


def read_by_transformers_alone(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "config.json").unlink()
    return read_by_transformers(folder)


def test_the_only_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    """An adapter's folder, as one case; of macOS' own files none counts."""
    (tmp_path / "adapter_config.json").write_text("{}")
    write(tmp_path / "adapter_model.safetensors", lora=1)
    (tmp_path / "._adapter_model.safetensors").write_bytes(b"\0\5\x16\7")
    assert number_of(checkpoint(tmp_path), "lora") == 1


def test_a_variant_is_read_by_its_name(tmp_path: Path) -> None:
    with_variants(tmp_path)
    assert number_of(checkpoint(tmp_path / "model.fp16.safetensors"), "a") == 5
    sharded_with_variants(tmp_path)
    write_index(tmp_path, TWO, "other.safetensors.index.json")
    assert number_of(checkpoint(tmp_path / "other.safetensors.index.json"), "b") == 2
    assert number_of(checkpoint(tmp_path / "model.safetensors.index.fp16.json"), "b") == 6


def several(folder: Path) -> None:
    for name in ("one", "two"):
        write(folder / f"{name}.safetensors", **{name: 1})


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    (folder / TWO["b"]).unlink()


def more_in_the_index(folder: Path) -> None:
    sharded(folder)
    write_index(folder, {**TWO, "c": TWO["b"]})


def less_in_the_index(folder: Path) -> None:
    sharded(folder)
    write(folder / TWO["b"], b=2, c=3)


def in_another_file(folder: Path) -> None:
    sharded(folder)
    write(folder / TWO["b"], a=5, b=2)


def twice(folder: Path) -> None:
    write(folder / TWO["a"], a=1)
    write(folder / TWO["b"], {"a": "b"}, b=2)
    write_index(folder, TWO)


def no_index(folder: Path) -> None:
    sharded(folder)
    (folder / INDEX).write_text('{"weight_map": ["a"]}')


def missing_by_the_config(folder: Path) -> None:
    single(folder)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "other.safetensors"}))


def bad_config(folder: Path) -> None:
    single(folder)
    (folder / "config.json").write_text("[]")


def nothing(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").touch()


REFUSED: dict[Callable[[Path], None], str] = {
    several: r"neither model.safetensors nor model.safetensors.index.json; it has one.safetensors, two.safetensors",
    without_a_shard: r"index.json names model-00002-of-00002.safetensors, which is missing",
    more_in_the_index: r"the index names a tensor that its file lacks: 'c' of .*00002-of",
    less_in_the_index: r"the index does not name a tensor of its file: 'c' of .*00002-of",
    in_another_file: r"tensor 'a' is in .*00002-of-00002.safetensors and in a file before it",
    twice: r"tensor 'a' is in .*00002-of-00002.safetensors and in a file before it",
    no_index: r"index.json is not an index of safetensors files: Expected `object`",
    missing_by_the_config: r"config.json names other.safetensors, which is missing",
    bad_config: r"config.json is not the config of a model",
    nothing: r"neither model.safetensors nor .*; it has tokenizer.json",
}


@pytest.mark.parametrize("layout", REFUSED, ids=lambda layout: layout.__name__)
def test_what_is_not_certain_is_refused(tmp_path: Path, layout: Callable[[Path], None]) -> None:
    layout(tmp_path / "model")
    with pytest.raises(errors.UsageError, match=REFUSED[layout]):
        checkpoint(tmp_path / "model")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="nothing cannot be read: No such file"):
        checkpoint(tmp_path / "nothing")


def converted(path: Path) -> None:
    """Run the command of the hint with which a path is refused."""
    with pytest.raises(errors.UsageError) as caught:
        checkpoint(path)
    _, *words = shlex.split(caught.value.hint[caught.value.hint.index("python -") :])
    if words[0] == "-c":
        exec(words[1], {})
    else:
        subprocess.run([sys.executable, "-W", "ignore", *words], check=True, timeout=100, stdout=subprocess.DEVNULL)


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_save_are_refused_with_what_converts_them(tmp_path: Path, legacy: bool) -> None:
    folder = tmp_path / "a model's"
    folder.mkdir()
    tied = {**WEIGHTS, "c": WEIGHTS["a"].t()}
    torch.save(tied, folder / "best.pt", _use_new_zipfile_serialization=not legacy)
    converted(folder / "best.pt")
    assert differences(checkpoint(folder / "best.safetensors"), tied) == []


def test_shards_of_torch_save_are_refused_with_what_converts_them(tmp_path: Path) -> None:
    for number, name in enumerate(WEIGHTS, 1):
        torch.save({name: WEIGHTS[name]}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    torch.save({"step": 1}, tmp_path / "training_args.bin")
    converted(tmp_path)
    assert differences(checkpoint(tmp_path), WEIGHTS) == []


@pytest.mark.slow
@pytest.mark.filterwarnings(ALONE)
def test_a_checkpoint_of_torch_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path / "step-5"
    save(dict(WEIGHTS), checkpoint_id=folder, no_dist=True)
    (one,) = folder.glob("*.distcp")
    with pytest.raises(errors.UsageError, match=r"torch\.distributed\.checkpoint wrote it"):
        checkpoint(one)
    converted(folder)
    converted(tmp_path / "step-5.pt")
    assert differences(checkpoint(tmp_path / "step-5.safetensors"), WEIGHTS) == []


def write_parts(folder: Path, rank: int, name: str) -> None:
    """The file of one of two ranks, as torch 2.13 writes it of a DTensor."""
    offsets = {"a": {"saved_offsets": [rank, 0]}, **({"b": {"saved_offsets": [0]}} if rank == 0 else {})}
    parts = {"a": WEIGHTS["a"][rank : rank + 1], **({"b": WEIGHTS["b"]} if rank == 0 else {})}
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    save_file(parts, folder / name, metadata)


@pytest.mark.slow
def test_parts_of_tensors_are_refused_with_what_makes_them_whole(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_parts(tmp_path, rank, f"shard-0000{rank + 1}-model-00001-of-00001.safetensors")
    with pytest.raises(errors.UsageError, match="DCP_SHARDING_INFO"):
        checkpoint(tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    converted(tmp_path)
    assert differences(checkpoint(tmp_path / "consolidated"), WEIGHTS) == []
    for one in (tmp_path / "consolidated").iterdir():
        one.rename(tmp_path / one.name)  # where transformers' consolidate_distributed_checkpoint puts them
    assert differences(checkpoint(tmp_path), WEIGHTS) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_ranks_that_overwrote_each_other_is_refused(tmp_path: Path, rank: int) -> None:
    """By the defaults of torch's writer all ranks write one file, whose index has the
    size of all."""
    name = "model-00001-of-00001.safetensors"
    write_parts(tmp_path, rank, name)
    write_index(tmp_path, {"a": name, **({"b": name} if rank == 0 else {})}, total_size=30)
    with pytest.raises(errors.UsageError, match="may hold parts of tensors"):
        checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("spread", [False, True])
def test_what_one_rank_has_written_by_torch_is_whole(tmp_path: Path, spread: bool) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    files = {name: number for number, name in enumerate(WEIGHTS, 1)} if spread else None
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=files)
    save(dict(WEIGHTS), storage_writer=writer, no_dist=True)
    assert differences(checkpoint(tmp_path), WEIGHTS) == []
