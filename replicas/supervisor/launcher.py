"""torchrun in a process of its own: one agent of one replica, started by the shim.

``python -m replicas.supervisor.launcher --control FD --parent PID`` runs ``torch.distributed.run``'s own path
(its argument parser, its ``elastic_launch``) with what a supervised replica needs:

* SIGTERM when the shim dies, on which torchrun drains its workers;
* every worker behind the guard (:mod:`replicas.supervisor.guard`), so that none outlives this process;
* a c10d rendezvous whose two TCPStores (the rendezvous' and the workers') listen on the local address only, on ports
  that the kernel picked. Node 0 hosts the first and tells its port through the shim; the others wait for it;
* no restarts of its own: those are the supervisor's;
* the exit codes of the ranks, which torchrun's exit code hides, in a report to the shim;
* no waiting where there is nothing to wait for (:func:`_hasten`, :class:`_Agent`): torchrun sleeps up to 0.3 s before
  it joins a rendezvous, looks once a second whether the others are there, and looks at its workers from time to time.
"""

# ruff: noqa: E402  # torch is loaded while the garbage collector is off

from __future__ import annotations

import gc

_collects = gc.isenabled()
gc.disable()  # a tenth of the time that torch takes to load: there is no garbage in it, and a lot to look through

import argparse
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.launcher import api as launcher_api

from replicas import own_code
from replicas.supervisor import orders
from replicas.supervisor.commands import guard_command, guard_orders
from replicas.supervisor.guard import GUARD
from replicas.supervisor.orders import ExitReport, NodeSpec, RankExit
from replicas.supervisor.processes import die_with_parent

if _collects:
    gc.enable()

__all__ = ["local_store", "main"]

_BACKEND = "replicas-c10d"
_MONITOR_INTERVAL_S = 0.05  # of an agent that is not ours
_LOOK_INTERVAL_S = 1.0
_INSTANT_S = 1e-4
_MEET_INTERVAL_S = 0.05
_MANY_NODES = 100
_ERROR_NCHARS = 4000
_SHUTDOWN_SHARE = 0.8  # of the stop timeout: torchrun kills what ignores SIGTERM a little before the shim would


def local_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A TCPStore server that listens on ``address`` only, on a free port.

    Left to itself a TCPStore listens on every interface, whatever its host name.
    """
    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


class _LocalRendezvous(DynamicRendezvousHandler):
    """torchrun's c10d rendezvous, with the workers' store on the local address only."""

    def get_backend(self) -> str:
        return _BACKEND

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return local_store(master_addr)


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    limit = timedelta(seconds=int(parameters.get("join_timeout", "300")))
    handler: RendezvousHandler = _LocalRendezvous.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(join=limit),
    )
    return handler


class _Agent(LocalElasticAgent):
    """torchrun's agent, which hears of the end of a worker at once, and else looks at them once in a second."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._worker_group.spec.monitor_interval = _INSTANT_S  # it waits below
        self._watched: PContext | None = None
        self._ends = select.poll()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._watched is not self._pcontext and self._pcontext is not None:
            self._watched, self._ends = self._pcontext, select.poll()
            for pid in self._pcontext.pids().values():  # nobody has reaped them yet
                self._ends.register(os.pidfd_open(pid), select.POLLIN)
        for pidfd, _ in self._ends.poll(_LOOK_INTERVAL_S * 1e3):
            self._ends.unregister(pidfd)
            os.close(pidfd)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def _method_name(depth: int = 2) -> str:
    """What torchrun reads the sources of all its callers for, each time it records an event."""
    return sys._getframe(depth).f_code.co_name


def _hasten(nnodes: int) -> None:
    """Have torchrun wait for nothing but what it waits for. A torch that does things elsewhere is merely slower.

    Its pauses keep many nodes from asking one store all at once; here they are few, or one.
    """
    pause: Callable[[Any], None] = getattr(dynamic_rendezvous, "_delay", lambda seconds: None)
    share = min(1.0, nnodes / _MANY_NODES)

    def shortened(seconds: float | tuple[float, float]) -> None:
        """Up to 0.3 s before joining, and a second between two looks whether all are there."""
        if isinstance(seconds, tuple):
            pause((seconds[0] * share, seconds[1] * share))  # it takes what is less than 10 ms for nothing
        else:
            pause(max(_MEET_INTERVAL_S, seconds * share))

    for module, name, ours in (
        (dynamic_rendezvous, "_delay", shortened),
        (dynamic_rendezvous, "get_method_name", _method_name),
        (launcher_api, "LocalElasticAgent", _Agent),
    ):
        if hasattr(module, name):
            setattr(module, name, ours)


