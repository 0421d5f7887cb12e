"""A run on a Ray that asks for a token, as one that was started after a first plain
``ray.init()`` does.

Covers: integrations/ray_run.py.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.programs.cluster_programs import commits
from tests.engines.programs.ray_cluster import VARIABLES
from tests.engines.test_ray_job import write
from tests.support.runs import MARK, ROOT, processes_marked
from tests.support.waits import eventually


class Ray(NamedTuple):
    address: str
    home: Path
    mark: str


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    """One node. Its user has a token in the home folder, and names no mode."""
    folder, home, mark = Path(tempfile.mkdtemp(prefix="ray")), tmp_path_factory.mktemp("home"), secrets.token_hex(8)
    (folder / "ray").mkdir()  # where Ray notes the address; short, as its sockets are in it
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    options = ("--port=0", "--num-cpus=3", "--object-store-memory=80000000", "--include-dashboard=false", "--block")
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options)
    environ = environment(home, mark, RAY_TMPDIR=str(folder), **VARIABLES)
    found = folder / "ray" / "ray_current_cluster"
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)
    try:
        eventually(lambda: "Ray runtime started" in (folder / "out").read_text(), "Ray", timeout_s=120)
        yield Ray(found.read_text().strip(), home, mark)
    finally:
        process.terminate()
        process.wait(60)
        eventually(lambda: not processes_marked(mark), "the end of Ray", timeout_s=30)
        shutil.rmtree(folder)


def environment(home: Path, mark: str, **variables: str) -> dict[str, str]:
    """Without what says of Ray's authentication, unless it is among ``variables``."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**others, MARK: mark, "PYTHONPATH": str(ROOT), "HOME": str(home), **variables}


def replicas_ray(ray: Ray, folder: Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run three steps."""
    write(folder, steps=3)
    command = (sys.executable, "-m", "replicas", "ray", "run.toml", "--address", ray.address)
    environ = environment(home, ray.mark, **variables)
    return subprocess.run(command, cwd=folder, env=environ, check=False, capture_output=True, text=True, timeout=120)


def test_a_run_with_the_token(ray: Ray, tmp_path: Path) -> None:
    done = replicas_ray(ray, tmp_path, ray.home, RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stderr
    assert [version for version, _, _ in commits(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "no Ray cluster"),  # an explicit address turns Ray's authentication on for no program
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}, "no Ray cluster"),
        ({"RAY_AUTH_MODE": "token"}, "the Ray cluster refuses this program: Token authentication is enabled"),
    ],
    ids=["no mode", "another token", "no token"],
)
def test_a_run_without_the_token_says_how_to_give_it(
    ray: Ray, tmp_path: Path, variables: dict[str, str], told: str
) -> None:
    done = replicas_ray(ray, tmp_path, tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert told in last
    assert "set RAY_AUTH_MODE=token" in last
    assert not commits(tmp_path)
