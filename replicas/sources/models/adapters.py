"""PEFT's adapters: merged into copies of the layers that they tune, or alone.

``merge_and_unload()`` of PEFT gives the model that a server without adapters needs. But
it writes into the base weights: undoing that in bfloat16 leaves other values, and a
training run that merges at each step drifts. So nothing is merged in the model. For one
tuned layer at a time, :class:`Merging` copies the layer with its tensors, and runs
PEFT's own ``merge_and_unload()`` on a tuner that has this layer alone. The result is
bit for bit that of the whole model, for any method of the adapter. Beside the model, a
copy of one layer is in memory, and the temporaries of PEFT for it; for packed experts,
only for a few of them (:mod:`experts`).

Layers that have a base weight in common (tied embeddings) are merged together.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from replicas import errors
from replicas.sources.models.experts import merge_in_slices
from replicas.sources.models.unwrapping import Unwrapped, copy_modules

__all__ = ["MERGED", "SAVED", "Merging", "active_adapter", "adapter_tensors", "find_peft_model"]

MERGED = (
    "LORA",
    "ADALORA",
    "IA3",
    "LOHA",
    "LOKR",
    "OFT",
    "BOFT",
    "VERA",
    "HRA",
    "FOURIERFT",
    "LN_TUNING",
    "TRAINABLE_TOKENS",
)
"""Methods of PEFT whose merged weights are tested against its own
``merge_and_unload()``."""
SAVED = (*MERGED, "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
"""Methods whose adapter alone is tested against the output of ``save_pretrained``."""


def find_peft_model(model: nn.Module) -> Any:
    """Return ``model`` if it is a model of PEFT, else None.

    :raises replicas.errors.UsageError: adapters were added in another way.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:  # not imported
        return None
    if isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    if getattr(model, "_hf_peft_config_loaded", False):
        raise errors.UsageError(
            "hf: adapters that were added by add_adapter() or load_adapter() of transformers are not supported",
            hint="add them with peft.get_peft_model(model, config)",
        )
    return None


