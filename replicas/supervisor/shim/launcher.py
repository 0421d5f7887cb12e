"""Launcher: run torchrun's agent of one node of a replica, as a child of the shim.

``python -m replicas.supervisor.shim.launcher --control FD --parent PID`` runs
``torch.distributed.run``'s own path (its argument parser, its ``elastic_launch``) with
these changes for a supervised replica:

* the kernel sends it SIGTERM when the shim dies; torchrun then drains its workers;
* every worker starts behind the guard (:mod:`replicas.supervisor.wire.guard`), so that
  no worker outlives this process;
* ranks come from the orders, not from a rendezvous. torchrun's rendezvous unpickles
  values of a TCPStore, which has no passwords: every process that reached the port
  could run code here. Only the store of the workers' process groups is left; node 0
  hosts it, on the local address only, on a port picked by the kernel, and sends the
  port through the shim. This process never unpickles a class;
* it restarts no worker: the supervisor restarts replicas;
* it reports the exit codes of the ranks, which torchrun's exit code hides, to the shim;
* it notices the end of a worker immediately (:class:`_Agent`); torchrun polls.
"""

# ruff: noqa: E402  # torch is loaded while the garbage collector is off

from __future__ import annotations

import gc

_collects = gc.isenabled()
gc.disable()  # saves a tenth of torch's load time: many objects, no garbage

import argparse
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api as launcher_api

from replicas.common import own_code
from replicas.common.foreign import lines, one_line
from replicas.linux import inherited
from replicas.linux.helpers import TORCHRUN
from replicas.linux.processes import LAUNCHER, die_with_parent
from replicas.supervisor.shim.forked_workers import ForkedWorkers, fork_workers
from replicas.supervisor.shim.starting import guard_command, guard_orders, where
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.guard import GUARD
from replicas.supervisor.wire.orders import PartSpec, note, plain
from replicas.supervisor.wire.part_state import ExitReport, RankExit

if _collects:
    gc.enable()

_torch_run: Any = torch_run  # torch leaves parse_args untyped
_BACKEND = "replicas"
_MONITOR_INTERVAL_S = 0.05  # used only by torch's own agent
_LOOK_INTERVAL_S = 1.0
_INSTANT_S = 1e-4
_MEET_INTERVAL_S = 0.05
_CONNECT = timedelta(seconds=60)
_ALIKE = "TORCH_ELASTIC_WORKER_IDENTICAL"
_TEXT_NCHARS = 300
_ERROR_NCHARS = 4000
_NEVER_S = 3600.0  # after the stop timeout; the shim kills the remaining processes before


def local_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Start and return a TCPStore server on a free port of ``address`` only.

    :param address: a local address; torch alone would listen on all of them.
    :param timeout: default timeout of the store's operations.
    """
    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def forbid_pickles() -> None:
    """Refuse pickles that name a class or function, in the whole process, for good.

    A version of torchrun that unpickles from a socket fails here and executes nothing.
    """

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        """Audit hook: raise PermissionError where a pickle looks up a name."""
        if event == "pickle.find_class":
            raise PermissionError(f"a pickle names {'.'.join(map(str, arguments))}: torchrun may load none here")

    sys.addaudithook(refuse)


class _Rendezvous(RendezvousHandler):
    """The rendezvous of torchrun's agents: ranks and the workers' store.

    Ranks follow the node numbers. A node starts its workers when all nodes are up.
    """

    def __init__(self, spec: PartSpec, store: TCPStore) -> None:
        """Keep the spec and the workers' store; wait for no node yet.

        :param store: the store of the workers, over which nodes find each other, too.
        """
        self._spec = spec
        self._bootstrap = RendezvousStoreInfo(store.host, store.port)
        # a single node waits for no other
        self._store: Store = HashStore() if spec.nnodes == 1 else PrefixStore("replicas/nodes", store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are up; return the workers' store and this node's rank.

        :raises RendezvousTimeoutError: a node did not come up in time.
        """
        spec = self._spec
        self._store.set(str(spec.node), "")
        deadline = time.monotonic() + spec.rendezvous_timeout_s
        while missing := [node for node in range(spec.nnodes) if not self._store.check([str(node)])]:
            if time.monotonic() > deadline:
                nodes = ", ".join(map(str, missing))
                raise RendezvousTimeoutError(f"node {nodes} did not come up within {spec.rendezvous_timeout_s:g} s")
            time.sleep(_MEET_INTERVAL_S)  # the store's own wait would delay SIGTERM
        return RendezvousInfo(self._store, spec.node, spec.nnodes, self._bootstrap)

    @property
    def use_agent_store(self) -> bool:
        """Always True, so that workers use the store that the agents use."""
        return True

    def get_backend(self) -> str:
        """Return the name under which this rendezvous is registered."""
        return _BACKEND

    def get_run_id(self) -> str:
        """Return a name of this generation of the replica."""
        return _run_id(self._spec)

    def is_closed(self) -> bool:
        """Return False: it stays usable."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the supervisor ends the other nodes."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node joins later."""
        return 0

    def shutdown(self) -> bool:
        """Return True, and do nothing."""
        return True