def _torchrun_arguments(spec: NodeSpec, endpoint: str) -> list[str]:
    timeout_s = max(1, int(spec.rendezvous_timeout_s))
    return [
        f"--nnodes={spec.nnodes}:{spec.nnodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--rdzv-backend={_BACKEND}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={spec.group}-{spec.replica}-{spec.generation}",
        f"--rdzv-conf=is_host=false,join_timeout={timeout_s}",
        f"--local-addr={spec.local_addr}",
        "--max-restarts=0",
        f"--monitor-interval={_MONITOR_INTERVAL_S}",
        f"--log-dir={spec.scratch}",
        "--no-python",
        *guard_command(),
    ]


def _endpoint(spec: NodeSpec, control: socket.socket) -> tuple[str, TCPStore | None]:
    """Where the nodes meet; on node 0 with the store, which the caller must keep."""
    if spec.node == 0:
        store = local_store(spec.local_addr)
        orders.send(control, {"type": "rendezvous", "host": spec.local_addr, "port": store.port})
        return f"{spec.local_addr}:{store.port}", store
    control.settimeout(spec.rendezvous_timeout_s)
    try:
        message = orders.receive(control)
    except TimeoutError:
        raise RendezvousTimeoutError(f"node 0 did not come up within {spec.rendezvous_timeout_s:g} s") from None
    finally:
        control.settimeout(None)
    if message is None:
        raise SystemExit("the shim is gone")
    return f"{message['host']}:{message['port']}", None


def _bound_close(timeout_s: float) -> None:
    """When one worker fails torchrun stops the others with ``PContext.close()``, whose default wait is 30 s."""
    close: Any = PContext.close
    if close.__defaults__ != (None, 30):
        raise RuntimeError("this version of torch has another PContext.close(death_sig=None, timeout=30)")
    close.__defaults__ = (None, timeout_s)


def _rank_exit(rank: int, failure: ProcessFailure) -> RankExit:
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
        text="" if text == "<NONE>" else text[:300],
        at=float(failure.timestamp),
        error=error[-_ERROR_NCHARS:],
    )


def _failed(error: ChildFailedError) -> ExitReport:
    """The ranks that failed by themselves come first: those that torchrun stopped because of them were SIGTERMed."""
    exits = [_rank_exit(rank, failure) for rank, failure in error.failures.items()]
    exits.sort(key=lambda rank: (rank.code == -signal.SIGTERM, rank.at, rank.rank))
    first, *others = exits[:64]
    return ExitReport("failed", ranks=(first, *(other._replace(error="") for other in others)))


def launch(spec: NodeSpec, control: socket.socket) -> ExitReport:
    """Run the workers of this node to their end."""
    shutdown_s = spec.stop_timeout_s * _SHUTDOWN_SHARE
    _bound_close(shutdown_s)
    _hasten(spec.nnodes)
    rendezvous_handler_registry.register(_BACKEND, _create_handler)
    try:
        endpoint, store = _endpoint(spec, control)
        config, entrypoint, arguments = _config(_torchrun_arguments(spec, endpoint))
        config.shutdown_timeout = shutdown_s
        os.environ[GUARD] = guard_orders(spec, direct=False)
        launcher_api.elastic_launch(config, entrypoint)(*arguments)
        del store  # kept to here: the other nodes meet in it
    except ChildFailedError as error:
        return _failed(error)
    except SignalException:
        return ExitReport("stopped")
    except Exception as error:  # noqa: BLE001  # whatever torchrun raises goes into the report, its traceback into the log
        traceback.print_exc()
        return ExitReport("lost", text=f"torchrun of node {spec.node}: {type(error).__name__}: {error}"[:500])
    return ExitReport("ok")


def _config(arguments: list[str]) -> tuple[Any, Callable[..., Any] | str, list[str]]:
    parse: Any = torch_run.parse_args
    config, entrypoint, rest = torch_run.config_from_args(parse(arguments))
    return config, entrypoint, rest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="replicas.supervisor.launcher", description="started by the shim")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="pid of the shim")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent, signal.SIGTERM)
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    message = orders.receive(control)
    if message is None:
        return 1
    spec = NodeSpec.of(message["spec"])
    own_code.without(os.environ, spec.env)
    report = launch(spec, control)
    orders.send(control, report.message("report"))
    return 0 if report.outcome == "ok" else 1


def _leave(code: int) -> NoReturn:
    """End without taking torch apart, which takes a fifth of a second in which the replica cannot start again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
