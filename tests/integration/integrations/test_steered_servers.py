"""Requests with random demands through HAProxy, to servers of one's own behind their
gates, while versions are promoted, rejected and rolled back, and whoever takes part is
killed (-9).

REQUESTS=100000 KILLS=50 SERVERS=8 for the long one, SEED for another.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from replicas import errors
from replicas.control.client import Client
from replicas.messages.version_orders import Label, Promote, Reject, Rollback, VersionOrder
from replicas.status import ChannelStatus
from tests.support.programs import group
from tests.support.root import ROOT
from tests.support.runs import Run, running
from tests.support.waits import eventually

REQUESTS = int(os.environ.get("REQUESTS", "4000"))
KILLS = int(os.environ.get("KILLS", "6"))
SERVERS = int(os.environ.get("SERVERS", "3"))
SEED = int(os.environ.get("SEED", "1"))
CLIENTS = 4
START_S = 240.0
LOOK_S = 0.05
OWN_SERVER = ROOT / "examples" / "own_engine"

TRAINER = """
import os, time, torch, replicas
out = os.environ["OUT"]
with replicas.join("policy") as channel:
    while True:
        asked = sorted((int(name) for name in os.listdir(out) if name.isdigit()))
        for number in asked:
            channel.publish({"weight": torch.full((8, 1), float(number))}, meta={"step": number}).wait(60)
            os.unlink(f"{out}/{number}")
        time.sleep(0.02)
