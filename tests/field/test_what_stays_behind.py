"""What is left of an engine, a trainer or a node that was killed, and how long others
wait for it: reports of group C in docs/field.md."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.field.worlds import Toys, toys
from tests.support.processes import parent_of
from tests.support.runs import alive
from tests.support.waits import eventually

GONE_S = 40.0
"""Until no process of a killed engine is left: 0.5 to 2 s, and more on a machine that
is busy with other tests. Elsewhere: never."""
ROLES = ["api", "serve", "shim", "agent"]
ROUNDS = int(os.environ.get("FIELD_ROUNDS", "4"))


def kill_and_wait(world: Toys, role: str) -> float:
    """Kill a process of the server; seconds until none of its processes was left, when
    the next one may start."""
    found = world.processes()
    found["shim"] = parent_of(found["serve"])
    agent = parent_of(found["shim"])
    began = time.monotonic()
    os.kill(agent if role == "agent" else found[role], signal.SIGKILL)
    eventually(
        lambda: not any(alive(pid) for pid in found.values()), f"the end of {found} after {role}", timeout_s=GONE_S
    )
    took_s = time.monotonic() - began

    def again() -> bool:
        now = world.processes()
        return now["serve"] not in (0, found["serve"]) and now["api"] != found["api"] and alive(now["api"])

    eventually(again, "the next engine", timeout_s=90)
    assert not (world.folder / "overlap").exists(), "it began while the last one was there"
    return took_s


@pytest.mark.timeout(300)
def test_vllm_55510_no_process_of_a_killed_engine_is_left(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its core and its workers are in sessions of their own, and have no mark in their
    environments. The next one starts when nothing of the last is left."""
    with toys(tmp_path, servers=1) as world:
        for role in ROLES:
            record_property(f"gone_s after {role}", kill_and_wait(world, role))
        world.run.signal(signal.SIGTERM)
        world.run.wait(timeout_s=60)
        world.run.assert_nothing_left()


@pytest.mark.timeout(300)
def test_nemo_3592_an_engine_that_is_killed_again_and_again_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """So the next one finds the memory that the last one had."""
    with toys(tmp_path, servers=1) as world:
        for number in range(ROUNDS):
            kill_and_wait(world, ROLES[number % 2])
        world.run.signal(signal.SIGTERM)
        world.run.wait(timeout_s=60)
        world.run.assert_nothing_left()
