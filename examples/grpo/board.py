"""The display of the demo while it runs: a live board on a terminal, plain lines
elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from history import History
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["Board"]

_BARS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 8
_CHART_COLUMNS = 64
_STATE_STYLES = {"ready": "green", "finished": "green", "failed": "bold red", "backoff": "red", "starting": "yellow"}


class Board:
    """Context manager: call :meth:`show` to refresh the board and :meth:`say` to add a
    line."""

    def __init__(self, console: Console, history: History) -> None:
        self._console = console
        self._history = history
        self._started = time.monotonic()
        self._said: deque[str] = deque(maxlen=7)
        self._shown_step = 0
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        line = f"[{self.elapsed_s:5.1f} s] {text}"
        self._said.append(line)
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        if self._live is not None:
            self._live.update(self._board(), refresh=True)
        elif self._history.step // 10 > self._shown_step // 10:
            self._shown_step = self._history.step
            self.say(self._line())

    def _line(self) -> str:
        history = self._history
        last = history.steps[-1]
        rollouts = history.replicas("rollout")
        ready = sum(replica.state == "ready" for replica in rollouts)
        sync = f"{last.sync_s * 1000:.0f} ms" if last.sync_s is not None else "failed"
        return (
            f"step {last.number:3}/{history.steps_wanted}  reward {last.reward:.3f}  version {last.version}  "
            f"sync {sync}  rollouts ready {ready}/{len(rollouts)}  e.g. {last.sample}"
        )

    # ------------------------------------------------------------ the live board

    def _board(self) -> Group:
        history = self._history
        title = f"replicas · GRPO on {len(history.replicas())} replicas · step {history.step}/{history.steps_wanted}"
        return Group(
            Panel(self._replicas(), title=title, subtitle=f"{self.elapsed_s:.0f} s", border_style="cyan"),
            Panel(self._chart(), title=self._reward_title(), border_style="cyan"),
            Panel(Group(self._sync(), *(Text(line) for line in self._said)), border_style="cyan"),
        )

    def _replicas(self) -> Table:
        table = Table(box=None, expand=True)
        for column, width in (("replica", 10), ("state", 9), ("gen", 3), ("version", 7), ("heartbeat", 9)):
            table.add_column(column, no_wrap=True, min_width=width)
        table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
        for replica in self._history.replicas():
            age = replica.heartbeat_age_s
            table.add_row(
                replica.name,
                Text(replica.state, style=_STATE_STYLES.get(replica.state, "")),
                str(replica.generation),
                str(replica.versions.get("policy", "")),
                "" if age is None else f"{age:.1f} s",
                Text("" if replica.state == "ready" else replica.reason or replica.last_exit, style="dim"),
            )
        return table

    def _reward_title(self) -> str:
        steps = self._history.steps
        return f"reward {steps[-1].reward:.3f} · {steps[-1].sample}" if steps else "reward"

    def _chart(self) -> Text:
        heights = [reward * _CHART_ROWS for reward in _columns(self._history.rewards, self._history.steps_wanted)]
        rows = []
        for row in reversed(range(_CHART_ROWS)):
            label = {_CHART_ROWS - 1: "1.0", 0: "0.0"}.get(row, "")
            cells = "".join(_BARS[round(8 * min(1.0, max(0.0, height - row)))] for height in heights)
            rows.append(f"{label:>4} │{cells}")
        return Text("\n".join(rows), style="green", no_wrap=True)

    def _sync(self) -> Text:
        channel = next(
            (c for c in (self._history.status.channels if self._history.status else ()) if c.name == "policy"), None
        )
        last = channel.last_sync if channel else None
        if channel is None or last is None:
            return Text("no weights published yet", style="dim")
        text = f"last sync: version {last.version} {last.outcome} in {last.seconds * 1000:.0f} ms, {last.nbytes / 1e6:.2f} MB"
        phases = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in last.phases.items())
        return Text(f"{text}, {last.members} members, epoch {channel.epoch}\n  {phases}", style="bold")


def _columns(values: list[float], wanted: int) -> list[float]:
    """Return ``values``, of ``wanted`` in all, as means over the columns of the
    chart."""
    per_column = max(1.0, wanted / _CHART_COLUMNS)
    columns: list[float] = []
    while (start := int(len(columns) * per_column)) < len(values):
        part = values[start : max(start + 1, int((len(columns) + 1) * per_column))]
        columns.append(sum(part) / len(part))
    return columns
