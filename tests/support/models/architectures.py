"""Transformers models of a few thousand parameters, with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

with warnings.catch_warnings():  # of libraries that they import
    warnings.simplefilter("ignore")
    import transformers

__all__ = ["ARCHITECTURES", "ONE_OF_EACH_KIND", "Architecture", "forward", "make", "quiet"]

Config = Mapping[str, Any]

_TEXT: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT: Config = {name: value for name, value in _TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
_MOE: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 0,
}
_LATENT: Config = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA: Config = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TEXT: Config = {**_TEXT, "rope_parameters": _ROPE}
_QWEN_VISION: Config = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
_BART: Config = {
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


class Architecture(NamedTuple):
    """A class of model, and its small configuration."""

    kind: str
    config: Config = _TEXT
    model: str = "AutoModelForCausalLM"


_VLM = "AutoModelForImageTextToText"
ARCHITECTURES: Mapping[str, Architecture] = {
    "Llama": Architecture("llama"),
    "Llama, tied": Architecture("llama", {**_TEXT, "tie_word_embeddings": True}),
    "Mistral": Architecture("mistral"),
    "Qwen2": Architecture("qwen2"),
    "Qwen2, a reward model": Architecture("qwen2", {**_TEXT, "num_labels": 1}, "AutoModelForSequenceClassification"),
    "Qwen3": Architecture("qwen3"),
    "Gemma 2": Architecture("gemma2"),
    "Gemma 3, text": Architecture("gemma3_text"),
    "Phi-3": Architecture("phi3"),
    "GLM-4": Architecture("glm4"),
    "OLMo 2": Architecture("olmo2"),
    "Granite": Architecture("granite"),
    "GPT-2": Architecture("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}),
    "GPT-NeoX": Architecture("gpt_neox"),
    "Falcon": Architecture(
        "falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    ),
    "Mixtral": Architecture("mixtral", {**_TEXT, **_MOE}),
    "Qwen2-MoE": Architecture("qwen2_moe", {**_TEXT, **_MOE}),
    "Qwen3-MoE": Architecture("qwen3_moe", {**_TEXT, **_MOE}),
    "OLMoE": Architecture("olmoe", {**_TEXT, **_MOE}),
    "DeepSeek-V2": Architecture("deepseek_v2", {**_TEXT, **_MOE, **_LATENT}),
    "DeepSeek-V3": Architecture("deepseek_v3", {**_TEXT, **_MOE, **_LATENT}),
    "GLM-4-MoE": Architecture("glm4_moe", {**_TEXT, **_MOE}),
    "MiniMax-M2": Architecture("minimax_m2", {**_TEXT, **_MOE}),
    "Ernie 4.5-MoE": Architecture("ernie4_5_moe", {**_TEXT, **_MOE}),
    "gpt-oss": Architecture("gpt_oss", {**_TEXT, **_MOE}),
    "Llama 4, text": Architecture(
        "llama4_text",
        {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
        | {"interleave_moe_layer_step": 1},
    ),
    "Qwen3-Next": Architecture(
        "qwen3_next",
        {**_TEXT, **_MOE, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Jamba": Architecture(
        "jamba",
        {**_TEXT, **_MOE, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "Granite hybrid": Architecture(
        "granitemoehybrid",
        {**_TEXT, **_MOE, **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "Falcon-H1": Architecture("falcon_h1", {**_TEXT, **_MAMBA, "mamba_d_ssm": 64}),
    "Mamba": Architecture("mamba", {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 96}),
    "LFM2": Architecture("lfm2", {**_TEXT, "layer_types": ["conv", "full_attention"]}),
    "Qwen2.5-VL": Architecture("qwen2_5_vl", {"text_config": _QWEN_TEXT, "vision_config": _QWEN_VISION}, _VLM),
    "Qwen3-VL": Architecture(
        "qwen3_vl", {"text_config": _TEXT, "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}}, _VLM
    ),
    "Qwen3-VL-MoE": Architecture(
        "qwen3_vl_moe",
        {"text_config": {**_TEXT, **_MOE}, "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
        _VLM,
    ),
    "Gemma 3": Architecture(
        "gemma3", {"text_config": _TEXT, "vision_config": {**_VISION, "model_type": "siglip_vision_model"}}, _VLM
    ),
    "LLaVA": Architecture(
        "llava",
        {"text_config": {**_TEXT, "model_type": "llama"}}
        | {"vision_config": {**_VISION, "model_type": "clip_vision_model"}},
        _VLM,
    ),
    "InternVL": Architecture(
        "internvl",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_VISION, "model_type": "internvl_vision"},
        },
        _VLM,
    ),
    "T5": Architecture(
        "t5",
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 96},
        "AutoModelForSeq2SeqLM",
    ),
    "BART": Architecture("bart", _BART, "AutoModelForSeq2SeqLM"),
    "BERT": Architecture("bert", _BERT, "AutoModelForMaskedLM"),
}

ONE_OF_EACH_KIND = ("Llama, tied", "GPT-2", "Qwen3-MoE", "gpt-oss", "Falcon-H1", "Qwen2.5-VL", "T5")
"""Dense and tied, transposed layers, experts in two layouts, a state space beside
attention, a vision model, an encoder and a decoder."""
"""By the name in the handbook's table."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the advice of these libraries, which pytest would take for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(name: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Any:
    """A model of random weights, its persistent buffers too."""
    one = ARCHITECTURES[name]
    torch.manual_seed(seed)
    with quiet():
        config = transformers.CONFIG_MAPPING[one.kind](**one.config)
        model = getattr(transformers, one.model).from_config(config, dtype=dtype)
    saved = model.state_dict().keys()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(one for name, one in model.named_buffers() if name in saved)):
            if tensor.is_floating_point():
                tensor.normal_(std=0.05)
    return model.eval()


@torch.no_grad()
def forward(model: Any) -> torch.Tensor:
    """What the model answers to a short text."""
    tokens = torch.tensor([[1, 5, 9, 7, 30, 2]])
    given = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    with quiet():
        answer: torch.Tensor = model.eval()(**given).logits
    return answer
