"""The keys of the job that ``replicas slurm`` makes of a run (``[slurm]``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from replicas.config import values as forms
from replicas.config.tables import AsKey

_Count = Annotated[int, forms.whole(1)]
_Name = Annotated[str, forms.name]
_Natural = Annotated[int, forms.whole(0)]


class SlurmConfig(msgspec.Struct, frozen=True, kw_only=True):
    partition: Annotated[_Name | None, AsKey(default="Slurm's own")] = None
    """The partition of the job."""
    nodes: _Count = 1
    """Number of nodes of the job."""
    gpus_per_node: Annotated[_Natural | None, AsKey(default="none are asked for")] = None
    """Number of GPUs of the job on each of its nodes."""
    cpus_per_node: Annotated[_Count | None, AsKey(default="whole nodes, for this job alone")] = None
    """Number of CPUs of the job on each of its nodes. Set it when nodes are shared with
    other jobs.
    """
    time_s: Annotated[float | None, forms.duration(60.0), AsKey(default="the partition's")] = None
    """Longest time of the job until it is queued again. Set it when the partition
    allows more than the queue favours.
    """
    grace_s: Annotated[
        float | None, forms.duration(1.0), AsKey(default="30 s more than the longest drain of a group takes")
    ] = None
    """Time before its end at which the job gets a signal, and drains. Raise it when
    saving a checkpoint then takes longer.
    """
    options: Annotated[tuple[str, ...], forms.options] = ()
    """Further options of sbatch, such as "--account=grpo" or "--constraint=a100"."""
