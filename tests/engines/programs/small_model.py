"""A small model with random weights for released engines: loads and answers take
milliseconds."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

__all__ = ["CONFIG", "fill"]

CONFIG = LlamaConfig(
    vocab_size=49152,  # of the tokenizer
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def fill(model: torch.nn.Module, seed: int) -> None:
    """Give it random weights, the same ones for the same seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(std=0.3)
