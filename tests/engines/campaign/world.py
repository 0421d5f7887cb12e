"""Two servers behind the URL of a released router, clients that ask it all the time,
and faults of one server at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas import errors
from replicas.engine import PauseMode
from replicas.integrations.router import WorkerList, channel_of, ready_leaders
from replicas.linux.processes import die_with_parent
from tests.engines.campaign.judge import Answer
from tests.engines.programs.small_model import CONFIG
from tests.engines.world import MODEL, ON_A_CPU, START_S, VLLM_OPTIONS, EngineWorld
from tests.support.field.worlds import ask
from tests.support.runs import ROOT, Run, alive, running
from tests.support.waits import eventually

__all__ = ["CampaignWorld", "Clients", "campaign_world"]

SERVERS = 2
CLIENTS = 4
PREFIX = tuple(int(token) for token in torch.arange(64) * 37 % 20000 + 100)
"""Four blocks of the prefix cache."""
TOKENS = 8
ANSWER_S = 600.0
"""A request to a frozen server is tried on the other when that is given up."""
LOOK_S = 0.2
PAUSE_S = 0.8
"""Of a client between two requests, on average: all of them together ask less than a
server can answer, while the other one is away for a minute or more."""
ROLES = ("follower", "api", "core", "worker0")
FAULTS = (*((role, kind) for role in ROLES for kind in ("kill", "freeze")), ("trainer", "kill"))


def run_text(model: Path, out: Path, mode: PauseMode) -> str:
    serve = ["-m", "replicas.integrations.vllm", "serve", str(model), *VLLM_OPTIONS, "--pause-mode", mode]
    return f"""
