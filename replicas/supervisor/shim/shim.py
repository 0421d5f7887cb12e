"""Shim: own a replica's process tree on one node, and leave no process of it.

An agent execs ``python -m replicas.supervisor.shim.shim --control FD --parent PID`` for
each part of a replica. Orders come over the socketpair ``FD``
(:mod:`replicas.supervisor.wire.orders`), the spec of the part first; the state of the
part goes back (:mod:`replicas.supervisor.wire.part_state`). The shim is a subreaper, so
every process that a rank forks stays below it. One thread runs one loop over a
selector, in the phases of :mod:`replicas.supervisor.shim.phases`:

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
(:mod:`replicas.linux.cgroups`), so SIGKILL to the tree is one write that none escapes.
The agent's death shows in a pidfd and the end of the control stream (a parent-death
signal is bound to the *thread* that spawned the shim). A shim without a ping for its
lease or patience (:mod:`replicas.supervisor.shim.lease`) ends in the same way: with
``ORPHAN_GRACE_S`` from SIGTERM to SIGKILL. If it is killed, launcher and ranks have
death signals, and an agent sweeps the rest. Standard library only, and no slow modules.
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
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from replicas.linux import inherited, private
from replicas.linux.processes import Child, become_subreaper
from replicas.supervisor.cleanup.inventory import InventoryTimer
from replicas.supervisor.shim import starting
from replicas.supervisor.shim.deaths import DeathWatch, StoppedWatch, exit_report
from replicas.supervisor.shim.dumps import Stacks
from replicas.supervisor.shim.lease import ShimLease
from replicas.supervisor.shim.part_processes import PartProcesses
from replicas.supervisor.shim.phases import SWEEP_GRACE_S, Input, Phases
from replicas.supervisor.shim.pump_watcher import PumpWatcher
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import MessageSocket, PartSpec, note
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, StateSender, state_message

ORPHAN_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL when the supervisor is gone, in seconds."""
RELAY_S = 0.5
"""How long torchrun may take to forward SIGTERM to its ranks, in seconds."""


