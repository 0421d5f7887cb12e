"""The live view of `make demo-llm` on a terminal; plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from llm_history import History

__all__ = ["Board"]

BARS = "▁▂▃▄▅▆▇█"
STYLES = {"ready": "green", "finished": "green", "failed": "bold red", "backoff": "red", "starting": "yellow"}


class Board:
    """Context manager: call :meth:`show` to refresh the board and :meth:`say` to add a
    line."""

    def __init__(self, console: Console, history: History) -> None:
        self._console = console
        self._history = history
        self._started = time.monotonic()
        self._said: deque[str] = deque(maxlen=8)
        self._shown = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        line = f"[{self.elapsed_s:6.1f} s] {text}"
        self._said.append(line)
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        history = self._history
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        elif history.step > self._shown:
            self._shown = history.step
            ready = sum(one.state == "ready" for one in history.servers())
            self.say(
                f"step {history.step:3}/{history.steps_wanted}  reward {history.rewards[-1]:.2f}  "
                f"version {history.committed()}  staleness {history.staleness[-1]}  servers ready {ready}/2"
            )

    def _view(self) -> Group:
        history = self._history
        progress = ProgressBar(total=history.steps_wanted, completed=history.step)
        title = f"GRPO · TRL and two vLLM servers · step {history.step}/{history.steps_wanted}"
        line = "".join(BARS[min(7, int(reward * 8))] for reward in history.rewards)
        reward = f"{history.rewards[-1]:.2f}  {line}" if line else "no step yet"
        return Group(
            Panel(
                Group(progress, self._servers()), title=title, subtitle=f"{self.elapsed_s:.0f} s", border_style="cyan"
            ),
            Panel(Text(reward, style="green"), title="reward (1 = all sums right)", border_style="cyan"),
            Panel(Group(*(Text(line) for line in self._said)), border_style="cyan"),
        )

    def _servers(self) -> Table:
        history, committed = self._history, self._history.committed()
        table = Table(box=None, expand=True)
        for column in ("replica", "state", "generation", "version", "staleness", "answers"):
            table.add_column(column, no_wrap=True)
        for replica in history.servers():
            version = replica.versions.get("policy", 0)
            answers = sum(history.sampler.answers.get(replica.name, {}).values()) if history.sampler else 0
            table.add_row(
                *(replica.name, Text(replica.state, style=STYLES.get(replica.state, "")), str(replica.generation)),
                *(str(version or "-"), str(committed - version) if version else "-", str(answers)),
            )
        return table
