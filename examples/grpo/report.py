"""The results of the demo: a table on the screen, summary.json, reward.png, and the
page of the run in one file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from history import History
from rich.console import Console
from rich.table import Table

__all__ = ["print_summary", "save"]

PLOT = "reward.png"
REPORT = "report.html"
REPORT_S = 60.0


def print_summary(console: Console, history: History, out: Path) -> None:
    summary = history.summary()
    table = Table(title="GRPO over replicas", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f} s"

    table.add_row("reward, first → last", f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}")
    table.add_row("steps", f"{summary['steps']} of {history.steps_wanted}")
    table.add_row("versions committed", str(summary["versions_committed"]))
    syncs = ", ".join(f"{count} {outcome}" for outcome, count in summary["syncs"].items())
    table.add_row("syncs", syncs or "-")
    table.add_row("sync, median / worst", f"{seconds(summary['sync_median_s'])} / {seconds(summary['sync_worst_s'])}")
    table.add_row("weights moved", f"{summary['bytes'] / 1e6:.1f} MB")
    table.add_row("restarts", str(summary["restarts"]))
    if history.kill:
        after = f", at step {history.kill.step_after}" if history.kill.step_after else ""
        recovery = f"{summary['recovery_s']:.1f} s{after}" if summary["recovery_s"] else "not recovered"
        table.add_row(
            f"kill -9 of {history.kill.replica}, at step {history.kill.step}", f"ready again after {recovery}"
        )
    table.add_row("batches missed / stale", f"{history.missed} / {history.stale}")
    table.add_row("torn versions", str(summary["torn_versions"]))
    table.add_row("wall time", f"{summary['wall_s']:.0f} s")
    console.print(table)
    saved = " and ".join(str(path) for path in (out / PLOT, out / "summary.json") if path.exists())
    console.print(f"saved {saved}; logs: {out / 'run' / 'logs'}", soft_wrap=True)
    console.print(f"the whole run, to look through in a browser: {out / REPORT}", soft_wrap=True)
    for problem in summary["problems"]:
        console.print(f"[bold red]FAILED[/]: {problem}", soft_wrap=True)


def save(history: History, out: Path) -> None:
    """Write ``summary.json``, ``report.html``, and with matplotlib ``reward.png``, into
    ``out``."""
    series = {"rewards": history.rewards, "sync_s": [step.sync_s for step in history.steps]}
    (out / "summary.json").write_text(json.dumps({**history.summary(), **series}, indent=1) + "\n")
    (out / PLOT).unlink(missing_ok=True)  # of an earlier run
    command = [sys.executable, "-m", "replicas", "report", str(out / "run"), "-o", str(out / REPORT)]
    subprocess.run(command, check=True, timeout=REPORT_S, stdout=subprocess.DEVNULL)
    if importlib.util.find_spec("matplotlib") is not None:
        _plot(history, out / PLOT)


def _plot(history: History, path: Path) -> None:
    import matplotlib as mpl  # a heavy import, wanted only here

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=[3, 1], layout="constrained")
    numbers = [step.number for step in history.steps]
    above.plot(numbers, history.rewards, color="tab:green")
    above.set_ylim(0, 1.02)
    above.set_ylabel("reward (1 = sorted right)")
    above.set_title("GRPO: one trainer of two ranks, two rollout replicas")
    below.plot(numbers, [(step.sync_s or 0.0) * 1000 for step in history.steps], color="tab:blue")
    below.set_ylabel("sync [ms]")
    below.set_xlabel("step")
    if history.kill:
        for axis in (above, below):
            axis.axvline(history.kill.step, color="tab:red", linestyle="--", label=f"kill -9 {history.kill.replica}")
            if history.kill.step_after:
                axis.axvline(history.kill.step_after, color="tab:orange", linestyle="--", label="ready again")
        above.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
