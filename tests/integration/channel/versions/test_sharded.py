"""A trainer of four ranks publishes what it has sharded in all the usual ways, gathered
by the leader or each rank's own shards; a target of one rank has it whole.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import replicas
from replicas.core.members.roster import GroupShape
from tests.support.channel.sharded_trainer import CASES, CHANNELS, STEPS, WORLD, whole
from tests.support.root import ROOT

TIMEOUT_S = 150.0
ROLES = {
    name: {"sources": [{"group": "trainer", "ranks": name}], "targets": ["rollout"], "deadline": "60s"}
    for name in CHANNELS
}


@contextmanager
def trainer(folder: Path, endpoint: str, token: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Its ranks, which end with the block."""
    words = [sys.executable, "-m", "tests.support.channel.sharded_trainer"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(folder / "store"), endpoint],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{token}\n")
            rank.stdin.flush()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same, bit by bit."""
    other = list(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        one, two = found[name], wanted[name].detach()
        same = one.shape == two.shape and one.dtype == two.dtype
        if (
            not same
            or one.contiguous().flatten().view(torch.uint8).tolist() != two.flatten().view(torch.uint8).tolist()
        ):
            other.append(name)
    return other


@pytest.mark.timeout(400)
def test_every_placement_arrives_whole(tmp_path: Path) -> None:
    shapes = {"trainer": GroupShape(replicas=1, world_size=WORLD), "rollout": GroupShape(replicas=1, world_size=1)}
    wrong: dict[tuple[str, int, str], list[str]] = {}
    with replicas.Coordinator(ROLES, groups=shapes).in_thread() as run:
        where, token = run.endpoint, run.token
        targets = [
            replicas.join(name, endpoint=where, token=token, group="rollout", replica=0, rank=0, world_size=1)
            for name in CHANNELS
        ]
        with trainer(tmp_path, run.endpoint, run.token) as ranks:
            for case, step, target in itertools.product(CASES, range(STEPS), targets):
                try:
                    update = target.receive(deadline=TIMEOUT_S).wait()
                except replicas.errors.DeadlineExceeded:
                    ended = [rank for rank in ranks if rank.poll() is not None]
                    said = [rank.communicate()[1][-3000:] for rank in ended]
                    raise AssertionError((case, step, target.name, said)) from None
                with update:
                    assert update.meta == {"case": case, "number": step}
                    if found := differences(dict(update.tensors()), whole(case, step)):
                        wrong[case, step, target.name] = found
            results = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        for target in targets:
            target.close()
    assert wrong == {}
    assert [output for output, _ in results] == [f"done {WORLD}\n"] * WORLD, "\n".join(said for _, said in results)
