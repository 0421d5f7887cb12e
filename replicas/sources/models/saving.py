"""The changes that ``save_pretrained`` of transformers makes to a ``state_dict``, by
the functions of transformers 5.19 to 5.24."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from replicas import errors
from replicas.sources.models.recording import Arrangement, Form, record

__all__ = ["arrangements", "check", "is_pretrained", "kept_names", "saved_names"]

_IN_MEMORY = "publish(model) sends it under the names that it has in memory"


def is_pretrained(model: nn.Module) -> bool:
    """Return True if the module is a model of transformers."""
    library: Any = sys.modules.get("transformers")  # not imported: no module is one
    return library is not None and isinstance(model, library.PreTrainedModel)


def check(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model that ``hf`` does not support.

    :param model: without wrappers and adapters. :param state: its ``state_dict``.
    :raises replicas.errors.UsageError: the model is quantised, sharded by transformers'
        own tensor parallelism, or has a replaced module.
    """
    kind = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        method = getattr(model.hf_quantizer.quantization_config, "quant_method", "")
        method = getattr(method, "value", method)
        text = f"hf: the {kind} is quantised ({method}), which is not supported"
        raise errors.UsageError(text, hint=f"call its dequantize(), or: {_IN_MEMORY}")
    if (getattr(model, "_tp_size", None) or 1) > 1:  # 1 under its FSDP2
        text = f"hf: the {kind} is sharded by transformers' tensor parallelism, which is not supported"
        raise errors.UsageError(text, hint="shard it by FSDP2 (fully_shard)")
    wanted = _names_of_class(model)
    missing = [name for name in wanted if name not in state]
    unknown = [name for name in state if name not in wanted]
    if missing and unknown:
        text = (
            f"hf: a module of the {kind} was replaced by a wrapper, or by a quantised or other one, that is not "
            f"supported: it has {unknown[0]!r}, and lacks {missing[0]!r} of its class"
        )
        raise errors.UsageError(text, hint=f"unwrap the model, or: {_IN_MEMORY}")


def _names_of_class(model: Any) -> set[str]:
    """Return the names of the tensors that a model of this configuration should have.

    To learn them, an object of the model's class is made on the meta device. If the
    class cannot be made from a configuration alone, its nearest base class is tried.

    :raises replicas.errors.UsageError: no class can be made so.
    """
    import transformers

    failed: Exception | None = None
    for kind in type(model).__mro__:
        if not issubclass(kind, transformers.PreTrainedModel) or kind is transformers.PreTrainedModel:
            continue
        # under its own name; initialising meta tensors would only take time
        bare = type(kind.__name__, (kind,), {"init_weights": lambda self: None, "__module__": kind.__module__})
        try:
            with torch.device("meta"):
                return set(bare(copy.deepcopy(model.config)).state_dict())  # a constructor may write to it
        except Exception as error:  # noqa: BLE001  # e.g. it needs another argument
            failed = failed or error
    name = type(model).__name__
    text = f"hf: {name} cannot be made from its configuration: {type(failed).__name__}: {failed}"
    raise errors.UsageError(text, hint=_IN_MEMORY) from failed


def saved_names(model: Any, state: Mapping[str, torch.Tensor], tied: Iterable[list[str]]) -> list[str]:
    """Return the names, in memory, of the tensors that ``save_pretrained`` would write.

    They come in order: one name of each shared tensor, without names that the class
    ignores.

    :param model: without wrappers. :param state: its ``state_dict``.
    :param tied: lists of names, each of one shared tensor.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = set(model._keys_to_ignore_on_save or ())
    for names in tied:
        one = torch.empty(1)  # a stand-in: the function compares memory
        try:
            left_out |= set(names) - remove_tied_weights_from_state_dict(dict.fromkeys(names, one), model).keys()
        except RuntimeError:  # a tie unknown to the class: publish both names, tied
            continue
    return [name for name in state if name not in left_out]


def arrangements(model: Any, forms: Mapping[str, Form]) -> dict[str, Arrangement]:
    """Return how each tensor of the checkpoint, by name, is made of those in memory.

    transformers' conversion runs once, on meta tensors.

    :param model: without wrappers. :param forms: dtypes and shapes in memory, by name.
    :raises replicas.errors.UsageError: transformers cannot convert, or is too old.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        text = "hf: this release of transformers cannot name the tensors of a checkpoint"
        raise errors.UsageError(text, hint="install transformers 5.19 or newer") from error
    try:
        rows = record(lambda tensors: revert_weight_conversion(model, tensors), forms)
        _check_names(rows, forms)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        text = f"hf: transformers cannot name the checkpoint of {type(model).__name__}: {error}"
        raise errors.UsageError(text, hint=_IN_MEMORY) from error
    return rows


def _check_names(rows: Mapping[str, Arrangement], forms: Mapping[str, Form]) -> None:
    """Raise ValueError if transformers gave the tensors of a checkpoint wrong names.

    It may give a part of a pattern as a name (5.19 does, to the experts of a
    dequantised gpt-oss), or one name to two tensors, so that one is left out.

    :param rows: by name in the checkpoint, how its tensor is made.
    :param forms: the tensors in memory by name, each of which must be used by a row.
    :raises ValueError: a name has characters of a pattern, or a tensor is not used.
    """
    pattern = next((name for name in rows if set(name) & set("$^*+?()[]|\\")), None)
    if pattern is not None:
        raise ValueError(f"it gives the name {pattern!r}")
    lost = forms.keys() - {name for row in rows.values() for name in row.inputs}
    if lost:
        raise ValueError(f"it leaves out {min(lost)!r}")


def kept_names(model: Any, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Return those of ``names`` that transformers leaves in float32 in a cast to
    ``dtype``.

    :param names: of tensors in memory.
    """
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    pattern: re.Pattern[str] = build_glob_alternation(list(plan))[0]
    return {name for name in names if pattern.search(name)}
