"""The exit codes of the command ``replicas`` and of the supervisor. Imports nothing."""

from __future__ import annotations

__all__ = [
    "BAD_CONFIG",
    "BUG",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "PREEMPTED",
    "SUPERVISED",
    "UNAVAILABLE",
    "USAGE",
]

DONE = 0
"""The run is over or was drained; a command did what it was asked to do."""
FAILED = 1
"""A group failed past its restart budget; or what a command asked for did not come
about, or ``doctor`` found a problem."""
USAGE = 2
"""The command line is wrong, or the machine does not let the run start (a port that is
in use, an operating system other than Linux)."""
SUPERVISED = 3
"""Another supervisor already has this run."""
UNAVAILABLE = 69
"""No run answers: it is not running, or cannot be reached."""
BUG = 70
"""A bug of this package: its traceback is on stderr."""
PREEMPTED = 75
"""The run was drained because its machine is about to be taken away (SIGUSR1). The next
start continues it."""
BAD_CONFIG = 78
"""The config cannot be used, or its plan does not fit this machine; every problem is on
stderr."""
INTERRUPTED = 130
"""Ctrl-C ended a command other than ``run``."""
