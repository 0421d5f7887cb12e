"""An archive of a run, and a run whose source is an archive: replicas that the
supervisor starts, restarts and shows; and the commands that read archives.

Covers: cli/following_commands.py, cli/version_commands.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import replicas
from replicas.status import ReplicaStatus
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

FROM = """
[groups.trainer]
launcher = "external"
[channels.policy]
sources = ["trainer"]
[channels.policy.archive]
to = "{url}"
key = "{key}"
"""
TO = """
[groups.hand]
launcher = "external"
[channels.policy]
sources = [{{ archive = "{url}/policy", key = "{key}" }}]
targets = ["hand"]
"""
PROGRAM = "import sys; from replicas.cli.main import main; sys.exit(main())"
START_S = 120.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/archive"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key.pem"


def public(key: Path) -> str:
    path = key.with_name(f"{key.name}.pub")
    eventually(path.exists, "the key is made", timeout_s=START_S)
    return path.read_text().strip()


@contextmanager
def archived(folder: Path, url: str, key: Path) -> Iterator[Run]:
    folder.mkdir(exist_ok=True)
    with running(folder, FROM.format(url=url, key=key), name="from") as run:
        run.wait_line("control at", timeout_s=START_S)
        yield run


def join(run: Run, group: str) -> replicas.Channel:
    token = (run.state_dir / "token").read_text().strip()
    return replicas.join("policy", endpoint=run.endpoint(), token=token, group=group, rank=0, world_size=1)


def publish(trainer: replicas.Channel, value: int) -> replicas.Receipt:
    return trainer.publish({"w": torch.full((100_000,), float(value))}, meta={"step": value}).wait(60)


def replica(run: Run, name: str) -> ReplicaStatus:
    return next(one for group in run.status().groups for one in group.replicas if one.name == name)


def wait_for(run: Run, version: int) -> None:
    """Its archive has the version, which it shows as the loaded one."""

    def is_there() -> bool:
        return replica(run, "policy-archive/0").versions.get("policy") == version

    eventually(is_there, f"version {version} is archived", timeout_s=START_S)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=START_S)


def test_a_run_is_archived_whoever_is_killed_and_goes_on_when_it_is_started_again(
    tmp_path: Path, url: str, key: Path
) -> None:
    with archived(tmp_path / "from", url, key) as run, join(run, "trainer") as trainer:
        publish(trainer, 1)
        wait_for(run, 1)
        pid = replica(run, "policy-archive/0").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        publish(trainer, 2)
        wait_for(run, 2)
        assert replica(run, "policy-archive/0").restarts == 1
        receipt = publish(trainer, 3)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=60) == 0, "SIGTERM just after a commit: it is archived"
    follower = replicas.follow(url, "policy", key=public(key), timeout=10)
    with closing(follower), next(follower) as update:
        assert (update.version, update.digest, update.meta) == (3, receipt.digest, {"step": 3})


def test_a_run_in_another_place_takes_an_archive_as_its_source(tmp_path: Path, url: str, key: Path) -> None:
    (tmp_path / "to").mkdir()
    with archived(tmp_path / "from", url, key) as run, join(run, "trainer") as trainer:
        first = publish(trainer, 1)
        wait_for(run, 1)
        text = TO.format(url=url, key=public(key))
        with running(tmp_path / "to", text, name="to") as other:
            other.wait_line("control at", timeout_s=START_S)
            with join(other, "hand") as hand:
                for receipt in (first, publish(trainer, 2), publish(trainer, 3)):
                    with hand.receive(at_least=receipt.version, deadline=START_S).wait() as update:
                        if update.version == receipt.version:
                            assert (update.digest, update.meta) == (receipt.digest, {"step": receipt.version})


def test_a_storage_that_is_down_shows_as_lag_and_stops_nothing(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with archived(tmp_path / "from", "s3://bucket/run", key) as run, join(run, "trainer") as trainer:
        for value in (1, 2, 3):
            publish(trainer, value)
        log = run.log("policy-archive/0")
        said = "the storage fails, try"
        eventually(lambda: log.exists() and said in log.read_text(), "its log says why", timeout_s=START_S)
        assert replica(run, "policy-archive/0").restarts == 0
        with urllib.request.urlopen(f"http://{run.endpoint()}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        (lag,) = re.findall(r"^replicas_archive_lag_versions\{.*\} (.*)$", text, re.MULTILINE)
        (lag_s,) = re.findall(r"^replicas_archive_lag_seconds\{.*\} (.*)$", text, re.MULTILINE)
        assert (float(lag), float(lag_s) > 0) == (3, True)
        assert "hunter2" not in text + str(run.status()) + log.read_text()


def test_commands_read_an_archive(tmp_path: Path, url: str, key: Path) -> None:
    with archived(tmp_path / "from", url, key) as run, join(run, "trainer") as trainer:
        for value in (1, 2, 3):
            publish(trainer, value)
            wait_for(run, value)
        channel, by = f"{url}/policy", ("--archive-key", public(key))
        out = tmp_path / "v.safetensors"
        done = command("get", channel, "-o", str(out), "--version", "2", *by)
        assert done.returncode == 0, done.stderr
        assert load_file(out)["w"][0] == 2
        assert command("verify", channel, str(out), "--version", "2", *by).returncode == 0
        done = command("verify", channel, str(out), *by)
        assert (done.returncode, "w: values differ" in done.stdout) == (1, True)
        done = command("get", channel, "-o", str(out))
        assert (done.returncode, "--archive-key is missing" in done.stderr) == (2, True)
        done = command("get", channel, "-o", str(out), "--archive-key", f"ed25519:{'0' * 64}")
        assert (done.returncode, "was not signed by the key" in done.stderr) == (1, True)
        done = command("get", channel, "-o", str(out), "--version", "9", "--deadline", "0.5", *by)
        assert (done.returncode, "has no version 9; it has 3, 2, 1" in done.stderr) == (1, True)
        line = [sys.executable, "-c", PROGRAM, "mirror", channel, str(tmp_path / "m"), *by]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT) as mirror:
            note = tmp_path / "m" / "latest" / "replicas.json"
            eventually(lambda: note.exists() and json.loads(note.read_text())["version"] == 3, "3", timeout_s=START_S)
            publish(trainer, 4)
            eventually(lambda: json.loads(note.read_text())["version"] == 4, "4", timeout_s=START_S)
            mirror.send_signal(signal.SIGTERM)
            assert mirror.wait(30) == 0
