"""``python -m replicas.supervisor.agent.local``: the agent of the supervisor's machine.

The supervisor starts it (:mod:`replicas.supervisor.fleet.local_agent`), and it dials
the run's Unix socket. It ignores the signals that end a session; it ends with the
supervisor, or when that tells it to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicas import errors
from replicas.common import own_code
from replicas.linux import inherited
from replicas.linux.cgroups import RunCgroups
from replicas.linux.sockets import reachable
from replicas.supervisor.agent.agent import Agent, SupervisorLink
from replicas.supervisor.agent.orphans import remove_socket
from replicas.supervisor.agent.shims import Shims
from replicas.trust.dial import dial_socket

CONNECTING: dict[str, Any] = {"open_timeout": 5.0, "max_size": 8 << 20}
"""Options of every agent's connection. No WebSocket pings: the beats replace them."""


async def dial_run(path: Path) -> tuple[SupervisorLink, str]:
    """Connect to the run's Unix socket. Return the connection, and "" as address.

    :raises OSError: the socket cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with reachable(path) as name:
            await asyncio.get_running_loop().sock_connect(connection, name)
        return await dial_socket(connection, "/agent", **CONNECTING), ""
    except BaseException:
        connection.close()
        raise


async def _run(options: argparse.Namespace) -> int:
    """Run the agent until its end, and return its exit code.

    At the end, remove the Unix socket if its supervisor is dead.

    :param options: the parsed command line: node, run, socket, state folder etc.
    """
    groups = RunCgroups(options.run, options.cgroup, limited=options.limited)
    agent = Agent(
        options.node,
        lambda: dial_run(options.socket),
        Shims(groups, options.state_dir, lock=options.lock),
        options.state_dir,
        wanted=lambda: os.getppid() == options.parent,  # until the supervisor that started this agent is gone
    )
    try:
        return await agent.run()
    finally:
        remove_socket(options.socket)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent of the supervisor's machine as this process, to its end.

    Ignores SIGTERM, SIGINT and SIGHUP. Return the exit code: 0 if the run is over or
    the node was released, else 1.

    :param arguments: of the command line; default: those of this process.
    """
    parser = argparse.ArgumentParser(prog="replicas.supervisor.agent.local", description="started by the supervisor")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--node", required=True, help="name of this machine as a node")
    parser.add_argument("--socket", type=Path, required=True, help="the run's Unix socket")
    parser.add_argument("--state-dir", type=Path, required=True, help="the run's state folder")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    parser.add_argument("--lock", type=int, help="descriptor of the run's lock, held as long as the agent lives")
    parser.add_argument("--cgroup", type=Path, help="control group below which those of the run are made")
    parser.add_argument("--limited", action="store_true", help="limits of memory and processes are wanted")
    options = parser.parse_args(arguments)
    inherited.put_in_order()
    faulthandler.enable()
    own_code.undo(os.environ)  # ranks inherit the environment of the supervisor
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if options.lock is not None:
        os.set_inheritable(options.lock, False)
    logging.basicConfig(format="replicas: agent: %(message)s", level=logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            return asyncio.run(_run(options))
        except errors.WorldError as error:
            logging.getLogger("replicas.agent").error("%s", error)
            return 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
