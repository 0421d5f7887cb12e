"""What shim and launcher start, and what they read of it afterwards. Standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from replicas.supervisor.orders import NodeSpec

__all__ = ["guard_command", "guard_orders", "resolve_command", "scratch_folder", "tail"]


def resolve_command(command: Sequence[str]) -> list[str]:
    """A command as it is exec'ed: ``x.py`` and ``-m module`` run in this interpreter, unbuffered."""
    if command[0] == "-m" or command[0].endswith(".py"):
        return [sys.executable, "-u", *command]
    return list(command)


def guard_orders(spec: NodeSpec, rank: int) -> str:
    """The guard's environment variable for a child of this process; ``rank`` -1: torchrun's ``RANK``."""
    return json.dumps(
        {"parent": os.getpid(), "log_dir": spec.log_dir, "rank": rank, "command": resolve_command(spec.command)}
    )


def scratch_folder(spec: NodeSpec) -> Path:
    """Where torchrun keeps the error files of this node's ranks; it goes with the node."""
    return Path(spec.log_dir) / f"torchrun-{spec.node}"


def guard_command() -> list[str]:
    """Command line of the guard, which is not imported as a module: it must be quick."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]


def tail(path: Path, nbytes: int = 2048) -> str:
    """The last line of a log that is not empty: of a Python program the exception. Empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - nbytes))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
