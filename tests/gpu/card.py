"""The GPU that the tests in this folder use: a real one, or the fake of
:mod:`tests.support.devices.fake_accelerator`.

A real one if ``GPU_TESTS=real``, as `make gpu` sets it: these tests count all memory
that is in use on it, and so run alone there. On the fake every line runs but CUDA's and
NCCL's own: device memory is memory that other processes open by a handle, all CPU
tensors count as device tensors, and lanes are Gloo's.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from replicas.weights.copies.accelerator import Accelerator, accelerator
from tests.support.devices.fake_accelerator import NAME, PREFIX, FakeAccelerator

__all__ = [
    "BACKEND",
    "DEVICE",
    "REAL",
    "as_host",
    "backend_of",
    "bits",
    "busy",
    "card",
    "default_group",
    "environment",
    "given_back",
    "has_gpu",
    "new_stream",
    "used_nbytes",
    "uuid",
    "write",
]

GIVEN_BACK_S = 20.0
CALIBRATION_CYCLES = 50_000_000


REAL = os.environ.get("GPU_TESTS") == "real"
DEVICE = "cuda" if REAL else "cpu"
BACKEND = "nccl" if REAL else "gloo"


def has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is told of by a warning
        return torch.cuda.is_available() and dist.is_nccl_available()


def environment() -> dict[str, str]:
    """Of every process that takes part in a test, this one included. Fake devices have
    names of their own in each process that runs tests: what others do on theirs is not
    counted as ours."""
    if REAL:
        return {"GPU_TESTS": "real"}
    return {"REPLICAS_ACCELERATOR": NAME, "FAKE_GPUS": f"FAKE-{os.getpid()}"}


def backend_of(staging: str) -> str:
    """Of lanes for weights of the GPU. What is on the fake counts as host memory,
    unless it is a slot there."""
    return "nccl" if REAL or staging == "device" else "gloo"


def as_host(name: str) -> dict[str, str]:
    """For a rank: NCCL refuses two ranks on one GPU, unless it takes them for two
    hosts, or is new enough and told to."""
    return {} if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else {"NCCL_HOSTID": name}


def card() -> Accelerator:
    found = accelerator()
    assert found is not None, "this process has no GPU"
    return found


def uuid() -> str:
    """The GPU of the tests."""
    found = card().device()
    assert found, "this process can use no GPU"
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor, on the host."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


# ---------------------------------------------------------------- what a trainer does


def new_stream() -> object:
    """A stream of a trainer's own, for :meth:`Accelerator.on_stream`."""
    found = card()
    return found.new_stream() if isinstance(found, FakeAccelerator) else torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def busy(seconds: float) -> None:
    """Keep the current stream of this thread busy for about so long, from when it comes
    to it."""
    found = card()
    if isinstance(found, FakeAccelerator):
        found.launch(lambda: time.sleep(seconds))
    else:
        torch.cuda._sleep(int(_cycles_per_s() * seconds))  # type: ignore[no-untyped-call]  # torch leaves it untyped


@cache
def _cycles_per_s() -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for _ in range(2):  # the second one counts
        began.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ended.record()
        ended.synchronize()
    return float(CALIBRATION_CYCLES / began.elapsed_time(ended) * 1e3)


def write(tensor: torch.Tensor, value: float) -> None:
    """Fill it, on the current stream of this thread."""
    found = card()
    if isinstance(found, FakeAccelerator):
        found.launch(lambda: tensor.fill_(value))
    else:
        tensor.fill_(value)


@contextlib.contextmanager
def default_group() -> Iterator[None]:
    """The user's own default process group in this process: it works before and
    after."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # torch's annotations leave it out
    try:
        use_default_group()
        yield
        use_default_group()
    finally:
        dist.destroy_process_group()


def use_default_group() -> None:
    """A kernel and a collective of the user's own."""
    matrix = torch.full((64, 64), 2.0, device=DEVICE)
    product = matrix @ matrix
    dist.all_reduce(product)
    assert bool(product.eq(256.0).all())


# ---------------------------------------------------------------- whose memory it is


def used_nbytes() -> int:
    """Memory of the GPU that is in use, by whomever: the driver's word. Of the fake:
    what any process has open."""
    if REAL:
        free, total = card().free_nbytes(uuid())
        return total - free
    found: dict[int, int] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed, or ended, meanwhile
            if str(link.readlink()).startswith(f"/memfd:{PREFIX}{uuid()}"):
                status = link.stat()
                found[status.st_ino] = status.st_size
    return sum(found.values())


def given_back(limit_nbytes: int, what: str) -> None:
    """Wait until no more than ``limit_nbytes`` are in use: a process that is dead has
    not yet given back all on the card."""
    deadline = time.monotonic() + GIVEN_BACK_S
    while (used := used_nbytes()) > limit_nbytes:
        assert time.monotonic() < deadline, f"{what}: {used} bytes are in use, {used - limit_nbytes} too many"
        time.sleep(0.05)
