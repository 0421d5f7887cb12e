"""What a round of faults does, in order of time, and what it may cost.

Theory of operation
===================

The faults of a round are put on one line of time with their ends (a stopped process
goes on, the disk has room again), and done one after the other. A victim is found when
its fault comes: those that come later hit a run that is recovering, and may find
nobody. So what a replica must have paid is known by bounds: :attr:`Attack.least`
restarts, and :attr:`Attack.most`.
"""

from __future__ import annotations

import heapq
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress

from replicas.control.commands import Order, Restart, Scale
from replicas.errors import ReplicasError
from tests.chaos.tree.tree_faults import Fault
from tests.chaos.tree.tree_world import Picture, Process, TreeWorld
from tests.support.machine.disks import fill
from tests.support.processes import start_time

__all__ = ["Attack"]

ORDER_S = 90.0
"""An order is answered by then, whatever happens beside it."""
SIGNALS = {
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "freeze": signal.SIGSTOP,
    "exit": signal.SIGUSR2,
    "flood": signal.SIGUSR1,
    "stutter": signal.SIGKILL,
    "drain": signal.SIGTERM,
    "hurry": signal.SIGTERM,
    "preempt": signal.SIGUSR1,
    "reload": signal.SIGHUP,
}


class Attack:
    """One round of faults on a run that is as in ``picture``. ``undo`` gets what lasts
    until the round is over."""

    def __init__(self, faults: list[Fault], world: TreeWorld, picture: Picture, undo: ExitStack) -> None:
        self.faults = faults
        self.least: Counter[str] = Counter()
        """By group: restarts that these faults must cost."""
        self.most: Counter[str] = Counter()
        """By group: and may cost."""
        self.doomed: set[Process] = set()
        """Processes that must be gone soon."""
        self.frozen: set[Process] = set()
        """Those that only the next supervisor can end: of a shim that is frozen, or
        that was killed with all who look on."""
        self.hit: set[str] = set()
        """Replicas that were hit, in whatever way."""
        self.flooded: dict[str, tuple[int, int, int]] = {}
        """Generation and pid of replicas of which a flood was asked, and how many lines
        they had told of before."""
        self.at = 0.0
        """When the last fault came."""
        self.words: list[str] = []
        self._world = world
        self._before = picture
        self._undo = undo
        self._steps: list[tuple[float, int, Callable[[], None]]] = []
        self._paid: set[str] = set()
        self._scaled: set[str] = set()
        self._unwatched: set[Process] = set()
        self._orders: list[threading.Thread] = []
        self._last = ""
        self.ends = next((fault for fault in faults if fault.ends_run), None)

    def run(self) -> None:
        """Do it all, with its ends; returns when nothing is paused any more, and the
        disk has room."""
        began = time.monotonic()
        for fault in self.faults:
            self._plan(began + fault.at_s, lambda fault=fault: self._do(fault))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        while self._steps:
            due, _, step = heapq.heappop(self._steps)
            time.sleep(max(0.0, due - time.monotonic()))  # the line of time itself, not a wait for anything
            step()
        for order in self._orders:
            order.join(ORDER_S)
            assert not order.is_alive(), f"{order.name} was not answered within {ORDER_S:g} s"
        if self.ends is not None and any(fault.pair == ("kill", "agent") for fault in self.faults):
            self.frozen |= self._unwatched

    def __str__(self) -> str:
        return " + ".join(self.words)

    def _plan(self, at: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._steps, (at, len(self._steps), step))

    def _do(self, fault: Fault) -> None:
        self.at = time.monotonic()
        if fault.target == "disk":
            self._fill(fault)
        elif fault.target == "clock":
            self._world.jump(fault.jump_s)
            self.words.append(f"{fault} {fault.jump_s:+g} s")
        elif fault.target == "supervisor":
            self._supervisor(fault)
        elif fault.kind in ("restart", "scale"):
            self._command(fault)
        else:
            self._signal(fault)

    # ------------------------------------------------------------ signals

    def _supervisor(self, fault: Fault) -> None:
        self.words.append(str(fault))
        self._world.run.signal(SIGNALS[fault.kind])
        if fault.kind == "hurry":
            self._plan(time.monotonic() + fault.pause_s / 4, lambda: self._world.run.signal(signal.SIGTERM))
        elif fault.kind == "pause":
            self._plan(self.at + fault.pause_s, lambda: self._world.run.signal(signal.SIGCONT))
        if fault.ends_run:
            self.doomed |= self._before.everything()

    def _signal(self, fault: Fault) -> None:
        picture = self._before if fault.at_s == 0.0 else self._world.look(whole=False)
        name, pid = self._victim(fault, picture) if picture is not None else ("", 0)
        if picture is None or not pid:
            self.words.append(f"{fault} (nobody there)")
            return
        identity = (pid, picture.identities[pid] or 0)
        self.words.append(f"{fault} {name} pid {pid}" + (f" at {fault.at_s:.2f} s" if fault.at_s else ""))
        if fault.kind == "flood":
            self._count_lines(name)  # before it may have written more
        _send(identity, SIGNALS[fault.kind])
        if fault.kind in ("kill", "freeze") and fault.pair != ("freeze", "shim"):
            self.doomed.add(identity)
        if fault.kind == "pause":
            self._plan(self.at + fault.pause_s, lambda: _send(identity, signal.SIGCONT))
        elif fault.kind == "freeze":
            self._undo.callback(_send, identity, signal.SIGCONT)
        if fault.pair == ("kill", "agent"):  # the shims end with it
            self.hit |= set(picture.bodies)
            for each in picture.bodies:
                self._costs(each, picture, certain=fault.at_s == 0.0)
            for each in self._before.bodies.keys() - picture.bodies.keys():  # it may have begun again just before
                self.most[each.partition("-")[0]] += 1
        if not name:
            return
        self.hit.add(name)
        self._last = name
        if fault.pair == ("freeze", "shim"):
            self.frozen |= picture.all_of(name)
        elif fault.pair == ("kill", "shim"):
            self._unwatched |= picture.all_of(name)
        if fault.restarts:
            self._costs(name, picture, certain=fault.at_s == 0.0)

    def _costs(self, name: str, picture: Picture, *, certain: bool) -> None:
        group = name.partition("-")[0]
        certain = certain and name not in self._scaled
        if not certain or name not in self._paid:
            self.most[group] += 1
        if certain and name not in self._paid and self.ends is None:  # a run that ends may end before it has seen it
            self.least[group] += 1
        self._paid.add(name)
        self.doomed |= picture.all_of(name)

    def _victim(self, fault: Fault, picture: Picture) -> tuple[str, int]:
        """Name of the replica, empty for what is the run's, and pid; 0: there is
        none."""
        if fault.target in ("store", "agent"):
            return "", picture.store if fault.target == "store" else picture.agent
        names = sorted(picture.bodies)
        if fault.kind == "flood":
            names = [name for name in names if name.startswith("loud")]
        elif fault.same and self._last in names:
            names = [self._last]
        found = []
        for name in names:
            body = picture.bodies[name]
            pids = {
                "shim": [body.shim],
                "pump": [body.pump],
                "torchrun": [body.launcher],
                "rank": body.ranks,
                "daemon": picture.daemons[name],
            }[fault.target]
            found += [(name, pid) for pid in pids if pid and picture.identities[pid] is not None]
        return found[int(fault.pick * len(found))] if found else ("", 0)

    def _count_lines(self, name: str) -> None:
        up = next(line for line in reversed(self._world.told(name)) if "up" in line)
        self.flooded[name] = (up["generation"], up["pid"], self._world.written(name, up["pid"]))

    # ------------------------------------------------------------ the rest

    def _fill(self, fault: Fault) -> None:
        self.words.append(str(fault))
        assert self._world.disk is not None
        full = ExitStack()
        full.enter_context(fill(self._world.disk))
        self._undo.callback(full.close)
        self._plan(self.at + fault.pause_s, full.close)

    def _command(self, fault: Fault) -> None:
        names = sorted(self._before.bodies)
        name = names[int(fault.pick * len(names))] if fault.kind == "restart" else "plain-1"
        group, _, index = name.partition("-")
        self.words.append(f"{fault} {name if fault.kind == 'restart' else group}")
        if fault.kind == "restart":
            self._order(name, Restart(target=f"{group}/{index}"))
        else:
            self._order(name, Scale(group=group, replicas=1), Scale(group=group, replicas=2))
            self._scaled.add(name)

    def _order(self, name: str, *orders: Order) -> None:
        """Hand in orders that concern a replica, one after the other.

        The supervisor answers an order when it is carried out. The next steps do not
        wait for that: an order may need who is paused until one of them.
        """
        group = name.partition("-")[0]
        scales, uncounted = len(orders) > 1, name in self._paid

        def carry_out() -> None:
            for number, order in enumerate(orders):
                try:
                    self._world.order(order)
                except ReplicasError as error:
                    self.words.append(f"({type(error).__name__}: {error})")
                    break
                if number == 0:  # a full disk takes no order
                    self.hit.add(name)
                    self.most[group] += not scales
                    self.doomed |= self._before.all_of(name)
            else:
                self.least[group] -= scales and uncounted  # perhaps it was stopped before its end was seen

        order = threading.Thread(target=carry_out, name=f"order for {name}", daemon=True)
        order.start()
        self._orders.append(order)


def _send(process: Process, signum: int) -> None:
    """Signal that very process, or nobody."""
    pid, began = process
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if start_time(pid) == began:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)