class Shim:
    """A shim's loop: starts, watches and ends a replica's processes on this node."""

    def __init__(
        self, control: socket.socket, parent_fd: int, spec: PartSpec, tee: int | None, starts: ModuleType = starting
    ) -> None:
        """Take over the descriptors, and handle signals; start no process yet.

        :param control: socket to the agent.
        :param parent_fd: pidfd of the agent.
        :param tee: descriptor of the supervisor's stderr; None if lines are not shown
            there.
        :param starts: the module that starts its processes; in a shim that a template
            has forked :mod:`replicas.supervisor.shim.forked_starting`.
        :raises OSError: no descriptor is left.
        """
        self.spec, self._starts = spec, starts
        self._parent_fd = parent_fd
        self._selector = selectors.DefaultSelector()
        self._agent = MessageSocket(control, "the agent", self._obey, self._selector.unregister)
        self._teller = StateSender(self._agent, spec)
        self._logs = PumpWatcher(spec, self._selector, tee, self._teller.count_lost_lines)
        self._scratch: Path | None = None
        self._main: Child | None = None
        self._launcher: MessageSocket | None = None
        self._stopped: StoppedWatch | None = None
        self._ranks: set[int] = set()
        """Pids of ranks that this process has forked for the launcher."""
        self._report: ExitReport | None = None
        self._broken = ""
        self._processes = PartProcesses(spec, self._selector, lambda: self._logs.pid)
        self._stock = InventoryTimer(
            self._processes.find_with_sidecars, time.monotonic(), lambda found: self._teller.update(belongings=found)
        )
        self._stacks = Stacks(spec, self._logs.pipes, self._agent)
        self._deaths = DeathWatch(self._selector, self._processes.find)
        self._phases = Phases()
        self._lease = ShimLease(time.monotonic(), spec.lease_until, spec.patience_s)
        self._promised_s = math.inf
        self._cut_s = 0.0
        self._wake = _wakeup_fd()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)
        self._selector.register(parent_fd, selectors.EVENT_READ, self._on_agent_gone)

    def run(self) -> int:
        """Start the part's processes, and serve until none is left. Blocks.

        Return the exit code of the shim, 0.
        """
        self._start()
        while self._phases.now != "over":
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._reap()
            self._on_time(time.monotonic())
            if self._phases.now == "sweeping" and self._processes.are_gone():
                self._apply_event("empty")
            if self._phases.now == "closing" and self._logs.over and self._processes.are_gone():
                self._apply_event("logs_read")
        if self._scratch is not None:
            private.remove_tree(self._scratch)
        self._processes.leave_group(run=not self._agent.open)  # a living agent removes the run's group
        self._teller.update(gone=True, remains=None)
        return 0

    # ------------------------------------------------------------ inputs

    def _on_control(self) -> None:
        """Handle the agent's next message; stop the part if the connection ended."""
        if not self._agent.read():
            self._on_agent_gone()

    def _obey(self, message: orders.Message) -> None:
        """Carry out an order of the agent. Raise Malformed for an invalid one."""
        if message["type"] == "stop":
            with orders.reading("stop"):
                timeout_s = float(message["timeout_s"])
                broken = str(message.get("broken", ""))
            self._broken = self._broken or broken  # the first reason is the cause
            if not broken and not self._teller.state.stopping:
                self._teller.update(stopping=True)
            self._stop(timeout_s, stacks=bool(message.get("stacks")))
        elif message["type"] == "stacks":
            self._stacks.ask(self._main, time.monotonic())
        elif message["type"] == "rendezvous":
            with orders.reading("rendezvous"):
                meeting = str(message["host"]), int(message["port"])
            if self._launcher is not None and self._teller.state.rendezvous is None:
                self._launcher.send(message)
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

    def _take_from_launcher(self, message: orders.Message) -> None:
        """Handle a message of torchrun's launcher: its exit report, or an address.

        Keep the report. Send the address (rendezvous), at which the parts of the
        replica meet, to the agent. Or fork a rank that the launcher asks for.

        :raises Malformed: the message is not valid.
        """
        if message["type"] == "fork":
            self._fork_rank(orders.read(dict[str, str], message.get("env")))
        elif message["type"] == "report":
            self._report = orders.read(ExitReport, message.get("report"))
        else:
            with orders.reading("rendezvous"):
                self._teller.update(rendezvous=(str(message["host"]), int(message["port"])))

    def _on_signal(self) -> None:
        """Read the numbers of arrived signals; stop the part for any but SIGCHLD."""
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._wake, 512)
            if any(signum != signal.SIGCHLD for signum in received):
                self._stop(self.spec.stop_timeout_s)

    def _on_agent_gone(self) -> None:
        """Handle the end of the agent: close its connection, and stop the part.

        SIGKILL follows SIGTERM after 2 s (``ORPHAN_GRACE_S``).
        """
        self._agent.close()
        if self._parent_fd >= 0:
            self._selector.unregister(self._parent_fd)
            os.close(self._parent_fd)
            self._parent_fd = -1
        self._stop(ORPHAN_GRACE_S)

    # ------------------------------------------------------------ processes

    def _start(self) -> None:
        """Start the log pump and the main process; report a failure to the agent."""
        try:
            self._logs.start()
            if self.spec.launcher == "torchrun":
                self._scratch = starting.make_scratch_folder(self.spec)
                self._main, ours = self._starts.start_launcher(self.spec, self._logs.pipes, self._scratch)
                self._stopped = StoppedWatch(self._main.pid)
                self._launcher = MessageSocket(
                    ours, "the launcher", self._take_from_launcher, self._selector.unregister
                )
                self._selector.register(ours, selectors.EVENT_READ, self._launcher.read)
            else:
                self._main = self._starts.start_program(self.spec, self._logs.pipes)
        except OSError as error:
            self._teller.update(report=_not_started(error))
            self._apply_event("not_started")
        else:
            self._teller.update(main_pid=self._main.pid)

    def _fork_rank(self, env: dict[str, str]) -> None:
        """Fork a rank with this environment; tell the launcher its pid, or why not."""
        assert self._launcher is not None
        try:
            rank = self._starts.fork_rank(self.spec, env, self._logs.pipes)
        except OSError as error:
            self._launcher.send({"type": "forked", "pid": 0, "error": str(error)})
            return
        self._ranks.add(rank.pid)
        self._launcher.send({"type": "forked", "pid": rank.pid})

    def _reap(self) -> None:
        """Reap all ended children; handle the end of main process and log pump.

        Tell the launcher the exit codes of ranks that were forked here.
        """
        for pid, code in self._processes.reap():
            if self._main is not None and pid == self._main.pid:
                self._main.ended(code)
                self._stopped = None
                if self._launcher is not None:
                    self._launcher.read_rest()  # has the exit report, which main_ended needs
                self._stacks.finish(time.monotonic())
                self._apply_event("main_ended")
            elif pid == self._logs.pid:
                self._logs.ended(code)
            elif pid in self._ranks:
                self._ranks.remove(pid)
                if self._stopped is not None:
                    self._stopped.has_dead_rank = True
                if self._launcher is not None:
                    self._launcher.send({"type": "ended", "pid": pid, "code": code})

    # ------------------------------------------------------------ ending

    def _stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Stop the part: SIGTERM to the main process now, SIGKILL to all later.

        A later call can only make the SIGKILL earlier. Does not wait.

        :param timeout_s: from SIGTERM to SIGKILL; torchrun gets 0.5 s more to forward
            it.
        :param stacks: save the stacks of the ranks first, which delays SIGTERM.
        """
        if stacks and self._phases.now == "running":
            self._stacks.ask(self._main, time.monotonic(), then=lambda: self._stop(timeout_s))
            return
        self._stacks.finish(time.monotonic())
        self._promised_s = min(self._promised_s, timeout_s)
        relay_s = RELAY_S if timeout_s and self.spec.launcher == "torchrun" else 0.0
        self._apply_event("stop", timeout_s + relay_s)

    def _apply_event(self, event: Input, timeout_s: float = SWEEP_GRACE_S) -> None:
        """Step the phases by an event, and carry out the resulting actions.

        :param event: for example ``stop`` or ``main_ended``.
        :param timeout_s: for a stop, the time from SIGTERM to SIGKILL.
        """
        for action in self._phases.enter_phase(event, time.monotonic(), timeout_s):
            match action:
                case "take_inventory":
                    self._stock.take_final(time.monotonic())
                case "end_main" if self._main is not None:
                    self._main.signal(signal.SIGTERM)
                case "read_output":
                    self._logs.drain(then=lambda: self._apply_event("output_read"))
                case "report" | "report_stop":
                    self._report_end(stopping=action == "report_stop")
                case "end_all":
                    self._processes.end()
                    self._stock.take_final(time.monotonic())
                case "close_logs":
                    self._logs.close()

    def _report_end(self, *, stopping: bool) -> None:
        """Send the agent the exit report, once the last lines are in the log.

        :param stopping: the end of the main process was ordered.
        """
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

    def _on_time(self, now: float) -> None:
        """Do what is due: end, dump stacks, take the inventory, or kill.

        Called after each wake of the loop, with the monotonic time.
        """
        if self._lease.has_expired(now):
            note("ending the ranks: the agent of this node has sent nothing for too long")
            self._stop(ORPHAN_GRACE_S)
        if self._stopped is not None and self._main is not None and self._stopped.is_stuck(now):
            self._stopped = None
            self._broken = f"torchrun on node {self.spec.node} was frozen when a rank died, and has not noticed"
            self._main.signal(signal.SIGKILL)
        self._logs.on_time(now)
        self._stacks.on_time(now)
        if self._phases.now == "running":
            self._stock.on_time(now)
        if now >= self._phases.kill_at:
            self._kill(now)

    def _kill(self, now: float) -> None:
        """SIGKILL every process, and report those that do not die of it."""
        if self._phases.now == "stopping":
            self._cut_s = self._promised_s
        left = self._processes.kill(now)
        if self._phases.record_kill(now) and left:
            self._teller.update(remains=self._processes.describe_remains(left))

    def _timeout(self) -> float | None:
        """Return the seconds until the loop must wake, or None for no limit."""
        times = [self._phases.kill_at, self._lease.due, self._logs.due, self._stacks.due, self._processes.due]
        times += [self._stock.due] if self._phases.now == "running" else []
        times += [self._stopped.due] if self._stopped is not None else []
        return max(0.0, min(times) - time.monotonic()) if min(times) < math.inf else None


def _wakeup_fd() -> int:
    """Handle SIGCHLD, SIGTERM, SIGINT and SIGHUP; return a descriptor to poll.

    Each of these signals writes its number there, as a byte.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    return reader


