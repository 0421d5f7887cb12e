"""The layers of a vLLM worker's model between two versions: tried, loaded, put back.

Theory of operation
===================

vLLM's layerwise reload takes the layers apart (their parameters become *meta* tensors,
without memory), counts the elements given to each layer, and makes a layer real when
the count is complete. A layer that was given a part only is made real at the end: the
rest of its memory is uninitialised. So a version is *tried* first, if its manifest
differs from that of the last good load: its tensors are handed to vLLM's own loaders
while no layer can become complete, and the regions of each parameter that they write
are recorded. This moves no bytes, and afterwards the parameters are restored. So
misfits are known by name before a layer is touched.

Some models (gpt-oss in vLLM 0.32) bypass vLLM's count when they write to parameters,
which then restores the old weights of these layers. The trial detects these layers:
they are made real before the load, and put together after it.

A load that fails half-way is *abandoned*: parameters of unfinished layers are restored.
The model is a mixture of two versions then, but each of its layers is whole, and the
next load begins as the first one did.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_TENSORS,
    materialize_layer,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from replicas import errors
from replicas.integrations.vllm_worker.proof import Comparison, CopiedRegion, compare_sample, first_names, place_of

__all__ = ["EngineReload"]

logger = logging.getLogger("vllm.replicas")
_NEVER = -(1 << 62)
"""A count of elements that no load completes."""
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides, in elements."""
_WORDS = 300
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Suffixes of buffers of old checkpoints, which every loader leaves out."""
_FITS = "publish hf(model), whose names are those of its checkpoint"


class _WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class has none
    """Records which regions of meta parameters are written.

    :param names: path, name and shape of each parameter, by the address of its storage.
    :param strict: whether floats may be written from floats of 16 bits or more only.
    :ivar tensor: name and value of the tensor that is loaded now.
    :ivar regions: written regions of each storage, by its address.
    :ivar places: origin of each region, by storage; None: a computed value.
    """

    def __init__(self, names: dict[int, tuple[str, str, tuple[int, ...]]], *, strict: bool) -> None:
        """Record nothing until entered as a context manager.

        :param names: path, name and shape of each parameter, by the address of its
            storage.
        :param strict: refuse a write to a float from an integer or an 8-bit float.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own class has none
        self._names, self._strict = names, strict
        self.tensor: tuple[str, torch.Tensor] | None = None
        self.regions: dict[int, set[_Region]] = {}
        self.places: dict[int, dict[_Region, CopiedRegion | None]] = {}
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record a write to a meta tensor, then run the operation and return its
        result."""
        aten = torch.ops.aten
        if func in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default) and args[0].is_meta:
            self._record_write(args[0], args[1] if func is aten.copy_.default else None)
        elif func._schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self.places.setdefault(_storage(args[0]), {})[_region(args[0])] = None  # computed in place
        return func(*args, **(kwargs or {}))

    def _record_write(self, written: torch.Tensor, given: torch.Tensor | None) -> None:
        """Record a write to ``written``, a meta tensor: a copy of ``given``, or of a
        constant (None).

        :raises _Misfit: with ``strict``, the dtypes do not fit.
        """
        storage = _storage(written)
        if given is not None:
            self.calls += 1
            floats = written.is_floating_point() and given.is_floating_point()
            packed = given.dtype.itemsize == 1 < written.dtype.itemsize
            if self._strict and written.is_floating_point() and (not floats or packed):
                name = ".".join(self._names[storage][:2]) if storage in self._names else "a parameter"
                raise _Misfit(f"{given.dtype} is given for {name}, which is {written.dtype}")
        region = _region(written)
        self.regions.setdefault(storage, set()).add(region)
        places = self.places.setdefault(storage, {})
        if given is None:
            places.pop(region, None)
        elif region not in places and self.tensor is not None and storage in self._names:
            places[region] = place_of(*self.tensor, given, written, self._names[storage])
        else:
            places[region] = None

    def copied_places(self) -> list[CopiedRegion]:
        """Return the regions of parameters that are written by plain copies only, each
        with the region of the version's tensor that was copied to it."""
        whole = (found.values() for found in self.places.values() if None not in found.values())
        return [place for found in whole for place in found if place is not None]

    def count_written(self, tensor: torch.Tensor) -> int:
        """Return how many elements of ``tensor``, a parameter of the model, were
        written."""
        return sum(math.prod(shape) for _, shape, _ in self.regions.get(_storage(tensor), ()))


