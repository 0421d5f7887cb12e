"""The evaluation of site b: it loads each version that comes out of the archive."""

import torch

import replicas

model = torch.nn.Linear(1000, 1000, dtype=torch.bfloat16)
with replicas.join("policy") as channel:
    while True:  # until the run ends
        with channel.receive().wait() as update:
            update.load_into(model)
        step = update.meta["step"]
        assert isinstance(step, int)
        assert torch.equal(model.bias, torch.full_like(model.bias, step)), "these are not the weights of this step"
        print(f"step {step} is evaluated, digest {update.digest}", flush=True)