class _Agent(LocalElasticAgent):
    """torchrun's agent, which the end of a worker wakes immediately."""

    workers: ForkedWorkers | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Make torch's agent with the same arguments; start no worker."""
        super().__init__(*arguments, **named)
        self._worker_group.spec.monitor_interval = _INSTANT_S  # _monitor_workers waits instead
        self._watched: PContext | None = None
        self._ends = select.poll()
        self._are_over = False  # the workers have ended, or had their time to end

    def _assign_worker_ranks(self, *arguments: Any, **named: Any) -> Any:
        """Compute the workers' ranks without the store; torch calls this.

        All nodes have the same number of workers, so nothing has to be exchanged.
        """
        os.environ[_ALIKE] = "1"  # all nodes have as many workers: ranks are computed, not exchanged in the store
        try:
            return super()._assign_worker_ranks(*arguments, **named)
        finally:
            del os.environ[_ALIKE]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait up to 1 s for the end of a worker. Return the state of the workers.

        torch calls it in a loop, in this process's main thread.
        """
        forked = self.workers
        if self._watched is not self._pcontext and self._pcontext is not None:
            self._watched, self._ends = self._pcontext, select.poll()
            if forked is not None:
                self._ends.register(forked.control, select.POLLIN)
            for pid in self._pcontext.pids().values():  # not reaped yet, so the pids are valid
                if forked is None or pid not in forked.pids:
                    self._ends.register(os.pidfd_open(pid), select.POLLIN)
        has_ended = forked is not None and bool(forked.codes)
        for descriptor, _ in self._ends.poll(0 if has_ended else _LOOK_INTERVAL_S * 1e3):
            if forked is None or descriptor != forked.control.fileno():  # whose messages torch's look reads
                self._ends.unregister(descriptor)
                os.close(descriptor)
        result: RunResult = super()._monitor_workers(worker_group)
        self._are_over = result.state != WorkerState.HEALTHY
        return result

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        """End the workers, as torch does, unless torch has already ended them.

        A worker that survives SIGKILL is left to the shim, which reports it.
        """
        if not self._are_over:
            super()._shutdown(*arguments, **named)


def _run_id(spec: PartSpec) -> str:
    """Return a name of this generation of the replica."""
    return f"{spec.group}-{spec.replica}-{spec.generation}"


def _torchrun_arguments(spec: PartSpec) -> list[str]:
    """Return the arguments of torchrun's command line for this part."""
    return [
        f"--nnodes={spec.nnodes}:{spec.nnodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--rdzv-backend={_BACKEND}",
        f"--rdzv-id={_run_id(spec)}",
        f"--local-addr={spec.local_addr}",
        "--max-restarts=0",
        f"--monitor-interval={_MONITOR_INTERVAL_S}",
        f"--log-dir={spec.scratch}",
        "--no-python",
        *guard_command(),
    ]


def _workers_store(spec: PartSpec, control: socket.socket) -> TCPStore:
    """Return the store of the workers' process groups; on node 0, host it.

    Node 0 sends its address through the shim; the others wait for that. Blocks.

    :param control: socket to the shim.
    :raises RendezvousTimeoutError: node 0 did not come up in time.
    :raises SystemExit: the shim has ended.
    """
    if spec.node == 0:
        store = local_store(spec.local_addr)
        orders.send(control, {"type": "rendezvous", "host": spec.local_addr, "port": store.port})
        return store
    control.settimeout(spec.rendezvous_timeout_s)  # node 0 may never come up
    try:
        message = orders.receive(control)
    except TimeoutError:
        raise RendezvousTimeoutError(f"node 0 did not come up within {spec.rendezvous_timeout_s:g} s") from None
    finally:
        control.settimeout(None)
    if message is None:
        raise SystemExit("the shim has ended")
    with orders.reading("rendezvous"):
        host, port = str(message["host"]), int(message["port"])
    return TCPStore(host, port, is_master=False, timeout=_CONNECT)


