"""A target that the supervisor did not start: a process of somebody else that joined
the run by its endpoint and token.

Nobody ends it when the coordinator has declared it lost, so that it can wake up
afterwards, or find that another process has taken its place: it must be refused, and
harm nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from replicas import environ
from tests.support.processes import children
from tests.support.runs import MARK, ROOT, Run

__all__ = ["Guest"]


class Guest:
    """One such process at a time, plus those that were replaced and have not ended
    yet."""

    def __init__(self, run: Run, group: str, replica: int, env: Mapping[str, str]) -> None:
        self.name = f"{group}-{replica}"
        self.process: subprocess.Popen[bytes] | None = None
        self.replaced: list[subprocess.Popen[bytes]] = []
        self._run = run
        self._program = Path(__file__).with_name("server.py")
        self._env = {
            **os.environ,
            **env,
            MARK: run.mark,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(run.scratch),
            environ.TOKEN_FILE: str(run.state_dir / "token"),
            environ.RUN: run.name,
            environ.GROUP: group,
            environ.REPLICA: str(replica),
        }

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None and self.process.poll() is None else 0

    def start(self) -> None:
        """Another one, under the same name; the one before is not ended by this."""
        if self.process is not None:
            self.replaced.append(self.process)
        with (self._run.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(self._program)],
                env=self._env,
                cwd=self._run.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def fenced(self) -> bool:
        """Whether all that were replaced have ended."""
        self.replaced = [process for process in self.replaced if process.poll() is None]
        return not self.replaced

    def pids(self) -> set[int]:
        """All processes of it, its forkserver and sidecars included."""
        found = {process.pid for process in (*self.replaced, self.process) if process is not None}
        for _ in range(2):
            found |= {child for pid in found for child in children(pid)}
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        for process in (*self.replaced, self.process):
            if process is not None:
                process.kill()
                process.wait(10)
