"""Small models for released engines, by architecture; adapters are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
import transformers

__all__ = ["ARCHITECTURES", "AS_ITSELF", "BFLOAT16", "IDS", "TOKENS", "greedy_error", "make", "true_answer"]

IDS = [5, 77, 13, 200, 9, 42, 7]
TOKENS = 8
"""So many are decoded after the prompt."""
TEXT: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
MAMBA: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}


def _lora(**options: Any) -> Callable[[Any], Any]:
    def tuned(model: Any) -> Any:
        found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options))
        with torch.no_grad():
            for name, one in found.named_parameters():
                if "lora_B" in name:
                    one.normal_(std=0.1)
        return found

    return tuned


ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any], Callable[[Any], Any] | None]] = {
    "Llama, tied": ("llama", {**TEXT, "tie_word_embeddings": True}, None),
    "Qwen2": ("qwen2", TEXT, None),
    "Phi-3": ("phi3", TEXT, None),
    "Qwen3-MoE": ("qwen3_moe", {**TEXT, **EXPERTS, "head_dim": 64}, None),
    "Mixtral": ("mixtral", {**TEXT, **EXPERTS}, None),
    "gpt-oss": ("gpt_oss", {**TEXT, **EXPERTS, "head_dim": 64}, None),
    "GLM-4-MoE": ("glm4_moe", {**TEXT, **EXPERTS}, None),
    "DeepSeek-V3": ("deepseek_v3", {**TEXT, **EXPERTS, **LATENT}, None),
    "Granite hybrid": (
        "granitemoehybrid",
        {**TEXT, **EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
        None,
    ),
    "Falcon-H1": ("falcon_h1", {**TEXT, **MAMBA, "mamba_d_ssm": 128}, None),
    "Idefics3": ("idefics3", {}, None),
    "LoRA": ("llama", TEXT, _lora()),
    "DoRA": ("llama", TEXT, _lora(use_dora=True)),
}
BFLOAT16 = ("gpt-oss", "Granite hybrid", "Falcon-H1", "Idefics3")
"""Of which vLLM packs some weights on a CPU, or has no kernels in float32."""
AS_ITSELF = ("DeepSeek-V3",)
"""On a CPU vLLM 0.32 does not compute these as transformers does (latent attention, by
0.06 to 0.6 in float32), from a checkpoint neither: compared with an engine that starts
with the weights."""


def make(kind: str, config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> Any:
    """A model of random weights, its persistent buffers too."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[kind](**config), dtype=torch.float32
    )
    saved = made.state_dict().keys()
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn_like(value) * 0.2 if value.ndim > 1 else 1 + 0.1 * torch.randn_like(value))
        for name, value in made.named_buffers():
            if name in saved and value.is_floating_point():  # such as the bias of a router
                value.normal_(std=0.5)
    return made.to(dtype).eval()


def true_answer(of: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens, by transformers."""
    with torch.no_grad():
        all_of = of(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    answer: torch.Tensor = all_of[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    return answer


def greedy_error(of: Any, tokens: list[int]) -> float:
    """By how much the log-probability of a token that an engine has decoded is below
    that of transformers' best one, at most; 0: they decode the same."""
    assert len(tokens) == TOKENS
    with torch.no_grad():
        rows = of(torch.tensor([[*IDS, *tokens]])).logits[0, len(IDS) - 1 : -1].float().log_softmax(-1)
    return float((rows.max(-1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max())
