"""The results of `make demo-llm`: a table on the screen, summary.json and
reward.png."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from llm_history import History
from rich.console import Console
from rich.table import Table

__all__ = ["conclude", "print_summary", "save"]

ENDS = 8
"""Number of steps at each end whose mean is the first and the last reward."""
RISE = 0.15
"""Least rise of the reward in a successful run."""
DIFFERENCE = 0.01
"""Mean difference of log-probabilities of the same tokens: far above rounding in
float32 (0.00002). Beyond it, servers and trainer compute with different weights."""


def conclude(history: History, state_dir: Path) -> None:
    """Compare the answered with the committed versions, and record each problem."""
    problems = history.problems
    committed = {end["record"]["version"] for end in _syncs(state_dir) if end["record"]["outcome"] == "committed"}
    sampler = history.sampler
    assert sampler is not None
    answered = {version for versions in sampler.answers.values() for version in versions}
    if answered - committed:
        problems.append(f"answers with versions that were not committed: {sorted(answered - committed)}")
    if sampler.went_back:
        problems.append(f"answers that went back: {sampler.went_back}")
    if len(sampler.answers) < len(history.servers()):
        problems.append(f"only {sorted(sampler.answers)} answered")
    if history.exit_code:
        problems.append(f"the run ended with exit code {history.exit_code}")
    if len(history.steps) < history.steps_wanted:
        problems.append(f"{len(history.steps)} of {history.steps_wanted} steps")
    elif _mean(history.rewards[-ENDS:]) < _mean(history.rewards[:ENDS]) + RISE:
        problems.append("the reward did not rise")
    if _policy_difference(history) > DIFFERENCE:
        problems.append(f"trainer and servers differ: log-probabilities by {_policy_difference(history):.2f}")
    for fault in history.faults:
        if fault.done_at is None:
            problems.append(f"{fault.signal} to {fault.role} of {fault.replica} found no moment")
        elif fault.back_s is None and fault.progress < 0.9:
            problems.append(f"{fault.replica} did not come back after {fault.signal} to its {fault.role}")


def _syncs(state_dir: Path) -> list[dict[str, Any]]:
    """Return the ends of all publishes, from the run's event log."""
    found = []
    for path in (state_dir / "events.jsonl.1", state_dir / "events.jsonl"):
        lines = path.read_text().splitlines() if path.exists() else []
        events = (json.loads(line).get("event", {}) for line in lines)
        found += [event for event in events if event.get("type") == "SyncEnded"]
    return found


def _policy_difference(history: History) -> float:
    """Return the difference between trainer and servers on the sampled tokens: TRL's
    figure, the median of all steps."""
    name = "sampling/sampling_logp_difference/mean"
    found = [float(step[name]) for step in history.steps if name in step]
    return statistics.median(found or [0.0])


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _summary(history: History) -> dict[str, Any]:
    held = [step["replicas/copied_seconds"] for step in history.steps if "replicas/copied_seconds" in step]
    sampler = history.sampler
    assert sampler is not None
    return {
        "reward_first": _mean(history.rewards[:ENDS]),
        "reward_last": _mean(history.rewards[-ENDS:]),
        "steps": len(history.steps),
        "versions_committed": history.committed(),
        "trainer_held_median_s": statistics.median(held) if held else None,
        "policy_difference_median": _policy_difference(history),
        "staleness_worst": max(history.staleness, default=0),
        "answers_sampled": sum(count for versions in sampler.answers.values() for count in versions.values()),
        "answers_refused": sampler.refused,
        "faults": [
            {
                "process": f"{one.role} of {one.replica}",
                "signal": one.signal,
                "in_load": one.in_load,
                "step": one.step,
                "back_s": one.back_s,
            }
            for one in history.faults
            if one.done_at is not None
        ],
        "wall_s": history.wall_s,
        "problems": history.problems,
    }


def print_summary(console: Console, history: History, out: Path) -> None:
    summary = _summary(history)
    table = Table(title="GRPO with TRL and vLLM", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    held = summary["trainer_held_median_s"]
    table.add_row("reward, first → last", f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}")
    table.add_row("steps", f"{summary['steps']} of {history.steps_wanted}")
    table.add_row("versions committed", str(summary["versions_committed"]))
    table.add_row("trainer held by a publish, median", "-" if held is None else f"{held:.3f} s")
    table.add_row("worst staleness of a ready server", f"{summary['staleness_worst']} versions")
    table.add_row("log-probabilities, trainer / servers", f"differ by {summary['policy_difference_median']:.3f}")
    table.add_row("answers sampled / refused", f"{summary['answers_sampled']} / {summary['answers_refused']}")
    for fault in (one for one in history.faults if one.done_at is not None):
        back = "not back" if fault.back_s is None else f"back after {fault.back_s:.0f} s"
        table.add_row(f"{fault.signal}, {fault.role} of {fault.replica}, step {fault.step}", back)
    table.add_row("wall time", f"{history.wall_s:.0f} s")
    console.print(table)
    console.print(
        f"saved {out / 'reward.png'} and {out / 'summary.json'}; logs: {out / 'run' / 'logs'}", soft_wrap=True
    )
    console.print(f"the whole run, to look through in a browser: {out / 'report.html'}", soft_wrap=True)
    for problem in history.problems:
        console.print(f"[bold red]FAILED[/]: {problem}", soft_wrap=True)


def save(history: History, out: Path) -> None:
    """Write ``summary.json``, ``report.html`` and ``reward.png`` into ``out``."""
    series = {"rewards": history.rewards, "staleness": history.staleness}
    (out / "summary.json").write_text(json.dumps({**_summary(history), **series}, indent=1) + "\n")
    command = [sys.executable, "-m", "replicas", "report", str(out / "run"), "-o", str(out / "report.html")]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    import matplotlib as mpl  # a heavy import, wanted only here

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=[3, 1], layout="constrained")
    steps = [step["step"] for step in history.steps]
    smooth = [_mean(history.rewards[max(0, end - ENDS) : end]) for end in range(1, len(steps) + 1)]
    above.plot(steps, history.rewards, color="tab:green", alpha=0.35, label="each step")
    above.plot(steps, smooth, color="tab:green", linewidth=2, label=f"mean of {ENDS} steps")
    above.set_ylim(0, 1.02)
    above.set_ylabel("reward (1 = all sums right)")
    above.set_title("SmolLM2-135M learns to add: TRL, two vLLM servers")
    below.step(steps, history.staleness, color="tab:blue")
    below.set_ylabel("staleness\n[versions]")
    below.set_xlabel("step")
    for number, fault in enumerate(history.faults):
        label = (
            f"{fault.signal}, {fault.role} of {fault.replica}" if len(history.faults) == 1 else "a process is killed"
        )
        above.axvline(fault.step, color="tab:red", linestyle="--", linewidth=1, label="" if number else label)
        below.axvline(fault.step, color="tab:red", linestyle="--", linewidth=1)
    above.legend(loc="lower right")
    figure.savefig(out / "reward.png", dpi=120)
    plt.close(figure)
