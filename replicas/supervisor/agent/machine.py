"""Find this machine's resources: GPUs, CPUs, memory, and whether they can be limited.

:func:`inspect_machine` uses neither torch nor a GPU context.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping

import msgspec

from replicas.linux import smi
from replicas.linux.cgroups import LIMITS, find_own, own_group
from replicas.linux.files import kernel_lines
from replicas.linux.helpers import interpreter

_NVML_S = 20.0
NAME_MAX = 63
_NO_GPUS = ("", "-1", "NoDevFiles")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of this machine for a run.

    :ivar gpus: names for ``CUDA_VISIBLE_DEVICES``.
    :ivar gpus_from: source of the names, or why there are none.
    :ivar gpu_order: the ``CUDA_DEVICE_ORDER`` of the names; empty for the present one.
    :ivar limits_refused: why memory and processes cannot be limited; empty if they can.
    """

    gpus: tuple[str, ...] = ()
    gpus_from: str = ""
    gpu_order: str = ""
    cpus: int = 1
    memory_nbytes: int = 0
    limits_refused: str = ""


def inspect_machine(*, gpus: bool = True, environ: Mapping[str, str] | None = None) -> Machine:
    """Return the resources within CPU set, cgroups and ``CUDA_VISIBLE_DEVICES``.

    Blocks; changes nothing.

    :param gpus: look for GPUs. This takes up to 1 s, and 20 s if the driver hangs.
    :param environ: the environment to read; default: that of this process.
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
    remedy = f"start it {'as root, or ' * bool(os.geteuid())}under systemd with Delegate=yes, or remove the limit"
    try:
        own = find_own()
        controllers = kernel_lines(own / "cgroup.controllers")[0].split()
        missing = [name for name in LIMITS if name not in controllers]
        refused = f"{own} has no controller {' or '.join(missing)}; {remedy}" if missing else ""
    except OSError as error:
        refused = f"{error.strerror}; {remedy}"
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        gpus=names,
        gpus_from=gpus_from,
        gpu_order=order,
        cpus=cpus,
        memory_nbytes=min([memory_nbytes, *(int(text) for text in _cgroup_texts("memory.max") if text != "max")]),
        limits_refused=refused,
    )


def node_name() -> str:
    """Return the hostname as the name of a node.

    Other characters than letters, digits, ``-``, ``_`` and ``.`` are replaced; "local"
    if none are left.
    """
    found = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:NAME_MAX].strip(".-_")
    return found or "local"


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the indices or UUIDs in ``CUDA_VISIBLE_DEVICES``, None if it is unset.

    As CUDA does, stop at the first invalid entry, such as -1.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    words = map(str.strip, text.split(","))
    return tuple(dict.fromkeys(itertools.takewhile(lambda word: word not in _NO_GPUS, words)))  # as CUDA does


def _nvml_gpus() -> tuple[tuple[str, ...], str, str]:
    """Ask NVIDIA's driver for the GPUs, in a child process. Blocks up to 20 s.

    :returns: the indices in PCI bus order, their source or why there are none, and the
        ``CUDA_DEVICE_ORDER`` of the indices ("" without GPUs).
    """
    try:
        ctypes.CDLL(smi.NVML)  # loading it does not call the driver
    except OSError as error:
        return (), f"no NVIDIA driver: {error}", ""
    count, why = nvml_count([interpreter(), "-I", "-S", smi.__file__], _NVML_S)
    if count is None:
        return (), f"NVML says: {why}", ""
    return tuple(map(str, range(count))), "NVML", "PCI_BUS_ID"


def nvml_count(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Run ``command``, which prints a number. Blocks up to ``timeout_s``.

    :returns: the number and "", or None and why there is none.
    """
    try:
        code, text = smi.ask(command, timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"nothing within {timeout_s:g} s: the driver hangs"
    words = text.strip()
    if code == 0 and words.isdecimal():
        return int(words), ""
    return None, words or f"nothing; it ended with {code}"


def _cgroup_texts(name: str) -> Iterator[str]:
    """Yield this file's first line in the own control group and in each above it."""
    try:
        own = own_group()
    except OSError:
        return
    for folder in (own, *own.parents):
        with contextlib.suppress(OSError):  # the root has no limits, and a controller that is off has no file
            yield kernel_lines(folder / name)[0]
