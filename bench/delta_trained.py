"""How small are the deltas between steps of a real optimizer?

    .venv-engines/bin/python -m bench.bench_delta --trained [--quick] [--steps N]
        [--model FOLDER]

SmolLM2-135M-Instruct, as `make environments` writes it (bfloat16), or the model of
FOLDER; needs `transformers`. As in fine-tuning by RL, its weights become float32, AdamW
trains them, and after each step they are published as bfloat16: what is measured is the
difference from the step before. How many elements a step changes depends on the rate,
and on how large the weights are: one that is small beside a weight moves it within what
bfloat16 tells apart. The float32 weights begin in the middle of that, so fewer change
in the first steps than later; so it is measured twice, from the checkpoint on, and
(*later*) after the float32 weights were moved at random within it, which is where they
are after many steps. The text is that of ``docs/``.

A share is the bytes of a delta, of those of all weights; the mean of all steps, and the
range. Next to the delta of :mod:`replicas.carry.delta`: zstd at level 1 of the xor of
all bytes, and int32 positions with the values. One thread encodes.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from bench.support import ROOT, Bar, Spread, machine, show, write
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import apply_block, encode_block

LIMITS = {1e-6: 0.0045, 5e-6: 0.0095}
"""Which share is promised at which learning rate."""
STEPS, QUICK_STEPS = 20, 4
TOKENS, SEQUENCES = 128, 4
THREADS = 2


def batches(folder: Path) -> Iterator[torch.Tensor]:
    """Pieces of the documentation, at random; never the same order twice."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(tokens) - TOKENS, (SEQUENCES,), generator=generator)
        yield torch.stack([tokens[start : start + TOKENS] for start in starts.tolist()])


def loaded(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return found


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """With its float32 weights anywhere within half a step of bfloat16, at random.

    All but some of those at a power of two, below which steps are half as large, round
    to what they were.
    """
    torch.manual_seed(1)
    found = copy.deepcopy(model)
    with torch.no_grad():
        for one in found.parameters():
            _, exponent = torch.frexp(one)
            step = torch.ldexp(torch.ones_like(one), exponent - 8)  # between neighbours in bfloat16
            one.add_((torch.rand_like(one) - 0.5) * step * (one != 0))
    return found


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


def measure(first: torch.nn.Module, source: Iterator[torch.Tensor], rate: float, steps: int) -> dict[str, Any]:
    model, losses = copy.deepcopy(first), list[float]()
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


def run_trained(options: argparse.Namespace) -> None:
    folder = Path(options.model)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("left out: --trained needs transformers, which is in .venv-engines (make environments)")
        return
    if not (folder / "config.json").is_file():
        print(f"left out: --trained needs a model, and {folder} has none; make environments, or name one by --model")
        return
    torch.set_num_threads(THREADS)
    checkpoint = loaded(folder)
    count = options.steps or (QUICK_STEPS if options.quick else STEPS)
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for rate, limit in LIMITS.items():
        for begins, model in (("checkpoint", checkpoint), ("later", moved(checkpoint))):
            found = measure(model, batches(folder), rate, count)
            means = {name: sum(values) / len(values) for name, values in found["shares"].items()}
            for name in WAYS:
                samples, spread = found["shares"][name], Spread(found["times"][name])
                first = [f"{rate:g}", begins, f"{means['changed']:.2%}"] if name == "delta" else ["", "", ""]
                shown = f"{min(samples):.3%} - {max(samples):.3%}"
                ratio = f"{means[name] / means['delta']:.2f}"
                table.append([*first, name, f"{means[name]:.3%}", shown, ratio, *spread.cells()[:1]])
            table.append(None)
            if model is checkpoint:  # of which it is promised
                text = f"bytes of a delta at {rate:g}, in % of all"
                bars.append(Bar(text, 100 * means["delta"], means["delta"] <= limit))
            rows.append({"rate": rate, "begins": begins, "means": means, **found})
    columns = ["rate", "begins", "changed", "", "bytes", "range", "x delta", "CPU to make it"]
    nbytes = rows[-1]["nbytes"]
    show(f"Deltas between {count} steps of AdamW, {nbytes / 1e6:.0f} MB of bfloat16", columns, table)
    for bar in bars:
        print(bar.line())
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    facts = {"machine": machine(), "quick": options.quick, "steps": count, "model": folder.name}
    write("bench_delta_trained", {**facts, "rows": rows, "bars": kept})
