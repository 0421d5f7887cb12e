"""GPUs for machines without one: memory of other processes, streams that lag behind,
events across processes, and faults.

``REPLICAS_ACCELERATOR="tests.support.devices.fake_accelerator:FakeAccelerator"``
(:data:`NAME`), with the repository's root on ``PYTHONPATH``, in every process. *Device
memory* is a memfd that all who open it map; its handle names the descriptor. When its
owner frees it, it is overwritten: whoever still reads it sees garbage, as on a GPU.
*CPU tensors count as device tensors*, but for those in registered host memory, and
those given to :meth:`FakeAccelerator.host`.

A *stream* is a thread that does what is enqueued, in order. Without a delay (see below)
it is the caller's own thread, at once. What a torch operation does to CPU tensors is in
no stream: with a delay, tests change weights through :meth:`FakeAccelerator.launch`.

What the environment says, read each time it matters:

=======================
============================================================================================
``FAKE_GPUS``           UUIDs of the visible ones, the current one first (default ``FAKE-0``)
``FAKE_DELAY_S``        how long each copy takes longer than it would (default 0)
``FAKE_MEMORY_NBYTES``  how much each has, counted for each process alone (default: 1 TiB)
``FAKE_FAULTS``         words, separated by commas: ``ipc`` (opening memory or events of other processes is forbidden),
                        ``register`` (host memory cannot be pinned), ``copy`` (the next
                        copy breaks the device for this process), ``absent`` (this
                        machine has none)
``FAKE_RANK_FAULTS``    those of ranks and not of their sidecars, which have the same environment
``FAKE_SIDECAR_FAULTS`` the reverse; besides: ``hidden`` (no GPU is visible)
=======================
============================================================================================
"""  # noqa: W505  # a picture

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from replicas.errors import NoCapacity, Preflight, WorldError
from replicas.weights.copies.accelerator import Accelerator, DeviceMemory, Event, Registration

__all__ = ["NAME", "FakeAccelerator", "FakeStream", "fake_memory_nbytes"]

NAME = f"{__name__}:FakeAccelerator"
PREFIX = "fake-gpu "
_POISON = 0xDD
_LOOK_S = 0.0005
_tokens = itertools.count(1)


def faults() -> set[str]:
    whose = "SIDECAR" if Path("/proc/self/comm").read_text().startswith("replica-s") else "RANK"
    words = (os.environ.get(name, "") for name in ("FAKE_FAULTS", f"FAKE_{whose}_FAULTS"))
    return set(filter(None, ",".join(words).split(",")))


def _delay_s() -> float:
    return float(os.environ.get("FAKE_DELAY_S") or 0)


def fake_memory_nbytes(pid: int, uuid: str = "") -> int:
    """How much fake device memory the process has open: what it allocated, and what it
    opened. 0 when it is gone."""
    found: dict[int, int] = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(link.readlink()).startswith(f"/memfd:{PREFIX}{uuid}"):
                    status = link.stat()
                    found[status.st_ino] = status.st_size
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(found.values())


