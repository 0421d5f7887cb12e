"""What the processes of one user show to others on the machine, as the kernel lists it
for root."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replicas.linux.files import kernel_lines

__all__ = ["Listener", "Process", "files_of", "listeners", "processes_of"]

_LISTENS = "0A"
_UNIX_LISTENS = 0x10000  # __SO_ACCEPTCON
_KINDS = (
    ("pump", r"^replicas log pump of "),
    ("supervisor", r"-m replicas\.supervisor( |$)"),
    ("store", r"-m replicas\.coordinator\.store_process "),
    ("agent", r"-m replicas\.supervisor\.agent\.local "),
    ("shim", r"-m replicas\.supervisor\.shim\.shim "),
    ("launcher", r"-m replicas\.supervisor\.shim\.launcher "),
    ("forkserver", r"-m replicas\.sidecar\.forkserver "),
)


@dataclass(frozen=True)
class Process:
    """``kind``: what it is of a run; ``rank``: a user's program."""

    pid: int
    kind: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    sockets: frozenset[int]
    written: tuple[Path, ...]
    """Regular files that it has open for writing, and that have a name."""


@dataclass(frozen=True)
class Listener:
    """``kinds``: of the processes that have it. ``family``: ``tcp``, ``udp``, ``raw``,
    ``abstract`` or ``path``.

    ``address``: of the former, hexadecimal as the kernel prints it. ``name``: of the
    latter.
    """

    kinds: frozenset[str]
    family: str
    address: str = ""
    port: int = 0
    name: str = ""


def processes_of(uid: int) -> list[Process]:
    """All living processes of this user."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if folder.stat().st_uid == uid and (made := _process(folder)) is not None:
                found.append(made)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def _process(folder: Path) -> Process | None:
    arguments = tuple(os.fsdecode(one) for one in (folder / "cmdline").read_bytes().split(b"\0") if one)
    if not arguments:  # it is ending
        return None
    pairs = (one.decode("utf-8", "replace").partition("=") for one in (folder / "environ").read_bytes().split(b"\0"))
    sockets, written = set(), []
    for link in (folder / "fd").iterdir():
        try:
            found, target = link.stat(), str(link.readlink())
            flags = int((folder / "fdinfo" / link.name).read_text().partition("flags:")[2].split()[0], 8)
        except FileNotFoundError:
            continue
        if stat.S_ISSOCK(found.st_mode):
            sockets.add(found.st_ino)
        elif stat.S_ISREG(found.st_mode) and flags & os.O_ACCMODE != os.O_RDONLY and found.st_nlink:
            written.append(Path(target))
    return Process(
        int(folder.name),
        _kind(" ".join(arguments), (folder / "comm").read_text(errors="replace").strip()),
        arguments,
        {name: value for name, _, value in pairs if name},
        frozenset(sockets),
        tuple(written),
    )


def _kind(line: str, comm: str) -> str:
    if comm == "replica-sidecar":  # forked from the forkserver
        return "sidecar"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, line)), "rank")


def listeners(processes: Iterable[Process]) -> Iterator[Listener]:
    """Every socket of these processes to which somebody could connect, or send."""
    kinds: dict[int, set[str]] = {}
    for process in processes:
        for inode in process.sockets:
            kinds.setdefault(inode, set()).add(process.kind)
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for words in _rows(table):
            inode, state = int(words[9]), words[3]
            if inode in kinds and (not table.startswith("tcp") or state == _LISTENS):
                address, _, port = words[1].partition(":")
                yield Listener(frozenset(kinds[inode]), table.removesuffix("6"), address, int(port, 16))
    for words in _rows("unix"):
        inode, name = int(words[6]), words[7] if len(words) > 7 else ""
        if inode in kinds and int(words[3], 16) & _UNIX_LISTENS and not name.startswith("@cuda-"):  # the driver's own
            family = "abstract" if name.startswith("@") else "path"
            yield Listener(frozenset(kinds[inode]), family, name=name.removeprefix("@"))


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split(maxsplit=7 if table == "unix" else -1) for line in _lines(Path(f"/proc/net/{table}"))]
    except FileNotFoundError:
        return []


def _lines(path: Path) -> list[str]:
    return kernel_lines(path)[1:]


def files_of(uid: int, roots: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below these folders that belongs to this user."""
    for root in roots:
        for path in (root, *root.rglob("*")):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if found.st_uid == uid:
                yield path, found
