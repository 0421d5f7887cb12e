"""Process groups on device memory: what is staged, how NCCL is asked and waited for.

Covers: sidecar/groups.py, sidecar/process.py.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from replicas.errors import Preflight, WorldError
from replicas.messages import GroupSpec
from replicas.sidecar import building, wire
from replicas.sidecar.groups import GlooGroup, NcclGroup, StartedWork
from replicas.sidecar.process import SidecarProcess
from replicas.weights.memory.buffers import Buffer
from tests.support.devices.device_memory import lingering_nbytes
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator

_c10d: Any = dist  # torch's own annotations leave out most of the names below
FAR = 1e12


def spec_of(rank: int, size: int, **changes: Any) -> GroupSpec:
    fields: dict[str, Any] = {"backend": "gloo", "address": "127.0.0.1", "timeout_s": 5.0}
    return GroupSpec("test", "127.0.0.1", 1, rank, size, **(fields | changes))


def everywhere(size: int, run: Callable[[int], Any]) -> list[Any]:
    """What each of ``size`` members does at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


# ---------------------------------------------------------------- staging


class NcclIsNear(FakeAccelerator):
    """A GPU on whose memory Gloo does not work."""

    group_backend = "nccl"


def test_gloo_stages_what_is_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "0.001")  # a copy that nobody waits for comes too late
    monkeypatch.setattr("replicas.sidecar.groups.PINNED_NBYTES", 4096)
    store = _c10d.HashStore()

    def run(rank: int) -> list[torch.Tensor]:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gpu = NcclIsNear()
        group = GlooGroup(_c10d.ProcessGroupGloo(store, rank, 2, options), spec_of(rank, 2), gpu)
        deadline = time.monotonic() + 5.0
        memory = gpu.allocate(4096, "FAKE-0")
        mine = memory.tensor.view(torch.float32)
        found: list[torch.Tensor] = []
        for round_ in range(2):  # the second time in the same staging memory
            mine.fill_(rank + round_)
            group.all_reduce(mine, "sum", deadline).wait()
            found.append(mine.clone())
            mine.fill_(rank)
            group.broadcast(mine, 1, deadline).wait()
            found.append(mine.clone())
            host = torch.full((3,), float(rank))
            gpu.host(host)
            handle = group.send(mine[:3], 1, deadline) if rank == 0 else group.receive(host, 0, deadline)
            handle.wait()
            found.append(host)
        assert gpu.pinned == [4096], "staging memory is pinned, once"
        large = torch.full((2000,), rank, dtype=torch.float32)
        group.reduce(large, 0, "sum", deadline).wait()
        if rank == 0:
            assert bool(large.eq(1).all())
        return found

    for rank, found in enumerate(everywhere(2, run)):
        assert bool(found[0].eq(1).all())
        assert bool(found[3].eq(3).all())
        assert bool(found[1].eq(1).all())
        assert bool(found[2].eq(rank).all()), "what rank 1 has received"


# ---------------------------------------------------------------- NCCL, as it is asked


