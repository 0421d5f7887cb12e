"""Exit codes of the command ``replicas`` and of the supervisor. Imports nothing."""

from __future__ import annotations

__all__ = [
    "BAD_CONFIG",
    "BUG",
    "CUT",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "PREEMPTED",
    "SUPERVISED",
    "UNAVAILABLE",
    "USAGE",
]

DONE = 0
"""The run is over or was drained; a command succeeded."""
FAILED = 1
"""A group failed past its restart budget, a command failed, or ``doctor`` found a
problem."""
USAGE = 2
"""The command line is wrong, or the machine cannot run it (port in use, not Linux), or
fewer nodes than ``cluster.min_nodes`` joined in time."""
SUPERVISED = 3
"""Another supervisor already has this run."""
CUT = 4
"""The run is over or was drained, but processes were killed as they had not ended
within ``stop_timeout``, or do not die and are left behind. stderr and the events name
their replicas."""
UNAVAILABLE = 69
"""No run answers: it is not running, or cannot be reached."""
BUG = 70
"""A bug of this package: its traceback is on stderr."""
PREEMPTED = 75
"""The run was drained because its machine will be preempted (SIGUSR1). The next start
continues it."""
BAD_CONFIG = 78
"""The config is invalid or does not fit this machine; stderr has every problem."""
INTERRUPTED = 130
"""Ctrl-C ended a command other than ``run``."""
