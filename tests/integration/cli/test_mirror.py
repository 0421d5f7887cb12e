"""``replicas mirror`` against a living run: versions become folders, whatever ends the
command.

Covers: cli/following_commands.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import replicas
from replicas.sources.mirror import Mirror
from tests.support.mirrors.histories import slot, version
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

GROUPS = """
[groups.trainer]
launcher = "external"
[groups.hand]
launcher = "external"
min_ready = 0
[groups.mirror]
launcher = "exec"
command = ["-m", "replicas", "mirror", "policy", "{folder}", "--keep", "1"]
restart = {{ initial_delay = "0s", no_progress_cycles = 0 }}
[channels.policy]
sources = ["trainer"]
targets = ["hand", "mirror"]
slots = 3
"""
PROGRAM = "import sys; from replicas.cli.main import main; sys.exit(main())"
START_S = 120.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with running(folder, GROUPS.format(folder=folder / "supervised")) as started:
        started.wait_line("control at", timeout_s=START_S)
        yield started


@pytest.fixture
def trainer(run: Run) -> Iterator[replicas.Channel]:
    token = (run.state_dir / "token").read_text().strip()
    with replicas.join("policy", endpoint=run.endpoint(), token=token, group="trainer", rank=0, world_size=1) as joined:
        yield joined


def publish(trainer: replicas.Channel, value: float) -> int:
    receipt = trainer.publish({"w": torch.full((100_000,), value)}, meta={"step": int(value)}).wait(60)
    return receipt.version


@contextlib.contextmanager
def mirror(run: Run, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, "mirror", "policy", str(folder), "-c", str(run.config), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def newest(folder: Path) -> tuple[int, float]:
    """Version and value of the newest folder."""
    path = folder / "latest"
    try:
        note = json.loads((path / "replicas.json").read_text())
    except FileNotFoundError:
        return 0, 0.0
    return note["version"], float(load_file(path / "model.safetensors")["w"].float().mean())


def wait_for(folder: Path, version: int, value: float) -> None:
    eventually(lambda: newest(folder) == (version, value), f"version {version} in {folder}", timeout_s=START_S)


def test_versions_become_folders_until_it_is_told_to_stop(run: Run, trainer: replicas.Channel, tmp_path: Path) -> None:
    with mirror(run, tmp_path / "m", "--name", "step_{step}", "--marker", "STABLE") as process:
        eventually(lambda: any(one.group == "hand" for one in trainer.members), "the mirror", timeout_s=START_S)
        for value in (1.0, 2.0, 3.0):
            version = publish(trainer, value)
            trainer.loaded(version, deadline=START_S).wait()
            assert newest(tmp_path / "m") == (version, value), "loaded: it is there"
        assert sorted(one.name for one in (tmp_path / "m").glob("[!.]*")) == ["latest", "step_2", "step_3"]
        assert (tmp_path / "m" / "step_3" / "STABLE").exists()
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.splitlines()[-1] == f"version {version}: {tmp_path}/m/step_3"
    eventually(lambda: all(one.group != "hand" for one in trainer.members), "its leaving")


def test_one_that_is_killed_goes_on_with_the_newest(run: Run, trainer: replicas.Channel, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with mirror(run, folder):
        first = publish(trainer, 4.0)
        wait_for(folder, first, 4.0)
    (folder / ".version-99.part").mkdir()  # as one that was killed while it wrote leaves
    second = publish(trainer, 5.0)
    with mirror(run, folder):
        wait_for(folder, second, 5.0)
        assert not (folder / ".version-99.part").exists()


def test_versions_of_an_earlier_run_are_older(run: Run, trainer: replicas.Channel, tmp_path: Path) -> None:
    """Though their numbers are higher; and two mirrors do not share a folder."""
    folder = tmp_path / "m"
    publish(trainer, 11.0)
    with Mirror(folder) as earlier, slot(version(998)) as first, slot(version(999)) as second:
        earlier.write(first, version(998))
        earlier.write(second, version(999))
    with mirror(run, folder, "--keep", "2"):
        wait_for(folder, trainer.latest, 11.0)
        note = json.loads((folder / "latest" / "replicas.json").read_text())
        assert (note["run"], note["sequence"], note["term"] > 1) == (run.status().run, 3, True)
        with mirror(run, folder) as other:
            assert other.wait(60) == 2
            assert other.stderr is not None
            assert f"another mirror writes to {folder}" in other.stderr.read()
        wait_for(folder, publish(trainer, 12.0), 12.0)


def test_a_version_that_cannot_be_written_is_refused(run: Run, trainer: replicas.Channel, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with mirror(run, folder) as process:
        wait_for(folder, publish(trainer, 6.0), 6.0)
        in_the_way = trainer.latest + 1
        (folder / f"version-{in_the_way}").mkdir()
        assert publish(trainer, 7.0) == in_the_way
        assert process.stderr is not None
        assert "is refused" in process.stderr.readline()
        wait_for(folder, publish(trainer, 8.0), 8.0)


def test_a_supervised_one_is_restarted(run: Run, trainer: replicas.Channel) -> None:
    folder = run.folder / "supervised"
    wait_for(folder, publish(trainer, 9.0), 9.0)
    (pid,) = [pid for one in run.status().groups if one.name == "mirror" for pid in one.replicas[0].pids.values()]
    os.kill(pid, signal.SIGKILL)
    wait_for(folder, publish(trainer, 10.0), 10.0)
    assert len(list(folder.glob("version-*"))) == 1
