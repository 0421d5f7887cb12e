#!/usr/bin/env bash
# safetensors 0.8.0: what safetensors.torch.load_file (and safe_open's get_tensor) returned is a private mapping of the
# file. When the file is rewritten in place, tensors loaded long before change; where the caller has written one
# element, its page keeps the old values, so that one tensor holds two versions. safetensors.numpy.load_file copies.
# Expected: both loaders return values that are the caller's own, as torch.load does.
# Seen, after element 0 was set to 7 and the file filled with ones: first and last two elements [7, 0, 1, 1]; numpy:
# zeros.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy safetensors==0.8.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

SIZE = 1 << 16
save_file({"weight": torch.zeros(SIZE)}, "file.safetensors")
by_torch = load_file("file.safetensors")["weight"]
by_numpy = load_numpy("file.safetensors")["weight"]
by_torch[0] = 7
with open("file.safetensors", "r+b") as file:
    file.seek(-4 * SIZE, 2)
    file.write(np.ones(SIZE, np.float32).tobytes())
print("torch:", by_torch[[0, 1, -2, -1]].tolist(), "numpy:", by_numpy[[0, 1, -2, -1]].tolist())
assert by_torch[[0, 1, -2, -1]].tolist() == [7.0, 0.0, 1.0, 1.0], "torch's loader copies now"
assert not by_numpy.any(), "numpy's loader maps now"
PY
