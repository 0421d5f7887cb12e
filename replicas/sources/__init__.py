"""Trainers' models as weights that ``publish`` takes, under the names of their
checkpoints, and checkpoints themselves: model -> iterable of (name, tensor) ->
``publish``. Nothing here joins a channel or sends bytes."""

from replicas.sources.checkpoint import Checkpoint, checkpoint
from replicas.sources.hf import HfSource, hf
from replicas.sources.megatron import MegatronSource, is_linear, megatron

__all__ = ["Checkpoint", "HfSource", "MegatronSource", "checkpoint", "hf", "is_linear", "megatron"]
