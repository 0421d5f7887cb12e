"""`make demo-llm`: a language model learns by GRPO under a live view, with one engine
killed on the way.

    python llm_demo.py MODEL [--steps N] [--seed N] [--faults N] [--out DIR]

The supervisor is embedded: this program starts the run of llm.toml (TRL's trainer, two
vLLM servers, vLLM's router), watches it, kills the EngineCore of ``server/1`` with
SIGKILL at 40 % of the steps, and reports. ``--faults N`` in its place kills and freezes
N processes of the servers, drawn by the seed, over the whole run, half of them in the
moment of a load; 50 need some 150 steps. It exits with 1 when the reward did not rise,
trainer and servers computed with other weights, a server answered with a version that
was not committed or went back to an older one, the trainer failed, or an engine did not
come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from llm_board import Board
from llm_history import Fault, History
from llm_report import conclude, print_summary, save
from rich.console import Console
from servers import ROLES, Sampler, end, processes

from replicas import Supervisor
from replicas.status import ReplicaStatus

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
KILL_AT = 0.4
PATIENCE_S = 900.0
"""A step takes 13 to 30 s on two cores, and longer beside a server that starts."""
PERIOD_S = 0.25


def plan(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the config of llm.toml, with this run's model, port, steps, seed and
    folders."""
    config: dict[str, Any] = tomllib.loads((HERE / "llm.toml").read_text())
    config["run"]["state_dir"] = str(out / "run")
    config["logs"] = {"tee": "never"}  # the live view has the terminal; all lines are in the logs
    groups, model, port = config["groups"], str(options.model), str(_free_port())
    groups["server"]["command"] = [model if word == "MODEL" else word for word in groups["server"]["command"]]
    groups["router"]["command"] = [port if word == "PORT" else word for word in groups["router"]["command"]]
    url, steps = f"http://127.0.0.1:{port}", str(options.steps)
    groups["trainer"]["command"] = [
        *(str(HERE / "llm_train.py"), model, url, steps, str(options.seed), str(out / "records.jsonl"))
    ]
    groups["trainer"]["cwd"] = str(out)
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def faults(count: int, seed: int) -> list[Fault]:
    """Return the demo's single fault, or ``count`` faults drawn by the seed."""
    if not count:
        return [Fault(KILL_AT, "server/1", "core", "SIGKILL")]
    draw = random.Random(seed)
    # the last part of the run is left for recovery
    return [Fault((number + draw.random()) / (count + 1), *_drawn(draw)) for number in range(count)]


def _drawn(draw: random.Random) -> tuple[str, str, str, bool]:
    replica, role = draw.choice(["server/0", "server/1"]), draw.choice(ROLES)
    return replica, role, draw.choice(["SIGKILL", "SIGKILL", "SIGSTOP"]), draw.random() < 0.5


class Demo:
    """Watches one run, and injects its faults."""

    def __init__(self, supervisor: Supervisor, board: Board, history: History, records: Path) -> None:
        self._supervisor = supervisor
        self._board = board
        self._history = history
        self._records = records
        self._offset = 0
        self._committed = 0
        self._states: dict[str, str] = {}
        self._moved_s = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step or the last change of a replica's state."""
        return time.monotonic() - self._moved_s

    def look(self) -> None:
        """Read new records and states, inject due faults, and show the run."""
        history = self._history
        history.status = self._supervisor.status()
        self._read_records()
        for replica in (one for group in history.status.groups for one in group.replicas):
            if self._states.get(replica.name) != replica.state:
                self._states[replica.name] = replica.state
                self._moved_s = time.monotonic()
                reason = f": {replica.reason}" if replica.reason and replica.state in ("backoff", "failed") else ""
                self._board.say(f"{replica.name} is {replica.state}{reason}")
        servers = {replica.name: replica for replica in history.servers()}
        loading = history.committed() > self._committed
        self._committed = history.committed()
        for fault in history.faults:
            replica = servers[fault.replica]
            if fault.done_at is None:
                due = history.step >= max(1.0, fault.progress * history.steps_wanted)
                # one at a time, as the trainer needs a server
                if due and (loading or not fault.in_load) and all(one.state == "ready" for one in servers.values()):
                    self._strike(fault, replica)
                break  # one fault at a time
            if fault.back_s is None and replica.generation > fault.generation and replica.state == "ready":
                fault.back_s = time.monotonic() - fault.done_at
                self._board.say(f"{fault.replica} is back after {fault.back_s:.1f} s")
        if history.sampler is not None:
            history.sampler.look()
        self._board.show()

    def _read_records(self) -> None:
        if not self._records.exists():
            return
        with self._records.open() as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._offset += len(line.encode())
                self._history.steps.append(json.loads(line))
                self._moved_s = time.monotonic()
                versions = (one.versions.get("policy", 0) for one in self._history.servers() if one.state == "ready")
                loaded = [version for version in versions if version]  # 0: a process of the server has just died
                committed = self._history.committed()
                self._history.staleness.append(committed - min(loaded, default=committed))

    def _strike(self, fault: Fault, replica: ReplicaStatus) -> None:
        pid = processes(replica.pid).get(fault.role) if replica.pid is not None else None
        if pid is None:
            return  # not up yet; the next look tries again
        try:
            end(pid, getattr(signal, fault.signal))
        except ProcessLookupError:
            return
        fault.done_at, fault.step, fault.generation = time.monotonic(), self._history.step, replica.generation
        self._board.say(f"{fault.signal} to {pid}, the {fault.role} of {fault.replica}, at step {fault.step}")


async def run(options: argparse.Namespace, history: History, out: Path, console: Console) -> None:
    history.sampler = Sampler(history.urls)
    with Board(console, history) as board:
        async with Supervisor(plan(options, out)) as supervisor:
            board.say(f"supervisor at http://{supervisor.status().endpoint} (/status, /metrics, /readyz)")
            demo = Demo(supervisor, board, history, out / "records.jsonl")
            ending = asyncio.create_task(supervisor.run_until_done())
            interrupted = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
            while not ending.done() and not interrupted.is_set() and demo.stalled_s < options.patience:
                await asyncio.wait({ending}, timeout=PERIOD_S)
                demo.look()
            if ending.done():
                history.exit_code = ending.result()
            else:
                text = f"no step and no change for {options.patience:g} s; --patience S waits longer"
                history.problems.append("it was interrupted" if interrupted.is_set() else text)
                ending.cancel()
            board.say("ending all processes")
            await asyncio.gather(ending, return_exceptions=True)
        await asyncio.to_thread(history.sampler.close)
        history.wall_s = board.elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO with TRL and two vLLM servers, one of them killed on the way.")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0, help="kill and freeze so many processes, in place of one")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="give up after so many seconds without progress (%(default)g)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output") / "llm")
    options = parser.parse_args()
    options.model = options.model.absolute()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("records.jsonl", "summary.json", "reward.png"):
        (out / name).unlink(missing_ok=True)
    console = Console()
    history = History(options.steps, faults(options.faults, options.seed))
    asyncio.run(run(options, history, out, console))
    conclude(history, out / "run")
    save(history, out)
    print_summary(console, history, out)
    return 1 if history.problems else 0


if __name__ == "__main__":
    sys.exit(main())
