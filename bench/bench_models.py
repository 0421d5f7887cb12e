"""What does it cost to publish a model as its checkpoint, and its adapters merged?

    python -m bench.bench_models [--quick] [--repetitions N]

A Llama with the shapes of SmolLM2-135M (bfloat16, random weights), and the same with a
LoRA of rank 16 on all linear layers. Each publish goes through a coordinator into a
slot of shared memory; the order rotates from one repetition to the next.

- ``publish(model)``: under the names in memory, beside ``publish(hf(model))``.
- ``publish(hf(adapted))``, beside what is done by hand: PEFT's ``merge_adapter()``,
  ``publish``, ``unmerge_adapter()``.

"peak" is how much the process's resident memory grows beyond what it is before the
walk of the source, in parts of the model; of a mixture of experts with a LoRA on its
packed experts, too. "changed" is the relative change of the
frozen weights of a small Qwen2 after 1,000 walks, and after 1,000 times by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import replicas
from bench.support import Bar, busy_ratio, machine, run_bench, show, write
from replicas.coordinator import Coordinator
from replicas.sources import hf

WAIT_S = 120.0
LLAMA = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN2 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
QWEN3_MOE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "num_experts": 64,
    "moe_intermediate_size": 384,
    "tie_word_embeddings": True,
}
BARS = {"publish(hf(adapted))": ("by hand", 1.6), "publish(hf(model))": ("publish(model)", 1.2)}
"""By hand nothing is copied, and the frozen weights are changed."""


def _model(kind: str, config: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    made = transformers.CONFIG_MAPPING[kind](**config)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)


def _adapted(model: Any, targets: Any, parameters: list[str] | None = None) -> Any:
    import peft

    config = peft.LoraConfig(r=16, target_modules=targets, target_parameters=parameters)
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, one in found.named_parameters():
            if "lora_B" in name:
                one.normal_(std=0.02)
    return found


def _merged_by_hand(adapted: Any) -> dict[str, torch.Tensor]:
    names = ((name, one.detach()) for name, one in adapted.base_model.model.named_parameters() if "lora_" not in name)
    return {name.replace(".base_layer", ""): one for name, one in names}


def _publishes(channel: Any, model: Any, adapted: Any) -> dict[str, Callable[[], object]]:
    plain, merged = hf(model), hf(adapted)

    def publish(weights: object) -> None:
        channel.publish(weights, new_manifest=True).wait(WAIT_S)

    def by_hand() -> None:
        adapted.merge_adapter()
        publish(_merged_by_hand(adapted))
        adapted.unmerge_adapter()

    return {
        "publish(model)": lambda: publish(model),
        "publish(hf(model))": lambda: publish(plain),
        "by hand": by_hand,
        "publish(hf(adapted))": lambda: publish(merged),
    }


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(coordinator: Any, model: Any, adapted: Any, repetitions: int) -> dict[str, list[float]]:
    where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
    with (
        replicas.join("policy", group="trainer", replica=0, rank=0, world_size=1, **where) as trainer,
        replicas.join("policy", group="rollout", replica=0, rank=0, world_size=1, **where),
    ):
        runs = _publishes(trainer, model, adapted)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(repetitions + 1):
            turn = list(runs)
            for name in turn[number % len(turn) :] + turn[: number % len(turn)]:
                runs[name]()  # what is planned, and the slots' first touch, is done
                found[name].append(_timed(runs[name]))
    return {name: times[1:] for name, times in found.items()}


def _resident_nbytes(key: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(key))
    return int(line.split()[1]) << 10


def _peak(walk: Callable[[], Iterator[object]]) -> int:
    """Bytes by which resident memory grows at most during a walk."""
    for _ in walk():  # what is planned stays
        pass
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident_nbytes("VmRSS")
    for _ in walk():
        pass
    return _resident_nbytes("VmHWM") - before


def _peak_bar(name: str, adapted: Any) -> Bar:
    source, model = hf(adapted), adapted.base_model.model.model
    whole = _nbytes(adapted)
    largest = max(_nbytes(model.layers[0]), model.embed_tokens.weight.nbytes) / whole
    peak = _peak(lambda: iter(source)) / whole
    return Bar(
        f"{name}: a merged walk takes at most the largest layer, {largest:.2f} of the model", peak, peak <= largest
    )


def _changed(walk: Callable[[Any], object], times: int) -> float:
    """Relative change of frozen weights after so many walks."""
    adapted = _adapted(_model("qwen2", QWEN2), ["q_proj", "k_proj", "v_proj"])
    frozen = [one for name, one in adapted.named_parameters() if "lora_" not in name]
    before = [one.detach().clone() for one in frozen]
    for _ in range(times):
        walk(adapted)
    moved = sum(float((one.float() - old.float()).norm() ** 2) for one, old in zip(frozen, before, strict=True))
    return float((moved / sum(float(old.float().norm() ** 2) for old in before)) ** 0.5)


def _by_hand(adapted: Any) -> None:
    adapted.merge_adapter()
    adapted.unmerge_adapter()


def _nbytes(model: Any) -> int:
    return sum(one.nbytes for one in {id(one): one for one in model.parameters()}.values())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=0)
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (3 if arguments.quick else 9)
    warnings.simplefilter("ignore")  # advice of the libraries
    busy = await busy_ratio()
    model, adapted = _model("llama", LLAMA), _adapted(_model("llama", LLAMA), "all-linear")
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "60s", "slots": 2}}
    with Coordinator(channels).in_thread() as coordinator:
        times = await asyncio.to_thread(_measure, coordinator, model, adapted, repetitions)
    medians = {name: statistics.median(some) for name, some in times.items()}
    bars: list[Bar] = []
    for name, (beside, most) in BARS.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[beside], strict=True))
        bars.append(Bar(f"{name} takes at most {most:g} x {beside}", ratio, ratio <= most))
    packed = ["experts.gate_up_proj", "experts.down_proj"]
    with_experts = _adapted(_model("qwen3_moe", QWEN3_MOE), ["q_proj"], packed)
    peaks = [_peak_bar("LoRA on linear layers", adapted), _peak_bar("LoRA on packed experts", with_experts)]
    bars += peaks
    times_changed = 100 if arguments.quick else 1000
    changed = {
        "hf": _changed(lambda one: [None for _ in hf(one)], times_changed),
        "by hand": _changed(_by_hand, times_changed),
    }
    bars.append(Bar(f"{times_changed} walks change nothing", changed["hf"], changed["hf"] == 0))
    show("models", ("", "ms"), [[name, f"{median * 1e3:.1f}"] for name, median in medians.items()])
    print(f"changed after {times_changed}: hf {changed['hf']:.2g}, by hand {changed['by hand']:.2g}")
    print(*(bar.line() for bar in bars), sep="\n")
    samples = {"times": times, "peak": [bar.figure for bar in peaks], "changed": changed}
    write("bench_models", {"machine": machine(), "busy_before": busy, "samples": samples})


if __name__ == "__main__":
    run_bench(main())
