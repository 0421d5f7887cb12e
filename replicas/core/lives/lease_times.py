"""How long the two ends of a lease wait for each other. Pure.

An agent sends a *beat* each second, and the supervisor acknowledges it. From then on
two clocks run, each on its own machine. They need not agree on the time, only on its
speed:

* the agent may run until ``lease_s`` after it *sent* the last acknowledged beat; then
  it ends everything of the run, which takes at most :data:`END_S`;
* the supervisor counts the node as lost, and may start its replicas elsewhere, no
  earlier than ``lease_s + END_S + MARGIN_S`` after it *received* that beat.

The beat was received after it was sent, so the agent has always ended first.

On the supervisor's own machine there is no lease: the end of either process is always
noticed there. A frozen process has not ended, so the shims have a patience of their
own, :func:`local_patience_s`, for the case that the supervisor dies meanwhile. For a
supervisor that starts elsewhere they may run for :func:`outlives_s`.
"""

from __future__ import annotations

BEAT_S = 1.0
"""Interval of an agent's beats, in seconds."""
END_S = 4.0
"""Longest time that an agent, or a shim, takes to end the processes of a run."""
MARGIN_S = 1.0
"""Allowance for clocks of different speed and for processes that are slow to die."""
UNHEARD_S = 2 * BEAT_S
"""Do not blame a replica while its node has been silent for longer than this."""
FROZEN_S = 10.0
"""Silence after which the agent of the supervisor's own machine is replaced."""
LAST_S = 3.0
"""Time for a last ping when the patience of a shim is over, in seconds."""


def local_patience_s(adopt_s: float) -> float:
    """Return for how many seconds a shim may run on while its agent does not answer.

    A shim owns the processes of a replica. The time is for the supervisor's own
    machine: enough for a living supervisor to replace a frozen agent, and for another
    supervisor to take over from a dead one.

    :param adopt_s: seconds in which another supervisor may take over; 0 for none.
    """
    return max(2 * FROZEN_S, adopt_s)  # twice: the new agent has to start and to find them


def outlives_s(adopt_s: float) -> float:
    """Return the most seconds that processes on a supervisor's machine run after its
    death.

    Return 0 if no other supervisor may take over: then another run cannot begin before
    they are gone, as they hold the run's lock.

    :param adopt_s: seconds in which another supervisor may take over; 0 for none.
    """
    return local_patience_s(adopt_s) + LAST_S if adopt_s else 0.0


def lost_after_s(lease_s: float) -> float:
    """Return after how many seconds without a beat (a message) of a node its lease is
    over.

    Its replicas may then start elsewhere, as all processes on it have ended.

    :param lease_s: how long its agent goes on after the last acknowledged beat.
    """
    return lease_s + END_S + MARGIN_S
