"""Shim: own a replica's process tree on one node, and leave no process of it.

An agent execs ``python -m replicas.supervisor.shim.shim --control FD --parent PID`` for
each part of a replica. Orders come over the socketpair ``FD``
(:mod:`replicas.supervisor.wire.orders`), the spec of the part first; the state of the
part goes back (:mod:`replicas.supervisor.wire.part_state`). The shim is a subreaper, so
every process that a rank forks, double-forks or puts into a session of its own stays
below it. One thread runs one loop over a selector, in the phases of
:mod:`replicas.supervisor.shim.phases`:

* *running*: kill a torchrun that is stopped (SIGSTOP) when a rank dies, because it
  would never report that.
* *stopping*: if the ranks are reported stuck, save their stacks. Then SIGTERM to the
  main process; at the deadline SIGKILL to the whole tree.
* *sweeping*: the state has the exit report; SIGTERM to the remaining processes, then
  SIGKILL, repeated until this process has no child but the log pump, the control
  group is empty, and no process has the shim's mark (sidecars are children of the
  node's forkserver). Report processes that die slowly (``remains``). Kill Python's
  resource trackers last, as they unlink the files that the others have left in
  /dev/shm. When the pump has ended as well, the part is ``gone``.

Where possible, all processes that the shim starts are in a control group
(:mod:`replicas.linux.cgroups`), without the shim itself. SIGKILL to the tree is then
also one write, which no process can outrun or escape.

The shim notices the supervisor's death by a pidfd and by the end of the control stream;
there are ``ORPHAN_GRACE_S`` from SIGTERM to SIGKILL then. A parent-death signal is less
reliable: it is bound to the *thread* that spawned the shim, which an embedding program
may end at any time. An agent of another machine sends a lease with each ping, the local
agent a patience (:mod:`replicas.supervisor.shim.lease`): a shim that hears nothing for
that time ends as if its supervisor were gone.

If the shim itself is killed, the launcher and the ranks have their parent-death
signals, and the agent sweeps the remaining processes by their control group and by the
mark in their environment; the next agent does so if both are killed.

Standard library only; neither torch nor modules that load slowly (dataclasses,
argparse) are imported here: every restart waits for a shim.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from replicas.linux import cgroups, inherited, private
from replicas.linux.processes import (
    Child,
    become_subreaper,
    command_line,
    descendants,
    marked,
    own_children,
    signal_marked,
    signal_own,
)
from replicas.supervisor.cleanup.inventory import InventoryTimer
from replicas.supervisor.cleanup.sweeping import TrackerGrace, kill_group
from replicas.supervisor.shim.deaths import DeathWatch, EndWatch, StoppedWatch, exit_report
from replicas.supervisor.shim.dumps import Stack, Stacks, ranks_below, short
from replicas.supervisor.shim.lease import ShimLease
from replicas.supervisor.shim.phases import SWEEP_GRACE_S, Input, Phases
from replicas.supervisor.shim.pump_watcher import PumpWatcher
from replicas.supervisor.shim.starting import Starter
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec, note
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, Inventory, Remains, StateSender, state_message

ORPHAN_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL when the supervisor is gone, in seconds."""
RELAY_S = 0.5
"""How long torchrun may take to forward SIGTERM to its ranks, in seconds."""
_LOOK_AGAIN_S = 0.05
_MAX_REMAINS = 16


