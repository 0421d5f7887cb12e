import torch

import replicas

model = torch.nn.Linear(4, 2)
with replicas.join("policy") as channel:
    for step in range(1, 4):
        torch.nn.init.constant_(model.weight, step)  # your training step
        receipt = channel.publish(model, meta={"step": step}).wait()
        channel.loaded(receipt.version).wait()  # or go on training: rollouts load when they can
        print(f"step {step} is version {receipt.version}, loaded by all rollouts", flush=True)
