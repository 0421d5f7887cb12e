"""What do agents cost, and what does a run pay for a supervisor that is replaced?

    python bench/bench_cluster.py [--quick] [--repetitions N] [--only PART ...]

Two parts, each described in its own file: a supervisor of 4, 16 and 32 agents with 4
trivial replicas each, all on this machine (``agents``, ``bench/cluster_agents.py``),
and a supervisor that is killed with -9 under a loop of publishes, and replaced
(``adopt``, ``bench/cluster_adopt.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import cluster_adopt, cluster_agents
from bench.cluster_agents import EACH, AgentsSample
from bench.supervisor_scale import p99
from bench.support import Bar, Spread, busy_ratio, in_words, machine, scratch, show, write

PARTS = ("agents", "adopt")
UP_LIMIT_S = 30.0
IDLE_LIMIT = 0.05
STATUS_LIMIT_S = 0.1
LINEAR_LIMIT = 1.5
"""How many times as much each agent from 16 to 32 may take to come up as each from 4 to
16."""
STEP_LIMIT_S = 0.05
"""How much longer than the median the trainer's longest step may take."""
COMMIT_LIMIT_S = 3.0


def told(sample: object) -> None:
    """Show that the run goes on."""
    print(str(sample)[:400], file=sys.stderr, flush=True)


def _report(title: str, columns: Sequence[str], table: list[list[str] | None], bars: list[Bar]) -> list[Any]:
    show(title, columns, table, "\n".join(bar.line() for bar in bars))
    return [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


# ------------------------------------------------------------ agents


def agents(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    samples: list[AgentsSample] = []
    for repetition in range(repetitions):
        for size in cluster_agents.SIZES:
            samples.append(cluster_agents.measure(folder / f"{repetition}-{size}", size))
            told(samples[-1])
    by_size = {size: [one for one in samples if one.agents == size] for size in cluster_agents.SIZES}
    columns = ("agents", "up", "down", "supervisor idle", "agent idle", "status p99", "agent PSS", "RSS", "supervisor")
    table: list[list[str] | None] = [_agents_row(size, those) for size, those in by_size.items()]
    rows = _report(f"Agents with {EACH} replicas of a trivial command each", columns, table, _agents_bars(by_size))
    return {"samples": msgspec.to_builtins(samples), "bars": rows}


def _median(samples: Sequence[AgentsSample], value: Callable[[AgentsSample], float]) -> float:
    return Spread([value(sample) for sample in samples]).median


def _agents_row(size: int, samples: list[AgentsSample]) -> list[str]:
    return [
        str(size),
        in_words(_median(samples, lambda one: one.up_s)),
        in_words(_median(samples, lambda one: one.down_s)),
        f"{_median(samples, lambda one: one.idle['supervisor']):.1%}",
        f"{_median(samples, lambda one: one.idle['agent'] / one.agents):.2%}",
        in_words(_median(samples, lambda one: p99(one.status_s))),
        _mib(_median(samples, lambda one: one.agent_pss_nbytes)),
        _mib(_median(samples, lambda one: one.agent_rss_nbytes)),
        _mib(_median(samples, lambda one: one.supervisor_pss_nbytes)),
    ]


def _agents_bars(by_size: dict[int, list[AgentsSample]]) -> list[Bar]:
    few, some, many = sorted(by_size)
    up = {size: _median(samples, lambda one: one.up_s) for size, samples in by_size.items()}
    idle = _median(by_size[many], lambda one: one.idle["supervisor"])
    status_s = _median(by_size[many], lambda one: p99(one.status_s))
    growth = ((up[many] - up[some]) / (many - some)) / max((up[some] - up[few]) / (some - few), 1e-9)
    return [
        Bar(f"{many} agents, {many * EACH} replicas up, s (limit {UP_LIMIT_S:g})", up[many], up[many] < UP_LIMIT_S),
        Bar(f"the supervisor idle, % of a core (limit {IDLE_LIMIT:.0%})", idle * 100, idle < IDLE_LIMIT),
        Bar(f"status p99, ms (limit {STATUS_LIMIT_S * 1e3:g})", status_s * 1e3, status_s < STATUS_LIMIT_S),
        Bar(f"a later agent takes x times an early one (limit {LINEAR_LIMIT:g})", growth, growth <= LINEAR_LIMIT),
    ]


# ------------------------------------------------------------ adopt


def adopt(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    samples = cluster_adopt.measure(folder, 2 * repetitions, told)
    spreads = {
        "start of the whole run": Spread([one.start_s for one in samples[:1]]),
        "taken over": Spread([one.taken_over_s for one in samples]),
        "next commit": Spread([one.commit_s for one in samples]),
        "longest publish": Spread([one.publish_s for one in samples]),
    }
    growth_s = max(one.step_growth_s for one in samples)
    commit_s, missed = spreads["next commit"].median, sum(one.versions_missed for one in samples)
    table: list[list[str] | None] = [[what, *spread.cells()] for what, spread in spreads.items()]
    bars = [
        Bar(
            f"the trainer's longest step beyond its median, ms (limit {STEP_LIMIT_S * 1e3:g})",
            growth_s * 1e3,
            growth_s < STEP_LIMIT_S,
        ),
        Bar(f"next commit after the new start, s (limit {COMMIT_LIMIT_S:g})", commit_s, commit_s < COMMIT_LIMIT_S),
        Bar("kills after which all processes were the same", *_same(samples)),
        Bar("version numbers that were not committed (limit 0)", missed, missed == 0),
    ]
    rows = _report("kill -9 of the supervisor, replaced at once", ("", "median", "range"), table, bars)
    return {"samples": msgspec.to_builtins(samples), "bars": rows}


def _same(samples: Sequence[cluster_adopt.AdoptSample]) -> tuple[int, bool]:
    return sum(one.same for one in samples), all(one.same for one in samples)


# ------------------------------------------------------------ all


def run(parts: Sequence[str], quick: bool, repetitions: int) -> None:
    measures = {"agents": agents, "adopt": adopt}
    busy, load = asyncio.run(busy_ratio()), os.getloadavg()
    result: dict[str, Any] = {}
    with scratch() as folder:
        for part in parts:
            result[part] = measures[part](Path(folder) / part, quick, repetitions)
    facts = {"busy_before": busy, "load": load, "quick": quick, "repetitions": repetitions}
    print(f"Others used {busy:.0%} of the cores before.")
    write("bench_cluster", {"machine": machine(), **facts, **result})


def main() -> None:
    parser = argparse.ArgumentParser(description="What agents cost, and a supervisor that is replaced.")
    parser.add_argument("--quick", action="store_true", help="1 repetition")
    parser.add_argument("--repetitions", type=int, default=None, help="default 3")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all parts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(options.only, options.quick, options.repetitions or (1 if options.quick else 3))


if __name__ == "__main__":
    main()
