"""A version of ``hf(model)`` in the released vLLM, in this process: what the engine
answers with it, beside transformers.

    python tests/engines/programs/architecture_engine.py ARCHITECTURE FOLDER [fresh]

The engine starts with other random weights of the same model, and loads the version;
or, ``fresh``, it starts with those of the version. It prints, as an object of JSON, how
far its log-probabilities are from those of transformers' model, and its last answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import LLM, SamplingParams

from replicas.sources import hf
from replicas.testing import FakeRun
from tests.engines.programs.architectures import ARCHITECTURES, BFLOAT16, IDS, TOKENS, greedy_error, make, true_answer
from tests.field.engines.test_images import image_model


def answer(engine: LLM) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens."""
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    (found,) = engine.generate({"prompt_token_ids": IDS}, wanted, use_tqdm=False)
    rows: Any = found.prompt_logprobs
    return torch.tensor([row[token].logprob for row, token in zip(rows[1:], IDS[1:], strict=True)])


def decoded(engine: LLM) -> list[int]:
    wanted = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    (found,) = engine.generate({"prompt_token_ids": IDS}, wanted, use_tqdm=False)
    return list(found.outputs[0].token_ids)


def error(engine: LLM, of: Any) -> float:
    """Of log-probabilities, on average, against this model of transformers'."""
    return float((answer(engine) - true_answer(of)).abs().mean())


def main(architecture: str, folder: str, fresh: str = "") -> dict[str, Any]:
    kind, config, tune = ARCHITECTURES[architecture]
    dtype = torch.bfloat16 if architecture in BFLOAT16 else torch.float32
    if kind == "idefics3":  # with the files of its tokenizer and images, without which vLLM does not start it
        new, old = (image_model(Path(folder)).eval() for _ in range(2))
    else:
        new, old = (make(kind, config, seed, dtype) for seed in (1, 0))
    (new if fresh else old).save_pretrained(folder)
    new = new if tune is None else tune(new).eval()
    given: Any = {"weight_transfer_config": {"backend": "replicas"}, "dtype": str(dtype).removeprefix("torch.")}
    given["skip_tokenizer_init"] = kind != "idefics3"
    llm = LLM(folder, enforce_eager=True, max_model_len=128, **given)
    if fresh:
        return {"answer": answer(llm).tolist(), "decoded": decoded(llm)}
    executor: Any = llm.llm_engine.model_executor
    worker: Any = executor.driver_worker.worker.weight_transfer_engine
    found: dict[str, Any] = {"from disk": error(llm, old), "another model": error(llm, new)}
    with FakeRun() as run:
        worker._channel = run.join("rollout")  # without a follower as its rank 0
        run.join("trainer").publish(hf(new)).wait(60)
        worker.start_weight_update()
        for prove in (False, True):
            worker.receive_weights(worker.update_info_cls(1, prove=prove))
        worker.finish_weight_update()
        found |= {"loaded": error(llm, new), "answer": answer(llm).tolist(), "decoded": decoded(llm)}
        found["greedy"] = greedy_error(new, found["decoded"])
        worker.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
