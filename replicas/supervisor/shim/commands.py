"""Command lines that the shim and the launcher start. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from replicas.linux import private
from replicas.supervisor.shim.guard import pack
from replicas.supervisor.shim.orders import NodeSpec

__all__ = ["guard_command", "guard_orders", "resolve_command", "scratch_folder"]


def resolve_command(command: Sequence[str]) -> list[str]:
    """Command to exec: ``x.py`` and ``-m module`` run in this Python, unbuffered."""
    if command[0] == "-m" or command[0].endswith(".py"):
        return [sys.executable, "-u", *command]
    return list(command)


def guard_orders(spec: NodeSpec, *, direct: bool) -> str:
    """Value of the guard's environment variable, for a child of this process.

    :param direct: True if the shim starts it itself, not torchrun.
    """
    pipes = () if direct else spec.pipes
    return pack(
        [
            str(os.getpid()),
            str(spec.shim),
            " ".join(f"{out} {err}" for out, err in pipes),
            spec.cgroup if direct else "",  # torchrun's children inherit its control group
            *resolve_command(spec.command),
        ]
    )


def scratch_folder(spec: NodeSpec) -> Path:
    """Make a folder for torchrun's error files; it is removed with the node.

    It lies beside the logs, or, if that disk is full, with the temporary files.
    """
    folder = Path(spec.log_dir) / f"torchrun-{spec.node}"
    try:
        private.make_folder(folder)
        private.create(folder / "probe", bytes(4096))
        private.remove(folder / "probe")
    except OSError:
        import tempfile  # loads slowly, and is rarely needed

        private.remove_tree(folder)
        folder = Path(tempfile.mkdtemp(prefix="replicas-"))
    return folder


def guard_command() -> list[str]:
    """Command line of the guard, run as a file and not as a module, for speed."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