def _not_started(error: Exception) -> ExitReport:
    """Return the exit report of a part that could not be started."""
    return ExitReport("failed", text=f"cannot be started: {error}")


def _first_order(control: socket.socket, parent_fd: int) -> PartSpec | None:
    """Wait for the spec; return None if the agent ends before it sends one.

    :param control: socket to the agent.
    :param parent_fd: pidfd of the agent.
    :raises Malformed: the order is not valid.
    :raises OtherOrders: the agent is of another release.
    """
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

    :return: the exit code: 1 after a malformed order, otherwise 0.
    """
    # No argparse: it loads slowly, and users do not type these arguments.
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    inherited.put_in_order()
    control = socket.socket(fileno=options["control"])
    try:
        parent_fd = os.pidfd_open(options["parent"])
    except ProcessLookupError:  # the agent is gone
        return 0
    if os.getppid() != options["parent"]:
        return 0
    return serve(control, parent_fd, options.get("lock"), options.get("tee"))


def serve(
    control: socket.socket, parent_fd: int, lock: int | None, tee: int | None, starts: ModuleType = starting
) -> int:
    """Wait for the spec of the part, and run its shim in this process, to its end.

    :param control: socket to the agent. :param parent_fd: pidfd of the agent.
    :param lock: descriptor of the run's lock, which stays open; None if there is none.
    :param tee: descriptor of the supervisor's stderr; None to show no lines there.
    :param starts: the module that starts its processes.
    :return: the exit code of this process, as for :func:`main`.
    """
    become_subreaper()
    for descriptor in (control.fileno(), tee, lock):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    try:
        spec = _first_order(control, parent_fd)
        if spec is None:
            return 0
        shim = Shim(control, parent_fd, spec, tee, starts)
    except orders.Malformed as error:
        note(f"ending, after a malformed order of the agent: {error}")
        return 1
    except (orders.OtherOrders, OSError) as error:
        orders.send(control, state_message(UNKNOWN._replace(report=_not_started(error), gone=True)))
        return 0
    return shim.run()


if __name__ == "__main__":
    # Skip Python's teardown: the next generation would wait for it, and no output is
    # buffered here.
    os._exit(main())
