"""Find this machine's GPUs, CPUs and memory without torch and without a GPU context."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from replicas.linux import nvml
from replicas.linux.cgroups import LIMITS, find_own
from replicas.linux.smi import ask

__all__ = ["Machine", "look", "nvml_count", "visible_gpus"]

_REMEDY = "start it as root or under systemd with Delegate=yes, or remove the limit"
_NVML_S = 20.0
_NO_GPUS = ("", "-1", "NoDevFiles")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine has for a run.

    :ivar gpus: names for ``CUDA_VISIBLE_DEVICES``.
    :ivar gpus_from: source of the names, or why there are none.
    :ivar gpu_order: the ``CUDA_DEVICE_ORDER`` that they need; empty: the present one.
    :ivar limits_refused: why memory and processes cannot be limited; empty: they can.
    """

    gpus: tuple[str, ...] = ()
    gpus_from: str = ""
    gpu_order: str = ""
    cpus: int = 1
    memory_nbytes: int = 0
    limits_refused: str = ""


def look(*, gpus: bool = True, environ: Mapping[str, str] | None = None) -> Machine:
    """This machine, bounded by CPU set, cgroups and ``CUDA_VISIBLE_DEVICES``.

    :param gpus: look for GPUs, which may take a second, and 20 s if the driver hangs.
    """
    names: tuple[str, ...] = ()
    gpus_from = order = ""
    if gpus:
        visible = visible_gpus(os.environ if environ is None else environ)
        names, gpus_from, order = _nvml_gpus() if visible is None else (visible, "CUDA_VISIBLE_DEVICES", "")
    cpus = len(os.sched_getaffinity(0))
    for text in _cgroup_texts("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        gpus=names,
        gpus_from=gpus_from,
        gpu_order=order,
        cpus=cpus,
        memory_nbytes=min([memory_nbytes, *(int(text) for text in _cgroup_texts("memory.max") if text != "max")]),
        limits_refused=_limits_refused(),
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs in ``CUDA_VISIBLE_DEVICES`` (indices or UUIDs); None: it is not set."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    gpus: list[str] = []
    for word in text.split(","):
        if word.strip() in _NO_GPUS:  # CUDA stops here, too
            break
        gpus.append(word.strip())
    return tuple(dict.fromkeys(gpus))


def _nvml_gpus() -> tuple[tuple[str, ...], str, str]:
    """GPU indices in the order of the PCI bus, which is NVML's."""
    try:
        ctypes.CDLL(nvml.LIBRARY)  # loading it does not call the driver
    except OSError as error:
        return (), f"no NVIDIA driver: {error}", ""
    count, why = nvml_count([sys.executable, "-I", "-S", nvml.__file__], _NVML_S)
    if count is None:
        return (), f"NVML says: {why}", ""
    return tuple(map(str, range(count))), "NVML", "PCI_BUS_ID"


def nvml_count(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """The number that ``command`` prints (:mod:`replicas.linux.nvml`), or None and why.

    Blocks for ``timeout_s`` at most: what hangs in the driver may outlive SIGKILL.
    """
    try:
        code, text = ask(command, timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"nothing within {timeout_s:g} s: the driver hangs"
    words = text.strip()
    if code == 0 and words.isdecimal():
        return int(words), ""
    return None, words or f"nothing; it ended with {code}"


def _cgroup_texts(name: str) -> Iterator[str]:
    """Contents of this file in our cgroup (version 2) and in its ancestors."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if root is None or own is None:
        return
    folder = root / own.lstrip("/")
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            try:
                yield (place / name).read_text().strip()
            except OSError:
                continue  # the root has no limits, and a controller that is off has no file


def _limits_refused() -> str:
    try:
        own = find_own()
        controllers = (own / "cgroup.controllers").read_text().split()
    except OSError as error:
        return f"{error.strerror}; {_REMEDY}"
    missing = [name for name in LIMITS if name not in controllers]
    return f"{own} has no controller {' or '.join(missing)}; {_REMEDY}" if missing else ""
