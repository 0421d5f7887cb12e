"""CUDA without CUDA: calls of the driver, made through ctypes as ever, to one that
keeps everything in host memory.

Covers: weights/devices/cuda.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.errors import NoCapacity, Preflight, UsageError, WorldError
from replicas.weights.devices import cuda, cuda_driver
from replicas.weights.devices.cuda import Cuda
from replicas.weights.devices.cuda_driver import IpcHandle, Pointer

MIB = 1 << 20
OCTETS = bytes(range(16))
FIRST = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
SECOND = "MIG-10010203-0405-0607-0809-0a0b0c0d0e0f"


class Driver:
    """Two devices, the second of which is part of one."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self.pinned: dict[int, int] = {}
        self.contexts: list[int] = []
        self.room = 10 * MIB
        self.cached = 0
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.streams = 0
        self.mode = 0
        functions = {name: self._function(name, arguments) for name, arguments in cuda_driver._SIGNATURES.items()}
        self.driver = SimpleNamespace(**functions)

    def _function(self, name: str, arguments: tuple[Any, ...]) -> Any:
        do = getattr(self, name)

        def call(*given: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            return do(*given) or 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call)

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuGetErrorName(self, number: int, name: Any) -> int | None:
        if number == 999:
            return 1
        name[0] = b"CUDA_ERROR_OF_SOME_KIND"
        return None

    def cuDeviceGetCount(self, count: Any) -> None:
        count[0] = 1 if os.environ.get("CUDA_VISIBLE_DEVICES") == FIRST else 2

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device[0] = 40 + index

    def cuDeviceGetUuid(self, uuid: Any, device: int) -> None:
        uuid[0].octets[:] = OCTETS

    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> None:
        uuid[0].octets[:] = OCTETS if device == 40 else bytes([16, *OCTETS[1:]])

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        context[0] = 1000 + device

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        self.contexts.append(context)

    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        context[0] = self.contexts.pop()

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free[0], total[0] = self.room - self.cached, 16 * MIB

    def cuMemAlloc_v2(self, address: Any, nbytes: int) -> int | None:
        assert self.contexts
        assert self.mode == 1, "it would spoil a capture of another thread"
        if nbytes > self.room - self.cached:
            return 2
        self.room -= nbytes
        memory = ctypes.create_string_buffer(nbytes)
        address[0] = ctypes.addressof(memory)
        self.memory[address[0]] = memory
        return None

    def cuMemFree_v2(self, address: int) -> None:
        assert self.contexts == [1040]
        self.room += len(self.memory.pop(address))

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        handle[0].reserved[:] = address.to_bytes(8, "little") + bytes(range(56))

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: IpcHandle, flags: int) -> None:
        assert flags == 1
        self.opened.append(bytes(handle.reserved))
        memory = ctypes.create_string_buffer(64)
        address[0] = ctypes.addressof(memory)
        self.memory[address[0]] = memory

    def cuIpcCloseMemHandle(self, address: int) -> None:
        self.closed.append(address)
        del self.memory[address]

    def cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> None:
        self.pinned[address] = flags

    def cuMemHostUnregister(self, address: int) -> None:
        del self.pinned[address]

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1
        self.streams += 1
        stream[0] = self.streams

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        self.mode, mode[0] = mode[0], self.mode


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(cuda_driver, "load_library", lambda: made.driver)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: made.calls.append(f"set_device {index}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(made, "cached", 0))

    def over(block: cuda.Block, device: torch.device) -> torch.Tensor:
        described = block.__cuda_array_interface__
        assert described["typestr"] == "|u1"
        assert device == torch.device("cuda", 0)
        array: Any = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
        array.block = block
        return torch.frombuffer(array, dtype=torch.uint8)

    monkeypatch.setattr(cuda, "tensor_over", over)
    yield made
    assert not made.contexts
    assert not made.mode


def test_devices_are_called_what_every_process_calls_them(driver: Driver) -> None:
    gpu = Cuda()
    assert gpu.visible() == (FIRST, SECOND)
    assert gpu.device() == FIRST
    assert gpu.torch_device(SECOND) == torch.device("cuda", 1)
    assert gpu.uuid_of(torch.zeros(1)) == ""
    with pytest.raises(WorldError, match="not visible to process"):
        gpu.torch_device("GPU-1")
    assert not {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"} & set(driver.calls)  # no context


def test_torch_knows_as_soon_as_the_driver_is_in_use(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs ask it whether they can still fork."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: told.append("init"))
    assert Cuda().device() == FIRST
    assert told

    def fail() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert Cuda().device() == ""


def test_one_device_is_selected_before_the_driver_looks(driver: Driver) -> None:
    gpu = Cuda()
    gpu.select(FIRST)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == FIRST
    assert gpu.visible() == (FIRST,)
    with pytest.raises(Preflight, match="GPU-7 cannot be used"):
        gpu.select("GPU-7")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    late = Cuda()
    assert late.device() == FIRST
    late.select(SECOND)
    assert driver.calls[-1] == "set_device 1"
    driver.fails["cuInit"] = 999
    assert Cuda().device() == ""


def test_memory_is_given_back_with_the_last_tensor(driver: Driver) -> None:
    gpu = Cuda()
    memory = gpu.allocate(5, FIRST)
    assert driver.room == 8 * MIB
    assert (len(memory.handle), memory.tensor.numel(), gpu.free_nbytes(FIRST)) == (64, 5, (8 * MIB, 16 * MIB))
    view = memory.tensor[1:].fill_(3)
    freed: list[str] = []
    same = gpu.open(memory.handle, 5, FIRST, on_free=lambda: freed.append("same"))
    assert not driver.opened  # one's own cannot be opened
    assert same.tensor[4] == 3
    memory.close()
    memory.close()
    del view
    assert driver.room == 8 * MIB
    same.close()
    assert driver.room == 10 * MIB
    assert freed == ["same"]
    with pytest.raises(ValueError, match="closed"):
        _ = memory.tensor


def test_memory_is_given_back_whenever_garbage_is_collected(driver: Driver) -> None:
    gpu = Cuda()
    memory = gpu.allocate(5, FIRST)
    with gpu._lock, gpu._context_lock:  # it may happen in the middle of anything
        memory.close()
    assert driver.room == 10 * MIB


def test_memory_of_others(driver: Driver) -> None:
    gpu, handle = Cuda(), bytes(range(100, 164))
    freed: list[str] = []
    memory = gpu.open(handle, 64, FIRST, on_free=lambda: freed.append("other"))
    assert driver.opened == [handle]
    seen = memory.tensor
    memory.close()
    assert not driver.closed
    del seen
    assert (len(driver.closed), freed) == (1, ["other"])
    driver.fails["cuIpcOpenMemHandle_v2"] = 205
    with pytest.raises(WorldError, match="CUDA_ERROR_OF_SOME_KIND") as caught:
        gpu.open(handle, 64, FIRST)
    assert "--ipc=host" in caught.value.hint
    with pytest.raises(WorldError, match="a CUDA handle has 64 bytes, not 3"):
        gpu.open(b"abc", 64, FIRST)


def test_a_full_device(driver: Driver) -> None:
    gpu = Cuda()
    driver.cached = 10 * MIB  # torch has it all in its cache
    first = gpu.allocate(10 * MIB, FIRST)
    with pytest.raises(NoCapacity, match="0 B of its 16 MiB are free"):
        gpu.allocate(1, FIRST)
    first.close()
    driver.fails["cuIpcGetMemHandle"] = 801
    with pytest.raises(WorldError, match="cannot be shared"):
        gpu.allocate(1, FIRST)
    assert driver.room == 10 * MIB
    driver.fails["cuDevicePrimaryCtxRetain"] = 2
    with pytest.raises(NoCapacity, match="context"):
        Cuda().allocate(1, FIRST)
    driver.fails["cuDevicePrimaryCtxRetain"] = 999
    with pytest.raises(WorldError, match="failed with 999"):
        Cuda().allocate(1, FIRST)


def test_host_memory_is_pinned_for_all_contexts(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    gpu, host = Cuda(), torch.zeros(100, dtype=torch.uint8)
    pinned, reading = gpu.register(host, read_only=False), gpu.register(torch.zeros(5), read_only=True)
    assert pinned is not None
    assert reading is not None
    assert sorted(driver.pinned.values()) == [1, 9]
    pinned.close()
    pinned.close()
    del reading
    assert not driver.pinned
    driver.fails["cuMemHostRegister_v2"] = 801
    assert gpu.register(host, read_only=True) is None
    assert gpu.register(host, read_only=True) is None
    assert caplog.text.count("cannot be pinned") == 1


def test_errors_of_the_device_are_errors_of_ours() -> None:
    with pytest.raises(WorldError, match=r"GPU x failed: .*illegal memory access") as caught, cuda_driver.typed("x"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong advice")
    assert "restart the replica" in caught.value.hint
    with pytest.raises(NoCapacity), cuda_driver.typed("x"):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="of another kind"), cuda_driver.typed("x"):
        raise RuntimeError("of another kind")


def test_the_class_is_not_used_where_torch_has_no_cuda(driver: Driver) -> None:
    assert Cuda.present() == (torch.version.cuda is not None)
    assert Pointer is ctypes.c_uint64


class Torch:
    """What is asked of torch.cuda: events and streams that only write down what is done
    with them."""

    class Stream:
        def __init__(self, pointer: int, device: int) -> None:
            self.pointer, self.index = pointer, device

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.current: dict[int, object] = {0: "default 0", 1: "default 1"}
        self.broken = False

    def Event(self, **wanted: bool) -> Any:
        def note(what: str) -> Any:
            def do(*given: object) -> object:
                if self.broken and what in ("synchronize", "query"):
                    raise RuntimeError("CUDA error: unspecified launch failure")
                self.done.append((what, *given))
                return 250.0 if what == "elapsed_time" else True

            return do

        self.done.append(tuple(name for name in sorted(wanted) if wanted[name]))
        names = ("record", "wait", "synchronize", "query", "elapsed_time")
        return SimpleNamespace(ipc_handle=lambda: b"h" * 64, **{name: note(name) for name in names})

    def current_stream(self, index: int) -> object:
        return self.current[index]

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.done.append(f"on {index}")
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, {**self.current, stream.index: stream}
        yield
        self.current = before


def side_work(gpu: Cuda, driver: Driver) -> None:
    with gpu.on_side_stream(SECOND), gpu.on_side_stream(SECOND):
        assert driver.mode == 1


def test_events_and_streams(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Torch()
    for name in ("Event", "current_stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(stub, name))
    monkeypatch.setattr(torch.cuda, "ExternalStream", stub.Stream)
    gpu = Cuda()
    assert gpu.device() == FIRST
    event, later = gpu.event(timing=True), gpu.event(SECOND, timing=True)
    assert stub.done == ["on 0", ("blocking", "enable_timing"), "on 1", ("blocking", "enable_timing")]
    stub.done.clear()
    event.record()
    with gpu.on_side_stream(SECOND):
        later.record()
        event.wait()
    assert [what for what, *_ in stub.done] == ["record", "record", "wait"]
    (_, first), (_, second), (_, third) = stub.done
    assert (first, third) == ("default 0", "default 0")
    assert isinstance(second, Torch.Stream)
    for _ in range(3):  # each thread has one, as long as it lives
        thread = threading.Thread(target=side_work, args=(gpu, driver))
        thread.start()
        thread.join()
    assert driver.streams == 2
    assert later.seconds_since(event) == 0.25
    shared = gpu.event(interprocess=True)
    assert stub.done[-1] == ("blocking", "interprocess")
    assert gpu.open_event(shared.handle, FIRST) is shared
    gpu.synchronize()
    assert stub.done[-1] == ("synchronize",)
    stub.broken = True
    for wait in (event.synchronize, event.query, gpu.synchronize):
        with pytest.raises(WorldError, match="failed: CUDA error: unspecified"):
            wait()
    with pytest.raises(UsageError, match=r"torch\.cuda\.Stream"), gpu.on_stream("some"):
        pass


def test_copies_are_made_as_torch_makes_them(driver: Driver) -> None:
    gpu = Cuda()
    targets = [torch.zeros(2, 3), torch.zeros(0), torch.zeros(3, 2).T]
    sources = [torch.ones(2, 3, dtype=torch.float64), torch.zeros(0), torch.ones(2, 3)]
    gpu.copy(targets, sources)
    gpu.keep(sources)
    assert all(target.eq(1).all() for target in targets)
