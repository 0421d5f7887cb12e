"""A version of ``hf(model)`` in the released SGLang: what the engine answers with it,
beside transformers.

    python tests/engines/programs/sglang_architecture.py ARCHITECTURE FOLDER

The engine starts with other random weights of the same model, and loads the folder of
the version, as the follower has it do. It prints, as an object of JSON, how far its
log-probabilities are from those of transformers' model.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

import sglang
import torch

from replicas.integrations.shared.model_folder import ModelFolder
from replicas.sources import hf
from replicas.testing import FakeRun
from tests.engines.programs.architectures import ARCHITECTURES, IDS, TOKENS, greedy_error, make, true_answer


def complete(engine: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return engine.generate(input_ids=[IDS], sampling_params=sampling, return_logprob=True, logprob_start_len=0)[0]


def error(engine: Any, of: Any) -> float:
    """Of log-probabilities, on average, against this model of transformers'."""
    served = torch.tensor([one[0] for one in complete(engine)["meta_info"]["input_token_logprobs"][1:]])
    return float((served - true_answer(of)).abs().mean())


def main(architecture: str, folder: str) -> dict[str, Any]:
    kind, config, tune = ARCHITECTURES[architecture]
    new, old = (make(kind, config, seed, torch.bfloat16) for seed in (1, 0))
    old.save_pretrained(folder)
    new = new if tune is None else tune(new).eval()
    options: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    options |= {"grammar_backend": "none", "disable_overlap_schedule": True, "disable_cuda_graph": True}
    options |= {"mem_fraction_static": 0.3, "max_total_tokens": 2048, "skip_tokenizer_init": True}
    engine = sglang.Engine(model_path=folder, **options)
    found: dict[str, Any] = {"from disk": error(engine, old), "another model": error(engine, new)}
    with FakeRun() as run:
        rollout = run.join("rollout")
        run.join("trainer").publish(hf(new)).wait(60)
        with rollout.receive().wait() as update, closing(ModelFolder(folder)) as shown:
            found["misfit"] = shown.misfit(update)
            found["said"] = engine.update_weights_from_disk(str(shown.link_version(update)))
        found["loaded"] = error(engine, new)
        found["greedy"] = greedy_error(new, complete(engine)["output_ids"])
    engine.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
