"""A process that closes all its descriptors, as libraries that daemonise do: whatever
it had called, or calls then, ends with a typed error, and it can join again."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from replicas.coordinator import Coordinator

PROGRAM = """
import json, os, sys, threading, time
import torch, replicas
from replicas import errors

endpoint, token = sys.argv[1:]
where = dict(endpoint=endpoint, token=token, world_size=1)
WITHIN = 60.0
weights = {"w": torch.ones(4)}
source = replicas.join("policy", group="trainer", **where)
target = replicas.join("policy", group="rollout", **where)
peer = replicas.join("outer", group="peer", **where)
source.publish(weights).wait(WITHIN)
target.receive().wait(WITHIN).loaded()
written = source.arena_like(weights)

told = {}
def tell(name, call):
    try:
        told[name] = f"no error: {call()!r}"
    except BaseException as error:
        told[name] = type(error).__name__
before = {
    "receive": target.receive().wait,  # without a deadline
    "committed": source.committed().wait,
    "loaded": lambda: source.loaded(99).wait(),
    "barrier": peer.barrier(deadline=600).wait,
    "arena_like": lambda: [source.arena_like(weights, deadline=600) for _ in range(99)],
}
threads = [threading.Thread(target=tell, args=item, daemon=True) for item in before.items()]
for thread in threads:
    thread.start()
time.sleep(0.3)  # most of them wait; who does not yet is as good
os.closerange(3, 4096)
after = {
    "publish": lambda: source.publish(weights, deadline=600).wait(),
    "publish of an iterator": lambda: source.publish(iter(weights.items()), deadline=600).wait(),
    "publish in place": lambda: source.publish(written, deadline=600).wait(),
    "receive later": lambda: target.receive().wait(),
    "committed later": lambda: source.committed().wait(),
    "send": lambda: peer.send(weights["w"], dst="peer/1", deadline=600).wait(),
    "progress": lambda: source.progress(1),
}
for item in after.items():
    thread = threading.Thread(target=tell, args=item, daemon=True)
    thread.start()
    threads.append(thread)
    thread.join(WITHIN)
for thread in threads:
    thread.join(WITHIN)
for channel in (source, target, peer):
    closing = threading.Thread(target=tell, args=(f"close {channel.member.group}", channel.close), daemon=True)
    closing.start()
    closing.join(WITHIN)
hung = sorted({*before, *after} - told.keys())
with replicas.join("policy", group="trainer", **where) as again:
    version = again.publish(weights, deadline=60).wait(WITHIN).version
print(json.dumps({"told": told, "hung": hung, "version": version}), flush=True)
"""


@pytest.mark.timeout(400)
def test_every_call_ends_with_a_typed_error_and_a_new_join_works() -> None:
    channels: dict[str, dict[str, Any]] = {
        "policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": 2},
        "outer": {"peers": ["peer"]},
    }
    with Coordinator(channels, groups={"peer": 2}).in_thread() as coordinator:
        command = [sys.executable, "-c", PROGRAM, coordinator.endpoint, coordinator.token]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["hung"] == []
    told = {name: error for name, error in result["told"].items() if not name.startswith("close")}
    assert set(told.values()) <= {"Disconnected", "UsageError"}, told
    assert all(told[name] == "Disconnected" for name in ("publish", "receive", "committed", "loaded", "barrier")), told
    assert result["version"] >= 2
