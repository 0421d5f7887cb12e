"""Write the changes of a version in place into a vLLM worker's model, where that is
proven to be right.

Theory of operation
===================

vLLM's layerwise reload moves all bytes of a version to the device, and rebuilds every
layer. Since 0.32 ``load_checkpoint_weight_patches`` writes the changed elements alone:
through the model's own loaders, from tensors in which NaN means "unchanged". It
requires much of a model, and checks little: parameters must be kept as their loaders
write them, each by one plain copy. So:

- **A model is proven first.** When a whole version has been loaded, it is given to the
  model's loaders once more, which now compare instead of copying. Each element must be
  in its place, with its value: then no parameter was packed, padded or transposed, and
  no loader computes. Weights that are derived from others (those of latent attention)
  would not be updated, so a model with such tensors is not patched.
- **A patch is verified.** Its elements are compared in the same way, and no loader may
  have written a NaN over an unchanged element.

In all other cases the whole version is loaded, which also repairs the effects of a
patch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import replicas
from replicas.common.reason import Reason
from replicas.integrations.vllm_worker.ties import has_head, without_tied_head

__all__ = ["EnginePatches"]

logger = logging.getLogger("vllm.replicas")
BATCH_NBYTES = 256 << 20
"""Bytes of checkpoint tensors that are on the device at a time."""
WHOLE_SHARE = 8
"""A version is loaded whole if more than 1 / 8 of its bytes come in whole tensors."""
_Patch = tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]
"""Name, shape of the tensor, values, and their positions in it, flattened."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class _CopyComparer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class has none
    """Compares each tensor that would be copied with its destination; a given NaN
    matches any value but NaN.

    :ivar elements: number of compared elements. :ivar wrong: how many differ, or are
        NaN where nothing was given.
    """

    def __init__(self) -> None:
        """Begin with counts of 0; compare only while entered as a context manager."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own class has none
        self.elements = self.wrong = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compare in place of a copy, which is not made; run every other operation."""
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        there, given = args[0], args[1].to(args[0].device, args[0].dtype)
        nothing = given.isnan()
        self.elements += int((~nothing).sum())
        self.wrong += int(torch.where(nothing, there.isnan(), there != given).sum())
        return there


