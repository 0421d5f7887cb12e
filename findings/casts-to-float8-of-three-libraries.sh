#!/usr/bin/env bash
# torch 2.13.0 (CPU), ml-dtypes 0.6.0 (JAX's) and mlx 0.32.4 do not make the same float8 out of the same float32.
# Expected: one way for each format to treat what is out of its range, in three libraries, and NaN kept by all.
#
# float8_e4m3fn: torch makes 448 of infinity and of all that is larger, ml-dtypes makes NaN, and mlx's to_fp8 makes 448
# of NaN, too. torch's float8_e5m2 does not saturate: infinity stays. float8_e8m0fnu (scales of MX formats, without zero
# and sign): torch makes 2 of -2 and 2^-127 of 0, ml-dtypes makes NaN of both. So a check for finite values finds
# diverged weights before torch's cast, not after it, and a block of zeros whose scale is cast has another one in JAX.
# Seen: the table SEEN below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 ml-dtypes==0.6.0 'mlx[cpu]==0.32.4' numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import ml_dtypes
import mlx.core as mx
import numpy as np
import torch

INF, NAN = float("inf"), float("nan")
SEEN = {  # by torch, ml-dtypes, mlx
    ("float8_e4m3fn", 448.0): (448.0, 448.0, 448.0),
    ("float8_e4m3fn", 500.0): (448.0, NAN, 448.0),
    ("float8_e4m3fn", INF): (448.0, NAN, 448.0),
    ("float8_e4m3fn", NAN): (NAN, NAN, 448.0),
    ("float8_e5m2", INF): (INF, INF, None),
    ("float8_e8m0fnu", 2.0): (2.0, 2.0, None),
    ("float8_e8m0fnu", -2.0): (2.0, NAN, None),
    ("float8_e8m0fnu", 0.0): (2.0**-127, NAN, None),
}
for (name, value), seen in SEEN.items():
    by_torch = torch.tensor([value]).to(getattr(torch, name)).float().item()
    by_numpy = float(np.array([value], np.float32).astype(getattr(ml_dtypes, name)).astype(np.float32)[0])
    by_mlx = mx.from_fp8(mx.to_fp8(mx.array([value])), mx.float32).item() if name == "float8_e4m3fn" else None
    found = (by_torch, by_numpy, by_mlx)
    print(f"{name:15} of {value:5}: torch {by_torch}, ml-dtypes {by_numpy}, mlx {by_mlx}")
    assert str(found) == str(seen), "a cast differs now"  # as texts, as NaN is not equal to itself
PY
