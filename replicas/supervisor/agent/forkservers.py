"""The sidecar forkservers of a node, which the ranks of all its replicas share.

If ranks will need one, it is started together with them. If they probably never will,
because all members share memory, it is started at the first connection. Ranks that
differ in environment variables that a process reads only at its start have a separate
forkserver (:func:`replicas.linux.rank_environment.lasting`). A forkserver that no
replica of the node uses ends when the next replica starts. The replicas of one that is
given up (:mod:`replicas.sidecar.kept_forkserver`) cannot sync, and are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from replicas import environ
from replicas.linux.rank_environment import lasting
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.supervisor.agent.shim_process import base_environment


class Forkservers:
    """The sidecar forkservers of a node, by their addresses.

    A forkserver forks helper processes (sidecars) for ranks. For the event loop's
    thread only.

    :param broken: called with an address and a reason when ranks with that address
        cannot sync.
    """

    def __init__(self, broken: Callable[[str, str], None]) -> None:
        """Begin without forkservers.

        :param broken: called on the loop with an address and a reason when ranks with
            that address cannot sync, as its forkserver is not started again.
        """
        self._broken = broken
        self._kept: dict[frozenset[tuple[str, str]], KeptForkserver] = {}

    def address(self, environment: Mapping[str, str], *, ahead: bool) -> str:
        """Return the socket address of the forkserver for ranks with this environment.

        Ranks connect there to have helper processes (sidecars) forked. The first call
        for such an environment binds the address.

        :param ahead: start the forkserver now, unless it runs; else at the first
            connection.
        :raises OSError: the socket cannot be bound.
        """
        own = lasting(environment)
        if environ.STATE_ID in environment:
            own[environ.STATE_ID] = environment[environ.STATE_ID]
        key = frozenset(own.items())
        if key not in self._kept:
            self._kept[key] = KeptForkserver({**base_environment(), **own}, lambda reason: self._given_up(key, reason))
        if ahead:
            self._kept[key].need()
        return self._kept[key].address

    def retain(self, addresses: Collection[str]) -> None:
        """SIGKILL and forget the forkservers with addresses other than these."""
        for key, one in list(self._kept.items()):
            if one.address not in addresses:
                self._kept.pop(key).kill()

    async def aclose(self) -> None:
        """Kill all forkservers, and wait up to 5 s for their ends."""
        await asyncio.gather(*(one.aclose() for one in self._kept.values()))

    def _given_up(self, key: frozenset[tuple[str, str]], reason: str) -> None:
        """Forget a forkserver that does not run, and call ``broken`` with its address.

        :param key: the environment variables by which it is kept.
        :param reason: why it was given up, for people.
        """
        self._broken(self._kept.pop(key).address, reason)
