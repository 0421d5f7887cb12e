"""The trainer of site a: twenty steps, each of which changes a few weights."""

import time

import torch

import replicas

torch.manual_seed(0)
model = torch.nn.Linear(1000, 1000, dtype=torch.bfloat16)
weights = model.weight.data.view(-1)
with replicas.join("policy") as channel:
    for step in range(1, 21):
        weights[torch.randperm(weights.numel())[:10_000]] *= 1.01  # your training step
        model.bias.data.fill_(step)
        receipt = channel.publish(model, meta={"step": step}).wait()
        print(f"step {step} is version {receipt.version}, digest {receipt.digest}", flush=True)
        time.sleep(0.5)
