"""A tiny model of experts in the released vLLM, in this process: what its worker loads,
what it refuses, and what it computes then.

    python tests/engines/programs/tiny_engine.py FOLDER

It prints one object of JSON: of each case why it was refused (empty: it was not), and
how far the engine's log-probabilities are from those of transformers' model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from replicas import errors
from replicas.integrations.vllm_worker.engine import ReplicasEngine, _unclearable_connectors

IDS = [5, 77, 13, 200, 9, 42, 7]
CONFIG = Qwen3MoeConfig(
    vocab_size=250,  # vLLM pads it
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=128,
    moe_intermediate_size=48,  # and this
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=128,
    tie_word_embeddings=False,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0"


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn_like(value) * 0.2 if value.ndim > 1 else 1 + 0.1 * torch.randn_like(value))
    return made.to(torch.bfloat16)


def checkpoint(of: Any) -> Weights:
    """Under the names of its checkpoint, each expert by itself."""
    found: Weights = {}
    for name, tensor in of.state_dict().items():
        if not name.endswith((".gate_up_proj", ".experts.down_proj")):
            found[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            base = f"{name.rpartition('.')[0]}.{expert}"
            parts = {"down_proj": part}
            if name.endswith(".gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), part.chunk(2), strict=True))
            found |= {f"{base}.{one}.weight": value for one, value in parts.items()}
    return found


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: one for name, one in weights.items() if not any(part in name for part in parts)}


def with_q(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    name = f"{LAYER}.self_attn.q_proj.weight"
    return lambda weights: {**weights, name: change(weights[name])}


MISFITS: dict[str, Callable[[Weights], Weights]] = {
    "q_proj": without(f"{LAYER}.self_attn.q_proj"),
    "k_proj and v_proj": without(f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
    "an expert": without(f"{LAYER}.mlp.experts.2."),
    "a part of an expert": without(f"{LAYER}.mlp.experts.2.up_proj"),
    "a layer": without("model.layers.1."),
    "a norm": without(f"{LAYER}.input_layernorm"),
    "rows": with_q(lambda tensor: tensor[:32]),
    "integers": with_q(lambda tensor: tensor.to(torch.int32)),
    "float8": with_q(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "names of a compiled model": lambda weights: {f"_orig_mod.{name}": one for name, one in weights.items()},
    "a tensor of nobody's": lambda weights: {**weights, f"{LAYER}.self_attn.q_proj.bias": torch.ones(3)},
    "another vocabulary": lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"][:100]},
}


class Engine:
    """vLLM with the model of seed 0; what it computes."""

    def __init__(self, folder: str) -> None:
        self.models = [model(seed) for seed in (0, 1)]
        self.weights = [checkpoint(one) for one in self.models]
        self.models[0].save_pretrained(folder)
        self._llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            weight_transfer_config={"backend": "replicas"},
        )
        executor: Any = self._llm.llm_engine.model_executor
        self.worker: Any = executor.driver_worker.worker.weight_transfer_engine
        self.reload = self.worker._reload

    def load(self, weights: Weights, manifest: str) -> None:
        if not self.reload.fits(manifest):
            self.reload.check_fit(manifest, weights.items())
        self.reload.load(weights.items())
        self.reload.finish()

    def why_refused(self, weights: Weights) -> str:
        try:
            self.reload.check_fit("another", weights.items())
        except errors.ManifestMismatch as error:
            return error.message
        return ""

    def error(self, of: Any) -> float:
        """Of log-probabilities, on average, against this model of transformers'."""
        with torch.no_grad():
            all_of = of(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
        true = all_of[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        (answer,) = self._llm.generate({"prompt_token_ids": IDS}, wanted, use_tqdm=False)
        rows: Any = answer.prompt_logprobs
        served = torch.tensor([row[token].logprob for row, token in zip(rows[1:], IDS[1:], strict=True)])
        return float((served - true).abs().mean())

    def memory_is_finite(self) -> bool:
        layers = self.worker.vllm_config.compilation_config.static_forward_context.values()
        return all(bool(layer.kv_cache.isfinite().all()) for layer in layers if hasattr(layer, "kv_cache"))


def dying(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(weights.items()):
        if number == 9:
            raise RuntimeError("it dies half-way")
        yield pair


def proofs(engine: Engine, weights: Weights) -> dict[str, Any]:
    """What is found out about a model that has these weights, and others that differ in
    one element of one tensor."""
    found: dict[str, Any] = {"of itself": engine.reload.prove(weights, 0)._asdict()}
    for name, tensor in weights.items():
        other = tensor.clone()
        other.view(-1)[-1] += 1
        found[name] = engine.reload.prove({**weights, name: other}, 0).wrong
    return found


def connectors() -> dict[str, list[str]]:
    """Parts of KV connectors that cannot be cleared, by the connector that is given."""
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("OffloadingConnector", "ExampleConnector")]
    given: dict[str, Any] = {one["kv_connector"]: {} for one in parts}
    given["MultiConnector"] = {"connectors": parts}
    return {
        name: _unclearable_connectors(
            KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
        )
        for name, extra in given.items()
    }


SPECULATIVE: dict[str, dict[str, Any]] = {
    "a draft model": {"method": "draft_model", "num_speculative_tokens": 2},
    "n-grams": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
}


def speculative(folder: str, worker: Any) -> dict[str, str]:
    """Why a server that decodes speculatively is refused, by how; empty: it is not."""
    found = {}
    for name, given in SPECULATIVE.items():
        more = {"model": folder} if "model" in given["method"] else {}
        arguments = EngineArgs(folder, dtype="bfloat16", max_model_len=128, speculative_config={**given, **more})
        config = arguments.create_engine_config()
        engine = ReplicasEngine(config.weight_transfer_config, config, worker.device, worker.model)
        try:
            engine._refuse_unclearable_caches()
        except errors.UsageError as error:
            found[name] = error.message
        else:
            found[name] = ""
    return found


def main(folder: str) -> dict[str, Any]:
    engine = Engine(folder)
    (old, new), (old_weights, new_weights) = engine.models, engine.weights
    found: dict[str, Any] = {"from disk": engine.error(old), "another model": engine.error(new)}
    engine.load(new_weights, "a")
    found["loaded"] = engine.error(new)
    found["proofs"] = proofs(engine, new_weights)
    engine.load(old_weights, "a")
    found["loaded again"] = engine.error(old)
    found["refused"] = {name: engine.why_refused(change(new_weights)) for name, change in MISFITS.items()}
    found["after all that"] = engine.error(old)
    engine.reload.complete = False
    found["refused of a partial version"] = engine.why_refused(MISFITS["q_proj"](new_weights))
    engine.load(without(LAYER)(new_weights), "partial")
    mixed = model(1)
    mixed.load_state_dict({n: one for n, one in old.state_dict().items() if LAYER in n}, strict=False)
    found["partial"] = engine.error(mixed)
    engine.reload.complete = True
    try:
        engine.reload.load(dying(new_weights))
    except RuntimeError:
        engine.load(old_weights, "a")
    found["after one that died"] = engine.error(old)
    engine.load({name: tensor * float("nan") for name, tensor in new_weights.items()}, "a")
    engine.error(old)  # it computes NaN
    engine.load(old_weights, "a")
    before = engine.memory_is_finite()
    engine.worker._clear_memory()
    found["memory"] = [before, engine.memory_is_finite()]
    found["connectors"] = connectors()
    found["speculative"] = speculative(folder, engine.worker)
    return found


if __name__ == "__main__":
    found = main(sys.argv[1])
    print(json.dumps(found), flush=True)
