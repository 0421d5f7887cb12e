"""The code of the how-to pages that begins a run does what they say."""

from __future__ import annotations

import asyncio
import secrets
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.house.pages import code
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked
from tests.support.waits import eventually


def test_a_run_whose_events_are_logged(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []
    config = {
        "schema_version": 1,
        "run": {"name": "logged", "state_dir": str(tmp_path / "run")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {"one": {"launcher": "exec", "command": ["true"]}},
    }

    async def main() -> int:
        async with asyncio.timeout(60):  # the program ends with the run
            return int(await code("wandb.md").run(config, logged.append))

    assert asyncio.run(main()) == 0
    assert [one["event"] for one in logged][-1] == "RunEnded"
    assert sorted(one["at"] for one in logged) == [one["at"] for one in logged]


ROLLOUT = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            print("loaded", update.version, flush=True)
"""
TRAINER = """
import replicas, torch
with replicas.join("policy") as channel:
    targets = 0
    while targets < 2:
        receipt = channel.publish({"weight": torch.ones(3)}).wait()
        channel.loaded(receipt.version).wait(60)
        targets = sum(one.group == "rollout" for one in receipt.members)
"""


class Embedded:
    """A run that begins with one rollout, and ends when two have loaded a version."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self._mark = folder, mark
        (folder / "rollout.py").write_text(ROLLOUT)
        (folder / "trainer.py").write_text(TRAINER)
        groups = {
            name: {"launcher": "exec", "command": [str(folder / f"{name}.py")]} for name in ("rollout", "trainer")
        }
        groups["trainer"] |= {"depends_on": ["rollout"]}
        self.config = {
            "schema_version": 1,
            "run": {"name": "embedded", "state_dir": str(folder / "run"), "stop_when": ["trainer"]},
            "control": {"listen": "127.0.0.1:0"},
            "groups": groups,
            "channels": {"policy": {"sources": ["trainer"], "targets": ["rollout"]}},
        }

    def said(self) -> list[str]:
        return sorted(path.read_text() for path in self.folder.rglob("rollout/**/rank-0.log"))

    def is_over(self) -> None:
        eventually(lambda: not processes_marked(self._mark), "the end of its processes", timeout_s=10)


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Embedded(tmp_path, mark)


def test_a_supervisor_in_asyncio(embedded: Embedded) -> None:
    assert asyncio.run(code("embed.md").run(embedded.config)) == 0
    first, second = (set(text.splitlines()) for text in embedded.said())
    assert first & second, "both have loaded the last version"
    embedded.is_over()


def test_a_supervisor_in_anyio(embedded: Embedded) -> None:
    assert code("embed.md").main(embedded.config, 2.0) is None  # with one rollout its trainer waits
    embedded.is_over()


def test_a_supervisor_in_blocking_code(embedded: Embedded) -> None:
    during: list[tuple[int, bool]] = []

    def work() -> None:
        during.append((threading.get_ident(), bool(list(embedded.folder.rglob("endpoint.json")))))

    assert code("embed.md").run_blocking(embedded.config, work) == [1, 1]
    assert during == [(threading.get_ident(), True)]
    embedded.is_over()