class Shim:
    """The shim's loop. ``run`` returns when no process of the node is left."""

    def __init__(self, control: socket.socket, parent_fd: int, spec: PartSpec, tee: int | None) -> None:
        """:param parent_fd: pidfd of the supervisor.

        :raises OSError: there are no descriptors left.
        """
        self.spec = spec
        self._parent_fd = parent_fd
        self._selector = selectors.DefaultSelector()
        self._cgroup = Path(spec.cgroup) if spec.cgroup else None
        self._teller = StateSender(control, spec)
        self._logs = PumpWatcher(spec, self._selector, tee, self._teller.count_lost_lines)
        self._starter = Starter(spec, self._logs.pipes)
        self._main: Child | None = None
        self._launcher: socket.socket | None = None
        self._stopped: StoppedWatch | None = None
        self._report: ExitReport | None = None
        self._broken = ""
        self._stock = InventoryTimer(self._with_sidecars, time.monotonic())
        self._stacks = Stacks(Path(spec.log_dir), self._save_stacks)
        self._deaths = DeathWatch(self._selector, self._own, time.monotonic)
        self._others = EndWatch(self._selector)
        self._phases = Phases()
        self._childless = False
        self._lease = ShimLease(time.monotonic(), spec.lease_until, spec.patience_s)
        self._grace = TrackerGrace()
        self._killing_since = 0.0
        self._promised_s = math.inf
        self._cut_s = 0.0
        self._wake = _wakeup_fd()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)
        self._selector.register(parent_fd, selectors.EVENT_READ, self._supervisor_gone)

    def run(self) -> int:
        self._start()
        while self._phases.now != "over":
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._reap()
            self._on_time(time.monotonic())
            if self._phases.now == "sweeping" and self._empty():
                self._apply_event("empty")
            if self._phases.now == "closing" and self._logs.over and self._empty():
                self._apply_event("logs_read")
        if self._starter.scratch:
            private.remove_tree(Path(self._starter.scratch))
        if self._cgroup is not None:
            cgroups.leave(self._cgroup, run=self._teller.control is None)  # a living agent removes the run's group
        self._teller.update(gone=True, remains=None)
        return 0

    # ------------------------------------------------------------ inputs

    def _on_control(self) -> None:
        if (control := self._teller.control) is None:  # closed in this iteration of the loop
            return
        try:
            message = orders.receive(control)
            if message is None:
                self._supervisor_gone()
            else:
                self._obey(message)
        except orders.Malformed as error:
            note(f"ignoring a malformed order of the agent: {error}")

    def _obey(self, message: orders.Message) -> None:
        if message["type"] == "stop":
            with orders.reading("stop"):
                timeout_s = float(message["timeout_s"])
                broken = str(message.get("broken", ""))
            self._broken = self._broken or broken  # the first reason is the cause
            if not broken and not self._teller.state.stopping:
                self._teller.update(stopping=True)
            self._stop(timeout_s, stacks=bool(message.get("stacks")))
        elif message["type"] == "stacks":
            self._show_stacks()
        elif message["type"] == "rendezvous":
            with orders.reading("rendezvous"):
                meeting = str(message["host"]), int(message["port"])
            if self._launcher is not None and self._teller.state.rendezvous is None:
                orders.send(self._launcher, message)
                self._teller.update(rendezvous=meeting)
        elif message["type"] == "ping":
            with orders.reading("ping"):
                until, patience_s = float(message.get("until", 0.0)), float(message.get("patience_s", 0.0))
            self._lease.pinged(time.monotonic(), until, patience_s)
            self._teller.answer_ping()
            if self._phases.now == "running":
                self._deaths.watch_new_processes()
            self._logs.kill_if_stuck(time.monotonic())
        else:
            raise orders.Malformed(f"unknown order {message['type'][:80]!r}")

    def _on_launcher(self) -> None:
        assert self._launcher is not None
        try:
            message = orders.receive(self._launcher)
            if message is None:
                self._forget_launcher()
            elif message["type"] == "report":
                self._report = orders.read(ExitReport, message.get("report"))
            else:
                with orders.reading("rendezvous"):
                    self._teller.update(rendezvous=(str(message["host"]), int(message["port"])))
        except orders.Malformed as error:
            note(f"ignoring a malformed message of the launcher: {error}")

    def _read_last_reports(self) -> None:
        """Read the dead launcher's last messages. A child of it may hold the stream."""
        if self._launcher is None:
            return
        self._launcher.setblocking(False)
        try:
            while self._launcher is not None:
                self._on_launcher()
        except BlockingIOError:
            self._forget_launcher()

    def _forget_launcher(self) -> None:
        assert self._launcher is not None
        self._selector.unregister(self._launcher)
        self._launcher.close()
        self._launcher = None

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._wake, 512)
            if any(signum != signal.SIGCHLD for signum in received):
                self._stop(self.spec.stop_timeout_s)

    def _supervisor_gone(self) -> None:
        control, self._teller.control = self._teller.control, None
        if control is not None:
            for source in (self._parent_fd, control):
                self._selector.unregister(source)
            os.close(self._parent_fd)
            control.close()
        self._stop(ORPHAN_GRACE_S)

    # ------------------------------------------------------------ processes

    def _start(self) -> None:
        try:
            self._logs.start()
            if self.spec.launcher == "torchrun":
                self._main, self._launcher = self._starter.launcher()
                self._stopped = StoppedWatch(self._main.pid)
                self._selector.register(self._launcher, selectors.EVENT_READ, self._on_launcher)
            else:
                self._main = self._starter.program()
        except OSError as error:
            self._teller.update(report=_not_started(error))
            self._apply_event("not_started")
        else:
            self._teller.update(main_pid=self._main.pid)

    def _own(self) -> list[int]:
        if self._cgroup is not None:
            return cgroups.members(self._cgroup)
        return [pid for pid in descendants(os.getpid()) if pid != self._logs.pid]

    def _with_sidecars(self) -> set[int]:
        return {*self._own(), *(() if self._cgroup is not None else marked(self.spec.nonce))} - {self._logs.pid}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            self._childless = False
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._main is not None and pid == self._main.pid:
                self._main.ended(code)
                self._read_last_reports()  # has the exit report, which main_ended needs
                self._stacks.finish(time.monotonic())
                self._apply_event("main_ended")
            elif pid == self._logs.pid:
                self._logs.ended(code)

    # ------------------------------------------------------------ ending

    def _stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        if stacks and self._phases.now == "running":
            self._show_stacks(then=lambda: self._stop(timeout_s))
            return
        self._stacks.finish(time.monotonic())
        self._promised_s = min(self._promised_s, timeout_s)
        relay_s = RELAY_S if timeout_s and self.spec.launcher == "torchrun" else 0.0
        self._apply_event("stop", timeout_s + relay_s)

    def _apply_event(self, event: Input, timeout_s: float = SWEEP_GRACE_S) -> None:
        for action in self._phases.enter_phase(event, time.monotonic(), timeout_s):
            match action:
                case "take_inventory":
                    self._tell_stock(self._stock.take_final(time.monotonic()))
                case "end_main" if self._main is not None:
                    self._main.signal(signal.SIGTERM)
                case "read_output":
                    self._logs.drain(then=lambda: self._apply_event("output_read"))
                case "report" | "report_stop":
                    self._report_end(stopping=action == "report_stop")
                case "end_all":
                    signal_own(signal.SIGTERM, but=frozenset({self._logs.pid}))  # before a peer's death makes them fail
                    self._tell_stock(self._stock.take_final(time.monotonic()))
                case "close_logs":
                    self._logs.close()

    def _report_end(self, *, stopping: bool) -> None:
        """Send how the main process ended, once its last lines are in the log."""
        assert self._main is not None
        report = exit_report(
            self.spec,
            self._main,
            self._report,
            self._logs.pipes.last_lines,
            stopping=stopping,
            first_death=self._deaths.first,
        )
        if self._broken:
            report = ExitReport("lost", text=self._broken)
        self._teller.update(report=report._replace(cut_s=self._cut_s))

    def _show_stacks(self, then: Callable[[], None] | None = None) -> None:
        """Save the stacks of all ranks to their logs, and send them to the agent."""
        if self._main is None or self._main.code is not None:
            self._teller.send({"type": "stacks", "found": {}})
            return
        ranks = ranks_below(self._main.pid, torchrun=self.spec.launcher == "torchrun")
        self._stacks.ask(ranks, time.monotonic(), then)

    def _save_stacks(self, found: list[Stack]) -> None:
        for stack in found:
            self._logs.pipes.write_lines(stack.rank, stack.entry())
        name = f"{self.spec.group}/{self.spec.replica}"
        texts = {f"{name}/{stack.rank}": f"process {stack.pid}\n{stack.text}" for stack in short(found)}
        self._teller.send({"type": "stacks", "found": texts})

    def _tell_stock(self, found: Inventory | None) -> None:
        if found is not None:
            self._teller.update(belongings=found)

    def _on_time(self, now: float) -> None:
        if self._lease.has_expired(now):
            note("ending: the agent was silent for too long")
            self._stop(ORPHAN_GRACE_S)
        if self._stopped is not None and self._main is not None and self._main_runs and self._stopped.is_stuck(now):
            self._stopped = None
            self._broken = f"torchrun of node {self.spec.node} was stopped when a rank died, and did not see it"
            self._main.signal(signal.SIGKILL)
        self._logs.on_time(now)
        self._stacks.on_time(now)
        if self._phases.now == "running":
            self._tell_stock(self._stock.on_time(now))
        if now >= self._phases.kill_at:
            self._kill(now)

    def _kill(self, now: float) -> None:
        """SIGKILL every process, and report those that do not die of it."""
        self._killing_since = self._killing_since or time.time()
        if self._phases.now == "stopping":
            self._cut_s = self._promised_s
        spared = frozenset({self._logs.pid}) | self._grace.spared(self._own(), now)
        if self._cgroup is not None:
            kill_group(self._cgroup, cgroups.members(self._cgroup), spared)
        left = signal_own(signal.SIGKILL, but=spared)
        if self._childless_but_for_logs():  # remaining processes are children of the forkserver
            left += signal_marked(self.spec.nonce, signal.SIGKILL, but=spared)
        if self._phases.record_kill(now) and left:
            processes = tuple((pid, command_line(pid)) for pid in left[:_MAX_REMAINS])
            self._teller.update(remains=Remains(since=self._killing_since, processes=processes))

    def _empty(self) -> bool:
        """Return True if the replica's last process is gone; none starts in a sweep."""
        return self._childless_but_for_logs() and self._others.watch_all(self._find_sidecars)

    def _find_sidecars(self) -> set[int]:
        """Return processes of the replica that are not below this one: sidecars."""
        inside = cgroups.members(self._cgroup) if self._cgroup is not None else ()
        return {*inside, *marked(self.spec.nonce)} - {self._logs.pid}

    def _childless_but_for_logs(self) -> bool:
        return self._childless or set(own_children()) <= {self._logs.pid}

    @property
    def _main_runs(self) -> bool:
        return self._phases.now in ("running", "stopping")

    def _timeout(self) -> float | None:
        times = [
            self._phases.kill_at,
            self._lease.wakes,
            *self._logs.wakes,
            *self._stacks.wakes,
        ]
        times += self._stopped.wakes if self._stopped is not None and self._main_runs else []
        times += self._stock.wakes if self._phases.now == "running" else []
        times += [time.monotonic() + _LOOK_AGAIN_S] if self._others.has_unwatched else []
        return max(0.0, min(times) - time.monotonic()) if min(times) < math.inf else None