class FakeStream:
    """Does what is enqueued, in order: at once where nothing is delayed, else on a
    thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._under_way = 0
        self.error: BaseException | None = None

    def put(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self._under_way or _delay_s():
                self._under_way += 1
                self._queue.put(task)
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name="fake stream", daemon=True)
                    self._worker.start()
                return
        self._do(task)

    def _work(self) -> None:
        while True:
            self._do(self._queue.get())
            with self._lock:
                self._under_way -= 1

    def _do(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  # as a GPU does: whoever synchronises is told
            self.error = error.with_traceback(None)  # whose frames have memory


class FakeEvent(Event):
    """Two words that processes may share: when it was last recorded, and which of these
    has happened. As on a GPU, one that was recorded by a process which is killed before
    never happens."""

    def __init__(self, owner: FakeAccelerator, words: mmap.mmap, handle: bytes, timing: bool) -> None:
        self.handle = handle
        self._owner = owner
        self._words = words
        self._timing = timing
        self._at = 0.0

    def record(self) -> None:
        token = time.monotonic_ns() * 1000 + next(_tokens) % 1000
        struct.pack_into("q", self._words, 0, token)

        def happen() -> None:
            self._at = time.monotonic()
            if token > self._word(1):
                struct.pack_into("q", self._words, 8, token)

        self._owner.stream.put(happen)

    def wait(self) -> None:
        token = self._word(0)
        if self._word(1) < token:
            self._owner.stream.put(lambda: self._wait(token))

    def synchronize(self) -> None:
        self._wait(self._word(0))
        self._owner.check()

    def query(self) -> bool:
        self._owner.check()
        return self._word(1) >= self._word(0)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, FakeEvent)
        assert self._timing
        assert earlier._timing
        assert self.query()
        assert earlier.query()
        return self._at - earlier._at

    def _word(self, index: int) -> int:
        word: int = struct.unpack_from("q", self._words, 8 * index)[0]
        return word

    def _wait(self, token: int) -> None:
        while self._word(1) < token:
            time.sleep(_LOOK_S)


class FakeMemory(DeviceMemory):
    def __init__(
        self, owner: FakeAccelerator, fd: int, nbytes: int, uuid: str, on_free: Callable[[], None] | None
    ) -> None:
        mapping = mmap.mmap(fd, max(1, nbytes))
        super().__init__(torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes], b"" if on_free else _handle(fd))
        start = self.tensor.untyped_storage().data_ptr()
        number = next(_tokens)
        owner.ranges[number] = (start, start + max(1, nbytes), uuid)
        weakref.finalize(mapping, _free, owner, number, fd, nbytes, on_free, os.getpid()).atexit = False


def _free(
    owner: FakeAccelerator, number: int, fd: int, nbytes: int, on_free: Callable[[], None] | None, pid: int
) -> None:
    """It is unmapped by now, and another one may have its address."""
    if pid != os.getpid():
        return
    del owner.ranges[number]
    if on_free is None:
        owner.allocated -= nbytes
        os.pwrite(fd, bytes([_POISON]) * nbytes, 0)
    else:
        on_free()
    os.close(fd)


class FakeRegistration(Registration):
    def __init__(self, owner: FakeAccelerator, host: torch.Tensor) -> None:
        self._host: torch.Tensor | None = host
        self._owner = owner
        self._start = owner.mark(host)

    def close(self) -> None:
        if self._host is not None:
            self._owner.unpinned.append(self._start)
            self._owner.hosts.pop(self._start, None)
        self._host = None


class FakeAccelerator(Accelerator):
    """See the module's text.

    :ivar pinned: bytes that were pinned, each time.
    :ivar unpinned: addresses of what was unpinned.
    :ivar allocated: bytes that this process has allocated.
    """

    kind = "cuda"
    group_backend = "gloo"

    def __init__(self) -> None:
        self.default_stream = FakeStream()
        self.ranges: dict[int, tuple[int, int, str]] = {}
        self.hosts: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self.pinned: list[int] = []
        self.unpinned: list[int] = []
        self.allocated = 0
        self._local = threading.local()
        self._streams: weakref.WeakSet[FakeStream] = weakref.WeakSet([self.default_stream])
        self._selected = ""

    # ------------------------------------------------------------ for tests

    @property
    def stream(self) -> FakeStream:
        """The current one of this thread."""
        found: FakeStream = getattr(self._local, "stream", self.default_stream)
        return found

    def launch(self, kernel: Callable[[], object]) -> None:
        """What a torch operation on a GPU would be: done on the current stream,
        later."""
        self.stream.put(kernel)

    def new_stream(self) -> FakeStream:
        stream = FakeStream()
        self._streams.add(stream)
        return stream

    def host(self, tensor: torch.Tensor) -> None:
        """From now on this is host memory, for ever: its address must not become
        another tensor's."""
        self.mark(tensor)
        self._kept.append(tensor)

    def mark(self, tensor: torch.Tensor) -> int:
        """This is host memory until somebody says otherwise; its address."""
        start = tensor.untyped_storage().data_ptr()
        self.hosts[start] = start + tensor.untyped_storage().nbytes()
        return start

    def check(self) -> None:
        """Raise what a GPU would at the next synchronisation."""
        error = next((stream.error for stream in self._streams if stream.error is not None), None)
        if error is not None:
            raise WorldError(f"the GPU failed: {error}", hint="restart the replica") from error

    # ------------------------------------------------------------ devices

    @classmethod
    def present(cls) -> bool:
        return "absent" not in faults()

    def device(self) -> str:
        return next(iter(self.visible()), "")

    def visible(self) -> tuple[str, ...]:
        named = () if "hidden" in faults() else tuple(filter(None, os.environ.get("FAKE_GPUS", "FAKE-0").split(",")))
        return tuple(uuid for uuid in named if self._selected in ("", uuid))

    def select(self, uuid: str) -> None:
        if uuid not in self.visible():
            raise Preflight(
                f"the GPU {uuid} is not visible to this process, which sees {', '.join(self.visible()) or 'none'}",
                hint="show all processes of a replica the same GPUs: CUDA_VISIBLE_DEVICES",
            )
        self._selected = uuid

    def torch_device(self, uuid: str) -> torch.device:
        self._check_visible(uuid)
        return torch.device("cpu")

    def uuid_of(self, tensor: torch.Tensor) -> str:
        if not tensor.is_cpu:
            return ""
        start = tensor.untyped_storage().data_ptr()
        found = [uuid for first, end, uuid in list(self.ranges.values()) if first <= start < end]
        if found:
            return found[-1]
        return "" if any(first <= start < end for first, end in list(self.hosts.items())) else self.device()

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int, uuid: str) -> DeviceMemory:
        self._check_visible(uuid)
        free, _ = self.free_nbytes(uuid)
        if nbytes > free:
            raise NoCapacity(f"{nbytes} bytes do not fit on GPU {uuid}, which has {free} bytes free")
        fd = os.memfd_create(f"{PREFIX}{uuid}", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, max(1, nbytes))
        self.allocated += nbytes
        return FakeMemory(self, fd, nbytes, uuid, None)

    def open(
        self, handle: bytes, nbytes: int, uuid: str, *, on_free: Callable[[], None] = lambda: None
    ) -> DeviceMemory:
        self._check_visible(uuid)
        return FakeMemory(self, _open(handle), nbytes, uuid, on_free)

    def free_nbytes(self, uuid: str) -> tuple[int, int]:
        total = int(os.environ.get("FAKE_MEMORY_NBYTES") or 1 << 40)
        return max(0, total - self.allocated), total

    def register(self, host: torch.Tensor, *, read_only: bool) -> Registration | None:
        if "register" in faults():
            self.mark(host)
            return None
        self.pinned.append(host.nbytes)
        return FakeRegistration(self, host)

    # ------------------------------------------------------------ streams

    def event(self, uuid: str = "", *, interprocess: bool = False, timing: bool = False) -> Event:
        assert not (interprocess and timing)
        self._check_visible(uuid or self.device())
        if not interprocess:
            return FakeEvent(self, mmap.mmap(-1, 16), b"", timing)
        fd = os.memfd_create("fake-event", os.MFD_CLOEXEC)
        os.ftruncate(fd, 16)
        event = FakeEvent(self, mmap.mmap(fd, 16), _handle(fd), False)
        weakref.finalize(event, os.close, fd).atexit = False
        return event

    def open_event(self, handle: bytes, uuid: str) -> Event:
        self._check_visible(uuid)
        fd = _open(handle)
        try:
            return FakeEvent(self, mmap.mmap(fd, 16), b"", False)
        finally:
            os.close(fd)

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(destinations, sources, strict=True))
        for destination, source in pairs:
            assert destination.shape == source.shape, (destination.shape, source.shape)

        def run() -> None:
            if "copy" in faults():
                raise RuntimeError("an illegal memory access was encountered")
            time.sleep(_delay_s())
            with torch.no_grad():
                for destination, source in pairs:
                    destination.copy_(source)

        self.stream.put(run)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        kept = list(tensors)
        self.stream.put(kept.clear)

    @contextlib.contextmanager
    def on_side_stream(self, uuid: str = "") -> Iterator[None]:
        self._check_visible(uuid or self.device())
        if not hasattr(self._local, "side"):
            self._local.side = self.new_stream()
        with self.on_stream(self._local.side):
            yield

    @contextlib.contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        before = self.stream
        assert stream is None or isinstance(stream, FakeStream)
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, uuid: str = "") -> None:
        event = self.event(uuid)
        event.record()
        event.synchronize()

    def _check_visible(self, uuid: str) -> None:
        if uuid not in self.visible():
            raise WorldError(
                f"the GPU {uuid} is not visible to this process, which sees {', '.join(self.visible()) or 'none'}",
                hint="show all processes of a replica the same GPUs: CUDA_VISIBLE_DEVICES",
            )


def _handle(fd: int) -> bytes:
    return f"{os.getpid()} {fd} {os.fstat(fd).st_ino}".encode()


def _open(handle: bytes) -> int:
    pid, fd, inode = map(int, handle.split())
    if "ipc" in faults() and pid != os.getpid():
        raise WorldError(
            f"memory of process {pid} cannot be opened by CUDA IPC: forbidden",
            hint='run the container with --ipc=host, or set staging = "host" on the channel',
        )
    try:
        found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(f"memory of process {pid} cannot be opened by CUDA IPC: {error}") from error
    if os.fstat(found).st_ino != inode:
        os.close(found)
        raise WorldError(f"memory of process {pid} cannot be opened by CUDA IPC: it is gone")
    return found
