"""Choose the names of tied tensors that a vLLM worker's model is given.

A version has a tied tensor under each of its names. A model whose output layer shares
the embedding's weight has no parameter for the layer's own name: some of vLLM's loaders
skip that name, and others refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from replicas.core.base.manifest import Manifest

__all__ = ["has_head", "without_tied_head"]

_T = TypeVar("_T")
_HEAD = "lm_head."


def has_head(model: torch.nn.Module) -> bool:
    """Return True if the model's output layer has a weight of its own, not only the
    embedding's.

    Call it before a load takes the model apart.
    """
    return any(_HEAD in name for name, _ in model.named_parameters())


def without_tied_head(found: Iterable[tuple[str, _T]], manifest: Manifest, *, head: bool) -> Iterator[tuple[str, _T]]:
    """Yield the pairs of ``found``; leave out the output layer's name for a tied tensor
    if the model has no parameter of that name.

    :param found: tensors or changes of a version of this manifest, by name.
    :param head: :func:`has_head` of the model.
    """
    tied = {name for pair in manifest.aliases for name in pair}
    return ((name, value) for name, value in found if head or name not in tied or _HEAD not in name)
