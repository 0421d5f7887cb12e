"""Trainers' models as weights that ``publish`` takes, under the names of their
checkpoints."""

from replicas.sources.hf import HfSource, hf

__all__ = ["HfSource", "hf"]
