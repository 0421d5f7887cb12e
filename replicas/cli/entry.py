"""The console script ``replicas``, with a plain error where it cannot run."""

from __future__ import annotations

import sys

from replicas.control.exit_codes import USAGE
from replicas.linux import LinuxOnly, require


def main() -> int:
    """Run one command with this process's arguments and return its exit code.

    On a system other than Linux print that on stderr, and return 2.
    """
    try:
        require()
    except LinuxOnly as error:
        print(f"replicas: {error}", file=sys.stderr)
        return USAGE
    from replicas.cli.main import main as run  # can only be imported on Linux

    return run()
