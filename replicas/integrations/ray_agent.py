"""The actor in a bundle of Ray, and its child, the agent.

The agent is a separate process, as a Ray worker has threads and signal handlers that
the agent cannot share. The kernel signals the agent when the actor's process ends, for
any reason. Both start faster because this module imports neither Ray nor the
supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from replicas.errors import ReplicasError
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.processes import die_with_parent

__all__ = ["RayAgent", "main"]


class RayAgent:
    """A Ray actor that runs one agent, which starts a node's replicas, as its child."""

    def serve(self, join: str, name: str, labels: Mapping[str, str], folder: str) -> int:
        """Run an agent, the process that starts a node's replicas, as a child process;
        block until it ends, and return its exit code.

        :param join: ``TOKEN@HOST:PORT`` of the supervisor, a secret.
        :param name: the node's name, to which a part of Ray's node id is added.
        :param labels: of the node, for the placement of replicas.
        :param folder: parent of the folder for the agent's logs and state.
        """
        import ray

        node = f"{name}-{ray.get_runtime_context().get_node_id()[:8]}"
        words = [f"{name}={value}" for name, value in labels.items()]
        command = python_module(__name__, str(os.getpid()), node, str(Path(folder, node).absolute()), *words)
        return subprocess.run(command, **popen_arguments({**os.environ, "REPLICAS_JOIN": join}), check=False).returncode


def main(parent: str, node: str, folder: str, *labels: str) -> int:
    """Run the agent in the child process to its end; it gets SIGTERM when its parent
    ends. Return the exit code. The supervisor's address is in ``REPLICAS_JOIN``.

    :param parent: pid of the actor's process.
    :param node: the node's name. :param folder: for the agent's logs and state.
    :param labels: ``NAME=VALUE`` of the node.
    """
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