def _bound_close(timeout_s: float) -> None:
    """Set how long torchrun waits for its other workers after one has failed.

    Changes torch's default of 30 s, for the whole process.

    :param timeout_s: in seconds.
    :raises RuntimeError: this version of torch has another default.
    """
    close: Any = PContext.close
    if close.__defaults__ != (None, 30):
        raise RuntimeError("this version of torch has another PContext.close(death_sig=None, timeout=30)")
    close.__defaults__ = (None, timeout_s)


def _rank_exit(rank: int, failure: ProcessFailure) -> RankExit:
    """Return how a rank ended, from torchrun's record of the failure.

    Its text is that of the error file, if the worker wrote one.
    """
    message = failure.error_file_data.get("message", {}) if failure.error_file_data else {}
    if not isinstance(message, dict):
        message = {"message": str(message)}
    text = str(message.get("message", ""))
    extra = message.get("extraInfo", {})
    error = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    return RankExit(
        rank=rank,
        code=failure.exitcode,
        pid=failure.pid,
        text="" if text == "<NONE>" else one_line(text, _TEXT_NCHARS),
        at=float(failure.timestamp),
        error=lines(error)[-_ERROR_NCHARS:],
    )


def _failed(error: ChildFailedError) -> ExitReport:
    """Return a report of the failed ranks, the first cause first, 64 at most.

    Ranks that torchrun then ended by SIGTERM come last.
    """
    exits = [_rank_exit(rank, failure) for rank, failure in error.failures.items()]
    exits.sort(key=lambda rank: (rank.code == -signal.SIGTERM, rank.at, rank.rank))
    first, *others = exits[:64]  # thousands would not fit into a message
    return ExitReport("failed", ranks=(first, *(other._replace(error="") for other in others)))


def launch(spec: PartSpec, control: socket.socket) -> ExitReport:
    """Run torchrun until its workers have ended, and return the exit report.

    Changes ``os.environ`` and defaults of torch for this process. Errors of torchrun
    become a report, and their traceback goes to stderr.

    :param control: socket to the shim, for the address of the workers' store.
    """
    _bound_close(spec.stop_timeout_s)
    launcher_api.LocalElasticAgent = _Agent  # type: ignore[attr-defined]  # torch has no other way to set the agent class
    try:
        store = _workers_store(spec, control)
        rendezvous_handler_registry.register(_BACKEND, lambda parameters: _Rendezvous(spec, store))
        config, entrypoint, arguments = _torch_run.config_from_args(_torch_run.parse_args(_torchrun_arguments(spec)))
        config.shutdown_timeout = spec.stop_timeout_s + _NEVER_S
        os.environ |= {name: value for name, value in spec.env.items() if name.startswith(TORCHRUN)}  # the ranks' own
        os.environ[GUARD] = where(guard_orders(spec, direct=False))
        launcher_api.elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        return _failed(error)
    except SignalException:
        return ExitReport("stopped")
    except orders.Malformed as error:
        return ExitReport("lost", text=f"torchrun on node {spec.node} has got a malformed order of its shim: {error}")
    except Exception as error:  # noqa: BLE001  # any error goes into the report, its traceback into the log
        traceback.print_exc()
        return ExitReport("lost", text=one_line(f"torchrun of node {spec.node}: {type(error).__name__}: {error}", 500))
    return ExitReport("ok")


def main(arguments: Sequence[str] | None = None, control: socket.socket | None = None) -> int:
    """Receive the spec from the shim, run torchrun, and send the exit report.

    Blocks. Changes this process for good: it gets SIGTERM at the death of the shim, and
    refuses pickles that name code. Return its exit code: 0 if all workers succeeded,
    else 1.

    :param arguments: of the command line; default: those of this process.
    :param control: the control socket, in a process that the shim has forked; the shim
        then forks the workers, too.
    """
    parser = argparse.ArgumentParser(prog=LAUNCHER, description="started by the shim")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="pid of the shim")
    options = parser.parse_args(arguments)
    inherited.put_in_order()
    die_with_parent(options.parent, signal.SIGTERM)
    forbid_pickles()
    if control is None:
        control = socket.socket(fileno=options.control)
        control.set_inheritable(False)
    else:
        _Agent.workers = fork_workers(control)
    try:
        spec = orders.receive_spec(control)
    except (orders.Malformed, orders.OtherOrders) as error:
        note(f"ending, after a malformed order of the shim: {error}")
        return 1
    if spec is None:
        return 1
    own_code.restore_path(os.environ, spec.env)
    report = launch(spec, control)
    orders.send(control, {"type": "report", "report": plain(report)})
    return 0 if report.outcome == "ok" else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing torch down takes 0.2 s, which delays the restart
