"""How the main process of a node ended, in one report. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable

from replicas.supervisor.orders import ExitReport, NodeSpec, RankExit
from replicas.supervisor.processes import Child, signal_name

__all__ = ["exit_report"]


def exit_report(
    spec: NodeSpec,
    main: Child,
    told: ExitReport | None,
    last_lines: Callable[[str], tuple[str, ...]],
    *,
    stopping: bool,
) -> ExitReport:
    """The exit report of a node whose main process is gone.

    :param told: what the launcher came to report.
    :param last_lines: gives the last lines of ``torchrun``, or of a rank (``rank 0``).
    :param stopping: its end was asked for.
    """
    code = main.code
    assert code is not None
    if told is not None:
        if told.outcome == "stopped" and not stopping:
            return ExitReport("lost", text=f"torchrun of node {spec.node} was stopped from outside")
        return told._replace(ranks=_with_last_words(told.ranks, last_lines))
    if spec.launcher == "exec":
        if code == 0:
            return ExitReport("ok")
        rank = RankExit(rank=0, code=code, pid=main.pid, at=time.time())
        return ExitReport("stopped" if stopping else "failed", ranks=_with_last_words((rank,), last_lines))
    if stopping:
        return ExitReport("stopped")
    ended = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    words = _last(last_lines("torchrun")) if code > 0 else ""
    return ExitReport("lost", text=f"torchrun of node {spec.node} {ended}{': ' if words else ''}{words}")


def _with_last_words(ranks: tuple[RankExit, ...], last_lines: Callable[[str], tuple[str, ...]]) -> tuple[RankExit, ...]:
    """With the last line of each rank of which nothing better is known, and all last lines of the first, each thing once."""
    result = []
    for number, rank in enumerate(ranks):
        lines = last_lines(f"rank {rank.rank}")
        told = bool(rank.error) and _last(rank.error.splitlines()) in lines
        result.append(
            rank._replace(
                text=rank.text or _fatal(lines) or _last(lines),
                error="" if told or number else rank.error,
                lines=() if number else lines,
            )
        )
    return tuple(result)


def _fatal(lines: tuple[str, ...]) -> str:
    """What Python's faulthandler says before it shows the stacks."""
    return next((line for line in reversed(lines) if line.startswith("Fatal Python error: ")), "")


def _last(lines: tuple[str, ...] | list[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
