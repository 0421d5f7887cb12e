"""Compare the tensors of a SGLang server with a version.

``/weights_checker`` returns a checksum of every parameter of each scheduler. On a CPU
the checksum is the first 8 bytes of the SHA-256 of the parameter's memory, and can be
computed here if each scheduler has the whole model, not a shard of it. Parameters that
SGLang packs (``qkv_proj`` of three, ``gate_up_proj`` of two) are put together.

Checksums of a GPU are computed by a kernel of SGLang's own. There
``/get_weights_by_name`` returns the first rows of a tensor by its checkpoint name, for
some models; with several replicas of a model (``--dp-size``) it returns a list.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["difference"]

PACKED = {".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."), ".gate_up_proj.": (".gate_proj.", ".up_proj.")}
SAMPLES = 12
ROWS = 2
NAMED = 3

Ask = Callable[[str, dict[str, Any]], Any]
"""Path and body of a request → its decoded answer, or None if the server does not
support it."""


def difference(tensors: Mapping[str, torch.Tensor], ask: Ask, *, on_cpu: bool) -> str | None:
    """Compare tensors with the server's own, by requests to it. Return "A, B differ"
    with their names, an empty text if all compared ones are equal, or None if none
    could be compared.

    :param tensors: those of the version, by checkpoint name, on the host.
    :param ask: posts a JSON body to a path of the server, and waits; returns the
        decoded answer, or None if the server refuses the request.
    :param on_cpu: whether the server computes on a CPU. Its checksums are compared
        first then; those of a GPU cannot be computed here.
    """
    found = _by_checksums(tensors, ask) if on_cpu else None
    return _by_samples(tensors, ask) if found is None else found


def _by_checksums(tensors: Mapping[str, torch.Tensor], ask: Ask) -> str | None:
    """Compare by the server's checksums of whole parameters. Return "A, B differ", an
    empty text if all are equal, or None if none can be compared, as with a sharded
    model.

    :param ask: posts a JSON body to a path; returns the answer, None if refused.
    """
    answer = ask("/weights_checker", {"action": "checksum", "selector": "target"}) or {}
    ranks = answer.get("ranks") or []
    if any(_shards(rank, unknown=len(ranks)) > 1 for rank in ranks):
        return None
    compared, others = 0, dict[str, None]()
    for name, checksum in (item for rank in ranks for item in rank["checksums"].items()):
        parts = [tensors.get(one) for one in _parts(name)]
        if all(part is not None for part in parts):
            compared += 1
            if _checksum([part for part in parts if part is not None]) != checksum:
                others[name] = None
    return _named([*others]) if compared else None


def _shards(rank: Mapping[str, Any], unknown: int) -> int:
    """Return the number of schedulers (processes of SGLang) that the model is split
    among.

    :param rank: the server's answer for one scheduler.
    :param unknown: the number to return if the answer does not say so.
    """
    return max((one["tp_size"] * one["pp_size"] for one in rank.get("parallelism_info", ())), default=unknown)


def _parts(name: str) -> list[str]:
    """Return the names in a checkpoint of the tensors of which a server's parameter
    with this name is made: three for ``qkv_proj``, two for ``gate_up_proj``, else the
    same."""
    for packed, parts in PACKED.items():
        if packed in name:
            return [name.replace(packed, part) for part in parts]
    return [name]


def _checksum(parts: list[torch.Tensor]) -> str:
    """Return the checksum, 16 hex digits, that a server has of these tensors in a
    row."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _by_samples(tensors: Mapping[str, torch.Tensor], ask: Ask) -> str | None:
    """Compare the first two rows of about 12 tensors, asked of the server by name.
    Return "A, B differ", an empty text if all are equal, or None if the server shows
    none.

    :param ask: posts a JSON body to a path; returns the answer, None if refused.
    """
    names = list(tensors)
    compared, others = 0, []
    for name in names[:: max(1, len(names) // SAMPLES)]:
        shown = ask("/get_weights_by_name", {"name": name, "truncate_size": ROWS})
        tensor = tensors[name]
        of_replicas = shown if _depth(shown) > tensor.ndim else [shown]
        shows = [rows for rows in of_replicas if isinstance(rows, list)]
        seen = [rows for rows in shows if any(value is not None for value in _numbers(rows))]
        if seen:
            compared += 1
            if not all(_same(tensor[: len(rows)].float().reshape(-1).tolist(), _numbers(rows)) for rows in seen):
                others.append(name)
    return _named(others) if compared else None


def _depth(value: Any) -> int:
    """Return how many lists are nested in a value: 0 for a number."""
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _numbers(value: Any) -> list[Any]:
    """Return the numbers (or None, for a JSON null) in nested lists, in order."""
    return [number for one in value for number in _numbers(one)] if isinstance(value, list) else [value]


def _same(ours: list[float], told: list[Any]) -> bool:
    """Return True if the numbers are equal; a NaN or infinity of ours matches None.

    :param ours: from the version. :param told: from the server, as JSON.
    """
    return len(ours) == len(told) and all(
        one == other or (other is None and not math.isfinite(one)) for one, other in zip(ours, told, strict=True)
    )


def _named(names: list[str]) -> str:
    """Return "A, B differ" with the first three names and the number of others, or an
    empty text without names."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} differ" if names else ""
