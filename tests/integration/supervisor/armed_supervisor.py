"""``python -m tests.integration.supervisor.armed_supervisor CONFIG``: a supervisor
that kills (-9) a process at a moment of its coordinator, one of
:data:`tests.support.channel.coordinator_process.MOMENTS`.

The file ``armed`` in the working folder names it: ``{"moment": "decided", "times": 1,
"pid": 123}``; pid 0 is the supervisor itself. The file is removed before the kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Self
from unittest import mock

from replicas.config.file import load
from replicas.supervisor import operator as command_line
from replicas.supervisor.supervisor import Supervisor
from tests.support.channel.coordinator_process import MOMENTS

__all__ = ["COMMAND", "arm", "has_fired"]

COMMAND = (sys.executable, "-m", "tests.integration.supervisor.armed_supervisor")


def arm(folder: Path, moment: str, times: int, pid: int = 0) -> None:
    """From now on a process dies when the moment has come so many times."""
    assert moment in MOMENTS
    new = folder / "armed.new"
    new.write_text(json.dumps({"moment": moment, "times": times, "pid": pid}))
    new.rename(folder / "armed")


def has_fired(folder: Path) -> bool:
    return not (folder / "armed").exists()


def main() -> int:
    armed = Path("armed").absolute()
    seen = 0

    def tap(channel: object, what: object) -> None:
        nonlocal seen
        if not armed.exists():
            return
        order = json.loads(armed.read_text())
        seen += MOMENTS[order["moment"]](what)
        if seen == order["times"]:
            seen = 0
            armed.unlink()
            os.kill(order["pid"] or os.getpid(), signal.SIGKILL)

    class Tapped(Supervisor):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            self.coordinator.engine.tap = tap
            return self

    with mock.patch.object(command_line, "Supervisor", Tapped):
        return command_line.supervise(load(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