[groups.trainer]
launcher = "exec"
command = ["{Path(__file__).parent}/trainer.py"]
restart = {{ max_restarts = 1000, window = "1h", initial_delay = "0s", no_progress_cycles = 0 }}
env = {{ OUT = "{out}", PYTHONPATH = "{ROOT}", HF_HUB_OFFLINE = "1" }}
[groups.server]
replicas = {SERVERS}
launcher = "exec"
command = {json.dumps([*serve, "--served-model-name", "small"])}
restart = {{ max_restarts = 1000, window = "1h", initial_delay = "0s", no_progress_cycles = 0 }}
health = {{ start_timeout = "30m" }}
{ON_A_CPU}"""


class CampaignWorld(EngineWorld):
    """The run, and what was published and served when."""

    def __init__(self, run: Run, out: Path) -> None:
        self.run, self._out = run, out
        self._floors: list[tuple[float, int]] = []
        """When it was looked, and the oldest version that a server answered with."""
        self._over = threading.Event()

    @contextmanager
    def watching(self, router: str) -> Iterator[None]:
        """Note what the servers answer with; the trainer ends with the block."""
        thread = threading.Thread(target=self._watch, args=(WorkerList(router),))
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(60)
            (self._out / "stop").touch()

    def _watch(self, router: WorkerList) -> None:
        """Of those that the router may ask: the status says so first, and of one that
        the router still has it may not say it any more."""
        known: dict[str, int] = {}
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(errors.ReplicasError, OSError):  # busy: it is looked at again
                asked, served = router.workers(), self.served()
                known |= served
                self._floors.append((time.monotonic(), min(known.get(url, 0) for url in {*asked, *served})))

    def served(self) -> dict[str, int]:
        """The versions that servers answer with, by their addresses."""
        leaders = ready_leaders(channel_of(self.run.status(), "policy"))
        return {one.info["url"]: one.loaded for one in leaders}

    def wait_for_all(self) -> None:
        """Each server answers with the version that is the newest now, or with a newer
        one."""
        newest = self.run.status().channels[0].committed_version

        def look() -> bool:
            served = self.served()
            return len(served) == SERVERS and min(served.values()) >= max(newest, 1)

        eventually(look, "all servers serve the newest version", timeout_s=START_S)

    def windows(self, answers: list[Answer]) -> list[range]:
        """Of each answer the seeds of the versions that might be served: from the
        oldest one that a server had when it was asked, to the newest that was begun."""
        lines = [json.loads(line) for line in (self._out / "published.jsonl").read_text().splitlines()]
        begun = [(line["at"], line["seed"]) for line in lines if "version" not in line]
        seeds = sorted((line["version"], line["seed"]) for line in lines if "version" in line)
        found = []
        for answer in answers:
            looked = bisect(self._floors, (answer.sent, 0))
            floor = self._floors[looked - 1][1] if looked else 0
            known = bisect(seeds, (floor, math.inf))
            oldest = seeds[known - 1][1] if known else 1
            newest = begun[bisect(begun, (answer.received, 0)) - 1][1]
            found.append(range(oldest, newest + 1))
        return found

    def strike(self, choose: random.Random) -> str:
        """One fault at a random moment of the trainer's publishes and the servers'
        loads, waited for until all is well again; what it was."""
        role, kind = choose.choice(FAULTS)
        replica = choose.randrange(SERVERS)
        self._over.wait(choose.uniform(0, 3))
        if role == "trainer":
            (trainer,) = self.run.status().groups[0].replicas
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGKILL)
            eventually(lambda: not alive(trainer.pid or 0), "the end of the trainer", timeout_s=60)
            self.wait_for_publish()
            self.wait_for_all()
            return "trainer killed"
        before = self.processes(replica)
        os.kill(before[role], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        eventually(lambda: not any(map(alive, before.values())), "the end of the engine", timeout_s=300)
        self.wait_for_all()
        return f"{role} of server {replica}: {kind}"

    def wait_for_publish(self) -> None:
        before = self.run.status().channels[0].committed_version
        eventually(lambda: self.run.status().channels[0].committed_version > before, "a commit", timeout_s=START_S)


class Clients:
    """Threads that ask the URL until there are enough answers.

    :ivar answers: all that came.
    :ivar aborted: how many requests a load has aborted (``--pause-mode abort``).
    :ivar lost: why others have no answer.
    """

    def __init__(self, url: str, enough: int, seed: int) -> None:
        self._url, self._enough, self._seed = url, enough, seed
        self.answers: list[Answer] = []
        self.aborted = 0
        self.lost: list[str] = []
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Clients:
        self._clients = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._pool:
            for client in self._clients:
                client.result(2 * ANSWER_S)

    def wait_for(self, count: int) -> None:
        """Until there are so many answers."""

        def enough() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()  # which raises
            return len(self.answers) + len(self.lost) >= count

        eventually(enough, f"{count} answers", timeout_s=4 * START_S)

    def _ask(self, number: int) -> None:
        choose = random.Random(f"{self._seed} {number}")
        while not self._over.wait(choose.uniform(0, 2 * PAUSE_S)):
            prompt = (*PREFIX, *(choose.randrange(100, 20000) for _ in range(4)))
            asked = {"model": "small", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 5}
            asked |= {"temperature": 1, "seed": choose.randrange(2**31), "return_tokens_as_token_ids": True}
            sent = time.monotonic()
            try:
                choice = ask(f"{self._url}/v1/completions", asked, timeout_s=ANSWER_S)["choices"][0]
            except urllib.error.HTTPError as error:
                self.lost.append(f"{error.code} {error.read()[:500]!r} after {time.monotonic() - sent:.1f} s")
                continue
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(f"{error} after {time.monotonic() - sent:.1f} s")
                continue
            if choice["finish_reason"] == "abort":
                self.aborted += 1
                continue
            self.answers.append(_answer(sent, prompt, choice["logprobs"]))


def _answer(sent: float, prompt: tuple[int, ...], told: dict[str, Any]) -> Answer:
    def number(token: str) -> int:
        return int(token.partition(":")[2])

    best = tuple({number(token): value for token, value in one.items()} for one in told["top_logprobs"])
    return Answer(sent, time.monotonic(), prompt, tuple(map(number, told["tokens"])), best)


@contextmanager
def campaign_world(folder: Path, mode: PauseMode) -> Iterator[tuple[CampaignWorld, str]]:
    """A run whose servers all serve, and the router's URL."""
    model, out = folder / "model", folder / "out"
    out.mkdir()
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(model)
    with running(folder, run_text(model, out, mode)) as run:
        world = CampaignWorld(run, out)
        world.wait_for_all()
        with _router(run) as url, world.watching(url):
            yield world, url
        run.end(timeout_s=60)


@contextmanager
def _router(run: Run) -> Iterator[str]:
    """vllm-router, with the run's servers as its workers."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "replicas.integrations.router", "--endpoint", run.endpoint(), "--port", f"{port}"]
    command += ["--policy", "round_robin", "--prometheus-port", f"{metrics}", "--log-level", "warning"]
    parent, url = os.getpid(), f"http://127.0.0.1:{port}"
    with (
        (run.folder / "router.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(parent)) as process,
    ):

        def full() -> bool:
            assert process.poll() is None, (run.folder / "router.log").read_text()[-4000:]
            try:
                return len(WorkerList(url).workers()) == SERVERS
            except OSError:
                return False

        try:
            eventually(full, "a router with all servers", timeout_s=START_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()
