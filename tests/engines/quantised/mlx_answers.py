"""What the released mlx-lm answers with each of these models, one after another.

    python tests/engines/quantised/mlx_answers.py FOLDER ...

It prints an object of JSON: by folder, the log-probabilities of the prompt's tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

from tests.engines.programs.architectures import IDS


def answer(folder: str) -> list[float]:
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)  # of what is not quantised: its experts of DeepSeek compute in no other on a CPU
    logits = model(mx.array([IDS]))[0]
    rows = logits - mx.logsumexp(logits, -1, keepdims=True)
    return [rows[place, token].item() for place, token in enumerate(IDS[1:])]


if __name__ == "__main__":
    print(json.dumps({folder: answer(folder) for folder in sys.argv[1:]}), flush=True)
