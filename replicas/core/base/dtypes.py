"""The dtypes of tensors: their sizes, and their names in safetensors files."""

from __future__ import annotations

from replicas.errors import ManifestMismatch

_DTYPES = {
    "complex128": (16, ""),
    "float64": (8, "F64"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "complex64": (8, "C64"),
    "float32": (4, "F32"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "complex32": (4, ""),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "float4_e2m1fn_x2": (1, "F4"),
}
"""By torch's name: bytes of one element, and the name in safetensors 0.8 (empty if
safetensors lacks the dtype)."""
ITEM_NBYTES = {name: nbytes for name, (nbytes, _) in _DTYPES.items()}
"""Bytes of one element, by torch's dtype name without ``torch.``."""
FILE_CODES = {name: code for name, (_, code) in _DTYPES.items()}
"""safetensors' dtype names by torch's; empty if safetensors lacks the dtype."""
CODES = {code: name for name, code in FILE_CODES.items() if code}
"""torch's names of dtypes by safetensors' names."""
PACKED = {"F4": 2}
"""Numbers in one element of torch, for dtypes of which safetensors counts the numbers
(in the last dimension)."""


def item_nbytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, named as in torch without ``torch.``.

    :raises ManifestMismatch: the dtype is unknown, and cannot be published.
    """
    try:
        return ITEM_NBYTES[dtype]
    except KeyError:
        raise ManifestMismatch(
            f"dtype {dtype!r} cannot be published", hint=f"use one of {', '.join(sorted(ITEM_NBYTES))}"
        ) from None
