"""``replicas doctor``: what it finds, what it says to do, and that it leaves everything
as it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicas import environ
from replicas.cli import doctor as looks
from replicas.cli import main as cli
from replicas.cli.find_run import RunAddress
from replicas.linux.processes import MARK, start_time
from replicas.supervisor.state.locked_folder import give_identity
from replicas.supervisor.state.run_state import AgentRecord, ProcessRecord, RunState, Saved, machine
from tests.support.programs import SLEEPS, group
from tests.support.runs import alive

HEAD = 'schema_version = 1\n[run]\nname = "sick"\n[control]\nlisten = "127.0.0.1:{port}"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(HEAD.format(port=0) + group("a", SLEEPS, "replicas = 2"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def diagnosed(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, list[dict[str, str]]]:
    """The findings by what they are about."""
    assert cli.main(["doctor", "run.toml", "--json"]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in told["findings"]:
        found.setdefault(finding["about"], []).append(finding)
    assert told["problems"] == sum(one["state"] == "problem" for one in told["findings"])
    return found


def test_a_healthy_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnosed(capsys, 0)
    assert set(found) == {"run", "leftovers", "plan", "ports", "gpus", "limits", "disk"}
    assert found["run"][0]["text"].startswith("the run is not running")
    assert cli.main(["doctor", "run.toml"]) == 0
    out = capsys.readouterr().out
    assert "[+] leftovers no process of a dead supervisor of this run\n" in out
    assert out.endswith("all is well\n")
    assert not (folder / ".replicas").exists()


@pytest.fixture
def leftover(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process as a dead shim of this run leaves one: with a mark, and the id of the
    state folder in its environment."""
    state_dir = folder / ".replicas" / "sick"
    state_dir.mkdir(parents=True)
    for name in ("lock", "token"):
        (state_dir / name).touch()
    (state_dir / "endpoint.json").write_text('{"endpoint":"127.0.0.1:1","pid":1,"run":"sick"}')
    env = {**os.environ, MARK: "0123456789abcdef", environ.STATE_ID: give_identity(state_dir)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\n", timeout=20)


def test_leftovers_of_a_dead_run(
    folder: Path, leftover: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = diagnosed(capsys, 1)
    assert "the run's supervisor was killed; it left endpoint.json, token" in found["run"][0]["text"]
    (one,) = found["leftovers"]
    assert one["state"] == "problem"
    assert one["text"].startswith(f"process {leftover.pid} (found by its identity): {sys.executable} -c input()")
    assert one["remedy"] == "none needed: the next start of this run kills this process"
    assert alive(leftover.pid)
    monkeypatch.setattr(looks, "supervisor_of", lambda _: os.getpid())  # it lives, and could never write its state
    monkeypatch.setattr(RunAddress, "status", lambda _: mock.Mock(nodes=()))
    assert [one["state"] for one in diagnosed(capsys, 0)["leftovers"]] == ["ok"]


def test_what_a_start_takes_over_is_no_leftover(
    folder: Path, leftover: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``run.adopt`` the agent lives on without a supervisor, with all under it."""
    started = start_time(leftover.pid)
    assert started is not None
    process = ProcessRecord(leftover.pid, started)
    agent = AgentRecord(node="here", incarnation="i", local=True, process=process, scope=machine())
    saved = Saved(run="sick", machine=machine(), agents=(agent,), helpers=(process,))
    assert RunState(folder / ".replicas" / "sick" / "state.json").save(saved)
    assert [one["state"] for one in diagnosed(capsys, 1)["leftovers"]] == ["problem"]
    config = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(config.replace('"sick"', '"sick"\nadopt = "60s"'))
    found = diagnosed(capsys, 0)
    assert [one["state"] for one in found["leftovers"]] == ["ok"]
    (run,) = found["run"]
    assert run["state"] == "note"
    assert run["text"].startswith("the run has no supervisor, but 1 of its processes live, state in ")


def test_a_held_port_and_its_holder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (folder / "run.toml").write_text(HEAD.format(port=port) + group("a", SLEEPS))
        assert cli.main(["doctor", "run.toml"]) == 1
    out = capsys.readouterr().out
    assert f"[-] ports     control.listen: 127.0.0.1:{port} is held by process {os.getpid()} (" in out
    assert "-> end that process, or choose another port (0: any free one)" in out
    assert out.endswith("\n1 problem\n")


def test_a_plan_that_does_not_fit_and_who_is_on_the_gpus(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver's tool that says so."""
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{os.getpid()}, GPU-1, 512, python'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (folder / "run.toml").write_text(HEAD.format(port=0) + group("a", SLEEPS, "replicas = 2\nresources = { gpus = 1 }"))
    found = diagnosed(capsys, 1)
    assert "2 GPUs are needed at once" in found["plan"][0]["text"]
    assert [one["text"] for one in found["gpus"]] == [
        "1, says CUDA_VISIBLE_DEVICES",
        f"512 MiB on GPU-1 are held by process {os.getpid()} (not of this run): python",
    ]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert "their processes cannot be listed" in diagnosed(capsys, 1)["gpus"][1]["text"]


def test_a_limit_that_is_too_low(folder: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)); "
    code += "from replicas.cli.main import main; sys.exit(main(['doctor', 'run.toml']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "[-] limits    64 open files allowed, 320 may be needed\n              -> ulimit -n 320\n" in done.stdout
