"""Build the exit report of a node's main process. Standard library only."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable

from replicas.linux.processes import Child, signal_name
from replicas.supervisor.shim.orders import ExitReport, NodeSpec, RankExit

__all__ = ["exit_report"]


def exit_report(
    spec: NodeSpec,
    main: Child,
    told: ExitReport | None,
    last_lines: Callable[[str], tuple[str, ...]],
    *,
    stopping: bool,
    first_death: Callable[[Iterable[int]], str] = lambda before: "",
) -> ExitReport:
    """The exit report of a node whose main process is gone.

    :param told: the launcher's own report, if there is one.
    :param last_lines: returns the last lines of the log ``torchrun``, or ``rank 0``.
    :param stopping: its end was asked for.
    :param first_death: describes the crash that came before one of the given processes
        ended; empty: none.
    """
    code = main.code
    assert code is not None
    if told is not None:
        if told.outcome == "stopped" and not stopping:
            return ExitReport("lost", text=f"torchrun of node {spec.node} was stopped from outside")
        return told._replace(ranks=_explained(told.ranks, main, last_lines, first_death))
    if spec.launcher == "exec":
        if code == 0:
            return ExitReport("ok")
        rank = RankExit(rank=0, code=code, pid=main.pid, at=time.time())
        if stopping:
            return ExitReport("stopped", ranks=_with_last_words((rank,), last_lines))
        return ExitReport("failed", ranks=_explained((rank,), main, last_lines, first_death))
    if stopping:
        return ExitReport("stopped")
    ended = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    words = _last(last_lines("torchrun")) if code > 0 else ""
    return ExitReport("lost", text=f"torchrun of node {spec.node} {ended}{': ' if words else ''}{words}")


def _explained(
    ranks: tuple[RankExit, ...],
    main: Child,
    last_lines: Callable[[str], tuple[str, ...]],
    first_death: Callable[[Iterable[int]], str],
) -> tuple[RankExit, ...]:
    """Add last words, and to the first rank the crash that came before its end."""
    found = _with_last_words(ranks, last_lines)
    if not found or found[0].code < 0:
        return found
    return (found[0]._replace(after=first_death({main.pid, *(rank.pid for rank in ranks)})), *found[1:])


def _with_last_words(ranks: tuple[RankExit, ...], last_lines: Callable[[str], tuple[str, ...]]) -> tuple[RankExit, ...]:
    """Add a text to ranks without one, and the last lines to the first rank.

    Only the first rank keeps its error, unless the lines contain it.
    """
    result = []
    for number, rank in enumerate(ranks):
        lines = last_lines(f"rank {rank.rank}")
        told = bool(rank.error) and _last(rank.error.splitlines()) in lines
        result.append(
            rank._replace(
                text=rank.text or _fatal(lines) or (_exception(lines) if rank.code == 1 else "") or _last(lines),
                error="" if told or number else rank.error,
                lines=() if number else lines,
            )
        )
    return tuple(result)


def _fatal(lines: tuple[str, ...]) -> str:
    """The line that Python's faulthandler prints before the stacks; empty: none."""
    return next((line for line in reversed(lines) if line.startswith("Fatal Python error: ")), "")


_FRAME = re.compile(r'(?P<before>.*)  File "[^"]*", line \d+(?:, in .*)?')
_WARNING = re.compile(r".*:\d+: \w*Warning: .*")


def _exception(lines: tuple[str, ...]) -> str:
    """The exception at the end of the last traceback; empty: none.

    It is the first unindented line after the traceback's last frame. Lines may begin
    with the name of a process (``(EngineCore pid=7)``), and other processes may have
    written in between.
    """
    frames = [(at, found) for at, line in enumerate(lines) if (found := _FRAME.fullmatch(line))]
    if not frames:
        return ""
    at, frame = frames[-1]
    behind = (line.removeprefix(frame["before"]) for line in lines[at + 1 :] if line.startswith(frame["before"]))
    return next((line.strip() for line in behind if line and not line[0].isspace()), "")


def _last(lines: tuple[str, ...] | list[str]) -> str:
    """The last line that is no Python warning: those come at exit, after the cause."""
    words = [
        line.strip()
        for before, line in itertools.pairwise(("", *lines))
        if line.strip() and not _WARNING.fullmatch(line) and not (_WARNING.fullmatch(before) and line[0].isspace())
    ]
    return words[-1] if words else next((line.strip() for line in reversed(lines) if line.strip()), "")
