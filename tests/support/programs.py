"""Small programs for replicas, as source text."""

from __future__ import annotations

import sys

__all__ = ["DAEMONIZES", "IGNORES", "PUBLISHES", "RECEIVES", "SERVES", "SLEEPS", "group"]

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"

IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

DAEMONIZES = """
import os, subprocess, sys, time
sleep = [sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']
a = subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    b = subprocess.Popen(sleep, start_new_session=True)
    print(a.pid, b.pid, flush=True)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""Starts a child in a session of its own and a double-forked daemon, both deaf to
SIGTERM; prints their pids; sleeps."""


PUBLISHES = """
import json, os, time
import torch, replicas

out = os.environ["OUT"]
log = open(out + "/trainer-0.jsonl", "a", buffering=1)
def tell(**what):
    log.write(json.dumps({"pid": os.getpid(), "at": time.monotonic(), **what}) + "\\n")
with replicas.join("policy") as channel:
    while not os.path.exists(out + "/stop"):
        stamp = time.monotonic_ns() // 1000
        weights = {"a": torch.full((300_000,), stamp), "b": torch.full((7, 11), stamp)}
        tell(began=stamp)
        try:
            receipt = channel.publish(weights, meta={"stamp": stamp}).wait()
            tell(ended=stamp, version=receipt.version, lost=list(receipt.lost))
        except replicas.errors.Fenced:
            raise
        except replicas.errors.ReplicasError as error:
            tell(ended=stamp, error=type(error).__name__, text=str(error))
        time.sleep(stamp % 100 / 1000)
"""
"""Publishes until there is a file ``stop``. Every element of a version is its *stamp*,
the clock in microseconds when it was made: weights that mix two versions, or that
nobody committed, show by themselves."""

RECEIVES = """
import json, os, time
import replicas

log = open(os.environ["OUT"] + f"/rollout-{os.environ['REPLICA_ID']}.jsonl", "a", buffering=1)
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            values = {int(v) for _, t in update for v in (t.min(), t.max())}
        log.write(json.dumps({"pid": os.getpid(), "at": time.monotonic(), "version": update.version,
                              "stamp": update.meta["stamp"], "values": sorted(values)}) + "\\n")
"""
"""Receives for ever, and writes down each version with all values that occur in it."""

SERVES = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait():
            pass
"""
"""Receives and loads for ever."""


def group(name: str, code: str, more: str = "") -> str:
    """TOML of a group that executes Python source (as a literal string: its backslashes
    stay what they are)."""
    quotes = "'" * 3
    command = f'"{sys.executable}", "-c", {quotes}{code}{quotes}'
    return f'[groups.{name}]\nlauncher = "exec"\ncommand = [{command}]\n{more}\n'
