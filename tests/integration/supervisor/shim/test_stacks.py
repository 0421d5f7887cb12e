"""What a stuck rank was doing is in its log before it is killed, and is told to whoever
asks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import replicas
from tests.support.programs import group
from tests.support.runs import running
from tests.support.waits import eventually

HOLDS_THE_GIL = """
import ctypes, replicas
def never_comes_back():
    while True:
        ctypes.PyDLL(None).sleep(600)
channel = replicas.join("c")
never_comes_back()
"""

NEVER_JOINS = """
import time
def loads_for_ever():
    time.sleep(600)
loads_for_ever()
"""

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
def does_not_end():
    while True:
        time.sleep(600)
does_not_end()
"""

IDLES = """
import time, replicas
def stands_still():
    time.sleep(600)
with replicas.join("c") as channel:
    channel.progress(1)
    stands_still()
"""

JOINS = """
import time, replicas
def works():
    print("up", flush=True)
    time.sleep(600)
with replicas.join("c") as channel:
    works()
"""


def test_stuck_ranks_show_their_stacks_before_they_are_killed(tmp_path: Path) -> None:
    """One that holds the GIL in C for ever, one without progress, one that never joins,
    and one that does not even end."""
    later = 'restart = { initial_delay = "60s" }\nstop_timeout = "500ms"\n'
    start = 'health = { start_timeout = "1s" }'
    text = (
        group("holds", HOLDS_THE_GIL, later + 'health = { heartbeat_timeout = "2s" }')
        + group("idles", IDLES, later + 'health = { progress_timeout = "1s" }')
        + group("never", NEVER_JOINS, later + start)
        + group("deaf", DEAF, later + start)
        + '[channels.c]\npeers = ["holds", "idles", "never", "deaf"]\n'
    )

    def says(name: str, *words: str) -> bool:
        log = run.log(f"{name}/0")
        return log.exists() and all(word in log.read_text() for word in words)

    with running(tmp_path, text) as run:
        end = "replicas: end of stacks"
        eventually(lambda: says("never", " has not joined a channel, state ", end), "never's state")
        eventually(lambda: says("deaf", " has not joined a channel, state ", end), "deaf's state")
        eventually(
            lambda: says("holds", "replicas: stacks of rank 0, process ", "in never_comes_back", end),
            "the stacks of a rank that holds the GIL",
            timeout_s=40,
        )
        eventually(
            lambda: says("idles", "replicas: stacks of rank 0, process ", "in stands_still", end),
            "the stacks of a rank that makes no progress",
            timeout_s=40,
        )
        wanted = {
            "holds": "heartbeat_timeout",
            "idles": "progress_timeout",
            "never": "start_timeout",
            "deaf": "start_timeout",
        }
        eventually(
            lambda: {one.name: next(iter(one.restarts), "") for one in run.status().groups} == wanted, str(wanted)
        )
        assert (run.state_dir / "events.jsonl").read_text().count('"StacksSaved"') == 4


def test_whoever_asks_is_told_the_stacks_and_the_rank_goes_on(tmp_path: Path) -> None:
    config = {
        "schema_version": 1,
        "run": {"name": "asked", "state_dir": str(tmp_path)},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {"a": {"launcher": "exec", "command": [sys.executable, "-c", JOINS]}},
        "channels": {"c": {"peers": ["a"]}},
    }

    async def main() -> None:
        async with replicas.Supervisor(config) as supervisor:
            await supervisor.wait_ready("a", timeout=40)
            before = [replica.pid for replica in supervisor.status().groups[0].replicas]
            async with asyncio.timeout(20):
                while "in works" not in (await supervisor.stacks("a/0"))["a/0/0"]:
                    pass  # ready is who has joined; a moment later it works
            for _ in range(2):
                found = await supervisor.stacks("a/0")
                assert list(found) == ["a/0/0"]
                assert found["a/0/0"].startswith(f"process {before[0]}\n")
                assert "in works" in found["a/0/0"]
            assert sorted(await supervisor.stacks()) == ["a/0/0"]
            assert [replica.pid for replica in supervisor.status().groups[0].replicas] == before

    asyncio.run(main())
