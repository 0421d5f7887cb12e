"""Keepers, as the processes of a host see them: what one does, and how a source starts one.

Theory of operation
===================

A keeper (:mod:`replicas.core.keepers`) is a channel without a user: a session, what it holds, transfers and lanes. It maps
what it is offered, so that the memory lives as long as it does, lets go of it at the next commit, and sends it through a
sidecar of its own (which takes a forkserver: started when it is first needed).

It ends when it is told so, when it is refused, and when it has been without a session for its lease: the coordinator
is gone, or has given it up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from replicas import errors, keeper
from replicas.channel.hub import BYE_TIMEOUT_S, Hub
from replicas.channel.lanes import Lanes
from replicas.channel.loop import session_loop
from replicas.channel.session import Session
from replicas.channel.transfers import Transfers
from replicas.memory.beacon import own_beacon
from replicas.memory.process import own_process
from replicas.messages import PROTOCOL, Hello, KeeperOver, KeeperWanted

__all__ = ["GROUP", "KeeperStarts", "run"]

logger = logging.getLogger("replicas.channel")

GROUP = "(keeper)"
"""In place of the name of a group; no group can be called so."""
JOIN_TIMEOUT_S = 20.0
"""Whoever wanted it was there a moment ago, and asks again if it must."""
LOOK_INTERVAL_S = 0.5
LEAVE_TIMEOUT_S = 10.0


class KeeperStarts:
    """A source's part of it: it starts a keeper when it is asked to. ``job``: with what."""

    def __init__(self, hub: Hub, job: keeper.Job) -> None:
        self._hub = hub
        self._job = job

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {KeeperWanted: self._wanted}

    def new_term(self) -> None:
        """A new coordinator asks again."""

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Nothing waits for it."""

    def _wanted(self, message: KeeperWanted) -> None:
        self._hub.spawn(self._start(), "keeper")

    async def _start(self) -> None:
        try:
            await asyncio.to_thread(keeper.start, self._job)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "%s: no keeper can be started here (%s): if this process dies before anybody has what it published, "
                "that is lost",
                self._hub.name,
                error,
            )


class _Life:
    """The keeper's part that knows when it is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {KeeperOver: lambda message: self.over.set()}

    def new_term(self) -> None:
        """What is held was in the Hello."""

    def fail_all(self, error: errors.ReplicasError) -> None:
        """The session is over."""
        self.over.set()


def _hello(job: keeper.Job) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        run=job.run,
        channel=job.channel,
        group=GROUP,
        replica=0,
        rank=0,
        world_size=1,
        incarnation=secrets.token_hex(8),
        generation=1,
        process=own_process(),
        keeps=True,
        torch_version=str(torch.__version__),
        beacon=own_beacon(),
    )


def run(job: keeper.Job) -> int:
    """Keep what there is to keep, until there is nothing any more. Returns an exit code."""
    loop = session_loop()
    hello = _hello(job)
    hub = Hub(loop, hello, None, job.channel)
    lanes, life = Lanes(hub), _Life()
    session = Session(loop, job.endpoint, job.token, hello, hub)
    hub.start(session, (Transfers(hub, lanes), lanes, life))
    try:
        loop.run(session.open(JOIN_TIMEOUT_S), JOIN_TIMEOUT_S + LEAVE_TIMEOUT_S)
    except (TimeoutError, errors.ReplicasError) as error:
        logger.warning("%s: no keeper: %s", job.channel, error)
        return 1
    _wait(life, session, job.lease_s)
    try:
        loop.run(_leave(hub, lanes), LEAVE_TIMEOUT_S)
    except TimeoutError:
        logger.warning("%s: leaving took more than %s s", job.channel, LEAVE_TIMEOUT_S)
    return 0


def _wait(life: _Life, session: Session, lease_s: float) -> None:
    """Return when it is over, or has had no session for too long."""
    alone_since: float | None = None
    while not life.over.wait(LOOK_INTERVAL_S):
        now = time.monotonic()
        alone_since = None if session.connected else alone_since or now
        if alone_since is not None and now - alone_since > lease_s:
            logger.warning("there has been no session for %g s", lease_s)
            return


async def _leave(hub: Hub, lanes: Lanes) -> None:
    await hub.session.close("not needed any more", BYE_TIMEOUT_S)
    hub.session_over(hub.error(errors.Gone, "the keeper has left", hint=""))
    await lanes.all_gone()
    hub.holdings.close()
