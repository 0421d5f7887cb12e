"""A thousand configs that nobody meant, given to ``replicas check`` and to a run that
lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import replicas
from replicas.cli import main as cli
from replicas.config import file as config_file
from replicas.config.structs import Config
from replicas.control import exit_codes
from replicas.errors import BadConfig
from replicas.telemetry.events import ReloadRefused
from tests.support.house.mutants import assert_told_well, mutant

COUNT, PARTS = 1000, 4
THROUGH_A_PROCESS = range(0, 1000, 25)
CHECK = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())", "check"]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_config_is_a_bug(part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    codes: set[int] = set()
    for seed in range(part, COUNT, PARTS):
        path.write_bytes(mutant(seed))
        code = cli.main(["check", str(path)])
        told = capsys.readouterr().err
        assert code in (0, exit_codes.BAD_CONFIG), (seed, told[-2000:])
        assert "Traceback" not in told, (seed, told[-2000:])
        assert all(one.isprintable() for one in told.splitlines()), (seed, told)
        codes.add(code)
    assert codes == {0, exit_codes.BAD_CONFIG}


@pytest.mark.parametrize("seed", THROUGH_A_PROCESS)
def test_nor_for_the_command_itself(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(mutant(seed))
    done = subprocess.run([*CHECK, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, exit_codes.BAD_CONFIG), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.stderr.startswith(f"replicas: {path}: ")
    assert not [one for one in done.stdout + done.stderr if not one.isprintable() and one != "\n"]


def _unless_it_fits(path: Path) -> Config:
    """A few mutants are fine, and would change the run as they say."""
    config_file.load(path)
    raise BadConfig(["line 0: it fits"])


@pytest.mark.timeout(600)
@pytest.mark.anyio
async def test_a_run_that_is_given_one_goes_on_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "schema_version": 1,
        "run": {"name": "mutants", "state_dir": str(tmp_path / "state")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {"a": {"launcher": "exec", "command": SLEEPS}},
    }
    path = tmp_path / "run.toml"
    async with replicas.Supervisor(config) as supervisor:
        await supervisor.wait_ready(timeout=20)
        monkeypatch.setattr(config_file, "read", _unless_it_fits)
        before, after = supervisor.status().groups, supervisor.last_event
        for seed in range(COUNT):
            path.write_bytes(mutant(seed))
            with pytest.raises(BadConfig) as caught:
                await supervisor.reload(path)
            assert_told_well(caught.value)
        (group,), (was,) = supervisor.status().groups, before
        assert [(one.name, one.pid, one.state, one.generation) for one in group.replicas] == [
            (one.name, one.pid, one.state, one.generation) for one in was.replicas
        ]
        told = 0
        async for record in supervisor.events(after):
            told += isinstance(record.event, ReloadRefused)
            if record.seq == supervisor.last_event:
                break
        assert told == COUNT
        assert b'config_last_reload_successful{run="mutants"} 0.0' in supervisor.metrics_text()
        await supervisor.drain(hurry=True)
