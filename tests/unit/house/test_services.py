"""What is deployed names only metrics, commands and exit codes that exist.

Covers: cli/agent_command.py.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.cli import agent_command as agent
from replicas.cli import main as cli
from replicas.control import exit_codes
from replicas.environ import JOIN
from replicas.status import ChannelStatus, GroupStatus, RunStatus, StoreStatus
from replicas.telemetry.metrics import Metrics
from tests.support.root import ROOT

SERVICE = ROOT / "services" / "supervisor"


def known_metrics() -> set[str]:
    status = RunStatus(
        run="x",
        version="0",
        endpoint="",
        pid=1,
        uptime_s=0.0,
        ready=True,
        store=StoreStatus(up=True, host="", port=0),
        groups=(GroupStatus(name="a", launcher="exec", world_size=1, replicas=()),),
        channels=(ChannelStatus(name="p", epoch=0, committed_version=0, digest="", members=()),),
    )
    text = Metrics(lambda: status).render()[0].decode()
    names = set(re.findall(r"^# TYPE (replicas_\w+) (?!histogram)", text, re.MULTILINE))
    histograms = re.findall(r"^# TYPE (replicas_\w+) histogram", text, re.MULTILINE)
    return names | {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")} | set(histograms)


@pytest.mark.parametrize("name", ["alerts.yml", "alerts_test.yml"])
def test_rules_use_metrics_that_exist(name: str) -> None:
    used = set(re.findall(r"\breplicas_\w+", (SERVICE / name).read_text()))
    assert used
    assert used <= known_metrics()


def test_the_tests_of_the_rules_name_rules_that_exist() -> None:
    rules = set(re.findall(r"alert: (\w+)", (SERVICE / "alerts.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (SERVICE / "alerts_test.yml").read_text()))
    assert tested <= rules


def test_the_unit_of_an_agent_runs_a_command_with_options_that_exist() -> None:
    unit = (SERVICE.parent / "agent" / "replicas-agent@.service").read_text()
    command = re.search(r"^ExecStart=\S+/replicas (\w+) (--[\w-]+)", unit, re.MULTILINE)
    assert command is not None
    (found,) = [info.callback for info in cli.app.registered_commands if info.callback is agent.agent]
    assert found.__name__ == command[1]
    assert command[2].removeprefix("--").replace("-", "_") in inspect.signature(found).parameters
    assert JOIN in unit
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert prevented is not None
    assert int(prevented[1]) == exit_codes.USAGE


def test_the_unit_runs_a_command_that_exists() -> None:
    unit = (SERVICE / "replicas@.service").read_text()
    command = re.search(r"^ExecStart=\S+/replicas (\w+) ", unit, re.MULTILINE)
    assert command is not None
    assert command[1] in {info.name or getattr(info.callback, "__name__", "") for info in cli.app.registered_commands}
    assert re.search(
        r"^Type=notify$", unit, re.MULTILINE
    )  # notify-reload is ignored before systemd 253 (Debian 12 has 252)
    assert re.search(r"^ExecReload=/bin/kill -HUP \$MAINPID$", unit, re.MULTILINE)
    assert re.search(r"^WatchdogSec=\d+$", unit, re.MULTILINE)
    forced = re.search(r"^RestartForceExitStatus=(\d+)$", unit, re.MULTILINE)
    assert forced is not None
    assert int(forced[1]) == exit_codes.PREEMPTED
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert prevented is not None
    assert [int(code) for code in prevented[1].split()] == [
        exit_codes.FAILED,
        exit_codes.USAGE,
        exit_codes.SUPERVISED,
        exit_codes.CUT,
        exit_codes.BAD_CONFIG,
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["supervisor/replicas@", "agent/replicas-agent@"])
def test_the_unit_is_understood_by_the_systemd_that_is_here(tmp_path: Path, name: str) -> None:
    unit = tmp_path / f"{Path(name).name}x.service"
    text = (SERVICE.parent / f"{name}.service").read_text()
    unit.write_text(text.replace("/opt/replicas/bin/replicas", sys.executable))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert not [line for line in done.stderr.splitlines() if unit.name in line or f"{Path(name).name}.service" in line]