def _wakeup_fd() -> int:
    """Return a descriptor on which each handled signal writes its number, a byte."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    return reader


def _not_started(error: Exception) -> ExitReport:
    return ExitReport("failed", text=f"cannot be started: {error}")


def _first_order(control: socket.socket, parent_fd: int) -> PartSpec | None:
    awaited = select.poll()
    for source in (control, parent_fd):
        awaited.register(source, select.POLLIN)
    heard = {descriptor for descriptor, _ in awaited.poll()}  # an order sent before the supervisor's end counts
    return orders.receive_spec(control) if control.fileno() in heard else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a shim. The arguments are pairs of an option and a number.

    ``--control``: descriptor of the control socket; ``--parent``: pid of the agent;
    ``--lock``: descriptor of the run's lock, held as long as the shim lives; ``--tee``:
    descriptor of the supervisor's stderr, if lines are wanted there.
    """
    # No argparse: it loads slowly, and users do not type these arguments.
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    inherited.put_in_order()
    become_subreaper()
    tee = options.get("tee")
    for descriptor in (tee, options.get("lock")):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=options["control"])
    control.set_inheritable(False)
    try:
        parent_fd = os.pidfd_open(options["parent"])
        spec = _first_order(control, parent_fd) if os.getppid() == options["parent"] else None
        if spec is None:
            return 0
        shim = Shim(control, parent_fd, spec, tee)
    except ProcessLookupError:  # the agent is gone
        return 0
    except orders.Malformed as error:
        note(f"malformed order of the agent: {error}")
        return 1
    except (orders.OtherOrders, OSError) as error:
        orders.send(control, state_message(UNKNOWN._replace(report=_not_started(error), gone=True)))
        return 0
    return shim.run()


if __name__ == "__main__":
    # Skip Python's teardown: the next generation would wait for it, and no output is
    # buffered here.
    os._exit(main())
