"""Hugging Face models, wrapped or sharded by any trainer, as a stream of the tensors of
their checkpoint.

Theory of operation
===================

**The rule.** :func:`hf` yields, name by name, dtype by dtype and bit by bit, what
``save_pretrained`` of the same model would write at that moment; with adapters,
``save_pretrained`` of the result of ``merge_and_unload()``, or of the adapter alone. An
inference engine and ``from_pretrained`` read these names, which are often not those of
the model in memory: transformers packs experts and renames parts of vision models when
it loads, and undoes that when it saves.

So no names are hard-coded here. The libraries themselves are asked, on a copy of the
model's *modules* that shares the tensors (:mod:`replicas.sources.models.unwrapping`):

- which tensors there are: ``state_dict()``, with persistent buffers;
- which of several tied names is written: ``remove_tied_weights_from_state_dict`` of
  transformers;
- how the tensors of the checkpoint are made of those in memory:
  ``revert_weight_conversion`` of transformers, called once on meta tensors and recorded
  (:mod:`replicas.sources.models.recording`);
- the change of an adapter: ``merge_and_unload()`` of PEFT, on a copy of one layer
  (:mod:`replicas.sources.models.adapters`);
- the tensors of an adapter: ``get_peft_model_state_dict`` of PEFT;
- the tensors that a cast leaves in float32: the dtype plan of transformers.

The model itself is never written to. Its tensors are gathered, merged and rearranged
one by one, so that no second model is ever in memory.

========================= ==========================================================
model                     how a tensor becomes whole
========================= ==========================================================
plain, DDP, torch.compile it is
FSDP2 (DTensor)           ``publish`` gathers it, or with ``ranks = "all"`` takes its
                          shards; what is rearranged or merged is gathered here
FSDP1                     ``summon_full_params`` of one wrapped module at a time
ZeRO-3                    ``deepspeed.zero.GatheredParameters``
========================= ==========================================================

**Unknown models are refused.** If tensors are missing that the model's class makes from
its configuration, and others are there instead, a wrapper or a quantised module has
replaced one: the names would be the wrapper's.

Gathers are collectives: every rank of the trainer must walk the source, in the same
order. A gather that runs on another CUDA stream than the caller's (FSDP1's) leaves
tensors that the caller's stream may overwrite too early; pass ``sync="device"`` then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import torch

from replicas import errors
from replicas.sources.models.adapters import active_adapter
from replicas.sources.models.gathering import WholeTensors
from replicas.sources.models.plan import Plan, Planner
from replicas.sources.models.unwrapping import is_whole

__all__ = ["HfSource", "hf"]

_LOAD_HINT = "publish(model), without hf, and load_into(model): both ends then use the names in memory"


def hf(
    model: torch.nn.Module,
    *,
    adapter: Literal["merged", "only"] = "merged",
    frozen: bool = True,
    sync: Literal["none", "device"] = "none",
) -> HfSource:
    """Return the weights of a Hugging Face model under the names of its checkpoint.

    Pass the result to :meth:`replicas.Channel.publish` at each step, on every rank that
    holds a part of the model; it may be kept and published again. A rollout that has
    the model in memory passes ``hf(model)`` of its own to
    :meth:`replicas.Update.load_into`.

    :param model: a ``transformers`` model, plain or wrapped by DDP, FSDP1, FSDP2,
        ZeRO-3, ``torch.compile`` or PEFT, or several of them. Tied weights come once,
        under the name that ``save_pretrained`` writes. Of another module: its
        ``state_dict``, under the names that it has there.
    :param adapter: of a PEFT model: ``"merged"``, the base model with the active
        adapters merged, or ``"only"``, the tensors of the active adapter.
    :param frozen: False: leave out parameters that are not trained. Servers must keep
        theirs then (``--partial``).
    :param sync: ``"device"``: wait for the device before each gathered tensor is
        handed out; default: gathers are on the current stream.
    :raises replicas.errors.UsageError: ``adapter="only"`` of a model without adapters,
        or an argument is not one of these. The walk raises it, too: the model, or the
        method of an adapter, is of a kind that is not supported.
    """
    return HfSource(model, adapter, frozen, sync)


class HfSource:
    """A model's weights under their checkpoint's names: an iterable of (name, tensor).

    The result of :func:`hf`. Each iteration yields the model's weights of that moment.
    """

    def __init__(self, model: torch.nn.Module, adapter: str, frozen: bool, sync: str) -> None:
        """Check the arguments, which are those of :func:`hf`; gather nothing.

        :raises replicas.errors.UsageError: an argument is wrong, or the model has no
            adapter with ``adapter="only"``.
        """
        if adapter not in ("merged", "only"):
            raise errors.UsageError(f"hf: adapter={adapter!r}", hint='pass "merged" or "only"')
        if sync not in ("none", "device"):
            raise errors.UsageError(f"hf: sync={sync!r}", hint='pass "none" or "device"')
        self._planner = Planner(model, only=adapter == "only", frozen=frozen)
        self._only = adapter == "only"
        self._sync = sync == "device"
        if self._only and self._peft_model() is None:
            raise errors.UsageError("hf: this model has no adapter", hint='pass adapter="merged", or a PEFT model')

    def _peft_model(self) -> Any:
        """Return the model of PEFT, without wrappers such as DDP, or None if it has no
        adapters."""
        return self._planner.unwrapped_structure().peft_model

    @property
    def adapter_config(self) -> str:
        """The adapter's configuration, a text of JSON as PEFT saves it, to pass to
        ``publish(..., adapter=)``.

        :raises AttributeError: the source is not ``adapter="only"``, or several
            adapters are active.
        """
        if not self._only:
            raise AttributeError("adapter_config")
        peft_model = self._peft_model()
        try:
            found = peft_model.peft_config[active_adapter(peft_model)].to_dict()
        except errors.UsageError as error:
            raise AttributeError(f"adapter_config: {error}") from error
        return json.dumps({**found, "inference_mode": True}, default=sorted)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and whole shape of each tensor, in order of the iteration.

        They are computed from this rank's own part, without communication.
        """
        rows = self._planner.plan().rows
        return [(name, row.form.dtype, row.form.shape) for name, row in rows.items()]

    def resident(self) -> dict[str, torch.Tensor] | None:
        """Return all tensors by name, as views of the model's own memory. Return None
        if one has to be gathered, merged or computed.

        ``publish`` copies such views all at once, and does not iterate then.
        """
        plan = self._planner.plan()
        return _views(plan) if _is_resident(plan) else None

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the tensors to which :meth:`replicas.Update.load_into` writes: views
        of the model's own memory, by name.

        :raises replicas.errors.UsageError: the model has adapters, or one of its
            tensors is not laid out as the checkpoint's.
        """
        plan = self._planner.plan()
        for name, row in plan.rows.items():
            shard = next((one for one in row.inputs if not row.same and not is_whole(plan.state[one])), None)
            if row.offset is None or shard is not None:
                why = (
                    f"is computed from {' and '.join(row.inputs)}"
                    if shard is None
                    else f"is a part of the sharded {shard}"
                )
                raise errors.UsageError(f"load_into(hf(model)): the checkpoint's {name!r} {why}", hint=_LOAD_HINT)
            if self._only or (plan.merging is not None and not plan.merging.origins.keys().isdisjoint(row.inputs)):
                text = f"load_into(hf(model)): an adapter of the model changes {name!r}"
                raise errors.UsageError(text, hint="load into the model without adapters: hf(peft_model.unload())")
            if plan.units:
                raise errors.UsageError("load_into(hf(model)): the model is sharded by FSDP1", hint=_LOAD_HINT)
        return _views(plan)

    def keeps_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """Return True if the model's class has tensor ``name`` stay in float32 when the
        model is cast to ``dtype``. Nothing is cast here.

        False for all names before the first :meth:`metadata` or iteration.
        """
        return name in self._planner.kept_in_float32(dtype)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of the checkpoint, in order. Each is gathered or merged
        when its turn comes (a collective of all ranks), and freed after it; others are
        views of the model's memory."""
        plan = self._planner.plan()
        with WholeTensors(plan) as whole:
            for name, row in plan.rows.items():
                with torch.no_grad():
                    tensor = whole.tensor_of(row)
                if self._sync and tensor.device.type != "cpu":
                    torch.accelerator.synchronize(tensor.device)
                yield name, tensor
                del tensor
                whole.release_after(row)


def _views(plan: Plan) -> dict[str, torch.Tensor]:
    """Return the plan's tensors by name, as views of the model's own memory.

    All must be such views, without gathering (:func:`_is_resident`).
    """
    with torch.no_grad():
        state = {name: tensor.detach() for name, tensor in plan.state.items()}
        return {name: row.apply(state) for name, row in plan.rows.items()}


def _is_resident(plan: Plan) -> bool:
    """Return True if all tensors of the plan are views of the model's own memory.

    Then none has to be gathered, merged or computed.
    """
    used = {name for row in plan.rows.values() for name in row.inputs}
    if plan.merging is not None and not used.isdisjoint(plan.merging.origins):
        return False
    views = all(row.offset is not None for row in plan.rows.values())
    return views and not plan.units and all(is_whole(plan.state[name]) for name in used)
