"""Trainers' models as weights that ``publish`` takes, under the names of their
checkpoints; and checkpoints themselves."""

from replicas.sources.checkpoint import Checkpoint, checkpoint
from replicas.sources.hf import HfSource, hf

__all__ = ["Checkpoint", "HfSource", "checkpoint", "hf"]
