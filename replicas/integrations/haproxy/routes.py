"""Servers for requests, by version and with their weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from replicas.integrations.router import channel_of, ready_leaders
from replicas.status import RunStatus

WEIGHT_MAX = 256
"""HAProxy's."""


class Server(NamedTuple):
    """A server that answers requests: its URL, and the version that it serves."""

    url: str
    version: int
    is_canary: bool = False


class Routes(NamedTuple):
    """The servers of a channel with the versions that they serve, and its labels,
    current version and candidate: by these HAProxy leads requests.

    :ivar labels: the version of each label.
    :ivar current: the version that targets load; a newer one is a candidate.
    :ivar share: share of the requests without a demand that the canary gets; 0: that of
        its number among the servers.
    """

    servers: frozenset[Server]
    labels: Mapping[str, int] = {}
    current: int = 0
    share: float = 0.0

    @property
    def newest(self) -> int:
        """The newest version that a server has loaded, or 0 if there are no servers."""
        return max((server.version for server in self.servers), default=0)

    @property
    def oldest(self) -> int:
        """The oldest version that a server has loaded, or 0 if there are no servers."""
        return min((server.version for server in self.servers), default=0)

    @property
    def settled(self) -> int:
        """The newest served version that is not a candidate (newer than ``current``),
        or 0 if there is none."""
        return max((server.version for server in self.servers if server.version <= self.current), default=0)

    @property
    def weights(self) -> dict[Server, int]:
        """The weight of each server, from 1 to 256, for requests that demand no
        version: equal, but for a canary (servers of a candidate), which gets ``share``
        of the requests."""
        canary = {server for server in self.servers if server.is_canary and server.version > self.current}
        others = len(self.servers) - len(canary)
        if not canary or not others or not self.share:
            return dict.fromkeys(self.servers, WEIGHT_MAX)
        shares = {
            server: self.share / len(canary) if server in canary else (1 - self.share) / others
            for server in self.servers
        }
        most = max(shares.values())
        return {server: max(1, round(WEIGHT_MAX * share / most)) for server, share in shares.items()}


def routes_of(status: RunStatus, channel: str) -> Routes:
    """Return the routes to the replicas that answer with a version of the channel, as a
    run's status shows them.

    :raises replicas.errors.UnknownChannel: the run has no such channel.
    """
    found = channel_of(status, channel)
    servers = frozenset(
        Server(one.info["url"], one.loaded, one.name.rpartition("/")[0] in found.canary) for one in ready_leaders(found)
    )
    labels = {label: version.number for version in found.versions for label in version.labels}
    return Routes(servers, labels, found.current, found.canary_share)
