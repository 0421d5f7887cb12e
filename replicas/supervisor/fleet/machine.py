"""Find this machine's GPUs, CPUs and memory without torch and without a GPU context."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from replicas.linux import nvml
from replicas.linux.cgroups import LIMITS, find_own

__all__ = ["Machine", "look", "nvml_count", "visible_gpus"]

_REMEDY = "start it as root or under systemd with Delegate=yes, or remove the limit"
_NVML_S = 20.0
_KILL_S = 0.2
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
    names, gpus_from, order = _gpus(os.environ if environ is None else environ) if gpus else ((), "", "")
    return Machine(
        gpus=names,
        gpus_from=gpus_from,
        gpu_order=order,
        cpus=_cpus(),
        memory_nbytes=_memory_nbytes(),
        limits_refused=_limits_refused(),
    )


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[str, ...], str, str]:
    visible = visible_gpus(environ)
    return _nvml_gpus() if visible is None else (visible, "CUDA_VISIBLE_DEVICES", "")


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
    null = subprocess.DEVNULL
    asked = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True)
    assert asked.stdout is not None
    try:
        text, _ = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            asked.wait(_KILL_S)
        return None, f"nothing within {timeout_s:g} s: the driver hangs"
    words = text.strip()
    if asked.returncode == 0 and words.isdecimal():
        return int(words), ""
    return None, words or f"nothing; it ended with {asked.returncode}"


def _cpus() -> int:
    cpus = len(os.sched_getaffinity(0))
    for text in _cgroup_texts("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


def _memory_nbytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(int(text) for text in _cgroup_texts("memory.max") if text != "max")])


def _cgroup_texts(name: str) -> Iterator[str]:
    """Contents of this file in our cgroup (version 2) and in its ancestors."""
    found = _own_cgroup()
    for place in () if found is None else (found[1], *found[1].parents):
        if found is not None and place.is_relative_to(found[0]):
            try:
                yield (place / name).read_text().strip()
            except OSError:
                continue  # the root has no limits, and a controller that is off has no file


def _own_cgroup() -> tuple[Path, Path] | None:
    """Mount point of cgroup v2 and this process's folder in it; None: not mounted."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    return None if root is None or own is None else (root, root / own.lstrip("/"))


def _limits_refused() -> str:
    try:
        own = find_own()
        controllers = (own / "cgroup.controllers").read_text().split()
    except OSError as error:
        return f"{error.strerror}; {_REMEDY}"
    missing = [name for name in LIMITS if name not in controllers]
    return f"{own} has no controller {' or '.join(missing)}; {_REMEDY}" if missing else ""
