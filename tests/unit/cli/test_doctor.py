"""What the doctor says about room for logs.

Covers: cli/doctor.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicas.cli import doctor as cli_checks
from replicas.config import file as config_file
from replicas.linux.processes import start_time
from replicas.linux.sockets import Listener
from replicas.messages.bounds import CARRY_PORTS as PORTS
from replicas.supervisor.agent import checks as doctor

GIB = 1 << 30


@pytest.mark.parametrize(("free", "said"), [(99 * GIB, False), (101 * GIB, True)])
def test_all_logs_together_are_compared_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: bool
) -> None:
    """Each log is bounded; of all of them together only a look at the config tells."""
    (tmp_path / "rank.py").touch()
    config = config_file.read(
        {
            "schema_version": 1,
            "run": {"name": "r", "state_dir": str(tmp_path)},
            "logs": {"max_size": "1GiB", "keep": 4, "keep_generations": 2},
            "groups": {"a": {"command": [str(tmp_path / "rank.py")], "replicas": 5, "nproc_per_node": 1}},
        }
    )

    class Usage:
        def __init__(self, _: Path) -> None:
            self.free = free

    monkeypatch.setattr("shutil.disk_usage", Usage)
    notes = [one for one in doctor._disk(tmp_path, doctor.Demand.of_all(config)) if one.state == "note"]
    assert bool(notes) is not said


def test_a_supervisor_that_starts_has_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has started already is no leftover."""
    holders: list[int] = []
    monkeypatch.setattr(cli_checks, "lock_holders", lambda _: holders)
    assert cli_checks.supervisor_of(tmp_path) is None
    (tmp_path / "lock").write_text(f"{os.getpid()} {start_time(os.getpid())} machine host")
    assert cli_checks.supervisor_of(tmp_path) is None, "nobody holds the lock"
    holders.append(os.getpid())
    assert cli_checks.supervisor_of(tmp_path) == os.getpid()


@pytest.mark.parametrize(
    ("first", "taken", "state", "words"),
    [
        (0, 0, "ok", "any free ports; with a firewall between nodes set this key"),
        (21_700, 0, "ok", "64 of the ports 21700 to 21763 are for carriers here; all nodes must reach these ports"),
        (21_700, 1, "note", "63 of the ports 21700 to 21763 are for carriers here; 21700 is held by process 7 (nginx)"),
        (21_700, PORTS, "problem", "0 of the ports"),
        (65_500, 1, "note", "35 of the ports 65500 to 65535"),
    ],
)
def test_ports_of_carriers(monkeypatch: pytest.MonkeyPatch, first: int, taken: int, state: str, words: str) -> None:
    """Those of other carriers are where they belong."""
    holders = dict.fromkeys(range(taken), "process 7 (nginx)")
    monkeypatch.setattr(
        cli_checks, "holder", lambda inode: holders.get(inode, "process 8 (python -m replicas.carry.carrier --fd 3)")
    )
    listening = [Listener("0.0.0.0", first + number, number) for number in range(max(taken, 3))]
    found = cli_checks._carriers(first, [*listening, Listener("0.0.0.0", 80, 0)])
    assert found.state == state
    assert words in found.text
    assert ("set cluster.carry_port so that the 64 ports" in found.remedy) is bool(taken)
