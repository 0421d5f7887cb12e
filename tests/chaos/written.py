"""Invariants I1, I2, I3 and I7, checked on what the programs of a world wrote
themselves. Each line is read once.

The numbers are those of ARCHITECTURE.md. What a world must show for it:
:class:`Writes`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["ALLOWED", "GUEST", "Line", "Writes", "Written"]

MARGIN_S = 5.0 + 2.0 + 2.5
"""Beyond its deadline: 5 s for the coordinator's word, up to 2 s that its process may
be stopped for, a busy machine."""
ALLOWED = frozenset(
    {"PeersLost", "DeadlineExceeded", "OutcomeUnknown", "Busy", "Gone", "Disconnected", "NoCapacity", "SyncError"}
)
"""Errors that a fault may cause; any other is a bug of ours."""
GUEST = "guest-0"
"""A target that nobody starts again; the next one may serve while this is still
frozen."""

Line = dict[str, Any]


class Writes(Protocol):
    """A world whose programs write."""

    @property
    def out(self) -> Path:
        """The folder that they write into."""

    @property
    def deadline_s(self) -> float:
        """Of its channels."""

    @property
    def peers(self) -> Sequence[str]:
        """Replicas that are peers of ``outer``, in the order of the powers of two that
        they give."""

    def log(self, name: str) -> list[Line]:
        """The whole lines of ``out/name.jsonl`` so far, such as ``trainer-0.1`` (rank
        1) or ``serve-0.0.outer``."""

    def sources(self) -> Sequence[str]:
        """The logs of everyone who publishes."""

    def targets(self) -> Mapping[str, list[Line]]:
        """The logs of everyone who must serve the newest weights."""

    def decided(self) -> list[int]:
        """Every version of the weights that was ever committed, in order."""

    def runs(self, name: str, pid: Any) -> bool:
        """Whether the process that wrote ``pid`` into this log still runs."""


class Written:
    """:param allowed: names of errors that operations may end with.

    :param clock: that of the programs.
    """

    def __init__(
        self, world: Writes, allowed: frozenset[str] = ALLOWED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._writes = world
        self._allowed = allowed
        self._read: dict[str, int] = defaultdict(int)
        self._open: dict[str, Line] = {}
        self._verdicts: dict[int, dict[str, str]] = defaultdict(dict)
        self._failed: set[int] = set()
        self._stamps: dict[int, int] = {}
        self._last: dict[str, Line] = {}
        self._joined: dict[str, Line] = {}
        self._sequences: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._took_part: dict[int, list[str]] = {}
        self._decided: list[int] = []

    def check(self, what: str) -> None:
        """Everything that the programs wrote since the last check."""
        self._publishes(what)
        self._weights(what)
        self._collectives(what)
        assert not (self._writes.out / "trap").exists(), (what, "I7: something was unpickled")

    def _new(self, name: str) -> list[Line]:
        lines = self._writes.log(name)
        fresh = lines[self._read[name] :]
        self._read[name] = len(lines)
        return fresh

    # ------------------------------------------------------------ I1

    def _publishes(self, what: str) -> None:
        """Each ended by its deadline, with a receipt or a typed error, the same on all
        ranks, unless its process died."""
        for name in self._writes.sources():
            for line in self._new(name):
                self._publish_line(name, line, what)
            line = self._open.get(name, {})
            if line and self._writes.runs(name, line["pid"]):
                assert self._clock() - line["at"] < self._writes.deadline_s + MARGIN_S, (
                    what,
                    "I1: a publish hangs",
                    line,
                )

    def _publish_line(self, name: str, line: Line, what: str) -> None:
        began = self._open.get(name)
        if "began" in line:
            assert began is None or began["pid"] != line["pid"], (what, "I1: two at once", line)
            self._open[name] = line
        elif "ended" in line:
            assert began is not None, (what, "I1: ended and never began", line)
            seconds = line["at"] - began["at"]
            assert seconds < self._writes.deadline_s + MARGIN_S, (what, "I1: it took too long", seconds, line)
            del self._open[name]
            self._verdict(name, line, what)
        elif "apart" not in line:
            assert line["works"], (what, "I1: the program's own group gave another value", line)

    def _verdict(self, name: str, line: Line, what: str) -> None:
        verdicts = self._verdicts[line["ended"]]
        error = line.get("error", "")
        allowed = (
            self._allowed | {""} | ({"Preflight"} if "memory full" in what else set())
        )  # none of its sidecars can work
        assert error in allowed, (what, "I1: no error for a fault of this kind", line)
        verdicts[name] = error or f"version {line['version']}"
        settled = {verdict for verdict in verdicts.values() if verdict not in ("OutcomeUnknown", "Disconnected")}
        assert len(settled) <= 1, (what, "I1: ranks were told different things", verdicts, line)
        if error and line["unanimous"]:
            self._failed.add(line["ended"])
        if not error:
            stamp = self._stamps.setdefault(line["version"], line["ended"])
            assert stamp == line["ended"], (what, "I2: one number for two sets of weights", line)

    # ------------------------------------------------------------ I2

    def _weights(self, what: str) -> None:
        """Nothing torn, nothing uncommitted, nothing older after something newer, the
        same on all ranks of a replica. An incarnation that was frozen with its node may
        still use what it had been handed before the next one came, but no more."""
        fresh = {name: self._new(name) for name in self._writes.targets()}
        self._decided = self._writes.decided()
        assert self._decided == sorted(set(self._decided)), (what, "I2: decisions out of order", self._decided)
        decided = set(self._decided)
        for name, lines in fresh.items():
            for line in lines:
                if "works" in line:
                    assert line["works"], (what, "I2: the ranks of a replica loaded different versions", line)
                    continue
                if "kept" in line:
                    assert line["values"] == [line["stamp"]], (what, "I2: it changed while it was open", name, line)
                    continue
                if "version" in line:
                    assert line["version"] in decided, (what, "I2: not committed", line)
                    self._served(name, line, what)
                if "joined" in line:
                    assert not self._replaced(name, line), (what, "I2: a replaced incarnation joined", name, line)
                    self._joined[_incarnation(name, line)] = line
                if not self._replaced(name, line):
                    self._last[_incarnation(name, line)] = line

    def _served(self, name: str, line: Line, what: str) -> None:
        version, stamp = line["version"], line["stamp"]
        assert line["values"] == [stamp], (what, "I2: torn", name, line)
        assert stamp not in self._failed, (what, "I2: its publish had failed", name, line)
        assert self._stamps.setdefault(version, stamp) == stamp, (what, "I2: other weights", name, line)
        if self._replaced(name, line):
            by = self._joined[_incarnation(name, line)]
            assert line["took"] < by["at"], (what, "I2: handed to a replaced incarnation", name, by, line)
            return
        before = self._last.get(_incarnation(name, line), {})
        if "version" in before and before["pid"] == line["pid"]:
            assert version > before["version"], (what, "I2: not newer", name, before, line)
        newest = before.get("version", before.get("joined", 0))
        assert version >= newest, (what, "I2: backwards", name, before, line)
        replica, _, rank = name.rpartition(".")
        sequences = self._sequences[replica, line["generation"]]
        sequences[rank].append(version)
        shortest = min(len(sequence) for sequence in sequences.values())
        heads = {tuple(sequence[:shortest][-3:]) for sequence in sequences.values()}
        assert len(heads) == 1, (what, "I2: the ranks of a replica loaded different versions", replica, heads)

    def _replaced(self, name: str, line: Line) -> bool:
        newest = self._joined.get(_incarnation(name, line), line)
        return int(newest["generation"]) > int(line["generation"])

    # ------------------------------------------------------------ I3

    def _collectives(self, what: str) -> None:
        """A mean over exactly those that the receipt names, or an error and untouched
        tensors."""
        peers = self._writes.peers
        for name in peers:
            for line in self._new(f"{name}.0.outer"):
                assert "crashed" not in line, (what, "I1: the peer's thread died", name, line)
                if "joined" in line or "apart" in line:
                    continue
                assert line["seconds"] < self._writes.deadline_s + MARGIN_S, (what, "I1: it took too long", name, line)
                if "error" in line:
                    allowed = self._allowed | {"RanksDisagree"}  # after a loss peers must find a common step again
                    assert line["error"] in allowed, (what, "I1: no error for a fault of this kind", name, line)
                    assert not line["touched"], (what, "I3: a failed collective changed its input", name, line)
                    continue
                members = line["members"]
                mean = sum(2.0 ** peers.index(member) for member in members) / len(members)
                assert name in members, (what, "I3: not named in its own receipt", name, line)
                assert all(abs(value - mean) < 1e-3 for value in line["values"]), (what, "I3: mean", mean, name, line)
                assert line["mean_step"] == line["step"], (what, "I3: mixed steps", name, line)
                assert self._took_part.setdefault(line["step"], members) == members, (what, "I3: members", name, line)


def _incarnation(name: str, line: Line) -> str:
    """Two generations of a replica never run at once; of the guest, one may still be
    frozen while the next one serves."""
    return f"{name} {line['pid']}" if name.startswith(GUEST) else name
