"""The signals by which the programs of a chaos run are ordered about."""

from __future__ import annotations

import signal

__all__ = ["EXIT", "RAISE", "REJOIN", "REJOIN_OUTER"]

RAISE = signal.SIGUSR1
"""Die of an exception."""
EXIT = signal.SIGUSR2
"""Exit with code 0."""
REJOIN = signal.SIGRTMIN
"""Leave the channel ``policy`` and join it again."""
REJOIN_OUTER = signal.SIGRTMIN + 1
"""The same with ``outer``."""
