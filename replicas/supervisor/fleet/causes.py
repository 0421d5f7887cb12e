"""Determine from its nodes' reports why a replica's generation ended. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

import msgspec

from replicas.core.lives.lifecycle import RestartReason
from replicas.linux.processes import signal_name
from replicas.supervisor.shim.orders import ExitReport, LogLoss, RankExit
from replicas.telemetry.events import LogLinesDropped, RankEnd, ReplicaExited

__all__ = ["Cause", "dropped", "exited", "verdict"]


@dataclass(frozen=True)
class Cause:
    """Why a generation ends.

    :ivar reason: bounded label of the restart.
    :ivar text: one human-readable line.
    """

    reason: RestartReason
    text: str


_OUTCOMES: tuple[Literal["failed", "lost", "stopped"], ...] = ("failed", "lost", "stopped")

_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals from outside: the program's last line of output does not explain them."""


def _words(rank: RankExit) -> str:
    if rank.code < 0:
        what = f"rank {rank.rank} was killed by {signal_name(-rank.code)}"
        return what if -rank.code in _SENT or not rank.text else f"{what}: {rank.text}"
    what = f"rank {rank.rank} exited with code {rank.code}{' after ' if rank.after else ''}{rank.after}"
    return f"{what}: {rank.text}" if rank.text else what


def verdict(reports: list[ExitReport]) -> Cause | None:
    """Why a generation ended by itself, from its nodes' reports; None: all ended well.

    The first of several failures counts; ranks that torchrun stopped because of it do
    not.
    """
    if all(report.outcome == "ok" for report in reports):
        return None
    failed = [report for report in reports if report.outcome == "failed"]
    ranks = [report.ranks[0] for report in failed if report.ranks]
    if ranks:
        first = min(ranks, key=lambda rank: (rank.code == -signal.SIGTERM, rank.at, rank.rank))
        return Cause("signal" if first.code < 0 else "exit", _words(first))
    other = failed or [report for report in reports if report.outcome == "lost"]
    text = next((report.text for report in other if report.text), "it ended")
    return Cause("exit" if failed else "lost", text)


def exited(group: str, replica: int, generation: int, reports: list[ExitReport], *, reason: str) -> ReplicaExited:
    """The event for the end of a generation's programs."""
    outcomes = {report.outcome for report in reports}
    worst = [one for one in _OUTCOMES if one in outcomes]
    ranks = sorted((rank for report in reports for rank in report.ranks), key=lambda rank: (rank.at, rank.rank))
    return ReplicaExited(
        group=group,
        replica=replica,
        generation=generation,
        outcome=worst[0] if worst else "ok",
        reason=reason,
        ranks=tuple(_rank_end(one, first=number == 0) for number, one in enumerate(ranks)),
    )


def dropped(group: str, replica: int, generation: int, loss: LogLoss) -> LogLinesDropped:
    """The event for lines that were lost on their way to a log."""
    where: Literal["file", "tee"] = "tee" if loss.where == "tee" else "file"
    return LogLinesDropped(
        group=group, replica=replica, generation=generation, count=loss.lines, where=where, reason=loss.reason
    )


def _rank_end(one: RankExit, *, first: bool) -> RankEnd:
    """The end of one rank; only the first rank's log lines and error are kept."""
    end = RankEnd(rank=one.rank, code=one.code, pid=one.pid, text=one.text)
    return msgspec.structs.replace(end, lines=one.lines, error=one.error) if first else end
