"""What another user of the machine plants in the stores of a run is executed by
nobody."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.machine.users import ATTACKER, VICTIM, as_user, folder_of, needs_users, python_environment
from tests.support.programs import group
from tests.support.runs import Run
from tests.support.waits import eventually

PLANTS = """
import base64, os, pickle, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore

owner, proof, out = sys.argv[1:]

class Evil:
    def __reduce__(self):
        return os.system, (f"id -u >> {proof}",)

payloads = [base64.b64encode(pickle.dumps(Evil())), pickle.dumps(Evil())]

def ports():
    for line in open("/proc/net/tcp").readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[7] == owner:
            yield int(words[1].split(":")[1], 16)

def plant(port):
    known = set()
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=2), wait_for_workers=False)
        for turn in range(1 << 30):
            for key in store.list_keys():
                store.set(key, payloads[turn % 2].decode("latin1"))
                if key not in known:
                    known.add(key)
                    with open(out, "a") as log:
                        log.write(f"{port} {key}\\n")
            time.sleep(0.01)
    except Exception as error:
        print(port, str(error).splitlines()[0], flush=True)
    finally:
        at_work.discard(port)

at_work = set()
while True:
    for port in ports():
        if port not in at_work:
            at_work.add(port)
            threading.Thread(target=plant, args=(port,), daemon=True).start()
    time.sleep(0.05)
"""

MEETS = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set("here/" + os.environ["RANK"], "here")   # a key for the attacker, before anything can fail
print("in generation", os.environ["REPLICAS_GENERATION"], flush=True)
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(1))
except Exception as error:  # they are the job's own, and the attacker may well break them
    print(type(error).__name__, flush=True)
time.sleep(600)
"""

SYNCS = """
import os, time, torch, replicas
with replicas.join("all") as channel:
    while True:
        try:
            channel.all_reduce(torch.ones(4))
        except replicas.errors.ReplicasError as error:
            print(type(error).__name__, flush=True)
        time.sleep(0.05)
"""


@contextmanager
def victims_run(text: str) -> Iterator[Run]:
    with folder_of(VICTIM) as folder:
        run = Run(folder, text, command=as_user(VICTIM, [sys.executable, "-m", "replicas.supervisor"]))
        (folder / "meets.py").write_text(MEETS)
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, VICTIM, VICTIM)
        try:
            yield run.start()
        finally:
            run.clean_up()


@contextmanager
def planting(planted: Path, proof: Path) -> Iterator[None]:
    command = [sys.executable, "-c", PLANTS, str(VICTIM), str(proof), str(planted)]
    with (planted.parent / "attack.log").open("wb") as log:
        process = subprocess.Popen(
            as_user(ATTACKER, command), env=python_environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(20)


def overwritten(planted: Path, key: str, stores: int) -> bool:
    """Whether in so many stores a key with this in it was overwritten."""
    lines = planted.read_text().splitlines() if planted.exists() else []
    return len({line.split()[0] for line in lines if key in line}) >= stores


def up(run: Run, generation: int, proof: Path) -> bool:
    """Whether every rank of the torchrun jobs has come so far. A payload that was
    executed comes first."""
    assert not proof.exists(), f"a payload was executed as {proof.read_text().split()}"
    logs = [run.log(replica, generation, rank) for replica, rank in (("one/0", 0), ("two/0", 0), ("two/0", 1))]
    return all(log.exists() and "in generation" in log.read_text() for log in logs)


@needs_users
@pytest.mark.timeout(240)
def test_what_a_stranger_plants_in_every_store_is_executed_by_nobody() -> None:
    """Torchrun jobs of one and two nodes start again in stores full of it, and a
    channel meets in the run's store."""
    more = 'restart = { initial_delay = "1ms", max_delay = "2ms", max_restarts = 50 }\nstop_timeout = "1s"\n'
    text = group("s", SYNCS, f"replicas = 2\n{more}")
    for name, nodes in (("one", 1), ("two", 2)):
        text += f'[groups.{name}]\nnnodes = {nodes}\nnproc_per_node = 1\ncommand = ["meets.py", "{name}"]\n{more}'
    text += '[channels.all]\npeers = ["s"]\ndeadline = "5s"\n'
    with folder_of(ATTACKER) as lair, victims_run(text) as run:
        proof, planted = run.scratch / "proof", lair / "planted"
        with planting(planted, proof):
            run.wait_line("control at", timeout_s=60)
            for generation in (1, 2):
                eventually(partial(up, run, generation, proof), f"all ranks of generation {generation}", timeout_s=90)
                eventually(partial(overwritten, planted, " here/", 2 * generation), "a planted key in each job's store")
                if generation == 1:
                    for name in ("one", "two"):
                        os.kill(run.find(f"meets.py {name}"), signal.SIGKILL)
            eventually(partial(overwritten, planted, "/card/", 1), "a planted key in the run's store")
            assert not proof.exists()
