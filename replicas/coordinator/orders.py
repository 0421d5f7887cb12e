"""Carry out an order about versions that did not come from a member."""

from __future__ import annotations

import asyncio

from replicas import errors
from replicas.coordinator.engine import Engine
from replicas.messages.bounds import shown
from replicas.messages.version_orders import Steered, VersionOrder


async def carry_out(engine: Engine, order: object) -> Steered:
    """Give a channel an order about versions (promote, roll back, ...).

    Return the outcome when the decision is on disk; there is no time limit. A rollback
    waits for publishes that have begun before it.

    :param order: one of :mod:`replicas.messages.version_orders`; checked here.
    :raises errors.UsageError: this is not such an order, or there is no such channel,
        version, label or lease.
    :raises errors.ReplicasError: the order was refused.
    """
    if not isinstance(order, VersionOrder):
        hint = "one of replicas.messages.version_orders"
        raise errors.UsageError(f"steer: order must be an order about versions, not {shown(order)}", hint=hint)
    channel = engine.channels.get(order.channel)
    if channel is None or channel.config.peers:
        known = [name for name, one in engine.channels.items() if not one.config.peers]
        text = f"no channel {order.channel!r} with versions"
        raise errors.UsageError(text, hint=f"one of {', '.join(known)}" if known else "the run has none")
    answer: asyncio.Future[Steered] = asyncio.get_running_loop().create_future()

    def tell(outcome: Steered | errors.ReplicasError) -> None:
        """Give the waiting caller ``outcome``, unless it no longer waits."""
        if answer.done():  # its sender no longer waits
            return
        if isinstance(outcome, errors.ReplicasError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    engine.change(channel, lambda channel, now: channel.order(order, tell, now))
    return await answer
