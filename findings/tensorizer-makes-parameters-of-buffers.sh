#!/usr/bin/env bash
# tensorizer 2.12.1 with torch 2.13.0: TensorDeserializer.load_into_module puts an nn.Parameter with requires_grad in
# the place of each buffer of floating point. Expected: a module like the one that was serialised, frozen parameters
# too.
#
# named_buffers() still lists them and parameters() does not, so module.requires_grad_(False) does not reach them: what
# a frozen module computes from a buffer wants a gradient, and a BatchNorm in eval mode raises RuntimeError outside
# no_grad. Parameters that were frozen when they were written come back trainable.
# Seen: running_mean is Parameter, requires_grad=True; "'native_batch_norm' is not differentiable with respect to
# argument 'running_mean'".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 tensorizer==2.12.1 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from tensorizer import TensorDeserializer, TensorSerializer
from torch import nn


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()


module()(torch.ones(2, 3))
serializer = TensorSerializer("file.tensors")
serializer.write_module(module())
serializer.close()
loaded = module()
with TensorDeserializer("file.tensors", device="cpu") as deserializer:
    deserializer.load_into_module(loaded)
print("parameters that want gradients:", [name for name, one in loaded.named_parameters() if one.requires_grad])
assert all(one.requires_grad for one in loaded.parameters()), "frozen parameters stay frozen now"
loaded.requires_grad_(False)
mean = loaded[1].running_mean
print("running_mean:", type(mean).__name__, mean.requires_grad, [name for name, _ in loaded.named_buffers()])
assert isinstance(mean, nn.Parameter) and mean.requires_grad, "buffers are plain tensors now"
try:
    loaded(torch.ones(2, 3))
    raise SystemExit("a loaded BatchNorm works now")
except RuntimeError as error:
    print(error)
    assert "argument 'running_mean'" in str(error)
PY
