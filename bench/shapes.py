"""The sets of tensors that are moved, as data: names and shapes, all in bfloat16.

The first is that of a real model, as a rule: 272 tensors of SmolLM2-135M, 269 MB (tied
embeddings come once). The others are a few large ones, very many small ones, and a
model of experts: the 18,867 tensors of Qwen3-30B-A3B, with each dimension divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

__all__ = ["FULL", "ITEM_NBYTES", "SETS", "SMALL", "Model", "Shape", "moe", "nbytes_of", "nbytes_of_set", "shapes"]

ITEM_NBYTES = 2  # bfloat16
Shape = tuple[str, tuple[int, ...]]


class Model(NamedTuple):
    """A Llama-like decoder. ``kv``: width of the keys and values."""

    layers: int
    hidden: int
    intermediate: int
    kv: int
    vocabulary: int


FULL = Model(layers=30, hidden=576, intermediate=1536, kv=192, vocabulary=49152)
SMALL = Model(layers=30, hidden=192, intermediate=512, kv=64, vocabulary=16384)
"""As many tensors, a ninth of the bytes: for ``--quick``."""


def shapes(model: Model) -> Iterator[Shape]:
    """Names and shapes, in the order of the model's file."""
    hidden, inner, kv = model.hidden, model.intermediate, model.kv
    yield "model.embed_tokens.weight", (model.vocabulary, hidden)
    for layer in range(model.layers):
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("mlp.down_proj", (hidden, inner)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("post_attention_layernorm", (hidden,)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)


def nbytes_of(model: Model) -> int:
    """Bytes of all its tensors in bfloat16."""
    return sum(prod(shape) for _, shape in shapes(model)) * ITEM_NBYTES


def _few(count: int, rows: int, columns: int) -> Iterator[Shape]:
    for number in range(count):
        yield f"blocks.{number}.weight", (rows, columns)


def _many(count: int) -> Iterator[Shape]:
    """Tensors of 256 bytes each."""
    for number in range(count):
        yield f"experts.{number // 1000}.scales.{number % 1000}", (128,)


def moe(divisor: int) -> Iterator[Shape]:
    """Names and shapes of Qwen3-30B-A3B (61 GB) with dimensions divided by this."""
    hidden, inner, queries, kv = (extent // divisor for extent in (2048, 768, 4096, 512))
    head, vocabulary = 128 // divisor, 151936 // divisor
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(48):
        own = (
            ("input_layernorm", (hidden,)),
            *(("self_attn.q_proj", (queries, hidden)), ("self_attn.q_norm", (head,))),
            *(("self_attn.k_proj", (kv, hidden)), ("self_attn.k_norm", (head,))),
            *(("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, queries))),
            *(("post_attention_layernorm", (hidden,)), ("mlp.gate", (128, hidden))),
        )
        experts = (
            (f"mlp.experts.{expert}.{name}", shape)
            for expert in range(128)
            for name, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            )
        )
        for name, shape in (*own, *experts):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


SETS: dict[str, Callable[[], Iterator[Shape]]] = {
    "smollm2": lambda: shapes(FULL),
    "smollm2-small": lambda: shapes(SMALL),
    "few": lambda: _few(8, 8192, 8192),  # 1 GiB
    "few-small": lambda: _few(8, 2048, 2048),
    "moe": lambda: moe(16),  # 240 MB
    "moe-small": lambda: moe(64),
    "many": lambda: _many(100_000),
    "many-small": lambda: _many(10_000),
}
"""By name; ``NAME-small`` is for ``--quick``."""


def nbytes_of_set(name: str) -> int:
    """Bytes of all its tensors."""
    return sum(prod(shape) for _, shape in SETS[name]()) * ITEM_NBYTES