class _Misfit(Exception):
    pass


class EngineReload:
    """Loads versions into the model of one vLLM worker, by vLLM's layerwise reload.

    :ivar complete: False: versions may lack parameters of the model.
    :ivar has_all: whether this worker has all layers and experts.
    """

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        """Find the model's parameters, and buffers that are copies of them.

        Change nothing. ``device``: where the parameters are.
        """
        self._model, self._config, self._device = model, model_config, device
        self._parameters = _named_parameters(model)
        self._kernels: list[tuple[Any, Any]] = []
        self._uncounted: list[Any] = []
        self._copies = _find_copies(model)
        self._fitting = ""
        self._places: list[CopiedRegion] = []
        self.complete = self.has_all = True

    def computes_with_freed_scales(self) -> bool:
        """Return True if a load frees memory that a layer uses: on a CPU vLLM's int8
        kernels keep the addresses of scales, which a reload replaces."""
        schemes = (getattr(layer, "scheme", None) for layer in self._model.modules())
        return any(hasattr(getattr(scheme, "kernel", None), "dnnl_handler") for scheme in schemes)

    def fits(self, manifest: str) -> bool:
        """Return True if a version of this manifest (its hash) was the last one that
        fitted."""
        return manifest == self._fitting

    def check_fit(
        self, manifest: str, weights: Iterable[tuple[str, torch.Tensor]], aliases: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Check that a version fits, and record its manifest (names, shapes and dtypes)
        and the regions that loaders write; afterwards the model is as before.

        The model's own loaders run on ``weights``, but write to meta tensors only.

        :param manifest: hash of the version's manifest.
        :param weights: (name, tensor) of the version.
        :param aliases: other names of tied tensors, each with the first name.
        :raises replicas.errors.ManifestMismatch: the version does not fit.
        """
        self.restore_unfinished()
        initialize_layerwise_reload(self._model)
        last, first_names = "", dict(aliases)
        used: set[str] = set()
        unused: list[str] = []

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            """Yield ``weights`` to the model's loader. Record the present one in
            ``last``, and those that the loader has not copied in ``unused``."""
            nonlocal last
            for name, tensor in weights:
                before = given.calls
                last = f"{name} {list(tensor.shape)}"
                given.tensor = name, tensor
                yield name, tensor
                if given.calls == before:
                    unused.append(name)
                else:
                    used.add(first_names.get(name, name))

        try:
            given = _WriteRecorder(self._keep_incomplete(), strict=self._config.quantization is None)
            with given, torch.no_grad():
                loaded = self._model.load_weights(named())
            self._check_names(loaded)
            self._check_layers(given)
            self._uncounted = [layer for layer in self._model.modules() if _bypasses_count(layer, given)]
        except errors.ReplicasError:
            raise
        except Exception as error:
            what, text = type(self._model).__name__, f"{type(error).__name__} {str(error)[:_WORDS]}".strip()
            text = str(error) if isinstance(error, _Misfit) else f"near {last}: {text}"
            raise errors.ManifestMismatch(f"it does not fit {what} ({_FITS}); {text}", phase="load", hint="") from error
        finally:
            self.restore_unfinished()
        collects = 2 * len(unused) >= given.calls  # the model collects all tensors first: unused ones are unknown
        self._places = [] if collects else given.copied_places()
        if not collects:
            self._check_ignored([one for one in unused if first_names.get(one, one) not in used])
        self._fitting = manifest

    def prove(self, weights: Mapping[str, torch.Tensor], turn: int) -> Comparison:
        """Compare a sample of the model's tensors with the version that it has loaded;
        return names of tensors that differ, and counts. Change nothing.

        :param weights: the version's tensors by name.
        :param turn: selects the sample; the version's number.
        """
        return compare_sample(self._model, self._places, weights, turn)

    def _keep_incomplete(self) -> dict[int, tuple[str, str, tuple[int, ...]]]:
        """Replace the real tensors of the model's layers by meta tensors, and have vLLM
        regard all layers as incomplete, so that it allocates no memory for them, until
        :meth:`restore_unfinished`.

        :returns: path, name and shape of all parameters, by the address of their
            storage.
        """
        names: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        for path, layer in self._model.named_modules():
            get_layerwise_info(layer).load_numel = _NEVER
            for name, tensor in get_layer_tensors(layer).items():
                if not tensor.is_meta:  # vLLM keeps some real, and loads into them directly
                    tensor = to_meta_tensor(tensor)
                    (layer._parameters if name in layer._parameters else layer._buffers)[name] = tensor
                names[_storage(tensor)] = path, name, tuple(tensor.shape)
        return names

    def _check_names(self, loaded: set[str] | None) -> None:
        """Check that all of the model's parameters were loaded, unless versions may
        lack some. Raise ManifestMismatch if one is missing.

        :param loaded: their names, as the model's loader reports them, or None if
            unknown.
        """
        if not self.complete or loaded is None or self._config.quantization is not None:
            return
        if missing := sorted(self._parameters - loaded):
            text = f"it has no weights for {len(missing)} of the model's parameters: {first_names(missing)}"
            raise errors.ManifestMismatch(
                f"{text} ({_FITS}; --partial if the trainer leaves these out)", phase="load", hint=""
            )

    def _check_layers(self, given: _WriteRecorder) -> None:
        """Raise ManifestMismatch if only a part of a layer was written in the trial.

        :param given: what the trial has recorded. Layers without any write keep their
            weights.
        """
        torn = []
        for path, layer in self._model.named_modules():
            if is_deferred_attention_layer(layer):
                continue
            tensors = {name: one for name, one in get_layer_tensors(layer).items() if name not in SKIP_LOAD_TENSORS}
            counts = {name: (given.count_written(one), get_tensor_load_numel(one)) for name, one in tensors.items()}
            if not any(count for count, _ in counts.values()):
                continue  # this layer keeps its weights
            for name, (count, total) in counts.items():
                optional = (
                    name not in layer._parameters or name in SKIP_TENSORS or self._config.quantization is not None
                )
                if count < total and (count or not optional):
                    torn.append(f"{path}.{name} ({count} of {total} elements)")
        if torn:
            text = f"it has a part only of {len(torn)} of the model's layers: {first_names(torn)}"
            raise errors.ManifestMismatch(
                f"{text}; publish all tensors of which a layer is made", phase="load", hint=""
            )

    def _check_ignored(self, unused: list[str]) -> None:
        """Refuse tensors that no loader of the model uses, such as a renamed expert:
        raise ManifestMismatch, or only log a warning if other workers may have them.

        :param unused: names of the version's tensors of which nothing was copied.
        """
        tied = getattr(self._config.hf_config, "tie_word_embeddings", False)
        ignored = [one for one in unused if not one.endswith(_DERIVED) and not (tied and one == "lm_head.weight")]
        if not ignored:
            return
        text = (
            f"the model ignores {len(ignored)} tensors of the version, which it does not have: {first_names(ignored)}"
        )
        if self.has_all:
            raise errors.ManifestMismatch(f"{text}; leave them out, or {_FITS}", phase="load", hint="")
        logger.warning("%s", text)  # other workers may have them

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a version that fits (:meth:`check_fit`), layer by layer, into the model;
        the caller calls :meth:`finish` next. After an error the model is a mixture of
        two versions until a load succeeds.

        :param weights: (name, tensor) of the version.
        """
        self.restore_unfinished()
        if self._device.type == "cpu":
            self._drop_expert_kernels()
        initialize_layerwise_reload(self._model)
        for layer in self._uncounted:
            materialize_layer(layer, get_layerwise_info(layer))
        self._check_names(self._model.load_weights(iter(weights)))
        for layer in self._uncounted:
            if get_layerwise_info(layer).can_load():
                _layerwise_process(layer, get_layerwise_info(layer))

    def finish(self) -> None:
        """Complete the load: make the remaining layers whole, and update what vLLM
        keeps beside the parameters (packed weights, copies in buffers)."""
        finalize_layerwise_reload(self._model, self._config)
        if self._device.type == "cpu":
            self._restore_kernels()
            self._pack_tied_layers()
        for copy, tensor in self._copies:
            copy().copy_(tensor().view(copy().shape))

    def restore_unfinished(self) -> None:
        """Give the layers that a load or trial has left unfinished their old parameters
        back; do nothing if there are none."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
        self._restore_kernels()

    def _drop_expert_kernels(self) -> None:
        """Take the kernels of the model's expert layers away, so that vLLM packs them
        again; keep them for :meth:`_restore_kernels`.

        On a CPU vLLM packs their weights when it makes their kernel, but not on a
        reload: it would compute with unpacked weights.
        """
        for layer in self._model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _restore_kernels(self) -> None:
        """Give layers of experts that were not loaded the kernels of
        :meth:`_drop_expert_kernels` back."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels.clear()

    def _pack_tied_layers(self) -> None:
        """Pack the weights of tied layers again.

        On a CPU vLLM computes with a packed copy of a layer's weight, and makes a new
        copy for layers that were given weights. An output layer that is tied to the
        embedding was given none: it would keep computing with the previous version. (On
        a GPU the layers share the memory itself.)
        """
        layers: dict[int, list[Any]] = {}
        for layer in self._model.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and getattr(layer, "quant_method", None) is not None:
                layers.setdefault(id(weight), []).append(layer)
        for layer in (one for tied in layers.values() if len(tied) > 1 for one in tied):
            layer.quant_method.process_weights_after_loading(layer)


def _named_parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters that versions have: without those that vLLM
    derives from others after a load (of latent attention)."""
    layers = dict(model.named_modules())
    names = (name.rpartition(".") for name, _ in model.named_parameters())  # tied ones come once
    loaded = ((path, name, get_layerwise_info(layers[path]).restore_metadata[0]) for path, _, name in names)
    return frozenset(f"{path}.{name}" if path else name for path, name, known in loaded if name in known)


def _bypasses_count(layer: Any, given: _WriteRecorder) -> bool:
    """Return True if more was written to the layer's tensors than vLLM has counted:
    vLLM would restore the layer's old weights at the end of a load.

    :param layer: a vLLM layer of the model. :param given: the writes of a trial.
    """
    if is_deferred_attention_layer(layer):
        return False
    written = sum(
        given.count_written(one) for name, one in get_layer_tensors(layer).items() if name not in SKIP_LOAD_TENSORS
    )
    return bool(written > get_layerwise_info(layer).load_numel - _NEVER)


def _find_copies(model: Any) -> list[tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]:
    """Find buffers that are copies of a tensor below them, in their own memory; return
    pairs of functions that return buffer and tensor.

    In vLLM 0.32 such a buffer is a view of a weight (of Mamba's convolution) until a
    CPU packs the weight and keeps an unpacked copy. A reload does not write to it.
    """
    found: list[tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = []
    for layer in model.modules():
        for name in layer._non_persistent_buffers_set:
            buffer = layer._buffers[name]
            if buffer is None or not buffer.is_floating_point() or buffer.numel() < 2:
                continue
            for below in layer.modules():
                for other, tensor in {**below._parameters, **vars(below)}.items():
                    if isinstance(tensor, torch.Tensor) and _is_copy(tensor, buffer):
                        found.append((partial(getattr, layer, name), partial(getattr, below, other)))
    return found


def _is_copy(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both have the same values, in different memory."""
    alike = one.dtype == other.dtype and one.numel() == other.numel() and _storage(one) != _storage(other)
    return alike and torch.equal(one.flatten(), other.flatten())


def _region(tensor: torch.Tensor) -> _Region:
    """Return offset, shape and strides of a tensor in its storage."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address
