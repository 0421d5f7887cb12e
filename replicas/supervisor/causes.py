"""Why a generation of a replica ended, from what its nodes report. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from replicas.core.lifecycle import RestartReason
from replicas.supervisor.orders import ExitReport, RankExit
from replicas.supervisor.processes import signal_name

__all__ = ["Cause", "verdict"]


@dataclass(frozen=True)
class Cause:
    """Why a generation ends. ``reason`` is the bounded label of the restart, ``text`` one line for people."""

    reason: RestartReason
    text: str


def _words(rank: RankExit) -> str:
    what = f"was killed by {signal_name(-rank.code)}" if rank.code < 0 else f"exited with code {rank.code}"
    return f"rank {rank.rank} {what}{': ' if rank.text else ''}{rank.text}"


def verdict(reports: list[ExitReport]) -> Cause | None:
    """Why a generation ended by itself, from its nodes' reports; None when all ended well.

    Of several failures the one that came first counts; ranks that torchrun stopped because of it do not.
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
