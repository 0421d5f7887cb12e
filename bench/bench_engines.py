"""What does a sync cost a trainer, and two vLLM servers that take its weights?

    .venv-engines/bin/python -m bench.bench_engines MODEL [--repetitions N]

A trainer and four released vLLM servers on one host, supervised: two follow a channel
(``python -m replicas.integrations.vllm serve``), two are plain ``vllm serve``, whose
weights the trainer replaces as vLLM's documentation tells: it saves a checkpoint (here
in /dev/shm, which is faster than any disk), and asks both servers at once to pause, to
reload it, to reset the prefix cache and to resume. One after the other, the order
changes with every repetition; the servers get no other requests.

Of the time that a follower's engine is paused, "ours" is what the library adds to the
engine's own load: the time until a worker has the version open, from the logs of both.

TRL's own transfers of weights (and vLLM's other backends) are NCCL's or CUDA's, and do
not run on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.support import Bar, Spread, machine, run_bench, scratch, show, write
from replicas import Supervisor

HERE = Path(__file__).parent
WARM_UPS = 1
START_TIMEOUT_S = 600.0
ROUND_TIMEOUT_S = 60.0
HELD_BAR = 1.3
COMMIT_BAR_S = 0.15
OURS_BAR = 0.1
OPTIONS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
SERVED = re.compile(r"version (\d+) is served: paused in \S+ s, loaded in (\S+) s, resumed in (\S+) s")
RECEIVED = re.compile(r"version (\d+): received in (\S+) s")


def plan(model: Path, folder: Path, repetitions: int, ports: list[int]) -> dict[str, Any]:
    """The run: its trainer measures."""
    groups: dict[str, Any] = {
        "trainer": {
            "command": [str(HERE / "engine_rank.py"), str(model), str(folder), str(repetitions), *map(str, ports)],
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "server": {
            "replicas": 2,
            "command": ["-m", "replicas.integrations.vllm", "serve", str(model), *OPTIONS],
            "env": ENVIRONMENT,
        },
    }
    for number, port in enumerate(ports):
        command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *OPTIONS, "--port", str(port)]
        groups[f"plain{number}"] = {"command": command, "env": {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}}
    for group in groups.values():
        group |= {"launcher": "exec", "restart": {"max_restarts": 0}}
    return {
        "schema_version": 1,
        "run": {"name": "bench-engines", "stop_when": ["trainer"], "state_dir": str(folder / "run")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": groups,
        "channels": {"policy": {"sources": ["trainer"], "targets": ["server"], "slots": 3}},
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def measure(model: Path, folder: Path, repetitions: int) -> list[dict[str, Any]]:
    limit_s = START_TIMEOUT_S + ROUND_TIMEOUT_S * (repetitions + WARM_UPS)
    async with Supervisor(plan(model, folder, repetitions + WARM_UPS, free_ports(2))) as supervisor:
        async with asyncio.timeout(limit_s):
            code = await supervisor.run_until_done()
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    if code != 0 or len(rows) != repetitions + WARM_UPS:
        logs = "".join(path.read_text()[-2000:] for path in (folder / "run" / "logs" / "trainer").glob("*/*/*.log"))
        raise RuntimeError(f"the run ended with {code} after {len(rows)} rounds:\n{logs}")
    return rows[WARM_UPS:]


def pauses(folder: Path, versions: set[int]) -> list[tuple[float, float]]:
    """Of each load of these versions: seconds of the pause, and of ours in it."""
    found = []
    for logs in (folder / "run" / "logs" / "server").iterdir():
        text = "".join(path.read_text() for path in sorted(logs.glob("*/*.log")))
        received = {int(one[1]): float(one[2]) for one in RECEIVED.finditer(text)}
        for one in SERVED.finditer(text):
            if int(one[1]) in versions:
                found.append((float(one[2]) + float(one[3]), received[int(one[1])]))
    return found


def report(rows: list[dict[str, Any]], ours: list[tuple[float, float]]) -> dict[str, Any]:
    def spread(key: str) -> Spread:
        return Spread([row[key] for row in rows])

    held, saved, copied = spread("held_s"), spread("saved_s"), spread("copied_s")
    committed, served, reloaded = spread("committed_s"), spread("served_s"), spread("reloaded_s")
    paused, disk_paused = Spread([pause for pause, _ in ours]), Spread([one for row in rows for one in row["paused_s"]])
    table = [
        ["one copy of the bytes", "", *copied.cells(copied)],
        None,
        ["replicas", "the trainer is held", *held.cells(copied)],
        ["", "committed on both", *committed.cells(copied)],
        ["", "both engines serve it", *served.cells(copied)],
        ["", "an engine is paused", *paused.cells(copied)],
        None,
        ["vLLM, from a checkpoint", "the trainer saves", *saved.cells(copied)],
        ["", "both engines serve it", *reloaded.cells(copied)],
        ["", "an engine is paused", *disk_paused.cells(copied)],
    ]
    nbytes = rows[0]["nbytes"]
    show(f"{nbytes / 1e6:.0f} MB to two vLLM servers", ["", "", "median", "range", "x copy"], table)
    ratio = statistics.median(row["held_s"] / row["copied_s"] for row in rows)
    share = statistics.median(part / whole for whole, part in ours)
    bars = [
        Bar(f"held, in copies of the bytes (at most {HELD_BAR})", ratio, ratio <= HELD_BAR),
        Bar(f"publish to committed, in seconds (at most {COMMIT_BAR_S})", committed.median, committed.median <= COMMIT_BAR_S),
        Bar(f"ours of the time that an engine is paused (at most {OURS_BAR})", share, share <= OURS_BAR),
    ]  # fmt: skip
    print(*(bar.line() for bar in bars), sep="\n")
    print(f"served in {served.median / reloaded.median:.2f} of the time that vLLM's reload of a checkpoint takes")
    return {"rounds": rows, "pauses": ours, "bars": {bar.text: bar.figure for bar in bars}}


async def main(options: argparse.Namespace) -> None:
    with scratch("/dev/shm") as found:
        folder = Path(found)
        rows = await measure(options.model.absolute(), folder, options.repetitions)
        result = report(rows, pauses(folder, {row["version"] for row in rows}))
    write("engines", {"machine": machine(), **result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sync of a trainer and two vLLM servers.")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--repetitions", type=int, default=9)
    run_bench(main(parser.parse_args(sys.argv[1:])))
