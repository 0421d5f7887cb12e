"""Calls that control several servers, one of which is stuck or fails: reports of group
B in docs/field.md, on toy servers with vLLM's routes and processes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.field.worlds import ask, toys
from tests.support.runs import alive
from tests.support.waits import eventually

OTHERS_S = 10.0
MIXED_S = 1.0


@pytest.mark.timeout(240)
def test_nemo_3612_a_server_that_is_stopped_in_its_pause_stays_alone(tmp_path: Path) -> None:
    """The others load and answer; the one is started again and serves the newest."""
    with toys(tmp_path, servers=3) as world:
        world.publish()
        world.wait_for(1, 1, 1)
        before = [world.processes(replica)["api"] for replica in range(3)]
        (world.folder / "freeze-1").touch()
        began = time.monotonic()
        receipt = world.publish()
        assert receipt["seconds"] < OTHERS_S
        eventually(lambda: world.versions()[::2] == [2, 2], "the others", timeout_s=OTHERS_S)
        assert [ask(f"{world.url(one)}/v1/completions")["version"] for one in (0, 2)] == ["2", "2"]
        assert time.monotonic() - began < OTHERS_S
        receipt = world.publish()
        assert receipt["seconds"] < OTHERS_S
        world.wait_for(3, 3, 3)
        assert ask(f"{world.url(1)}/v1/completions")["version"] == "3"
        after = [world.processes(replica)["api"] for replica in range(3)]
        assert (before[0] == after[0], before[1] == after[1], before[2] == after[2]) == (True, False, True)
        world.run.signal(signal.SIGTERM)
        world.run.wait(timeout_s=60)
        world.run.assert_nothing_left()


BAD = 4


@pytest.mark.timeout(240)
def test_dynamo_9131_a_fleet_of_which_one_failed_to_load_says_so_in_each_answer(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """There is no transaction over the fleet: the others go on, the one that failed
    answers nothing, and each answer names its version."""
    with toys(tmp_path, servers=3) as world:
        (world.folder / "refuse-1").write_text(str(BAD))
        for version in range(1, BAD):
            world.publish()
            world.wait_for(version, version, version)
        url = world.url(1)
        before = world.processes(1)["api"]
        answered: list[tuple[float, str]] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    answered.append((time.monotonic(), ask(f"{url}/v1/completions", timeout_s=5)["version"]))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(look)
            receipt = world.publish()
            began = time.monotonic()
            eventually(lambda: world.versions()[::2] == [BAD, BAD], "the others", timeout_s=OTHERS_S)
            eventually(lambda: not alive(before), "the end of the server that failed", timeout_s=OTHERS_S)
            stop.set()
        old = [at for at, version in answered if version == str(BAD - 1) and at > began]
        record_property("mixed_s", max(old, default=began) - began)
        assert max(old, default=began) - began < MIXED_S, "only until its own load began"
        assert {version for at, version in answered if at > began + MIXED_S} == set()
        assert receipt["version"] == BAD, "the version is committed all the same"
        assert world.versions()[1] == 0, "and the status says who does not have it"
        eventually(lambda: any("load_weights: a tensor" in line for line in world.run.said()), "the reason, in the log")
        told = world.publish()["not_loaded"]
        assert "load_weights: a tensor" in told["server/1"]
        world.wait_for(BAD + 1, BAD + 1, BAD + 1)
