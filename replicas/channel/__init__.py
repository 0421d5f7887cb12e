"""What a rank touches: joining a channel, publishing and receiving weights, collectives between peers. Imports torch."""

from __future__ import annotations

from replicas.channel.channel import Channel
from replicas.channel.joining import join
from replicas.channel.pending import Pending, Receipt
from replicas.channel.update import Update
from replicas.weights.packing import Shard

__all__ = ["Channel", "Pending", "Receipt", "Shard", "Update", "join"]
