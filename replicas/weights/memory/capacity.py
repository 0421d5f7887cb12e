"""Memory that a process may still allocate: the machine's and its cgroup's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from replicas.errors import NoCapacity

__all__ = ["RESERVE_NBYTES", "available_nbytes", "check_capacity"]

RESERVE_NBYTES = 32 << 20
"""Left free beside a large buffer, for its page tables and other processes."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED_NBYTES = 1 << 60


def available_nbytes(*, proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> tuple[int, str]:
    """Bytes that can still be allocated, and the name of the limit."""
    limits = [*_machine(proc), *_cgroups(proc, cgroup_root)]
    return min(limits, default=(_UNLIMITED_NBYTES, "nothing"))


def check_capacity(nbytes: int, what: str) -> None:
    """Raise :class:`NoCapacity` when ``nbytes`` more cannot be allocated for ``what``.

    The kernel reports no error: beyond a cgroup's limit it kills a process, and it
    charges shared memory to the cgroup of the process that touches it first.
    """
    available, limit = available_nbytes()
    reserve = RESERVE_NBYTES if nbytes >= RESERVE_NBYTES else 0
    if nbytes + reserve > available:
        kept = f", of which {reserve} are kept for others" if reserve else ""
        raise NoCapacity(f"{what} needs {nbytes} bytes, but {limit} leaves {available}{kept}")


def _machine(proc: Path) -> Iterator[tuple[int, str]]:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024, "the machine's memory"


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Every memory limit from this process's cgroup to the root, versions 2 and 1."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        limit_names: tuple[str, ...]
        if controllers == "":
            # Beyond memory.high no allocation fails, but every page is throttled to a
            # standstill.
            base, limit_names, usage_name = root, ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_names, usage_name = root / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            usage = _read(place / usage_name).strip()
            for name in limit_names:
                limit = _read(place / name).strip()
                if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED_NBYTES:
                    room = int(limit) - int(usage) + _reclaimable(place)
                    group = "/" if place == base else f"/{place.relative_to(base)}"
                    yield max(0, min(room, int(limit))), f"{name} of cgroup {group}"
            if place == base:
                break


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache: they count as used, but are freed on demand."""
    fields = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not every kernel or container has it; an unreadable limit is no limit
        return ""
