"""A rank's API: join a channel, publish, receive, run collectives. Imports torch.

`join` -> `Channel.publish`, `receive`, `all_reduce`... -> `Pending` -> `Receipt` or
`Update`. ``session`` talks to the coordinator, ``versions`` moves weights,
``operations`` runs collectives. Nothing here decides: the coordinator does
(:mod:`replicas.core`).
"""

from __future__ import annotations

from replicas import linux

linux.require()  # before imports that fail on other systems

from replicas.channel.channel import Channel  # noqa: E402
from replicas.channel.joining import join  # noqa: E402
from replicas.channel.session.pending import Pending, Receipt  # noqa: E402
from replicas.channel.versions.orders import Lease, Versions  # noqa: E402
from replicas.channel.versions.update import Update  # noqa: E402
from replicas.weights.changes import Change  # noqa: E402
from replicas.weights.feed import Shard  # noqa: E402

__all__ = ["Change", "Channel", "Lease", "Pending", "Receipt", "Shard", "Update", "Versions", "join"]
