"""How long does a new reader of an archive take, and what does an archive cost a run?

    python bench/bench_archive_time.py [--quick] [--repetitions N] [--only PART ...]

* ``joiner``: 269 MB of bfloat16 after 20 steps (a random 1 % of the elements in each):
  ``follow`` until it yields the newest version, beside obstore's download of the first
  version's whole, which checks nothing; each with a store of its own. The storage is a
  folder, moto's S3 server on loopback, and that server behind a link of 1 Gbit/s.
* ``run``: a trainer that publishes 64 MiB every 0.3 s (1 % changed), and a rollout that
  loads, under a supervisor: without an archive, with one in a folder, and with one
  whose storage is down. Of each run the medians, after a third of the publishes: the
  call of ``publish``, and from the call to the receipt. Noise is what the runs without
  an archive differ by: the others' median is to be no longer than the longest of these.

The order changes with every repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import from_url

import replicas
from bench.bench_archive import VERSIONS, random_steps
from bench.shapes import FULL, SMALL, nbytes_of
from bench.support import Bar, Spread, busy_ratio, machine, rotated, run_bench, show, write
from bench.trees import supervised, until
from replicas.archive import ArchiveKey, Version, Writer
from replicas.archive.keys import make_pem
from replicas.core.base.manifest import Manifest, TensorSpec

LINK_RATE, JOINED = 125e6, 1.2
BUCKET = "s3://bucket/run"
ENV = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_REGION": "us-east-1"}
WORDS, PUBLISHES, QUICK = 32 << 20, 30, 12
TRAINER = """
import json, sys, time, torch, replicas
words = torch.randint(0x3C00, 0x3D00, ({words},), dtype=torch.int16)
with replicas.join("policy") as channel, open("{told}", "a", buffering=1) as told:
    for _ in range({publishes}):
        words[torch.randint(len(words), (len(words) // 100,))] += 1
        began = time.monotonic()
        pending = channel.publish({{"w": words.view(torch.bfloat16)}})
        held = time.monotonic()
        pending.wait(60)
        told.write(json.dumps([held - began, time.monotonic() - began]) + chr(10))
        time.sleep(max(0.0, began + 0.3 - time.monotonic()))
    time.sleep(3600)
"""
ROLLOUT = """
import torch, replicas
model = {{"w": torch.zeros({words}, dtype=torch.bfloat16)}}
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            update.load_into(model)
"""
Samples = dict[str, list[float]]


def link(listen: socket.socket, port: int) -> None:
    """Carry connections to ``port``; all answers together take their time."""
    free_at = 0.0

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, rate: float) -> None:
        nonlocal free_at
        with closing(sink), suppress(OSError):
            while data := await source.read(1 << 18):
                free_at = max(free_at, time.monotonic() - 0.02) + len(data) / rate  # it sleeps for too long
                await asyncio.sleep(free_at - time.monotonic())
                sink.write(data)
                await sink.drain()

    async def connect(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(source, there, 1e12), carry(back, sink, LINK_RATE))

    async def serve() -> None:
        await (await asyncio.start_server(connect, sock=listen)).serve_forever()

    asyncio.run(serve())


@contextmanager
def s3(folder: str) -> Iterator[tuple[str, str]]:
    """moto's server with the objects of a folder: its endpoint, and that of a link."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as listen:
        port, slow = free.getsockname()[1], listen.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        carrier = multiprocessing.get_context("fork").Process(target=link, args=(listen, port), daemon=True)
        carrier.start()
        os.environ.update(ENV, AWS_ENDPOINT=f"http://127.0.0.1:{port}", AWS_ALLOW_HTTP="true")

        def made() -> bool:
            with suppress(OSError):
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                return bool(urllib.request.urlopen(request).close() is None)
            return False

        try:
            until(made, "moto's server")
            for path in Path(folder).rglob("*.*"):
                store_of(BUCKET).put(str(path.relative_to(folder)), path, use_multipart=False)
            store_of(BUCKET).put("policy/latest", Path(folder, "policy", "latest"))
            yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{slow}"
        finally:
            server.kill()
            server.wait()
            carrier.kill()


def store_of(url: str) -> Any:
    """obstore's own store."""
    return from_url(url) if url.startswith("file") else from_url(url, client_options={"allow_http": True})


def downloaded(url: str, name: str) -> float:
    began = time.perf_counter()
    data = store_of(url).get(name).bytes()
    spent = time.perf_counter() - began
    assert len(data)
    return spent


def joined(url: str, key: str, version: int) -> float:
    began = time.perf_counter()
    with closing(replicas.follow(url, "policy", key=key, timeout=60)) as follower, next(follower) as update:
        spent = time.perf_counter() - began
        assert update.version == version
    return spent


def joiners(nbytes: int, repetitions: int) -> dict[str, Samples]:
    """Seconds of both, by storage."""
    key, manifest = ArchiveKey(make_pem()), Manifest((TensorSpec("w", "bfloat16", (nbytes // 2,)),))
    found: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory() as folder:
        local = f"file://{folder}"
        writer = Writer(local, "policy", run="bench", key=key)
        for number, data in zip(range(1, VERSIONS + 1), random_steps(nbytes), strict=False):
            image = np.concatenate([np.frombuffer(manifest.header, np.uint8), data])
            writer.write(Version(number, image.data, manifest))
        (whole,) = (str(path.relative_to(folder)) for path in Path(folder).rglob("00000001-*.safetensors"))
        with s3(folder) as (fast, slow):
            places = {"a folder": (local, ""), "S3 on loopback": (BUCKET, fast), "S3, 1 Gbit/s": (BUCKET, slow)}
            for number in range(repetitions):
                for place in rotated([*places], number):
                    url, os.environ["AWS_ENDPOINT"] = places[place]
                    ways: dict[str, Callable[[], float]] = {"download": partial(downloaded, url, whole)}
                    ways["joiner"] = partial(joined, url, key.public, VERSIONS)
                    for way in rotated([*ways], number):
                        found.setdefault(place, {}).setdefault(way, []).append(ways[way]())
    return found


def published(folder: Path, archive: str, words: int, publishes: int) -> tuple[float, float]:
    """Medians of a run: seconds that publish blocks, and until the receipt."""
    folder.mkdir()
    told = folder / "told.jsonl"
    (folder / "trainer.py").write_text(TRAINER.format(words=words, told=told, publishes=publishes))
    (folder / "rollout.py").write_text(ROLLOUT.format(words=words))
    text = "".join(f'[groups.{name}]\ncommand = ["{folder}/{name}.py"]\n' for name in ("trainer", "rollout"))
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    text += f'[channels.policy.archive]\nto = "{archive}"\n' if archive else ""
    with supervised(folder / "run", text):
        until(lambda: told.exists() and told.read_text().count("\n") == publishes, "all are published", 300.0)
        rows = [json.loads(line) for line in told.read_text().splitlines()][publishes // 3 :]
        stored = [*Path(folder, "archive").rglob("entries/*.json")]
        assert stored or not archive.startswith("file"), "nothing was archived"
    held, committed = (statistics.median(column) for column in zip(*rows, strict=True))
    return held, committed


def runs(words: int, publishes: int, repetitions: int) -> dict[str, Samples]:
    """Medians of runs, by the archive that they have."""
    found: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and it does not listen
        down = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        os.environ.update(ENV, AWS_ENDPOINT=down, AWS_ALLOW_HTTP="true")
        for number in range(repetitions):
            for name in rotated(["no archive", "a folder", "storage down"], number):
                where = Path(folder, f"{name.replace(' ', '-')}-{number}")
                archive = {"a folder": f"file://{where}/archive", "storage down": BUCKET}.get(name, "")
                for kind, median in zip(
                    ("held", "committed"), published(where, archive, words, publishes), strict=True
                ):
                    found.setdefault(name, {}).setdefault(kind, []).append(median)
    return found


def bars_of(found: dict[str, dict[str, Samples]]) -> list[Bar]:
    bars = []
    for place, ways in found.get("joiner", {}).items():
        ratio = statistics.median(ways["joiner"]) / statistics.median(ways["download"])
        bars.append(Bar(f"joiner from {place}, of a download (at most {JOINED})", ratio, ratio <= JOINED))
    for name, kinds in found.get("run", {}).items():
        for kind, samples in kinds.items() if name != "no archive" else ():
            usual = Spread(found["run"]["no archive"][kind])
            ratio, noise = statistics.median(samples) / usual.median, max(usual.samples) / usual.median
            bars.append(Bar(f"{kind} with {name}, of no archive (at most {noise:.2f})", ratio, ratio <= noise))
    return bars


async def run(options: argparse.Namespace) -> None:
    repetitions, quick = options.repetitions or (3 if options.quick else 7), options.quick
    busy = await busy_ratio()
    found: dict[str, dict[str, Samples]] = {}
    if "joiner" in options.only:
        found["joiner"] = joiners(nbytes_of(SMALL if quick else FULL), repetitions)
    if "run" in options.only:
        found["run"] = runs(*((WORDS // 8, QUICK) if quick else (WORDS, PUBLISHES)), repetitions)
    rows: list[list[str] | None] = []
    for places in found.values():
        for place, ways in places.items():
            rows += [[place, way, *Spread(samples).cells()] for way, samples in ways.items()]
    bars = bars_of(found)
    notes = "\n".join([*(bar.line() for bar in bars), f"busy before: {busy:.2f}"])
    show("An archive in time", ["storage", "", "median", "range"], rows, notes)
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    facts = {"machine": machine(), "busy_before": busy, "quick": quick}
    write("bench_archive_time", {**facts, **found, "bars": kept})


def main() -> None:
    parser = argparse.ArgumentParser(description="What an archive takes in time.")
    parser.add_argument("--quick", action="store_true", help="an eighth of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--only", nargs="+", choices=("joiner", "run"), default=("joiner", "run"), help="default: both")
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()
