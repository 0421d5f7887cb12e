"""How much memory a process may still take: the machine's, and its cgroup's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from replicas.errors import NoCapacity

__all__ = ["RESERVE_NBYTES", "available_nbytes", "check_capacity"]

RESERVE_NBYTES = 32 << 20
"""What a large buffer must leave: the page tables of its mappings, and a little for
everything else that runs here."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED_NBYTES = 1 << 60


def available_nbytes(*, proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> tuple[int, str]:
    """Bytes that can still be allocated, and what sets this limit."""
    limits = [*_machine(proc), *_cgroups(proc, cgroup_root)]
    return min(limits, default=(_UNLIMITED_NBYTES, "nothing"))


def check_capacity(nbytes: int, what: str) -> None:
    """Raise :class:`NoCapacity` when ``nbytes`` more cannot be allocated for ``what``.

    The kernel would not say so: beyond the limit of a cgroup it kills a process, and it
    counts shared memory to whoever touches it first.
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
    """Every memory limit between this process's cgroup and the root, of version 2 and
    of version 1."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        limit_names: tuple[str, ...]
        if controllers == "":
            # Beyond memory.high nothing is refused, but every page is slowed down to a
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
    """Page cache of files counts as used, but makes room when it is needed."""
    fields = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not every kernel or container shows it; a limit that cannot be read is no limit
        return ""
