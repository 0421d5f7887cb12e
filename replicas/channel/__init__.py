"""What a rank touches: joining a channel, publishing and receiving weights, collectives
between peers. Imports torch."""

from __future__ import annotations

from replicas import linux

linux.require()  # before anything is imported that is not there elsewhere

from replicas.channel.channel import Channel  # noqa: E402
from replicas.channel.joining import join  # noqa: E402
from replicas.channel.pending import Pending, Receipt  # noqa: E402
from replicas.channel.versions.update import Update  # noqa: E402
from replicas.weights.feed import Shard  # noqa: E402

__all__ = ["Channel", "Pending", "Receipt", "Shard", "Update", "join"]
