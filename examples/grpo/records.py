"""Records from the demo's ranks to its driver: one JSON object a line, in the folder
``GRPO_RECORDS``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Record", "RecordReader", "RecordWriter"]

Record = dict[str, Any]


class RecordWriter:
    """Appends to ``<GRPO_RECORDS>/<name>.jsonl``; a line is written whole, or not at
    all."""

    def __init__(self, name: str) -> None:
        folder = Path(os.environ.get("GRPO_RECORDS", "."))
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Append a record; ``time_s``, the wall clock, is added."""
        line = json.dumps({"event": event, "time_s": time.time(), "pid": os.getpid(), **fields})
        os.write(self._fd, line.encode() + b"\n")


class RecordReader:
    """Reads the new lines of every file of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Record]:
        """Return the records since the last call, in the order of their time; each has
        ``source``, its file's stem."""
        found: list[Record] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += [{**json.loads(line), "source": path.stem} for line in whole.splitlines()]
        return sorted(found, key=lambda record: float(record["time_s"]))
