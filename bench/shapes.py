"""The tensors of a real model, as a rule: 272 of SmolLM2-135M, 269 MB in bfloat16 (tied embeddings come once)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

__all__ = ["FULL", "SMALL", "Model", "nbytes_of", "shapes"]

ITEM_NBYTES = 2  # bfloat16


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


def shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
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
