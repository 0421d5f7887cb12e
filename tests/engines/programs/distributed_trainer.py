"""A trainer of several ranks under torchrun, supervised, and what listens to it.

``distributed_trainer.py train ddp|fsdp2|zero3|zero3-lora STEPS`` trains ``model`` with
transformers' Trainer and PublishCallback. It writes the digests of its weights at each
step to ``expected.jsonl``, and the metadata of a source, for which rank 0 alone asks.
``distributed_trainer.py listen`` writes those of each version that arrives to
``seen.jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import replicas

torch.set_num_threads(1)


def digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of each tensor's bytes, by name."""

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[
            :16
        ]

    return {name: digest(tensor) for name, tensor in weights}


def write(name: str, row: dict[str, Any]) -> None:
    with Path(name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def listen() -> None:
    with replicas.join("policy") as channel:
        while True:
            with channel.receive().wait() as update:
                tensors = [*update]
                metadata = [(name, str(tensor.dtype), tensor.shape) for name, tensor in tensors]
                row = {"step": update.meta["step"], "digests": digests(tensors), "metadata": metadata}
                write("seen.jsonl", row)


def whole(model: Any) -> list[tuple[str, torch.Tensor]]:
    """All weights of a model at once, by its trainer's own way; a collective."""
    parameters = dict(model.named_parameters())
    if any(hasattr(one, "ds_id") for one in parameters.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters([*parameters.values()]):
            return adapted(model) if hasattr(model, "peft_config") else [*copies(model)]
    return [(name, getattr(one, "full_tensor", lambda one=one: one)()) for name, one in parameters.items()]


def copies(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, one.detach().clone()) for name, one in model.named_parameters())


def adapted(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The base model's weights with the adapters added."""
    base = model.get_base_model()
    deltas = {
        f"{name}.base_layer.weight": module.get_delta_weight("default").detach()
        for name, module in base.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert deltas
    return [
        (name.replace(".base_layer", ""), one + deltas[name] if name in deltas else one)
        for name, one in copies(base)
        if "lora_" not in name
    ]


def train(kind: str, steps: int) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed.configuration_utils import DistributedConfig

    from replicas.integrations.transformers import PublishCallback
    from replicas.sources import hf

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.on_step_end(args, state, control, model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found = digests(whole(model))
            if state.is_world_process_zero:
                sharded = sum(hasattr(one, "ds_id") or hasattr(one, "full_tensor") for one in model.parameters())
                metadata = [(name, str(dtype), shape) for name, dtype, shape in hf(model).metadata()]
                row = {"step": state.global_step, "digests": found, "sharded": sharded, "metadata": metadata}
                write("expected.jsonl", row)

    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    arguments = TrainingArguments(
        output_dir="out", max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1,
        ddp_backend="gloo", deepspeed=deepspeed if "zero3" in kind else None,
    )  # fmt: skip
    sharding = {"fsdp2": DistributedConfig(fsdp_size=2)}.get(kind)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32, distributed_config=sharding)
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"]))
    ids = [[(i + k) % 64 for k in range(8)] for i in range(32)]
    data = Dataset.from_list([{"input_ids": one, "labels": one} for one in ids])
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Recorder(), PublishCallback(wait="loaded")])
    trainer.train()
    if trainer.is_world_process_zero():
        write("history.jsonl", {"history": trainer.state.log_history})
    torch.distributed.destroy_process_group()  # else torch may abort as the interpreter ends


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen()
    else:
        train(sys.argv[2], int(sys.argv[3]))
