"""A tiny model of experts in the released vLLM, in this process: what is refused of
versions whose experts have other names, and what is computed with those that are
loaded.

    python tests/field/engines/experts.py FOLDER

It prints one object of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from replicas.sources import hf
from tests.engines.programs.tiny_engine import LAYER, Engine, Weights

EXPERT = f"{LAYER}.mlp.experts.2."


def renamed(weights: Weights) -> Weights:
    """One expert's name is of no parameter: to the engine it is missing, too."""
    return {name.replace(EXPERT, f"{LAYER}.mlp.expert_2."): one for name, one in weights.items()}


def missing(weights: Weights) -> Weights:
    return {name: one for name, one in weights.items() if not name.startswith(EXPERT)}


def extra(weights: Weights) -> Weights:
    """An expert that the model does not have."""
    more = {name.replace(EXPERT, f"{LAYER}.mlp.experts.9."): one for name, one in weights.items() if EXPERT in name}
    return {**weights, **more}


def main(folder: str) -> dict[str, Any]:
    engine = Engine(folder)
    (old, new), (old_weights, new_weights) = engine.models, engine.weights
    engine.load(old_weights, "good")
    found: dict[str, Any] = {"good": engine.error(old), "other weights": engine.error(new)}
    for change in (renamed, missing, extra):
        found[change.__name__] = engine.why_refused(change(new_weights))
    found["after refusals"] = engine.error(old)
    engine.load(dict(hf(new)), "of the trainer's model")
    found["of the trainer's model"] = engine.error(new)
    engine.load(old_weights, "good")
    found["after all that"] = engine.error(old)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(sys.argv[1])
    print(json.dumps(found), flush=True)