class EnginePatches:
    """Writes the changes of versions in place into one model, whose parameters are on
    ``device``.

    :ivar held_version: the version that the model holds as a whole, or 0.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        """Keep the model, whose parameters are on ``device``; prove and patch nothing
        yet."""
        self._model, self._device, self._has_head = model, device, has_head(model)
        self._proven = self._refused = ""
        self.held_version = 0

    def loaded(self, update: replicas.Update) -> None:
        """Record that the model holds the version ``update`` as a whole. For a new
        manifest (names, shapes and dtypes) find out, by a comparison of all elements
        through the model's own loaders, whether later versions can be patched in."""
        self.held_version = update.version
        manifest = update.manifest.hash
        if manifest in (self._proven, self._refused):
            return
        try:
            why = self._why_not_patchable(update)
        except Exception as error:  # noqa: BLE001  # of a model's loader
            why = f"{type(error).__name__}: {error}"
        if why:
            self._refused = manifest
            logger.info("loading all versions whole: %s", why)
        else:
            self._proven = manifest

    def _why_not_patchable(self, update: replicas.Update) -> Reason | None:
        """Return why this model, which holds the version ``update`` as a whole, cannot
        be patched, or None if it can: its own loaders, run on the version, must be seen
        to copy every element to its place. They compare here, and change nothing."""
        import vllm.model_executor.model_loader.checkpoint_weight_patch  # noqa: F401  # since 0.32

        if found := _find_derived_tensor(self._model):
            return f"{found} is derived from other weights"
        places = self._places()
        given = without_tied_head(update, update.manifest, head=self._has_head)
        wrong, elements = self._compare((name, tensor.to(self._device)) for name, tensor in given)
        if wrong or not elements or self._places() != places:
            return f"{wrong} of {elements} elements are not where the checkpoint has them"
        return None

    def _places(self) -> list[int]:
        """Return the addresses in memory of the model's parameters."""
        return [one.data_ptr() for one in self._model.parameters()]

    def _compare(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int]:
        """Return (wrong, compared) numbers of elements: the model's loaders run on
        ``weights``, but compare instead of copying."""
        with _CopyComparer() as compared, torch.no_grad():
            self._model.load_weights(weights)
        return compared.wrong, compared.elements

    def apply(self, update: replicas.Update) -> bool:
        """Write the elements that changed since the version that the model holds into
        the model. Return True if they are written and compared. Return False if
        ``update`` must be loaded whole: the model may be a mixture of versions then.

        Afterwards ``held_version`` is 0 until :meth:`loaded`.
        """
        base, self.held_version = self.held_version, 0
        if not base or update.base != base or update.manifest.hash != self._proven:
            return False
        try:
            count = sum(map(self._patch, self._batches(update)))
        except Exception as error:  # noqa: BLE001  # from a model's loader; the load repeats an update error
            logger.info("loading version %d whole: %s: %s", update.version, type(error).__name__, error)
            return False
        logger.info("patched version %d: %d elements changed since %d", update.version, count, base)
        return True

    def _batches(self, update: replicas.Update) -> Iterator[list[_Patch]]:
        """Yield the version's changed elements, copied to the device, in batches of
        about 256 MiB of whole tensors.

        :raises ValueError: the changes cannot be patched in.
        """
        manifest = update.manifest
        batch: list[_Patch] = []
        nbytes = 0
        whole_nbytes_left = manifest.data_nbytes // WHOLE_SHARE
        changes = ((change.name, change) for change in update.changes())
        for name, change in without_tied_head(changes, manifest, head=self._has_head):
            values, positions = change.values, change.positions
            if change.whole is not None:
                values = change.whole.reshape(-1)
                positions = torch.arange(values.numel())
                whole_nbytes_left -= values.nbytes
            if not values.numel():
                continue
            if whole_nbytes_left < 0:
                raise ValueError("too much has changed, or the changes are unknown")
            if values.dtype not in _FLOATS or values.isnan().any():
                raise ValueError(f"{name} has changed, and has NaN or is not a float")
            shape = manifest.tensors[manifest.index[name]].shape
            batch.append((name, shape, values.to(self._device), positions.to(self._device)))
            nbytes += math.prod(shape) * values.itemsize
            if nbytes >= BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _patch(self, batch: list[_Patch]) -> int:
        """Write the changed elements of some tensors into the model, and compare them;
        return their number. Raises ValueError if they differ."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        patches = [
            CheckpointWeightPatch(name, tuple(shape), values.dtype, values, positions)
            for name, shape, values, positions in batch
        ]
        load_checkpoint_weight_patches(self._model, patches, validate_unique_indices=False)
        wrong, _ = self._compare(
            (name, _with_nan_elsewhere(shape, values, positions)) for name, shape, values, positions in batch
        )
        if wrong:
            raise ValueError(f"{wrong} elements differ from the written values")
        return sum(len(values) for _, _, values, _ in batch)


def _with_nan_elsewhere(shape: tuple[int, ...], values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with these values at these positions (in the flattened
    tensor), and NaN elsewhere."""
    flat = torch.full((math.prod(shape),), math.nan, dtype=values.dtype, device=values.device)
    return flat.index_copy_(0, positions, values).view(shape)


def _find_derived_tensor(model: torch.nn.Module) -> str:
    """Return the name of a tensor that a layer has derived from its weights, or of a
    layer of latent attention, which does so; an empty text if there is none."""
    for path, layer in model.named_modules():
        if "MLA" in type(layer).__name__:
            return str(path)
        for name, value in vars(layer).items():
            floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1
            if floats and name != "kv_cache":
                return f"{path}.{name}"
    return ""
