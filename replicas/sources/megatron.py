"""Megatron's weights under the names of the Hugging Face checkpoint, from the
generators that export them.

Megatron-Bridge's ``AutoBridge.export_hf_weights`` (and mbridge's, and those of
Megatron-LM's forks) gathers a model that is split by tensors, pipelines and experts,
and yields one whole tensor after another. Each step of such a generator is a collective
of Megatron's own groups, so every rank must walk it to the end, in the same order, even
if the publish fails; and a yielded tensor may be freed at the next step. ``publish``
does both. This source adds:

- A generator is used up by one walk: :func:`megatron` takes a function that begins one.
- Names and shapes are unknown before the walk, and without them a first publish holds
  the whole model beside the slot. The source learns them from a walk that keeps no
  tensor, or from a checkpoint of the model.
- Tuples of three (Megatron-Bridge adds the name in Megatron) are accepted.
- Weights can be quantised on the way, to blocks of float8 with their scales.

It was built against this contract, with generators of the same form: no Megatron was
installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from replicas import errors
from replicas.weights.feed import is_scale

__all__ = ["MegatronSource", "float8_blocks", "is_linear", "megatron"]

BLOCK = 128
"""Rows and columns of a block: those of DeepSeek's and Qwen's float8 checkpoints."""
_FLOAT8 = torch.float8_e4m3fn
_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "norm.weight")
"""Suffixes of the matrices that float8 checkpoints leave in bfloat16."""
_Row = tuple[str, torch.dtype, tuple[int, ...]]


def megatron(
    export: Callable[[], Iterable[Any]],
    *,
    like: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    float8: Callable[[str], bool] | None = None,
    share: tuple[int, int] | None = None,
) -> MegatronSource:
    """Return the weights that a Megatron model exports, to be published at each step.

    Call it on every rank of the trainer, and pass the result to
    :meth:`replicas.Channel.publish` on every rank; keep it for later steps.

    :param export: begins one walk, such as ``lambda: bridge.export_hf_weights(model)``:
        an iterable of (name, tensor), or of tuples that begin so. It is called on every
        rank. Ranks that do not publish may yield anything, or nothing, as long as their
        walks take part in its collectives.
    :param like: names, dtypes and shapes of the walk, such as
        :func:`replicas.sources.checkpoint` of the model, or meta tensors. Default: this
        call itself walks once, on every rank, and keeps no tensor.
    :param dtype: as ``dtype`` of :meth:`replicas.Channel.publish`: cast plain floating
        tensors, but not scales.
    :param float8: quantise the matrices of these names to blocks of 128 x 128 in
        float8_e4m3fn, each followed by its ``..._scale_inv`` (float32), as vLLM and
        SGLang read them. :func:`is_linear` is what Qwen's and DeepSeek's checkpoints
        do. Default: nothing; a walk that yields float8 and scales is published as it
        is.
    :param share: (rank, ranks) of this process among those that get the same tensors:
        each publishes every ``ranks``-th tensor, and no other rank does. For a channel
        whose source has ``ranks = "all"``.
    :raises replicas.errors.UsageError: an argument is wrong. Errors of the walk come as
        they are.
    """
    return MegatronSource(export, like, dtype, float8, share)


class MegatronSource:
    """A Megatron model's exported weights: an iterable of (name, tensor).

    The result of :func:`megatron`. Each iteration is a new export (a collective).
    """

    def __init__(
        self,
        export: object,
        like: Mapping[str, torch.Tensor] | None,
        dtype: torch.dtype | None,
        float8: Callable[[str], bool] | None,
        share: tuple[int, int] | None,
    ) -> None:
        """Check the arguments, which are those of :func:`megatron`.

        Without ``like`` and ``share`` walk ``export`` once (a collective), to learn
        names, dtypes and shapes; keep no tensor.

        :raises replicas.errors.UsageError: an argument is wrong.
        """
        if not callable(export):
            hint = "pass a function: lambda: bridge.export_hf_weights(model)"
            raise errors.UsageError("megatron: a generator is used up by the first publish", hint=hint)
        if dtype is not None and dtype not in _CAST:
            raise errors.UsageError(f"megatron: dtype={dtype}", hint="name a plain floating dtype, e.g. torch.bfloat16")
        if share is not None and not 0 <= share[0] < share[1]:
            raise errors.UsageError(f"megatron: share={share}", hint="pass (rank, ranks), with rank below ranks")
        self._export: Callable[[], Iterable[Any]] = export
        self._dtype = dtype
        self._float8 = float8
        self._share = share
        rows = self._pairs() if like is None else like.items()
        self._rows = [row for name, tensor in rows for row in self._described(name, tensor)] if share is None else []

    def metadata(self) -> list[_Row]:
        """Return name, dtype and shape of each tensor in order, as found at the
        construction; an empty list with ``share``. No communication."""
        return list(self._rows)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Begin a new walk; yield name and tensor, or name and None for a tensor that
        another rank publishes.

        After an error in converting a tensor, finish the walk (a collective, in which
        other ranks take part) without yielding, then raise the error.
        """
        walk = self._pairs()
        for number, (name, tensor) in enumerate(walk):
            try:
                made = self._made(number, name, tensor)
            except BaseException:  # e.g. out of memory: the other ranks still take part in the walk
                for _ in walk:
                    pass
                raise
            yield from made

    def _made(self, number: int, name: str, tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor | None], ...]:
        """Return the (name, tensor) pairs to publish for one exported tensor: two if it
        is quantised; with None as tensor if another rank publishes it.

        :param number: position of the tensor in the walk.
        """
        if self._share is not None and number % self._share[1] != self._share[0]:
            return ((name, None),)
        if self._quantised(name, tensor.dtype, tensor.ndim):
            blocks, scales = float8_blocks(tensor)
            return (name, blocks), (f"{name}_scale_inv", scales)
        return ((name, tensor.detach().to(self._published(name, tensor.dtype))),)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Call ``export`` to begin a walk; yield its names and tensors. Skip items
        of the walk whose tensor is None."""
        for step in self._export():
            name, tensor, *_ = step
            if tensor is not None:
                yield name, tensor

    def _described(self, name: str, tensor: torch.Tensor) -> Iterator[_Row]:
        """Yield the rows of :meth:`metadata` for one exported tensor."""
        shape = tuple(tensor.shape)
        if self._quantised(name, tensor.dtype, len(shape)):
            yield name, _FLOAT8, shape
            yield f"{name}_scale_inv", torch.float32, tuple(-(-extent // BLOCK) for extent in shape)
        else:
            yield name, self._published(name, tensor.dtype), shape

    def _quantised(self, name: str, dtype: torch.dtype, dimensions: int) -> bool:
        """Return True if the tensor is to be quantised: a floating matrix whose name
        the ``float8`` function accepts."""
        return self._float8 is not None and dimensions == 2 and dtype in _CAST and self._float8(name)

    def _published(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor that is not quantised is published:
        ``dtype`` of the source, or its own for scales and other dtypes."""
        return self._dtype if self._dtype is not None and dtype in _CAST and not is_scale(name) else dtype


def is_linear(name: str) -> bool:
    """Return True for the names of matrices that float8 checkpoints quantise: those of
    attention and experts, not embeddings, heads, norms and routers."""
    return name.endswith(".weight") and not name.endswith(_KEPT)


def float8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to float8_e4m3fn; return it with the scale (float32) of each
    128 x 128 block: block times scale approximates the matrix. The last blocks may be
    smaller.

    An infinite or nan element becomes nan, and does not change the rest of its block:
    ``publish(check_finite=True)`` finds it.
    """
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight.detach()
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    blocks = blocks.where(blocks.isfinite(), math.nan)  # a cast of an infinity is not nan everywhere
    largest = blocks.abs().nan_to_num(0.0).amax(dim=(1, 3))
    # a subnormal scale is imprecise, or 0, and kernels may take it for 0
    scales = (largest / torch.finfo(_FLOAT8).max).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest > 0, scales, torch.ones_like(largest))
    packed = (blocks / scales[:, None, :, None]).view(high * BLOCK, wide * BLOCK)[:rows, :columns]
    return packed.contiguous().to(_FLOAT8), scales
