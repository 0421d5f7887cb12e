"""What is called of CUDA and NVML is what NVIDIA declares (in the text of
``cuda-bindings``), on a machine without a GPU.

Covers: linux/smi.py, weights/devices/cuda_driver.py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from replicas.linux import smi as nvml
from replicas.weights.devices import cuda, cuda_driver

DECLARED = re.compile(r"^cdef (?:CUresult|nvmlReturn_t|const char\*) (\w+)\((.*?)\) except", re.MULTILINE)
NUMBERS: dict[str, tuple[object, ...]] = {
    "char": ("char",),
    "int": ("integer", 4, "signed"),
    "unsigned int": ("integer", 4, "unsigned"),
    "unsigned long long": ("integer", 8, "unsigned"),
    "size_t": ("integer", 8, "unsigned"),
}
ENUM = NUMBERS["int"]
ADDRESS = ("address",)


def folder() -> Path:
    spec = importlib.util.find_spec("cuda.bindings")
    assert spec is not None
    assert spec.submodule_search_locations is not None, "it comes with the development requirements"
    return Path(spec.submodule_search_locations[0])


@cache
def text(name: str) -> str:
    return (folder() / name).read_text()


@cache
def functions(name: str) -> dict[str, tuple[str, ...]]:
    """The types of the arguments of each function that a file declares."""
    found = {}
    for function, arguments in DECLARED.findall(text(name)):
        split = [one.strip() for one in arguments.split(",") if one.strip()]
        found[function] = tuple(re.sub(r"\s*\b\w+$", "", one).removeprefix("const ").strip() for one in split)
    return found


def declared(function: str) -> tuple[str, ...]:
    """By its own name, or by the name that the header gives to its newest version."""
    known = functions("cydriver.pxd")
    return known[function] if function in known else known[re.sub(r"_v\d+$", "", function)]


def as_declared(kind: str) -> tuple[object, ...]:
    """A C type, with the names of types resolved."""
    source = text("cydriver.pxd")
    if kind in NUMBERS:
        return NUMBERS[kind]
    if kind.endswith("*"):
        target = kind.removesuffix("*").strip()
        opaque = target == "void" or re.search(rf"struct {target}:\s+pass$", source, re.MULTILINE)
        return ADDRESS if opaque else ("pointer", as_declared(target))
    if re.search(rf"\benum {kind}\b", source):
        return ENUM
    struct = re.search(rf"cdef struct {kind}:\n((?:        .*\n)+)", source)
    if struct is not None:
        fields = re.findall(r"^ +char \w+\[(\d+)\]$", struct[1], re.MULTILINE)
        assert len(fields) == len(struct[1].splitlines()), f"{kind} has other fields than arrays of char"
        return ("struct", sum(map(int, fields)), 1)
    alias = re.search(rf"ctypedef ([\w ]+?\*?)\s*\b{kind}(?: '\w+')?$", source, re.MULTILINE)
    assert alias is not None, f"what is {kind}?"
    return as_declared(alias[1])


def as_called(kind: Any) -> tuple[object, ...]:
    """One of ctypes' types, in the same words."""
    if kind is ctypes.c_void_p:
        return ADDRESS
    if kind is ctypes.c_char_p:
        return ("pointer", NUMBERS["char"])
    if issubclass(kind, ctypes.Structure):
        return ("struct", ctypes.sizeof(kind), ctypes.alignment(kind))
    if issubclass(kind, ctypes._Pointer):
        return ("pointer", as_called(kind._type_))
    assert issubclass(kind, ctypes._SimpleCData)
    return ("integer", ctypes.sizeof(kind), "signed" if kind(-1).value == -1 else "unsigned")


@pytest.mark.parametrize("function", sorted(cuda_driver._SIGNATURES))
def test_the_prototypes_of_the_driver_are_nvidias(function: str) -> None:
    ours = [as_called(kind) for kind in cuda_driver._SIGNATURES[function]]
    assert ours == [as_declared(kind) for kind in declared(function)]


@pytest.mark.parametrize("function", sorted(cuda_driver._SIGNATURES))
def test_nvidia_calls_the_driver_by_the_same_names(function: str) -> None:
    """A prototype is that of one version of a function (``cuMemAlloc_v2``), which the
    text does not name."""
    loaders = [*folder().rglob("*driver*.so")]
    assert any(function.encode() + b"\0" in path.read_bytes() for path in loaders)


def test_the_numbers_of_the_driver_are_nvidias() -> None:
    driver = importlib.import_module("cuda.bindings.driver")  # which loads no libcuda before it is called
    errors, streams, capture = driver.CUresult, driver.CUstream_flags, driver.CUstreamCaptureMode
    assert errors.CUDA_ERROR_OUT_OF_MEMORY == cuda_driver.OUT_OF_MEMORY
    assert errors.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == cuda_driver.ALREADY_REGISTERED
    assert streams.CU_STREAM_NON_BLOCKING == cuda_driver._NON_BLOCKING
    assert capture.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == cuda_driver._THREAD_LOCAL
    assert driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == cuda._LAZY_PEER_ACCESS
    assert driver.CU_MEMHOSTREGISTER_PORTABLE == cuda._PORTABLE
    assert driver.CU_MEMHOSTREGISTER_READ_ONLY == cuda._READ_ONLY
    assert ctypes.sizeof(cuda_driver.IpcHandle) == driver.CU_IPC_HANDLE_SIZE


class Nvml:
    """Notes the functions that are called, each with the number of its arguments."""

    def __init__(self, init: int) -> None:
        self.init = init
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*given: object) -> object:
            self.calls[name] = len(given)
            return b"no driver" if name == "nvmlErrorString" else self.init if name == "nvmlInit_v2" else 0

        return call


def test_nvml_is_called_as_nvidia_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (folder() / "cynvml.pxd").exists():
        pytest.skip("this release of cuda-bindings does not declare NVML")
    called: dict[str, int] = {}
    for init, code in ((0, 0), (9, 1)):
        fake = Nvml(init)
        monkeypatch.setattr(ctypes, "CDLL", lambda name, fake=fake: fake)
        assert nvml.main() == code
        called |= fake.calls
    known = functions("cynvml.pxd")
    assert called == {name: len(known[name]) for name in called}
    assert known["nvmlDeviceGetCount_v2"] == ("unsigned int*",)
    assert known["nvmlErrorString"] == ("nvmlReturn_t",)
    assert "const char* nvmlErrorString(" in text("cynvml.pxd")
