"""Limits that an update meets while it is mapped: typed errors that name them.

Covers: linux/scarce.py, weights/memory/still_mapped.py.
"""

from __future__ import annotations

import ast
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import replicas
from replicas import errors
from replicas.linux import scarce
from replicas.testing import FakeRun
from replicas.weights.devices.device_buffers import _Lingering
from replicas.weights.memory import mappings, still_mapped
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.pool import PREPARED_NBYTES, Pool

LOOKS: dict[str, Callable[[replicas.Update], object]] = {
    "iterate": dict,
    "tensors": lambda update: update.tensors(),
    "load_into": lambda update: update.load_into({"w": torch.zeros(3)}),
    "path": lambda update: update.path,
}


@contextmanager
def no_descriptor() -> Iterator[int]:
    """This process has no descriptor left; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    limit = fillers[0] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in fillers:
            os.close(one)


@pytest.mark.parametrize("look", LOOKS)
def test_an_update_that_cannot_be_mapped_names_the_limit(look: str) -> None:
    with FakeRun() as run:
        trainer, target = run.join("trainer"), run.join("rollout")
        trainer.publish({"w": torch.ones(3)}).wait()
        with target.receive().wait() as update:
            with no_descriptor() as limit, pytest.raises(errors.NoCapacity) as caught:
                LOOKS[look](update)
            assert f"this process may have {limit} files open" in caught.value.message
            assert "ulimit -n" in caught.value.hint
            assert caught.value.version == 1
            LOOKS[look](update)  # nothing is broken


@pytest.mark.parametrize(
    ("number", "made", "text"),
    [
        (errno.ENFILE, {}, "this machine may have 7 files open"),
        (errno.ENOMEM, {"space": 5}, "this process may have 5 bytes of address space"),
        (errno.ENOMEM, {"mappings": 6}, "this process may have 7 mappings, and has 6"),
        (errno.ENOMEM, {"sysctl": "2", "mappings": -9}, "does not overcommit memory"),
        (errno.ENOMEM, {}, "the kernel has no memory left for it"),
    ],
)
def test_each_limit_has_its_name(number: int, made: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = made.get("space", resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (space, space))
    monkeypatch.setattr(scarce, "_mappings", lambda: made.get("mappings", 1))
    monkeypatch.setattr(scarce, "_sysctl", lambda name: made.get("sysctl", "7"))

    def refuse(fd: int, flags: int = 0) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(mappings, "reopen", refuse)
    with pytest.raises(errors.NoCapacity, match=f"64 B of shared memory cannot be mapped: .*: .*{text}"):
        mappings.map_private(0, 64)


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "Try again"), RuntimeError("can't start new thread")])
def test_the_limit_of_processes_has_its_name(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_NPROC: (77, 77)}[kind])
    text = r"user \d+ may have 77 \(ulimit -u\), or the control group .*: raise that limit"
    with pytest.raises(OSError, match=text), scarce.naming_limits():
        raise error
    with pytest.raises(RuntimeError, match="another"), scarce.naming_limits():
        raise RuntimeError("another")


STARTS = ("subprocess.Popen", "os.fork", "asyncio.create_subprocess_exec")


def bare_starts(node: ast.AST, *, named: bool = False) -> Iterator[str]:
    """Calls that start a process outside of ``naming_limits``."""
    contexts = [*getattr(node, "decorator_list", ()), *(item.context_expr for item in getattr(node, "items", ()))]
    named = named or any(ast.unparse(one) == "naming_limits()" for one in contexts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS and not named:
        yield ast.unparse(node.func)
    for child in ast.iter_child_nodes(node):
        yield from bare_starts(child, named=named)


@pytest.mark.slow
def test_each_start_of_a_process_names_that_limit() -> None:
    root = Path(scarce.__file__).parents[1]
    texts = {path.relative_to(root): path.read_text() for path in root.rglob("*.py")}
    starting = {path: text for path, text in texts.items() if any(f"{one}(" in text for one in STARTS)}
    bare = [f"{path}: {one}" for path, text in starting.items() for one in bare_starts(ast.parse(text))]
    assert bare == ["linux/smi.py: subprocess.Popen"], "that one tells of the driver's tool alone"


@contextmanager
def no_thread() -> Iterator[None]:
    """This process can start no thread."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def test_without_threads_memory_is_left_and_its_readers_are_looked_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()

    def look(known: dict[int, int]) -> dict[str, set[int]]:
        looked.set()
        return {}

    monkeypatch.setattr(still_mapped, "mappers", look)
    pool = Pool("test", 0)
    buffers = [Buffer.allocate(64, "test") for _ in range(2)]
    with no_thread():
        pool.close_shown(buffers[0])
    assert buffers[0].fd < 0
    assert not looked.is_set()
    pool.close_shown(buffers[1])
    assert buffers[1].fd < 0
    assert looked.wait(30)
    pool.close()


def test_without_threads_memory_is_made_when_it_is_needed() -> None:
    pool = Pool("test", 0)
    with no_thread():
        pool.prepare(PREPARED_NBYTES, 1)
        pool.claim_buffer(PREPARED_NBYTES, 1).close()
    pool.prepare(PREPARED_NBYTES, 1)  # and made ahead as soon as there is a thread
    if (worker := pool._worker) is not None:
        worker.join(30)
    assert len(pool._spare) == 1
    pool.close()


def test_without_threads_device_memory_is_freed_later() -> None:
    class Waiting:
        def free_if_unused(self) -> bool:
            return ended.is_set()

    lingering, ended = _Lingering(), threading.Event()
    with no_thread():
        lingering.add(cast("Any", Waiting()))
    ended.set()
    lingering.add(cast("Any", Waiting()))
    if (thread := lingering._thread) is not None:
        thread.join(30)
    assert not lingering._left
    lingering.stop()
