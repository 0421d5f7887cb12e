"""A peer of the channel ``outer``: means over all peers, one step after the other, in a
thread of its own.

What each one gives names it: the power of two of its place, so that a result tells who
took part. Peers that were lost find the step again in what the others have written
down.
"""

from __future__ import annotations

import os
import threading
import time

import torch

import replicas
from tests.chaos.programs.member import NAME, OUT, RANK, REJOINS, Log, Orders, endpoint
from tests.chaos.programs.signals import REJOIN_OUTER

__all__ = ["PEERS", "start_peer"]

PEERS = os.environ.get("CHAOS_PEERS", "").split()
"""Replicas that are peers, as ``group-replica``; the place in this list is the power of
two that they give."""

ELEMENTS = 50_000
PAUSE_S = 0.05
CATCH_UP_S = 0.005
"""Before the next try: less than the pause of the others, who are to be caught up
with."""


def start_peer(orders: Orders) -> None:
    """Take part, if this rank is a peer, for as long as the process lives."""
    if NAME in PEERS and RANK == 0:
        threading.Thread(target=_run, args=(orders,), daemon=True).start()


def _run(orders: Orders) -> None:
    log = Log(".outer")
    try:
        while True:
            try:
                with replicas.join("outer", endpoint=endpoint()) as channel:
                    _reduce_for_ever(channel, log, orders)
            except replicas.errors.Disconnected as error:
                if not REJOINS:
                    raise
                log.tell(apart=type(error).__name__, text=str(error))
    except BaseException as error:
        if orders.ending:
            return  # the program ends
        log.tell(crashed=f"{type(error).__name__}: {error}")
        raise


def _reduce_for_ever(channel: replicas.Channel, log: Log, orders: Orders) -> None:
    """Until this member is fenced or told to join again; then it does."""
    code = 2.0 ** PEERS.index(NAME)
    step = _newest()
    log.tell(joined=step)
    while not orders.rejoin(REJOIN_OUTER):
        _announce(step)
        given = [torch.full((ELEMENTS,), code), torch.tensor([float(step), code])]
        began = time.monotonic()
        try:
            receipt = channel.all_reduce(given, op="mean", step=step).wait()
        except replicas.errors.ReplicasError as error:
            if orders.ending:
                return  # the program ends, and its channels were closed
            touched = bool((given[0] != code).any() or given[1].tolist() != [step, code])
            name, text = type(error).__name__, str(error)
            log.tell(step=step, error=name, text=text, touched=touched, seconds=time.monotonic() - began)
            if isinstance(error, replicas.errors.Fenced):
                return
            step = max(step + isinstance(error, replicas.errors.Gone), _newest())
            time.sleep(CATCH_UP_S)
        else:
            members = [f"{m.group}-{m.replica}" for m in receipt.members]
            values = sorted({given[0].min().item(), given[0].max().item(), given[1][1].item()})
            mean_step = given[1][0].item()
            log.tell(step=step, members=members, values=values, mean_step=mean_step, seconds=time.monotonic() - began)
            step += 1
            time.sleep(PAUSE_S)


def _announce(step: int) -> None:
    fresh = OUT / f"new.{NAME}"
    fresh.write_text(str(step))
    fresh.replace(OUT / f"step.{NAME}")


def _newest() -> int:
    """The newest step that any peer has begun."""
    return max((int(path.read_text()) for path in OUT.glob("step.*")), default=1)
