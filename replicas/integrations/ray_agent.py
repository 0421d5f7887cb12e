"""The agent in a bundle of Ray's: a child of the actor that holds the bundle.

A process of its own, as a worker of Ray has threads and signal handlers that an agent
cannot share. It is told to end when the actor's process does, whoever has ended that.
Does not import Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from replicas.common.own_code import findable
from replicas.errors import ReplicasError
from replicas.linux.processes import die_with_parent, python_module

__all__ = ["main", "serve"]


def serve(join: str, node: str, labels: Mapping[str, str], folder: Path) -> int:
    """Run an agent to its end; return its exit code.

    :param join: ``TOKEN@HOST:PORT`` of the supervisor, a secret.
    :param folder: for its logs and state.
    """
    words = [f"{name}={value}" for name, value in labels.items()]
    command = python_module(__name__, str(os.getpid()), node, str(folder), *words)
    return subprocess.run(command, env={**findable(os.environ), "REPLICAS_JOIN": join}, check=False).returncode


def main(parent: str, node: str, folder: str, *labels: str) -> int:
    """The child: an agent that ends with its parent."""
    from replicas.supervisor.agent.remote import Invitation, serve_node

    die_with_parent(int(parent), signal.SIGTERM)
    invitation = Invitation(os.environ.pop("REPLICAS_JOIN"))
    try:
        found = dict(word.split("=", 1) for word in labels)
        return serve_node(invitation, name=node, labels=found, state_dir=Path(folder))
    except ReplicasError as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
