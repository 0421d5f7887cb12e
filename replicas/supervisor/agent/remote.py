"""``replicas agent``: join a run's supervisor over the network, and serve as a node."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from replicas import errors
from replicas.common.logs import Log
from replicas.config.values import no_text
from replicas.linux import inherited, needs
from replicas.linux.cgroups import RunCgroups
from replicas.messages import arguments
from replicas.messages.bounds import encodable
from replicas.supervisor.agent.agent import Agent, SupervisorLink
from replicas.supervisor.agent.agent_folder import AgentFolder
from replicas.supervisor.agent.local import CONNECTING
from replicas.supervisor.agent.machine import inspect_machine
from replicas.supervisor.agent.shims import Shims
from replicas.trust.dial import PortConnection, dial
from replicas.trust.way import way_to

log = Log("replicas.agent")


class Invitation:
    """Token and address of the supervisor to join: ``TOKEN@HOST:PORT``.

    White space around the token is removed: a token read from a file, such as a
    Kubernetes Secret, ends in a newline.

    :raises replicas.errors.UsageError: the text is not an invitation.
    """

    def __init__(self, text: str) -> None:
        """Parse ``TOKEN@HOST:PORT``; connect nowhere.

        :raises replicas.errors.UsageError: the text is not an invitation.
        """
        token, at, endpoint = text.strip().rpartition("@")
        if not at:
            raise errors.UsageError("--join must be TOKEN@HOST:PORT", hint="`replicas token --join` prints it")
        self.token = arguments.token("the invitation's token", token.strip())
        self.endpoint = arguments.endpoint("the invitation's address", endpoint)

    def renew(self, token: str) -> None:
        """Use this token from the next connection on. The present connection stays."""
        self.token = token


class _AgentConnection(PortConnection):
    owners = frozenset({os.geteuid(), 0})


async def _dial(to: Invitation) -> tuple[SupervisorLink, str]:
    """Connect to the supervisor. Return the connection and its local address.

    :param to: address and token, as they are now; a renewed token serves the next call.
    """
    link = await dial(way_to(to.endpoint, to.token), "/agent", _AgentConnection, **CONNECTING)
    return link, str(link.transport.get_extra_info("sockname")[0])


async def _serve(to: Invitation, name: str, labels: Mapping[str, str], folder: AgentFolder, address: str) -> int:
    """Lock the folder, and run an agent until its end. Return its exit code.

    The caller releases the folder. Handles SIGTERM, SIGINT and SIGHUP of this process:
    the node then leaves in order.

    :param to: address and token of the supervisor.
    :param name: of the node.
    :param folder: the agent's own state folder.
    :param address: of this node's ranks for other nodes; "" for the connection's.
    """
    identity = await anyio.to_thread.run_sync(folder.acquire)
    machine = await anyio.to_thread.run_sync(inspect_machine)
    groups = RunCgroups(f"agent-{name}", limited=True)
    if groups.path is None:
        log.info("continuing without control groups: %s", groups.refused)
    shims = Shims(groups, folder.path, lock=folder.lock)
    shims.identity, shims.endpoint = identity, to.endpoint
    agent = Agent(
        name, lambda: _dial(to), shims, folder.path, labels=labels, machine=machine, address=address, on_token=to.renew
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, agent.leave, signum.name)
    return await agent.run()


def serve_node(to: Invitation, *, name: str, labels: Mapping[str, str], state_dir: Path, address: str = "") -> int:
    """Run an agent as this process until its run is over. Blocks.

    :param to: address and token of the supervisor.
    :param name: of the node.
    :param labels: of the node, which groups can ask for.
    :param state_dir: the agent's own state folder, which is locked meanwhile.
    :param address: of this node's ranks for other nodes; "" for the connection's local
        one.
    :return: 0 if the run is over or the node was drained; 1 if the supervisor was lost.
    :raises replicas.errors.ReplicasError: it was not accepted, or cannot be started.
    """
    if not encodable(str(state_dir)):
        raise errors.UsageError(no_text(state_dir), hint="or name another one with --state-dir")
    needs.check()
    inherited.put_in_order()
    logging.basicConfig(format="%(asctime)s replicas: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    folder = AgentFolder(state_dir)
    failed = True
    try:
        code = asyncio.run(_serve(to, name, labels, folder, address))
        failed = False
    finally:
        folder.release(failed=failed)
    return code
