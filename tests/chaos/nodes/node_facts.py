"""Invariants of a run over nodes, after each round and at the end, and what a campaign
prints."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replicas.control.exit_codes import CUT, DONE
from tests.chaos.census import Life, now
from tests.chaos.nodes.node_faults import LOST_S, NodeFault
from tests.chaos.nodes.node_host import NAMES
from tests.chaos.nodes.node_world import NodeWorld
from tests.chaos.written import ALLOWED, Line, Written
from tests.support.machine.load import Load
from tests.support.waits import eventually

__all__ = ["Before", "Facts", "Table"]

NEXT_COMMIT_S = 12.0
"""Of survivors: a heartbeat timeout, and a sync that is begun again."""
BUSY = 2.0
"""Held up by this factor, a replica may take longer than a publish's deadline for what
it does in half of that otherwise: to start a forkserver of its own, say."""
END_S = 20.0
THAWED_S = 5.0
"""Until nothing is left on a node that was frozen for longer than its lease."""


@dataclass
class Before:
    """What was so before a round."""

    at: float
    alive: dict[str, Life]
    events: int


class Facts:
    """:param load: moves the bars on a machine that is busy with other things, too."""

    def __init__(self, world: NodeWorld, load: Load) -> None:
        self._world, self._load = world, load
        self._written = Written(world, ALLOWED | {"Fenced"}, now)
        self._frozen: list[tuple[str, float, float]] = []
        self._checked = 0
        self._complete = True
        """Whether no event can be missing."""
        self._counted = True
        """Whether the counters go back to the first event."""

    def before(self) -> Before:
        return Before(now(), self._world.census.alive(), len(self._world.events()))

    def check(self, faults: Sequence[NodeFault], before: Before, ticks: float, what: str) -> None:
        for fault in faults:
            if fault.kind.startswith("freeze node"):
                self._frozen.append((NAMES[fault.host], fault.hit, fault.over))
            if "full disk" in fault.kind and fault.host == 0:
                self._complete = False
            if fault.of_state:
                self._counted = False
        self._written.check(what)
        self._one_life_each(what)
        self._gpus(what)
        self._others_go_on(faults, before, what)
        self._moved(faults, ticks, what)
        self._commits(faults, before, ticks, what)
        if self._complete:
            self._one_story(what)
            self._free(faults, before, what)

    # ------------------------------------------------------------ processes

    def _one_life_each(self, what: str) -> None:
        lives = self._world.census.lives
        by_name: dict[str, list[Life]] = defaultdict(list)
        for life in lives:
            by_name[life.name].append(life)
        for life in lives[self._checked :]:
            for other in by_name[life.name]:
                if other is life or not life.overlaps(other) or self._was_frozen(*sorted((other, life), key=_began)):
                    continue
                raise AssertionError(f"{what}: two of one replica at once: {other}; {life}")
        twice = [key for key, count in Counter((one.name, one.generation) for one in lives).items() if count > 1]
        assert not twice, (
            what,
            "one generation, two processes",
            [str(one) for one in lives if one.name == twice[0][0]],
        )
        self._checked = next((number for number, life in enumerate(lives) if life.alive), len(lives))

    def _was_frozen(self, old: Life, new: Life) -> bool:
        """Whether the earlier one did nothing while the other one lived: it was stopped
        with its node, and no member any more when the other one was."""
        overs = [over for node, hit, over in self._frozen if node == old.node and hit < new.began < over]
        return bool(overs) and old.ended is not None and old.ended < overs[-1] + THAWED_S

    def _gpus(self, what: str) -> None:
        lives = [life for life in self._world.census.lives if life.ended is None or life.ended > now() - 300.0]
        for one, other in itertools.combinations(lives, 2):
            if (one.node, one.gpus) == (other.node, other.gpus) and one.overlaps(other):
                raise AssertionError(f"{what}: one GPU ({one.gpus}), two owners: {one}; {other}")

    def _others_go_on(self, faults: Sequence[NodeFault], before: Before, what: str) -> None:
        """Whoever is on a node that no fault touched has the same process."""
        if any(fault.touches_all(self._world) for fault in faults):
            return
        touched = {NAMES[fault.host] for fault in faults if fault.kind not in ("kill supervisor", "clock", "full disk")}
        ended = [str(life) for life in before.alive.values() if life.node not in touched and not life.alive]
        assert not ended, (what, "healthy and ended", ended)

    def _moved(self, faults: Sequence[NodeFault], ticks: float, what: str) -> None:
        lives = self._world.census.alive()
        # An agent that is starved does not count that time as its supervisor's silence.
        close = self._load.factor(ticks) > BUSY
        for fault in faults:
            if not fault.moves or fault.refused:
                continue
            if close and "partition" in fault.kind and fault.lasts_s <= LOST_S:
                continue
            for life in fault.ranks:
                assert not life.alive, (what, "it should have ended", str(life))
            if fault.lasts_s > LOST_S and fault.host and len(faults) == 1:
                away = [life for life in fault.ranks if life.name in lives and lives[life.name].began > fault.over]
                assert not away, (what, "it did not run elsewhere in time", [str(life) for life in away])

    # ------------------------------------------------------------ syncs

    def _commits(self, faults: Sequence[NodeFault], before: Before, ticks: float, what: str) -> None:
        world = self._world
        if any(fault.trainers and fault.kind not in ("clock", "full disk") for fault in faults):
            return
        if any(fault.of_supervisor for fault in faults):
            return
        busy = self._load.factor(ticks) > BUSY
        found = [error for error in world.errors(before.at) if not (busy and error["error"] == "DeadlineExceeded")]
        assert not found, (what, "the trainer met an error", found)
        for fault in faults:
            commits = world.commits(fault.hit)
            assert commits, (what, "no commit after", str(fault))
            seconds = commits[0]["at"] - fault.hit
            assert seconds < self._load.bar_s(NEXT_COMMIT_S, ticks), (what, "the next commit took", seconds)

    # ------------------------------------------------------------ what is told

    def _one_story(self, what: str) -> None:
        """Events and counters tell of each generation and restart once."""
        moved = [line["event"] for line in self._world.events() if line["event"]["type"] == "Transition"]
        begun = Counter(_key(line) for line in moved if line["after"] == "starting" and line["event"] in _STARTS)
        again = {key: count for key, count in begun.items() if count > 1}
        assert not again, (what, "one generation was started twice, by the events", again)
        lives = {(life.name, life.generation) for life in self._world.census.lives}
        assert lives <= begun.keys(), (what, "processes of which no event tells", lives - begun.keys())
        if not self._counted:
            return
        retried = Counter((line["group"], line["restart_reason"]) for line in moved if line.get("restart_reason"))
        status = self._world.status()
        assert status is not None, what
        told = Counter({(one.name, reason): n for one in status.groups for reason, n in one.restarts.items() if n})
        assert told == retried, (what, "restarts, by counters and by events", told - retried, retried - told)

    def _free(self, faults: Sequence[NodeFault], before: Before, what: str) -> None:
        """Faults of nodes spend no restart budget."""
        if not all(fault.of_node for fault in faults):
            return
        told = [line["event"] for line in self._world.events()[before.events :]]
        spent = [one for one in told if one.get("restart_reason") not in (None, "node", "requested")]
        assert not spent, (what, "restarts that were paid for", spent)

    # ------------------------------------------------------------ the end

    def end(self, what: str) -> None:
        """The run is ended, and nothing of it is left."""
        world = self._world
        supervisor = world.hosts[0]
        for host in world.hosts:
            host.off_until = float("inf")
        supervisor.send(15, *supervisor.find("tests.chaos.nodes.node_supervisor"))
        for host in world.hosts:
            assert host.popen is not None, (what, host.name)
            code = host.popen.wait(END_S)
            assert code in (DONE, CUT), (what, "exit code on", host.name, code, host.said()[-2000:])
        world.hosts[0].leave_spaces()
        for host in world.hosts:

            def left(host=host) -> dict[int, str]:  # type: ignore[no-untyped-def]
                return {pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in host.pids}

            eventually(lambda host=host: not host.pids, f"{what}: left on {host.name}", timeout_s=END_S)  # type: ignore[misc]
            groups = [folder for folder, _, _ in os.walk(host.cgroup)][1:]
            assert not groups, (what, "control groups left on", host.name, groups)
            memory = Path(f"/proc/{host.machine.holder}/root/dev/shm")
            assert not [*memory.iterdir()], (what, "shared memory left on", host.name, [*memory.iterdir()])
            files = sorted(path.name for path in host.state_dir.iterdir())
            assert not {"token", "operator-token", "endpoint.json", "state.json", "leases", "control.sock"} & {
                *files
            }, (what, host.name, files)


_STARTS = ("start", "backoff_elapsed")


def _began(life: Life) -> float:
    return life.began


def _key(line: Line) -> tuple[str, int]:
    return f"{line['group']}-{line['replica']}", line["generation"]


class Table:
    """How long it took, by fault: until the next commit, until what was lost runs
    again, and until nothing was left of the old."""

    def __init__(self) -> None:
        self._rows: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
        self._count: Counter[str] = Counter()

    def add(self, faults: Sequence[NodeFault], world: NodeWorld) -> str:
        """Note a round; what it says of it."""
        told: list[str] = []
        for fault in faults:
            name = f"{fault.kind}{', the trainer there' if fault.trainers else ''}"
            name = name if len(faults) == 1 else "one of two at once"
            commits = world.commits(fault.hit)
            lost = [life for life in fault.ranks if not life.alive]
            again = [_next(life, world.census.lives) for life in lost]
            ended = [old.ended for life in lost for old in fault.old[life.name] if old.ended is not None]
            times = (
                [commits[0]["at"]] if commits else [],
                [max(life.began for life in again if life is not None)] if any(again) else [],
                [max(ended)] if ended and lost else [],
            )
            self._count[name] += 1
            for column, found in zip(self._rows[name], times, strict=True):
                column += [at - fault.hit for at in found]
            words = [f"{found[0] - fault.hit:.1f} s" if found else "-" for found in times]
            told.append(f"commit {words[0]}, again {words[1]}, gone {words[2]}")
        return " and ".join(told)

    def __str__(self) -> str:
        titles = ("next commit", "running again", "nothing left")
        rows = [f"{'fault':46}{'rounds':>7}" + "".join(f"{title:>18}" for title in titles)]
        rows.append(" " * 53 + "     median    max" * 3)
        for name, columns in sorted(self._rows.items()):
            rows.append(f"{name:46}{self._count[name]:7}" + "".join(map(_cell, columns)))
        return "\n".join(rows)


def _next(life: Life, lives: Sequence[Life]) -> Life | None:
    return next((one for one in lives if one.name == life.name and one.generation > life.generation), None)


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):9.1f} s{max(seconds):5.1f} s" if seconds else f"{'-':>18}"
