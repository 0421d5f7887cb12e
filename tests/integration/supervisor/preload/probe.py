"""What a program can see of its start, as JSON in the folder OUT; then an end with
threads, atexit and an exit code.

A rank's program of test_preload.py, which runs it forked from a template and started
anew.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_PR_GET_PDEATHSIG, _PR_GET_CHILD_SUBREAPER = 2, 37
OWN = ("REPLICA", "TORCHELASTIC_ERROR", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
"""Prefixes of variables that differ between replicas."""


class Mine:
    """Of ``__main__``, to be pickled."""


def square(number: int) -> int:
    return number * number


def pooled(method: str) -> list[int]:
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(square, [1, 2, 3])


def put_main(queue: Any) -> None:
    main = sys.modules.get("__mp_main__")
    queue.put(main and main.__file__)


def spawned() -> list[Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=put_main, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return [found, process.exitcode]


def loaded(workers: int) -> list[float]:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    return sorted(
        value
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers)
        for value in batch.tolist()
    )


def together() -> list[Any]:
    """An all-reduce of two ranks, and a step of FSDP2."""
    dist.init_process_group("gloo")
    tensor = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    torch.manual_seed(0)
    model: Any = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    found = [tensor.tolist(), dist.get_world_size(), loss.item()]
    dist.destroy_process_group()
    return found


def handlers() -> dict[str, str]:
    found = {one.name: signal.getsignal(one) for one in signal.Signals}
    return {name: getattr(one, "__name__", str(one)) for name, one in found.items()}


def descriptors() -> dict[str, str]:
    with os.scandir("/proc/self/fd") as entries:
        numbers = sorted(int(entry.name) for entry in entries)
    return {str(one): str(Path(f"/proc/self/fd/{one}").readlink()).partition(":")[0] for one in numbers[:-1]}


def status(*names: str) -> list[str]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [lines[name].strip() for name in names]


def prctl(option: int) -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(option, ctypes.byref(found))
    return found.value


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def in_thread() -> list[bool]:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(threading.current_thread() is not threading.main_thread()))
    thread.start()
    thread.join()
    return found


def stream(one: Any) -> list[Any]:
    raw = type(one.buffer).__name__
    return [one.encoding, one.errors, one.line_buffering, one.write_through, one.isatty(), one.name, raw, one.fileno()]


def has_mark() -> bool:
    entry = f"REPLICAS_SHIM={os.environ['REPLICAS_SHIM']}"
    return entry in Path("/proc/self/environ").read_text().split("\0")


def child() -> str:
    code = "import os, signal; print(os.getcwd(), sorted(os.listdir('/proc/self/fd'))[:3], signal.getsignal(13))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


main_thread = threading.main_thread
PROBES: dict[str, Callable[[], Any]] = {
    "argv": lambda: [sys.argv, sys.orig_argv, sys.executable],
    "flags": lambda: [str(sys.flags), sys.warnoptions, str(sys._xoptions)],
    "path": lambda: [sys.path, sys.prefix, sys.exec_prefix, sys.base_prefix],
    "name": lambda: [__name__, __file__, str(__package__), str(__spec__), __doc__],
    "loader": lambda: [type(globals()["__loader__"]).__name__, getattr(globals()["__loader__"], "path", "")],
    "main": lambda: [
        vars(sys.modules["__main__"]) is globals(),
        sorted(name for name in globals() if name[:2] == "__"),
    ],
    "builtins": lambda: __builtins__ is builtins,
    "pickle": lambda: type(pickle.loads(pickle.dumps(Mine()))).__module__,
    "source": lambda: [inspect.getsource(square), inspect.getsourcefile(Mine)],
    "cwd": os.getcwd,
    "umask": umask,
    "nice": lambda: [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    "limits": lambda: {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
    "affinity": lambda: sorted(os.sched_getaffinity(0)),
    "memory policy": lambda: status("Mems_allowed", "Cpus_allowed"),
    "env": lambda: {name: value for name, value in os.environ.items() if not name.startswith(OWN)},
    "names in env": lambda: sorted(os.environ),
    "ids": lambda: [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups()],
    "session": lambda: [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "fds": descriptors,
    "stdin": lambda: [sys.stdin.read(), sys.stdin.encoding, sys.stdin.errors],
    "stdout": lambda: [*stream(sys.stdout), sys.stdout is sys.__stdout__],
    "stderr": lambda: [*stream(sys.stderr), sys.stderr is sys.__stderr__],
    "handlers": handlers,
    "masks": lambda: status("SigBlk", "SigIgn", "SigCgt"),
    "wakeup": lambda: signal.set_wakeup_fd(-1),
    "death signal": lambda: prctl(_PR_GET_PDEATHSIG),
    "subreaper": lambda: prctl(_PR_GET_CHILD_SUBREAPER),
    "capabilities": lambda: status("CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs"),
    "comm": lambda: Path("/proc/self/comm").read_text(),
    "command line": lambda: Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
    "mark": has_mark,
    "control group": lambda: Path("/proc/self/cgroup").read_text().strip().rpartition(".")[0].rpartition("/")[2],
    "children": lambda: Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "threads": lambda: [threading.active_count(), status("Threads"), threading.current_thread() is main_thread()],
    "main thread": lambda: [main_thread().ident == threading.get_ident(), main_thread().native_id == os.getpid()],
    "faulthandler": faulthandler.is_enabled,
    "gc": lambda: [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
    "hooks": lambda: [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
    "tracing": lambda: [sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval()],
    "warnings": lambda: [str(one) for one in warnings.filters],
    "locale": lambda: [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()],
    "logging": lambda: [len(logging.root.handlers), logging.root.level, logging.getLoggerClass().__name__],
    "multiprocessing": lambda: [multiprocessing.current_process().name, multiprocessing.get_start_method()],
    "parent process": lambda: [multiprocessing.parent_process(), multiprocessing.active_children()],
    "timeout": socket.getdefaulttimeout,
    "tempfile": tempfile.gettempdir,
    "torch threads": lambda: [torch.get_num_threads(), torch.get_num_interop_threads()],
    "torch modes": lambda: [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
    "cuda": lambda: [torch.cuda.is_available(), torch.cuda.is_initialized()],  # type: ignore[no-untyped-call]
    "matmul": lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item(),
    "numpy": lambda: float((np.ones((300, 300)) @ np.ones((300, 300))).sum()),
    "pool by fork": lambda: pooled("fork"),
    "pool by spawn": lambda: pooled("spawn"),
    "pool by forkserver": lambda: pooled("forkserver"),
    "spawned": spawned,
    "data loader": lambda: loaded(0),
    "data loader with workers": lambda: loaded(2),
    "torch.compile": lambda: torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(3)).tolist(),
    "Gloo and FSDP2": together,
    "child": child,
    "thread": in_thread,
}


def probe(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # the error is what is compared
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    seeds = [random.random(), float(np.random.rand()), torch.initial_seed()]
    found = {name: probe(call) for name, call in PROBES.items()}
    name = f"{os.environ['REPLICAS_GROUP']}-{os.environ['REPLICA_ID']}-{os.environ['RANK']}.json"
    Path(os.environ["OUT"], name).write_text(json.dumps({"found": found, "seeds": seeds}, default=str))
    atexit.register(print, "atexit ran")
    threading.Timer(0.3, print, ("thread ended",)).start()
    print("to stderr", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
