"""``replicas agent``: join a run's supervisor over the network, and serve as a node.

The state folder of an agent belongs to it alone while it lives::

    <state_dir>/lock    flock'ed by the agent and its shims
    <state_dir>/id      identity of the folder; in the environment of its processes
    <state_dir>/token   what its ranks show to the coordinator (mode 0600)
    <state_dir>/logs/   as in the state folder of a supervisor

An agent that starts where another one was killed waits until the shims of that have
ended, kills those that are slow or frozen, and sweeps what is left by the folder's
identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from replicas import errors
from replicas.common.logs import Log
from replicas.config.values import no_text
from replicas.linux import inherited, needs, private
from replicas.linux.processes import command_line, signal_each
from replicas.messages import arguments
from replicas.messages.bounds import encodable
from replicas.supervisor.agent.agent import Agent, Link
from replicas.supervisor.agent.containment import Containment
from replicas.supervisor.agent.local import CONNECTING
from replicas.supervisor.agent.machine import look
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.state import give_identity
from replicas.trust.dial import PortConnection, dial
from replicas.trust.way import way_to

log = Log("replicas.agent")

_SETTLE_S = 8.0
"""How long processes of a dead agent may take to end by themselves."""
_SETTLE_INTERVAL_S = 0.05
_ORPHANS_S = 300.0
_SAY_INTERVAL_S = 60.0
_SWEEP_S = 5.0
"""Shorter than a lease: what a dead link has swallowed of a dial comes ever later."""


class Invitation:
    """Where to join, and with what: ``TOKEN@HOST:PORT``.

    White space at the token's ends is left out: a token that is read from a file, as a
    Secret of Kubernetes is, ends in a newline.

    :raises replicas.errors.UsageError: the text is none.
    """

    def __init__(self, text: str) -> None:
        token, at, endpoint = text.strip().rpartition("@")
        host, colon, port = endpoint.rpartition(":")
        token = token.strip()
        if not (at and token and colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise errors.UsageError(
                "an invitation is TOKEN@HOST:PORT", hint="`replicas token --join` prints that of a run"
            )
        self.token = arguments.token("the invitation's token", token)
        self.endpoint = arguments.endpoint("the invitation's address", endpoint)

    def renew(self, token: str) -> None:
        """Use another token from now on."""
        self.token = token


class _AgentConnection(PortConnection):
    owners = frozenset({os.geteuid(), 0})


async def _dial(to: Invitation) -> tuple[Link, str]:
    link = await dial(way_to(to.endpoint, to.token), "/agent", _AgentConnection, **CONNECTING)
    return link, str(link.transport.get_extra_info("sockname")[0])


class _Folder:
    """The state folder of an agent, while this process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = -1
        self._made = False

    def acquire(self) -> str:
        """Take the folder, and end what a dead agent has left; return its identity.

        Blocks up to about 15 s; longer while shims of a dead agent do not die.

        :raises replicas.errors.UsageError: another agent has it, or it is unusable.
        :raises replicas.errors.WorldError: they have not died within 5 minutes.
        """
        try:
            self._made = not self.path.exists()
            private.make_folder(self.path)
            self.lock = private.open_file(self.path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            text = f"cannot use the state folder {self.path}: {error.strerror or error}"
            raise errors.UsageError(text, hint="name another one with --state-dir") from error
        self._take()
        identity = give_identity(self.path)
        leftovers.sweep(None, identity, _SWEEP_S)
        private.make_folder(self.path / "logs")
        return identity

    def _take(self) -> None:
        """Lock it; the end of a flock is not announced, so ask again and again."""
        settled_at, give_up_at = (time.monotonic() + limit_s for limit_s in (_SETTLE_S, _ORPHANS_S))
        said_at = -math.inf
        while not self._locked():
            now = time.monotonic()
            if now > settled_at:
                orphans = self._orphans()
                if now > give_up_at:
                    pids = leftovers.lock_holders(self.path / "lock")
                    raise errors.WorldError(
                        f"processes of an earlier agent in {self.path} do not die: {', '.join(map(str, pids))}",
                        hint="see what they wait for; restart the machine, or name another folder with --state-dir",
                    )
                if orphans and now - said_at > _SAY_INTERVAL_S:
                    said_at = now
                    log.warning("shims of an earlier agent have the state folder: %s; they are killed", orphans)
                signal_each(orphans, signal.SIGKILL, leftovers.is_orphan)
            time.sleep(_SETTLE_INTERVAL_S)

    def _locked(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _orphans(self) -> list[int]:
        """Shims of a dead agent that hold the lock; none: those that did are dying.

        :raises replicas.errors.UsageError: a living agent, or somebody who cannot be
            seen from here, holds it.
        """
        holders = leftovers.lock_holders(self.path / "lock")
        orphans = [pid for pid in holders if leftovers.is_orphan(pid)]
        others = [command_line(pid) for pid in holders if pid not in orphans]
        if any(line and not line.startswith("[") for line in others) or not (holders or self._locked()):
            raise errors.UsageError(
                f"another agent uses the state folder {self.path}", hint="name another one with --state-dir"
            )
        return orphans

    def release(self, *, failed: bool = False) -> None:
        """Give it up; one that was made for a start that ``failed`` goes with it."""
        if failed and self._made and not any((self.path / "logs").glob("*")):
            private.remove_tree(self.path)
        with contextlib.suppress(OSError):  # the disk is read-only by now: the next agent writes another token
            private.remove(self.path / "token")
        if self.lock >= 0:
            os.close(self.lock)


async def _serve(to: Invitation, name: str, labels: Mapping[str, str], folder: _Folder, address: str) -> int:
    identity = await anyio.to_thread.run_sync(folder.acquire)
    machine = await anyio.to_thread.run_sync(look)
    containment = Containment(f"agent-{name}", lock=folder.lock, limited=True)

    def make(changed: Any) -> Shims:
        shims = Shims(containment, folder.path, changed)
        shims.identity, shims.endpoint = identity, to.endpoint
        return shims

    agent = Agent(
        name,
        lambda: _dial(to),
        make,
        folder.path,
        labels=labels,
        machine=machine,
        address=address,
        limits_refused=containment.refused,
        on_token=to.renew,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, agent.leave, signum.name)
    try:
        return await agent.run()
    finally:
        containment.close()


def serve_node(to: Invitation, *, name: str, labels: Mapping[str, str], state_dir: Path, address: str = "") -> int:
    """Run an agent in this process until its run is over.

    :return: 0: the run is over, or the node was drained; 1: its supervisor was lost.
    :raises replicas.errors.ReplicasError: it was not taken, or cannot be started.
    """
    if not encodable(str(state_dir)):
        raise errors.UsageError(no_text(state_dir), hint="or name another one with --state-dir")
    needs.check()
    inherited.put_in_order()
    logging.basicConfig(format="%(asctime)s replicas: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    folder = _Folder(state_dir)
    failed = True
    try:
        code = asyncio.run(_serve(to, name, labels, folder, address))
        failed = False
    finally:
        folder.release(failed=failed)
    return code
