"""A real vLLM of two data-parallel engines, paused and resumed while requests come:
verl#7846 in docs/field.md.

With experts the engines compute in waves together, which the report is about. A CPU's
vLLM (0.32) ends at the first one: its communicator has no ``all_gatherv``.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.field.engines.small import server

LOADS = int(os.environ.get("FIELD_LOADS", "100"))
CLIENTS = 4
STALL_S = 10.0
"""Longest time without an answer; Gloo's timeout is half an hour."""


@pytest.mark.timeout(1200)
def test_verl_7846_a_resume_that_meets_a_new_wave_stalls_no_engine(tmp_path: Path) -> None:
    """Requests come all the time, with gaps in which an engine has nothing to do."""
    answered, over = list[float](), threading.Event()
    with server(tmp_path, "--data-parallel-size", "2") as vllm, ThreadPoolExecutor() as pool:

        def ask(client: int) -> None:
            while not over.is_set():
                choice = vllm.complete([client, 5, 7], max_tokens=1 + client)
                assert choice["finish_reason"] == "length"
                answered.append(time.monotonic())
                over.wait(0.01 * (1 + client))

        with vllm.following():
            vllm.wait_until_served(vllm.publish())
            answered.append(time.monotonic())
            clients = [pool.submit(ask, client) for client in range(CLIENTS)]
            try:
                for _ in range(LOADS):
                    version = vllm.publish()
                    vllm.trainer.loaded(version).wait(60)
            finally:
                over.set()
            for client in clients:
                client.result(60)
    gaps = [later - sooner for sooner, later in itertools.pairwise(answered)]
    print(f"{len(answered)} answers, the longest gap is {max(gaps):.2f} s")
    assert max(gaps) < STALL_S