"""
"""Publishes each number for which there is a file, as a weight."""


class Asked(NamedTuple):
    """One request, and what came of it.

    :ivar low, high: of the versions that the answer names; 0: there was none.
    :ivar version, value: of the body. :ivar pid, replica: of the server.
    """

    began: float
    ended: float
    demand: str
    status: int
    low: int = 0
    high: int = 0
    version: int = 0
    value: float = 0.0
    pid: int = 0
    replica: str = ""
    why: str = ""


def world_of(folder: Path, port: int) -> str:
    """The config of a run; its servers are those of the example, and say who they
    are."""
    source = (OWN_SERVER / "server.py").read_text()
    said = 'return 200, {"version": self.version,'
    assert said in source
    who = '"pid": os.getpid(), "replica": os.environ["REPLICA_ID"],'
    (folder / "server.py").write_text(
        source.replace(said, f"{said} {who}").replace("import socket", "import os, socket")
    )
    (folder / "my_engine.py").write_text((OWN_SERVER / "my_engine.py").read_text())
    budget = 'restart = { max_restarts = 1000, initial_delay = "50ms", max_delay = "1s", no_progress_cycles = 0 }\n'
    proxy = f'"-m", "replicas.integrations.haproxy", "--port", "{port}", "--path", "/answer"'
    return (
        group("trainer", TRAINER, f'env = {{ OUT = "{folder}/asked" }}\n{budget}')
        + f'[groups.server]\nlauncher = "exec"\ncommand = ["my_engine.py"]\nreplicas = {SERVERS}\n{budget}'
        + f'[groups.proxy]\nlauncher = "exec"\ncommand = [{proxy}]\n{budget}'
        + '[channels.policy]\nsources = ["trainer"]\ntargets = ["server"]\nmin_targets = 1\nfollow = "promoted"\n'
        + 'slots = 6\ncanary = { group = "server", share = "10%" }\n'
    )


class Fleet:
    """The run, its clients, and those who give its orders and kill its processes."""

    def __init__(self, run: Run, port: int) -> None:
        self.run, self.port = run, port
        self.random = random.Random(SEED)
        self.over = threading.Event()
        self.asked: list[Asked] = []
        self.steps: dict[int, float] = {}
        self.rejected: set[int] = set()
        self.served: set[int] = set()
        self.demands = ["current"]
        self.published = self.kills = 0

    def client(self) -> Client:
        token = (self.run.state_dir / "operator-token").read_text().strip()
        return Client(self.run.endpoint(), token=token)

    def channel(self) -> ChannelStatus:
        (found,) = self.run.status().channels
        return found

    def answered(self) -> int:
        """Number of answers so far."""
        return sum(one.status == 200 for one in list(self.asked))

    def is_reachable(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        found = self._ask(connection, "", 1)
        connection.close()
        return found.status == 200

    # ------------------------------------------------------------ what is known

    def watch(self) -> None:
        """Note what the status says of each version, until it is over."""
        while not self.over.wait(LOOK_S):
            with suppress(errors.ReplicasError, OSError):
                self.look()

    def look(self) -> None:
        """Note what the status says of each version, and what one may demand."""
        found = self.channel()
        for version in found.versions:
            if version.step is not None:
                self.steps[version.number] = version.step
            if version.rejected:
                self.rejected.add(version.number)
        self.served.add(found.current)
        numbers = [version.number for version in found.versions[:4]] + [found.current] * 3
        labels = ["current", "candidate", "previous", "mine"]
        self.demands = [str(number) for number in numbers] + [f">={number}" for number in numbers] + labels

    # ------------------------------------------------------------ requests

    def ask_often(self, seed: int) -> None:
        """Send requests until it is over, each on a connection that may be kept."""
        chance = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.over.is_set():
            demand = chance.choice(self.demands) if chance.random() < 0.7 else ""
            found = self._ask(connection, demand, chance.randrange(1, 1000))
            self.asked.append(found)
            if not found.status:  # the proxy is away
                self.over.wait(0.2)
            elif found.status == 503:
                self.over.wait(0.05)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, demand: str, x: int) -> Asked:
        began = time.monotonic()
        headers = {"X-Replicas-Version": demand} if demand else {}
        try:
            connection.request("POST", "/answer", json.dumps({"x": x}), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return Asked(began, time.monotonic(), demand, 0, why=type(error).__name__)
        ended = time.monotonic()
        if answer.status != 200:
            return Asked(began, ended, demand, answer.status, why=str(body))
        named = answer.headers.get("x-replicas-version", "0")
        low, _, high = named.partition("-")
        (product,) = set(body["answer"])
        who = body["pid"], body["replica"]
        return Asked(began, ended, demand, 200, int(low), int(high or low), body["version"], product / x, *who)

    # ------------------------------------------------------------ orders and kills

    def act(self) -> str:
        """Kill somebody if it is time, else do one thing at random; return its name."""
        if self.kills / KILLS < len(self.asked) / REQUESTS:
            self.kills += 1
            return self._kill()
        (act,) = self.random.choices([self._publish, self._order], [1, 2])
        try:
            return act()
        except errors.ReplicasError as error:
            return f"refused: {type(error).__name__}"

    def _publish(self) -> str:
        self.published += 1
        (self.run.folder / "asked" / str(self.published)).touch()
        return "publish"

    def _order(self) -> str:
        orders: list[VersionOrder] = [
            Promote(channel="policy"),
            Promote(channel="policy"),
            Reject(channel="policy", why="by chance"),
            Rollback(channel="policy"),
            Label(channel="policy", label="mine", version="current", move=True),
        ]
        order = self.random.choice(orders)
        self.client().order(order)
        return type(order).__name__

    def _kill(self) -> str:
        """Kill a server, its follower, the proxy, its keeper or the trainer."""
        marks = {
            "server": "server.py",
            "follower": "my_engine.py",
            "haproxy": "haproxy -",
            "keeper": "integrations.haproxy",
            "trainer": "asked = sorted",
        }
        kinds = ["server", "server", "follower", "follower", "follower", "haproxy", "keeper", "trainer"]
        kind = self.random.choice(kinds)
        found = sorted(pid for pid, line in self.run.processes().items() if marks[kind] in line)
        if not found:
            return f"no {kind}"
        with suppress(ProcessLookupError):
            os.kill(self.random.choice(found), signal.SIGKILL)
        return f"kill {kind}"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    subprocess.run([ROOT / "tests/support/need_haproxy.sh"], check=True, timeout=300)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "asked").mkdir()
    with running(tmp_path, world_of(tmp_path, port)) as run:
        yield Fleet(run, port)


def test_no_answer_is_of_another_version_than_demanded(fleet: Fleet) -> None:
    fleet._publish()
    eventually(lambda: fleet.channel().versions, "a first version", timeout_s=START_S)
    fleet.client().order(Promote(channel="policy"))
    threads = [threading.Thread(target=fleet.watch)]
    eventually(lambda: fleet.channel().served.get(1) == SERVERS, "all servers serve it", timeout_s=START_S)
    eventually(fleet.is_reachable, "the proxy leads to them", timeout_s=START_S)
    threads += [threading.Thread(target=fleet.ask_often, args=(SEED * 100 + number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    done: Counter[str] = Counter()
    try:
        until = time.monotonic() + 120 + REQUESTS / 20
        while len(fleet.asked) < REQUESTS or fleet.answered() < REQUESTS / 5:
            assert time.monotonic() < until, (done, len(fleet.asked), fleet.answered())
            done[fleet.act()] += 1
            time.sleep(fleet.random.random())
        fleet.look()
    finally:
        fleet.over.set()
        for thread in threads:
            thread.join(120)
    print(
        done, Counter(one.status for one in fleet.asked), Counter(one.why[:80] for one in fleet.asked), file=sys.stderr
    )
    check(fleet)
    fleet.run.end(timeout_s=60)


def check(fleet: Fleet) -> None:
    """Every answer is of the version that it names and that was demanded, none of a
    rejected one but its canary's, and no server goes back."""
    answers = [one for one in fleet.asked if one.status == 200]
    for one in answers:
        assert one.low <= one.version <= one.high, one
        assert one.value == fleet.steps.get(one.version, one.value), one
        number = one.demand.removeprefix(">=")
        if one.demand.startswith(">="):
            assert one.low >= int(number), one
        elif number.isdigit():
            assert (one.low, one.high) == (int(number), int(number)), one
        elif number:
            assert one.low == one.high, one
    serving = defaultdict(set)
    for one in answers:
        serving[one.version].add(one.replica)
    strays = {version: found for version, found in serving.items() if version in fleet.rejected - fleet.served}
    assert all(len(found) == 1 for found in strays.values()), strays
    for pid in {one.pid for one in answers}:
        newest, ended = 0, sorted((one for one in answers if one.pid == pid), key=lambda one: one.ended)
        at = 0
        for one in sorted(ended, key=lambda one: one.began):
            while at < len(ended) and ended[at].ended < one.began:
                newest = max(newest, ended[at].version)
                at += 1
            assert one.version >= newest, (one, newest)
    refused = [one for one in fleet.asked if one.status not in (0, 200)]
    statuses = Counter(one.status for one in refused)
    assert statuses.pop(502, 0) <= KILLS, "servers that were killed with a request"
    assert statuses.keys() <= {409, 503, 400}, statuses
    assert all("replicas: " in one.why or "paused" in one.why for one in refused)
