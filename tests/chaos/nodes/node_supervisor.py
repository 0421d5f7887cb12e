"""``python -m tests.chaos.nodes.node_supervisor OUT CONFIG``: ``replicas run CONFIG``,
which tells what it decides and sees.

Every decision that its log has taken is appended to ``OUT/decisions.jsonl``, as the log
itself is written anew now and then, and every event of its channels to
``OUT/members.jsonl``, with the true time, and when it is there itself.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Self
from unittest import mock

import msgspec

from replicas.config.file import load
from replicas.coordinator.decisions import DecisionLog
from replicas.core.base.effects import Event
from replicas.core.base.ledger import Decision
from replicas.supervisor import operator as command_line
from replicas.supervisor.supervisor import Supervisor

__all__ = ["main"]


def main() -> int:
    out = Path(sys.argv[1])
    append = DecisionLog.append
    with (
        (out / "decisions.jsonl").open("ab", buffering=0) as decisions,
        (out / "members.jsonl").open("a", buffering=1) as members,
    ):

        def note(event: Event) -> None:
            at = time.clock_gettime(time.CLOCK_REALTIME)
            members.write(json.dumps({"at": at, "event": type(event).__name__, **msgspec.to_builtins(event)}) + "\n")

        def appended(log: DecisionLog, decision: Decision) -> None:
            append(log, decision)
            decisions.write(msgspec.json.encode(decision) + b"\n")

        class Heard(Supervisor):
            async def __aenter__(self) -> Self:
                await super().__aenter__()
                self.coordinator.subscribe(note)
                members.write(json.dumps({"at": time.clock_gettime(time.CLOCK_REALTIME), "event": "there"}) + "\n")
                return self

        with mock.patch.object(command_line, "Supervisor", Heard), mock.patch.object(DecisionLog, "append", appended):
            return command_line.supervise(load(Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
