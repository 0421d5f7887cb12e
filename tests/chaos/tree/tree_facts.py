"""Invariants I5 and I6 of a supervisor alone, checked by facts: the process table,
ports, files, and what counts what.

The numbers are those of ARCHITECTURE.md. Counts are kept by group for one *lineage*:
the supervisors that resume one another.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from replicas.core.lives.lifecycle import FREE_REASONS
from replicas.status import RunStatus
from tests.chaos.tree.tree_attack import Attack
from tests.chaos.tree.tree_world import MAX_RESTARTS, Picture, TreeWorld
from tests.support.runs import Run, processes_marked, shared_memory
from tests.support.waits import eventually

__all__ = ["Facts", "port_is_open"]

SETTLE_S = 15.0
DESCRIPTORS_GROWTH = 24
THREADS_GROWTH = 8
MEMORY_GROWTH_NBYTES = 48 << 20
LINE = re.compile(r"(\S+) (\d+) (\d+) (x*)")


class Facts:
    """``restarts``: by group, how many this lineage has counted."""

    def __init__(self, world: TreeWorld, base: Picture) -> None:
        self._world = world
        self.restarts: Counter[str] = Counter()
        self.certain = True
        """Whether all that happened in this lineage could be written down: no disk was
        full when its supervisor died."""
        self._base = _usage(base.supervisor)
        self._shared = shared_memory()
        self._generations: dict[str, tuple[int, int]] = {}
        self._seq = 0

    # ------------------------------------------------------------ a new supervisor

    def another(self, picture: Picture, *, resumed: bool, certain: bool) -> None:
        """The run was started again. ``resumed``: after a death, of which the state
        tells what was spent."""
        self._base = _usage(picture.supervisor)
        if not resumed:
            self.restarts.clear()
            self._generations.clear()
        self.certain = certain if resumed else True

    def resumed(self) -> bool:
        """Whether the present supervisor goes on where another one stopped, by its own
        word."""
        started = [event for event in self._events() if event["type"] == "RunStarted"]
        return bool(started) and bool(started[-1].get("resumed"))

    # ------------------------------------------------------------ I5

    def nothing_left(self, run: Run, ports: list[int], what: str, *, but: set[int]) -> None:
        """Of a supervisor that has ended: no process (``but`` some that nobody could
        end), port, segment or socket."""

        def left() -> dict[int, str]:
            return {pid: line for pid, line in processes_marked(run.mark).items() if pid not in but}

        eventually(lambda: not left(), f"{what}: I5: the end of {left()}", timeout_s=SETTLE_S)
        eventually(
            lambda: not any(map(port_is_open, ports)), f"{what}: I5: ports {ports} are closed", timeout_s=SETTLE_S
        )
        self._files(what)
        assert but or str(run.folder) not in Path("/proc/net/unix").read_text(), (what, "I5: a socket is left")

    def _files(self, what: str) -> None:
        eventually(lambda: shared_memory() <= self._shared, f"{what}: I5: nothing new in /dev/shm", timeout_s=SETTLE_S)
        scratch = [path for run in self._world.runs for path in run.scratch.iterdir()]
        assert not scratch, (what, "I5: temporary files are left", scratch)

    def nothing_piles_up(self, picture: Picture, what: str) -> None:
        """While the run goes on."""
        assert not picture.orphans, (what, "I5: processes without a place", picture.orphans)
        for older in self._world.runs[:-1]:
            assert not processes_marked(older.mark), (what, "I5: processes of a dead supervisor", older.mark)
        now = _usage(picture.supervisor)
        for name, allowed in (
            ("descriptors", DESCRIPTORS_GROWTH),
            ("threads", THREADS_GROWTH),
            ("memory", MEMORY_GROWTH_NBYTES),
        ):
            assert now[name] <= self._base[name] + allowed, (what, f"I5: {name} pile up", self._base, now)
        fifos = [path for path in self._world.run.state_dir.rglob("*") if path.is_fifo()]
        ranks = sum(self._world.shape.sizes.values())
        assert len(fifos) <= 3 * ranks, (what, "I5: pipes pile up", fifos)

    # ------------------------------------------------------------ I6

    def paid(self, attack: Attack) -> bool:
        """Whether what the faults must cost has been counted."""
        shown = {group.name: sum(group.restarts.values()) for group in self._world.run.status().groups}
        return all(shown[group] >= self.restarts[group] + least for group, least in attack.least.items())

    def one_story(self, attack: Attack, before: Picture, now: Picture, what: str) -> None:
        """Counters by the status, by the metrics and by the events are alike, within
        what the faults cost."""
        status = self._world.run.status()
        shown = {group.name: sum(group.restarts.values()) for group in status.groups}
        for group, count in shown.items():
            least, most = self.restarts[group] + attack.least[group], self.restarts[group] + attack.most[group]
            if self.certain:
                assert least <= count <= most, (what, "I6: restarts", group, count, (least, most))
            self.restarts[group] = count
        self._metrics(status, what)
        self._event_counts(status, what)
        self._budgets(status, what)
        self._others(attack, before, now, what)
        self._generations_grow(what)

    def _metrics(self, status: RunStatus, what: str) -> None:
        rows = [row for row in self._page("metrics").splitlines() if row.startswith("replicas_restarts_total{")]
        for group in status.groups:
            counted = sum(float(row.rpartition(" ")[2]) for row in rows if f'group="{group.name}"' in row)
            assert counted == sum(group.restarts.values()), (what, "I6: metrics and status differ", group, rows)

    def _event_counts(self, status: RunStatus, what: str) -> None:
        """The events since the last start that resumed nothing."""
        events = self._events()
        begins = [n for n, event in enumerate(events) if event["type"] == "RunStarted" and not event.get("resumed")]
        events = events[begins[-1] :]
        lost = sum(event["count"] for event in events if event["type"] == "EventsLost")
        for group in status.groups:
            told = Counter(
                event["restart_reason"]
                for event in events
                if event["type"] == "Transition" and event["group"] == group.name and event.get("restart_reason")
            )
            alike = dict(told) == {reason: count for reason, count in group.restarts.items() if count}
            assert alike or lost or not self.certain, (what, "I6: events and status differ", told, group.restarts)

    def _events(self) -> list[dict[str, Any]]:
        """All there are, their numbers in order."""
        path = self._world.run.state_dir / "events.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [record["seq"] for record in records]
        assert numbers == sorted(set(numbers)), "I6: the numbers of events do not grow"
        return [record["event"] for record in records]

    def _budgets(self, status: RunStatus, what: str) -> None:
        """What is left of a budget is what was not spent; after the clock has jumped,
        at least that."""
        for group in status.groups:
            spent = round((1.0 - group.restart_budget_remaining_ratio) * MAX_RESTARTS)
            due = sum(count for reason, count in group.restarts.items() if reason not in FREE_REASONS)
            exact = self.certain and not self._world.jumped
            assert spent == due if exact else spent <= due, (what, "I6: the budget", group, spent, due)

    def _others(self, attack: Attack, before: Picture, now: Picture, what: str) -> None:
        if attack.ends is not None:
            return
        for name in before.bodies.keys() - attack.hit:
            then, there = before.bodies[name], now.bodies[name]
            assert (then.shim, then.ranks) == (there.shim, there.ranks), (what, "I6: another was touched", then, there)

    def _generations_grow(self, what: str) -> None:
        """A generation is up only once, and after the one before."""
        for name in self._world.shape.sizes:
            ups = [line for line in self._world.told(name) if "up" in line]
            generation, pid = self._generations.get(name, (0, 0))
            last = ups[-1]
            assert (last["generation"], last["pid"]) == (generation, pid) or last["generation"] > generation, (
                what,
                "I6: generations",
                name,
                (generation, pid),
                last,
            )
            self._generations[name] = (last["generation"], last["pid"])

    # ------------------------------------------------------------ logs

    def floods(self, attack: Attack, what: str) -> None:
        """What was written is in the logs: whole lines, in order, none missing, up to
        the last."""
        lossy = attack.ends is not None or any(
            fault.target == "disk" or (fault.target == "shim" and fault.kind != "pause") for fault in attack.faults
        )
        for name, (generation, pid, before) in attack.flooded.items():
            if lossy or attack.most[name.partition("-")[0]]:  # it may have died of it, and its log with it
                continue
            self._wait_for_flood(name, generation, pid, before, what)

    def _wait_for_flood(self, name: str, generation: int, pid: int, before: int, what: str) -> None:
        eventually(lambda: self._world.written(name, pid) > before, f"{what}: the flood")
        written = self._world.written(name, pid)
        complete = (written, -1)
        what = f"{what}: {written} lines in the log of {name}"
        eventually(lambda: self._logged(name, generation, what) in complete, what)

    def _logged(self, name: str, generation: int, what: str) -> int:
        """How many lines; -1: some were dropped for a full disk, before this round."""
        path = self._world.run.log(name.replace("-", "/"), generation)
        parts = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdigit()]
        files = sorted(parts, key=lambda file: -int(file.suffix[1:]))
        text = "".join(file.read_text(errors="replace") for file in (*files, path) if file.exists())
        numbers = []
        for line in text.splitlines():
            found = LINE.fullmatch(line)
            if found is None:
                assert "dropped" in line, (what, "a torn line", line)
                return -1
            assert len(found[4]) == int(found[3]) % 80, (what, "a torn line", line)
            numbers.append(int(found[3]))
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), (what, "lines are missing or mixed")
        return numbers[-1] + 1 if numbers else 0

    def _page(self, name: str) -> str:
        host, _, port = self._world.run.endpoint().rpartition(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
            connection.request("GET", f"/{name}")
            return connection.getresponse().read().decode()


def port_is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _usage(pid: int) -> dict[str, int]:
    folder = Path(f"/proc/{pid}")
    (anonymous,) = re.findall(r"RssAnon:\s+(\d+) kB", (folder / "status").read_text())
    return {
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
        "memory": int(anonymous) * 1024,
    }