class Asked:
    """A backend that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> str:
        return self._note("end")

    def _note(self, *call: Any) -> str:
        self.calls.append(call)
        return "work"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        return self._note("send", peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        return self._note("recv", peer)


def test_what_goes_between_two_is_one_batch_of_nccl() -> None:
    tensor = torch.zeros(4)
    backend = Asked()
    group = NcclGroup(backend, spec_of(1, 4, backend="nccl"), FakeAccelerator(), torch.device("cpu"))
    group.send(tensor, 3, FAR)
    group.receive(tensor, 0, FAR)
    assert backend.calls == ["start", ("send", 3), ("end",), "start", ("recv", 0), ("end",)]


class NcclWork:
    def __init__(self, looks: int, error: Exception | None = None) -> None:
        self._looks = looks
        self._error = error
        self.waited = False

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def exception(self) -> Exception | None:
        return self._error

    def wait(self) -> None:
        assert self._looks < 0, "it would wait in its own way"
        assert self._error is None, "it would abort the communicator"
        self.waited = True


def test_nccl_is_waited_for_without_its_own_wait() -> None:
    def handle(work: NcclWork, deadline: float) -> StartedWork:
        return StartedWork([work], deadline, wait_for=NcclGroup._wait_for)

    work = NcclWork(5)
    handle(work, time.monotonic() + 5.0).wait()
    assert work.waited, "torch keeps the tensors until then"
    with pytest.raises(RuntimeError, match="NCCL: remote process exited"):
        handle(NcclWork(2, RuntimeError("remote process exited")), time.monotonic() + 5.0).wait()
    with pytest.raises(RuntimeError, match="did not end in time"):
        handle(NcclWork(1 << 40), time.monotonic() + 0.005).wait()


def test_what_nccl_may_not_do_is_said_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "INFO", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    building._set_nccl_environment(spec_of(0, 2, backend="nccl", nccl_env={"NCCL_ALGO": "Ring"}))
    assert os.environ == building.NCCL_ENVIRONMENT | {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "lo"}
    assert {os.environ[f"TORCH_NCCL_{name}"] for name in ("DUMP_ON_TIMEOUT", "ENABLE_MONITORING")} == {"0"}


@pytest.mark.slow
def test_a_group_of_nccl_that_does_not_connect_is_not_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor may hang, and with it the answer."""

    class Backend:
        def __init__(self, *arguments: object) -> None:
            made.append(weakref.ref(self))

        def eager_connect_single_device(self, device: torch.device) -> None:
            raise RuntimeError("no peer")

        Options = SimpleNamespace

    made: list[weakref.ref[Backend]] = []
    monkeypatch.setattr(building._c10d, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(building._c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(building, "accelerator", FakeAccelerator)
    monkeypatch.setattr(building, "_never_destroyed", [])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(RuntimeError, match="no peer"):
        building._build_nccl(_c10d.HashStore(), spec_of(0, 1, backend="nccl"))
    gc.collect()
    assert made[0]() is not None


@pytest.mark.parametrize(
    ("others", "said", "version", "named"),
    [
        ("FAKE-1", "", (2, 27, 5), False),
        ("FAKE-0", "", (2, 30, 1), True),
        ("FAKE-0", "1", (2, 29, 7), True),
        ("FAKE-0", "1", (2, 30, 1), False),
    ],
)
def test_ranks_on_one_gpu_take_another_name(
    monkeypatch: pytest.MonkeyPatch, others: str, said: str, version: tuple[int, ...], named: bool
) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_MULTI_RANK_GPU_ENABLE": said} if said else {})
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    store: dict[str, str] = {}
    other = SimpleNamespace(set=store.__setitem__, get=lambda key: store.get(key, next(iter(store.values()))))
    building._allow_shared_device(other, spec_of(1, 2, backend="nccl"), "FAKE-0")
    mine = store["device/1"]
    store["device/0"] = mine.replace("FAKE-0", others)
    os.environ.pop("NCCL_HOSTID", None)
    building._allow_shared_device(other, spec_of(1, 2, backend="nccl"), "FAKE-0")
    assert (os.environ.get("NCCL_HOSTID") == "replicas-test-1") is named


# ---------------------------------------------------------------- the process


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    monkeypatch.setattr("replicas.weights.copies.accelerator._chosen", (0, "", None))  # as in a process of its own
    monkeypatch.setenv("REPLICAS_ACCELERATOR", NAME)
    monkeypatch.setenv("FAKE_GPUS", "FAKE-0,FAKE-1")
    made = SidecarProcess(SimpleNamespace())  # type: ignore[arg-type]  # a fake
    yield made
    for key in list(made._buffers):
        made.handle(wire.ForgetBuffer(key), [])
    assert lingering_nbytes() == 0


def on_gpu(sidecar: SidecarProcess, key: int, uuid: str) -> Buffer:
    buffer = Buffer.allocate(64, "test", device=uuid)
    assert sidecar.handle(wire.MapBuffer(key, uuid), [os.dup(buffer.fd)]) is None
    return buffer


def test_memory_that_cannot_be_used_is_the_answer_to_who_needs_it(sidecar: SidecarProcess) -> None:
    first = on_gpu(sidecar, 1, "FAKE-0")
    first.tensor().fill_(7)
    assert sidecar.handle(wire.ProbeBuffer(1, 1), []) == wire.Probed(1, b"\7" * 64)
    sidecar._map(2, os.dup(first.fd), "FAKE-1")
    refused = sidecar.handle(wire.ProbeBuffer(2, 2), [])
    assert isinstance(refused, wire.Failed)
    assert (refused.kind, refused.over) == ("InternalError", False)
    assert refused.error == "this sidecar works on GPU FAKE-0, not on FAKE-1"
    sidecar.handle(wire.ForgetBuffer(2), [])
    assert sidecar.handle(wire.ProbeBuffer(3, 1), []) == wire.Probed(3, b"\7" * 64)
    first.close()


def test_a_gpu_that_the_sidecar_does_not_see_is_a_failed_preflight(sidecar: SidecarProcess) -> None:
    buffer = Buffer.allocate(64, "test", device="FAKE-1")
    os.environ["FAKE_GPUS"] = "FAKE-0"
    sidecar.handle(wire.MapBuffer(1, "FAKE-1"), [os.dup(buffer.fd)])
    failed = sidecar.handle(wire.ProbeBuffer(1, 1), [])
    assert isinstance(failed, wire.Failed)
    assert (failed.kind, failed.over) == ("Preflight", True)
    assert "CUDA_VISIBLE_DEVICES" in failed.hint
    os.environ["FAKE_GPUS"] = "FAKE-0,FAKE-1"
    buffer.close()


@pytest.mark.parametrize(("began", "error", "over"), [(False, WorldError("x"), False), (True, WorldError("x"), True)])
def test_a_gpu_that_fails_in_the_midst_of_it_is_the_end_of_the_group(
    sidecar: SidecarProcess, began: bool, error: Exception, over: bool
) -> None:
    def do() -> wire.Reply:
        sidecar._began = began
        raise error

    failed = sidecar._answer(1, do)
    assert isinstance(failed, wire.Failed)
    assert (failed.kind, failed.over) == ("WorldError", over)
    assert issubclass(Preflight, WorldError)