class Merging:
    """Merges the adapters of a PEFT model layer by layer, in copies of the layers.

    The tensors are those of the model that ``merge_and_unload()`` would return.

    :ivar base: the model without adapters, not merged, for its names and ties.
    :ivar origins: for the name of each tensor of ``base`` that a merge changes: the
        group of tuned layers to merge, and the name that :meth:`merge` gives it.
    :raises replicas.errors.UsageError: the method of an adapter is not tested.
    """

    def __init__(self, found: Unwrapped) -> None:
        """Unload PEFT from the copied modules, and find which layers must be merged
        together; merge nothing.

        :param found: the copied module tree, without wrappers. It is changed: PEFT
            replaces the tuned layers in it by their base layers. The user's model is
            not changed.
        """
        peft_model = found.module
        _check_methods(peft_model, peft_model.active_adapters, MERGED, 'hf(model, adapter="only")')
        self._tuner = peft_model.base_model
        layers = _tuned_layers(self._tuner.model)
        self._layers = {path: found.origins[id(module)] for path, module in layers.items()}
        with _quiet():
            self.base = self._tuner.unload()
        self.origins: dict[str, tuple[tuple[str, ...], str]] = {}
        state = self.base.state_dict(keep_vars=True)
        for group in self._groups():
            for path in group:
                names = [f"{path}.{name}" for name in self.base.get_submodule(path).state_dict(keep_vars=True)]
                self.origins |= {name: (group, name) for name in names}
        merged = {id(state[name]): origin for name, origin in self.origins.items()}
        # a merge also changes tensors of untuned layers that are tied to a tuned one
        self.origins |= {
            name: merged[id(tensor)]
            for name, tensor in state.items()
            if id(tensor) in merged and name not in self.origins
        }

    def _groups(self) -> list[tuple[str, ...]]:
        """Return the paths of all tuned layers, in groups that must be merged together.

        Layers with a tensor in common (tied weights) are in one group.
        """
        groups: dict[int, list[str]] = {}
        for path in self._layers:
            group = [path]
            for tensor in self.base.get_submodule(path).state_dict(keep_vars=True).values():
                if (other := groups.get(id(tensor))) is not None and other is not group:
                    other += [one for one in group if one not in other]
                    group = other
                groups[id(tensor)] = group
        return list(dict.fromkeys(tuple(group) for group in groups.values()))

    def merge(self, group: tuple[str, ...], whole: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Merge the adapters of a group of layers, on copies; the model stays as it is.

        Return the merged tensors, by their names in the whole model.

        :param group: paths of the layers, one of :attr:`origins`.
        :param whole: returns a private, gathered copy of a tensor of the model (a
            collective if it is sharded).
        :raises replicas.errors.UsageError: PEFT cannot merge this adapter.
        """
        holder = nn.Module()
        for number, path in enumerate(group):
            holder.add_module(str(number), self._layers[path])
        tuner = copy_modules(self._tuner_of(holder), whole)
        try:
            with _quiet():
                merge_in_slices(tuner.model.children())
                merged = tuner.merge_and_unload()
            tensors = [
                one for number in range(len(group)) for one in merged.get_submodule(str(number)).state_dict().values()
            ]
            return dict(zip(self.merged_names(group), tensors, strict=True))
        except torch.OutOfMemoryError:
            raise
        except (
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # PEFT has no class of its own
            text = f"hf: PEFT cannot merge the adapter of {group[0]!r}: {error}"
            raise errors.UsageError(
                text, hint='pass adapter="only", or merge it yourself and publish the merged model'
            ) from error

    def merged_names(self, group: tuple[str, ...]) -> list[str]:
        """Return the names, in the whole model, of the tensors that a merge returns.

        :param group: paths of the merged layers. The order is that of :meth:`merge`.
        """
        return [f"{path}.{name}" for path in group for name in self.base.get_submodule(path).state_dict(keep_vars=True)]

    def key(self, group: tuple[str, ...]) -> object:
        """Return a key by which a group's merged dtypes and shapes can be cached.

        Groups with equal keys have the same dtypes and shapes after a merge. The key is
        made of the layers' classes and active adapters, and of dtypes and shapes.
        """
        layers = [self._layers[path] for path in group]
        parts = [
            (type(part), *map(_description, part.parameters(recurse=False))) for one in layers for part in one.modules()
        ]
        return parts, [list(getattr(one, "active_adapters", ())) for one in layers]

    def tensors(self, group: tuple[str, ...]) -> list[torch.Tensor]:
        """Return the model's own tensors, each once, that :meth:`merge` of this group
        of layers reads: base weights and adapters, maybe shards."""
        found = [tensor for path in group for tensor in self._layers[path].parameters()]
        return list({id(tensor): tensor for tensor in found}.values())

    def _tuner_of(self, holder: nn.Module) -> Any:
        """Return a shallow copy of PEFT's tuner, the object that merges adapters, which
        has ``holder`` in place of its model: so it merges only the layers in there."""
        tuner = object.__new__(type(self._tuner))
        tuner.__dict__.update(self._tuner.__dict__, _modules={"model": holder}, _parameters={}, _buffers={})
        return tuner


def _description(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return dtype and shape of the whole tensor, also for a shard of ZeRO-3."""
    return tensor.dtype, getattr(tensor, "ds_shape", tensor.shape)


def _tuned_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that PEFT replaces when it unloads, by path."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path[:end] in found for end, letter in enumerate(path) if letter == ".")
        if not inside and isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found[path] = module
    return found


def _check_methods(peft_model: Any, adapters: list[str], tested: tuple[str, ...], instead: str) -> None:
    """Raise UsageError if an adapter's method is not tested, or it replicates layers.

    :param adapters: names. :param tested: methods that are supported.
    :param instead: the argument of ``hf`` that the error advises to pass.
    """
    for adapter in adapters:
        if getattr(peft_model.peft_config[adapter], "layer_replication", None):
            text = f"hf: adapter {adapter!r} replicates layers, which is not supported"
            raise errors.UsageError(text, hint="publish a model whose layers are its own")
        method = peft_model.peft_config[adapter].peft_type
        method = str(getattr(method, "value", method))
        if method not in tested:
            text = (
                f"hf: adapter {adapter!r} is of method {method}, which is not supported here ({', '.join(tested)} are)"
            )
            raise errors.UsageError(text, hint=f"pass {instead}, or merge it yourself and publish the merged model")


def adapter_tensors(peft_model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the active adapter that PEFT's ``save_pretrained`` writes,
    by name: the model's own, not copied, except those that PEFT computes (prompts).

    :param peft_model: without wrappers. :param state: its tensors, by name.
    :raises replicas.errors.UsageError: several adapters are active, or the method of
        the active one is not tested.
    """
    from peft import get_peft_model_state_dict

    adapter = active_adapter(peft_model)
    _check_methods(peft_model, [adapter], SAVED, 'adapter="merged"')
    with _quiet():
        found = get_peft_model_state_dict(peft_model, state_dict=dict(state), adapter_name=adapter)
    _check_adapter(peft_model, adapter, found)
    return dict(found)


def _check_adapter(peft_model: Any, adapter: str, found: Mapping[str, Any]) -> None:
    """Raise UsageError if ``found`` has another adapter's tensors or lacks the
    adapter's own: PEFT tells adapters apart by parts of names, and fails if an adapter
    has the name of a module."""
    given = set(map(id, found.values()))
    for other in peft_model.peft_config:
        own = _trained(peft_model, other)
        if own and (not own <= given if other == adapter else own & given):
            text = f"hf: PEFT cannot tell adapter {adapter!r} from the others of {', '.join(peft_model.peft_config)}"
            raise errors.UsageError(text, hint="give each adapter a name that no module of the model has")


def _trained(peft_model: Any, adapter: str) -> set[int]:
    """Return the ids of the tensors that PEFT trains for an adapter, named ``adapter``,
    in the model's layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [one for one in peft_model.modules() if isinstance(one, BaseTunerLayer)]
    parts = [getattr(layer, name, None) for layer in layers for name in layer.adapter_layer_names]
    own = [part[adapter] for part in parts if part is not None and adapter in part]
    tensors = [one.parameters() if isinstance(one, nn.Module) else [one] for one in own]
    return {id(tensor) for some in tensors for tensor in some}


def active_adapter(peft_model: Any) -> str:
    """Return the name of the only active adapter.

    :raises replicas.errors.UsageError: none or several are active.
    """
    active = list(peft_model.active_adapters)
    if len(active) != 1:
        text = f'hf: adapter="only" publishes one adapter, and {len(active)} are active ({", ".join(active) or "none"})'
        raise errors.UsageError(text, hint=f"call set_adapter() with one of {', '.join(peft_model.peft_config)}")
    return str(active[0])


class _quiet(warnings.catch_warnings):
    """Silences PEFT's advice for users who merge or save by hand."""

    def __enter__(self) -> None:
        """Ignore all warnings in the block."""
        super().__enter__()
        warnings.simplefilter("ignore")
