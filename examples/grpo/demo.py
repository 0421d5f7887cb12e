"""`make demo`: a GRPO run under a live view, with one rollout replica killed on the
way.

    python examples/grpo/demo.py [--no-kill] [--seed N] [--steps N] [--out DIR]
                                 [--patience SECONDS]

The supervisor is embedded: this is one asyncio program that starts the run of grpo.toml
(with its own steps, seed and folder), watches it, kills one rank of ``rollout/1`` with
SIGKILL at 40 % of the steps, and reports. It exits with 1 when the reward did not rise,
a version was torn, a replica went back to older weights, or the killed replica did not
return.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from board import Board
from history import History, Kill
from records import RecordReader
from report import print_summary, save
from rich.console import Console

from replicas import Supervisor, errors

HERE = Path(__file__).resolve().parent
VICTIM = "rollout/1"
KILL_AT = 0.4
PATIENCE_S = 300.0
"""Seconds without a step or a change of a replica's state until the demo gives up."""
PERIOD_S = 0.2


def plan(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the config of grpo.toml, with this run's steps, seed and folders."""
    config: dict[str, Any] = tomllib.loads((HERE / "grpo.toml").read_text())
    config["run"]["state_dir"] = str(out / "run")
    rollouts = config["groups"]["rollout"]["replicas"]
    seed = ["--seed", str(options.seed)]
    config["groups"]["trainer"]["command"] = [
        "train.py",
        "--steps",
        str(options.steps),
        *seed,
        "--rollouts",
        str(rollouts),
    ]
    config["groups"]["rollout"]["command"] = ["rollout.py", *seed]
    for group in config["groups"].values():
        group["cwd"] = str(HERE)
        group["env"]["GRPO_RECORDS"] = str(out / "records")
    return config


class Demo:
    """Watches one run, and kills one rank of it."""

    def __init__(
        self, supervisor: Supervisor, board: Board, history: History, records: RecordReader, *, kill: bool
    ) -> None:
        self._supervisor = supervisor
        self._board = board
        self._history = history
        self._records = records
        self._kill = kill
        self._states: dict[str, str] = {}
        self._progress = (time.monotonic(), -1)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step, or the last change of a replica's state."""
        return time.monotonic() - self._progress[0]

    def look(self) -> None:
        """Read new records and states, and show them; kill the rank when it is time."""
        for record in self._records.new():
            if (text := self._history.add(record)) is not None:
                self._board.say(text)
        self._history.status = self._supervisor.status()
        for replica in self._history.replicas():
            if self._states.get(replica.name) != replica.state:
                self._states[replica.name] = replica.state
                self._progress = (time.monotonic(), self._history.step)
                reason = f": {replica.reason}" if replica.reason and replica.state in ("backoff", "failed") else ""
                self._board.say(f"{replica.name} is {replica.state}{reason}")
        if self._history.step != self._progress[1]:
            self._progress = (time.monotonic(), self._history.step)
        if self._history.kill is not None:
            self._watch_recovery(self._history.kill)
        elif self._kill and self._history.step >= KILL_AT * self._history.steps_wanted:
            self._kill_one()
        self._board.show()

    def _kill_one(self) -> None:
        victim = next(replica for replica in self._history.replicas() if replica.name == VICTIM)
        pid = self._rank_pid()
        if victim.state != "ready" or pid is None:
            return  # not up yet; the next look tries again
        handle = os.pidfd_open(pid)
        try:
            if b"rollout.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                raise RuntimeError(f"process {pid} is not a rank of {VICTIM}")
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        self._history.kill = Kill(VICTIM, pid, self._history.step, time.monotonic(), victim.generation)
        self._board.say(f"kill -9 {pid}, the rank of {VICTIM}, at step {self._history.step}")

    def _rank_pid(self) -> int | None:
        """Return the pid in the ``info`` of the victim's rank, or None."""
        members = self._history.policy.members if self._history.policy else ()
        pids = [int(member.info["pid"]) for member in members if member.name == f"{VICTIM}/0" and "pid" in member.info]
        return pids[0] if pids else None

    def _watch_recovery(self, kill: Kill) -> None:
        victim = next(replica for replica in self._history.replicas() if replica.name == kill.replica)
        if kill.recovery_s is None and victim.generation > kill.generation and victim.state == "ready":
            kill.recovery_s = time.monotonic() - kill.time_s
            kill.step_after = self._history.step
            version = victim.versions.get("policy")
            self._board.say(f"{kill.replica} is back after {kill.recovery_s:.1f} s, with version {version}")


async def run(options: argparse.Namespace, out: Path, console: Console) -> History:
    history = History(options.steps)
    with Board(console, history) as board:
        async with Supervisor(plan(options, out)) as supervisor:
            board.say(f"supervisor at http://{supervisor.status().endpoint} (/status, /metrics, /readyz)")
            demo = Demo(supervisor, board, history, RecordReader(out / "records"), kill=not options.no_kill)
            ending = asyncio.create_task(supervisor.run_until_done())
            while not ending.done():
                await asyncio.wait({ending}, timeout=PERIOD_S)
                demo.look()
                if demo.stalled_s > options.patience:
                    history.gave_up = f"no step and no change for {options.patience:g} s; --patience S waits longer"
                    ending.cancel()
                    break
            else:
                history.exit_code = ending.result()
                demo.look()
            await asyncio.gather(ending, return_exceptions=True)
        history.wall_s = board.elapsed_s
    return history


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO over replicas: learn to sort digits, and survive a kill -9.")
    parser.add_argument("--no-kill", action="store_true", help="do not kill a rollout replica on the way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="give up after so many seconds without progress (%(default)g)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for plot, summary and logs")
    options = parser.parse_args()
    out = options.out.resolve()
    (out / "records").mkdir(parents=True, exist_ok=True)
    for left in (out / "records").glob("*.jsonl"):  # from an earlier run
        left.unlink()
    console = Console()
    if importlib.util.find_spec("matplotlib") is None:
        console.print("matplotlib is not installed: the run is not drawn (pip install matplotlib, or use make demo)")
    try:
        history = asyncio.run(run(options, out, console))
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is ended")
        return 130
    except errors.ReplicasError as error:
        console.print(f"[bold red]FAILED[/]: {type(error).__name__}: {error}", soft_wrap=True)
        return 1
    save(history, out)
    print_summary(console, history, out)
    return 1 if history.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
