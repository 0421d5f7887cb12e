"""How small are the deltas between steps of a real optimizer?

    python bench/bench_delta.py --trained [--quick] [--steps N]

The architecture of SmolLM2-135M (transformers' Llama; needs `transformers`), at random
values with its own spread, as this may run where no weights can be had; so it is
trained for some steps at a high rate first, until its gradients are those of a model
that learns. Then AdamW in fp32 at the learning rates of fine-tuning by RL, and after
each step the weights as bfloat16 against those of the step before. The text is that of
``docs/``, a token for each word. A share is the bytes of a delta, of those of all
weights; the mean of all steps, and the range. Next to the delta of
:mod:`replicas.carry.delta`: zstd at level 1 of the xor of all bytes, and int32
positions with the values. One thread encodes.
"""

from __future__ import annotations

import copy
import re
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from bench.shapes import FULL, Model
from bench.support import ROOT, Bar, Spread, machine, show, write
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import apply_block, encode_block

LIMITS = {1e-6: 0.0045, 5e-6: 0.0095}
"""Which share is promised at which learning rate."""
WARM_STEPS, WARM_RATE = 10, 3e-4
STEPS, QUICK_STEPS = 20, 4
TOKENS, SEQUENCES = 64, 1
THREADS = 2
SPREAD = 0.041666666666666664
"""Of the random values: ``initializer_range`` of the model's own config."""


def made(model: Model) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    heads = model.hidden // 64
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=heads,
        num_key_value_heads=model.kv // 64,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
        rms_norm_eps=1e-5,
    )
    found: torch.nn.Module = LlamaForCausalLM(config)
    return found


def batches(vocabulary: int) -> Iterator[torch.Tensor]:
    """Pieces of the documentation, at random; never the same order twice."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    words = re.findall(r"\w+|[^\w\s]", text)
    tokens = torch.tensor([zlib.crc32(word.encode()) % vocabulary for word in words])
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(tokens) - TOKENS, (SEQUENCES,), generator=generator)
        yield torch.stack([tokens[start : start + TOKENS] for start in starts.tolist()])


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def bytes_of(model: torch.nn.Module) -> npt.NDArray[np.uint8]:
    """All weights as bfloat16, one behind the other."""
    parts = [one.detach().to(torch.bfloat16).view(torch.uint8).flatten() for one in model.parameters()]
    return torch.cat(parts).numpy()


def ours(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> list[bytes]:
    blocks = range(0, len(new), BLOCK_NBYTES)
    return [encode_block(old[at : at + BLOCK_NBYTES].data, new[at : at + BLOCK_NBYTES].data) for at in blocks]


def xored(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> list[bytes]:
    return [zstandard.ZstdCompressor(level=1).compress((old ^ new).data)]


def positions(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> list[bytes]:
    values = new.view(np.uint16)
    where = np.flatnonzero(old.view(np.uint16) != values)
    return [where.astype(np.int32).tobytes(), values[where].tobytes()]


WAYS = {"delta": ours, "zstd-1 of the xor": xored, "int32 and values": positions}


def check(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], deltas: list[bytes]) -> None:
    out = np.empty(BLOCK_NBYTES, np.uint8)
    for number, found in enumerate(deltas):
        block = slice(number * BLOCK_NBYTES, min(len(new), (number + 1) * BLOCK_NBYTES))
        apply_block(old[block].data, found, out[: block.stop - block.start].data)
        assert np.array_equal(out[: block.stop - block.start], new[block])


def warmed(shape: Model) -> torch.nn.Module:
    """A model that has learnt a little."""
    model, source = made(shape), batches(shape.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        step(model, optimizer, next(source))
    return model


def measure(warm: torch.nn.Module, shape: Model, rate: float, steps: int) -> dict[str, Any]:
    model, source, losses = copy.deepcopy(warm), batches(shape.vocabulary), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    old = bytes_of(model)
    shares: dict[str, list[float]] = {name: [] for name in ("changed", *WAYS)}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(steps):
        losses.append(step(model, optimizer, next(source)))
        new = bytes_of(model)
        shares["changed"].append(float((old.view(np.uint16) != new.view(np.uint16)).mean()))
        for name, encode in WAYS.items():
            began = time.thread_time()
            found = encode(old, new)
            times[name].append(time.thread_time() - began)
            shares[name].append(sum(map(len, found)) / len(new))
            if name == "delta":
                check(old, new, found)
        old = new
    return {"nbytes": len(old), "losses": losses, "shares": shares, "times": times}


def run_trained(quick: bool, steps: int | None) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("left out: --trained needs transformers")
        return
    torch.set_num_threads(THREADS)
    shape = FULL._replace(layers=4) if quick else FULL
    warm = warmed(shape)
    count = steps or (QUICK_STEPS if quick else STEPS)
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for rate, limit in LIMITS.items():
        found = measure(warm, shape, rate, count)
        means = {name: sum(values) / len(values) for name, values in found["shares"].items()}
        for name in WAYS:
            samples, spread = found["shares"][name], Spread(found["times"][name])
            first = [f"{rate:g}", f"{means['changed']:.2%}"] if name == "delta" else ["", ""]
            shown = f"{min(samples):.3%} - {max(samples):.3%}"
            ratio = f"{means[name] / means['delta']:.2f}"
            table.append([*first, name, f"{means[name]:.3%}", shown, ratio, *spread.cells()[:1]])
        table.append(None)
        bars.append(Bar(f"bytes of a delta at {rate:g}, in % of all", 100 * means["delta"], means["delta"] <= limit))
        rows.append({"rate": rate, "means": means, **found})
    columns = ["rate", "changed", "", "bytes", "range", "x delta", "CPU to make it"]
    nbytes = rows[-1]["nbytes"]
    show(f"Deltas between {count} steps of AdamW, {nbytes / 1e6:.0f} MB of bfloat16", columns, table)
    for bar in bars:
        print(bar.line())
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    write("bench_delta_trained", {"machine": machine(), "quick": quick, "steps": count, "rows": rows, "bars": kept})
