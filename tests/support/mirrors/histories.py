"""What a reader sees of the folder of ``replicas mirror``, between any two system calls
of the writer, for as many histories as you like: ``python -m
tests.support.mirrors.histories COUNT [SEED]``; ``each`` for COUNT: an end at each
system call of a write.

A history is a folder and some lives of a mirror in it: of one run or of several, whose
versions count from 1 again, with names that come again. Lives end by SIGKILL or SIGTERM
at some system call, or on a disk (or in a process) without room for a version. At each
system call the harness reads ``latest`` as a reader does, and all other folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from replicas import errors
from replicas.linux.processes import die_with_parent
from replicas.sources import mirror
from replicas.sources.mirror import Mirror, Version
from tests.support.machine.disks import small_disk
from tests.support.machine.tracing import can_trace, trace

__all__ = ["EACH", "FORBIDDEN", "limit_s", "same", "slot", "version"]

FORBIDDEN = 77
"""Exit code: this machine allows no process to be traced."""
DISK_NBYTES, DISK_FILES = 400 << 10, 120
EACH = "each"
PAGE_NBYTES = 4096
NAMES = ("version-{version}", "step_{step}", "{step}")
STABLE = "STABLE"


def limit_s(count: int) -> float:
    """How long so many histories may take: ten times as long as on a quiet machine."""
    return 60.0 + 8.0 * count


def version(number: int, *, step: int = 0, run: str = "a", term: int = 1, nbytes: int = 3000) -> Version:
    return Version(
        version=number, digest=f"{run}.{term}.{number}", meta={"step": step, "nbytes": nbytes}, run=run, term=term
    )


def _data(one: Version) -> bytes:
    nbytes = int(one.meta["nbytes"])
    return (f"{one.digest}|".encode() * nbytes)[:nbytes]


@contextlib.contextmanager
def slot(one: Version) -> Iterator[int]:
    """A descriptor of the version, as of ``update.path``."""
    data = _data(one)
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    file = os.memfd_create("version")
    try:
        os.write(file, len(header).to_bytes(8, "little") + header + data)
        yield file
    finally:
        os.close(file)


def same(folder: Path) -> Version:
    """The version in a folder, of which each file is whole.

    :raises AssertionError: one is not.
    :raises FileNotFoundError: there is no such folder.
    """
    note = mirror._read_note(folder)
    names = sorted(one.name for one in folder.iterdir())
    assert note is not None, f"{folder} has {names}"
    assert names == sorted([STABLE, "config.json", "model.safetensors", mirror.NOTE]), folder
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:start])["__metadata__"]
    assert (metadata["replicas.version"], metadata["replicas.digest"]) == (str(note.version), note.digest), folder
    assert content[start:] == _data(note), folder
    assert (folder / "config.json").read_text() == "{}", folder
    return note


@dataclasses.dataclass
class Life:
    """One life of a mirror, and its fault: a signal at a system call, or no room."""

    name: str
    keep: int
    versions: list[Version]
    signal_at: int = 0
    signal: int = 0
    room: tuple[int, int] | None = None
    """Bytes and files that still fit."""


class History:
    """A folder, what its readers may see, and what has happened to it."""

    def __init__(self, folder: Path, like: Path, disk: bool, counts: Counter[str]) -> None:
        self.folder, self.like, self.disk, self.counts = folder, like, disk, counts
        self.newest: Version | None = None
        self._told = mmap.mmap(-1, 16)
        """Shared with the writer: which version it writes, how many it has written or
        refused, whether the last was refused, whether it has the folder."""
        self._seen = self._writing = 0
        self._before: dict[str, Version] = {}
        """The folders as the version that is written found them."""

    def live(self, life: Life) -> None:
        """One life, with all that a reader sees meanwhile."""
        self._told[:4] = bytes(4)
        self._seen = self._writing = 0
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def run() -> None:
            if life.room is not None and not self.disk:
                resource.setrlimit(resource.RLIMIT_FSIZE, (life.room[0], before[1]))
            signal.signal(signal.SIGTERM, _end)
            self._write(life, files)

        def look(calls: int) -> int:
            self.look(life)
            if self._told[3] and calls % 97 == 0:
                self._try_another_writer()
            return life.signal if calls == life.signal_at else 0

        with contextlib.ExitStack() as slots, self._full(life):
            files = [slots.enter_context(slot(one)) for one in life.versions]
            status = trace(run, look)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        told = os.WIFEXITED(status) and life.signal == signal.SIGTERM
        assert status == 0 or told or (killed and life.signal == signal.SIGKILL), f"{life}: {status}"
        self.counts["killed"] += killed
        self.counts["stopped"] += told
        self.look(life, ended=True)

    def _write(self, life: Life, files: list[int]) -> None:
        """In the writer's process."""
        try:
            kept = Mirror(self.folder, keep=life.keep, name=life.name, like=self.like, marker=STABLE)
        except errors.UsageError:
            if life.room is None:
                raise
            return
        self._told[3] = 1
        for number, (file, one) in enumerate(zip(files, life.versions, strict=True), 1):
            self._told[0] = number
            try:
                kept.write(file, one)
                self._told[2] = 0
            except errors.UsageError as error:
                if life.room is None or not error.hint.startswith("make room"):
                    raise
                self._told[2] = 1
            self._told[1] = number

    def look(self, life: Life, *, ended: bool = False) -> None:
        """Read as a reader does, at an instant of its own."""
        self.counts["looks"] += 1
        latest = self.folder / mirror.LATEST
        found = same(latest) if latest.is_symlink() else None
        writing, done, refused, there = self._told[0], self._told[1], bool(self._told[2]), self._folders()
        if writing > self._writing:
            self._writing, self._before = writing, there
        if done > self._seen:
            self._seen = done
            one = life.versions[done - 1]
            self.counts["refused" if refused else "written"] += 1
            if refused:
                assert found == self.newest, "a version that was refused is the newest"
            else:
                assert found is not None
                assert _but_number(found) == _but_number(one), "what was acknowledged is not there"
                others = sorted(self._before.items(), key=lambda one: one[1].sequence, reverse=True)
                newer = [name for name, _ in others if there.get(name) != found][: life.keep - 1]
                assert {name for name, one in there.items() if one != found} == set(newer), there
                assert found in there.values()
                # rmtree() may lose the exception of SIGTERM: it closes some files twice
                assert life.signal == signal.SIGTERM or not list(self.folder.glob(f".*{mirror._PART}"))
            self.newest = found
        elif found != self.newest:
            assert found is not None, "latest is gone"
            assert done < writing, f"{found} came from nowhere"
            assert _but_number(found) == _but_number(life.versions[writing - 1])
        if ended:
            self.newest = found

    def _folders(self) -> dict[str, Version]:
        """All that have a version's name: each is whole."""
        if not self.folder.exists():
            return {}
        names = (one for one in self.folder.iterdir() if not one.name.startswith(".") and one.name != mirror.LATEST)
        return {one.name: same(one) for one in names}

    def _try_another_writer(self) -> None:
        self.counts["second writers"] += 1
        with pytest.raises(errors.UsageError, match="another mirror writes"):
            Mirror(self.folder)

    @contextlib.contextmanager
    def _full(self, life: Life) -> Iterator[None]:
        """Fill the disk but for the room of this life."""
        fillers = self.folder.parent / "fillers"
        if life.room is None or not self.disk:
            yield
            return
        self.counts["full disks"] += 1
        fillers.mkdir()
        for number in range(max(0, os.statvfs(fillers).f_ffree - life.room[1] - 1)):
            (fillers / str(number)).touch()
        with (fillers / "bytes").open("wb") as file:
            free = os.statvfs(fillers)
            if (nbytes := free.f_bavail * free.f_frsize - life.room[0]) > 0:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        try:
            yield
        finally:
            shutil.rmtree(fillers)


def _but_number(one: Version) -> tuple[object, ...]:
    return one.run, one.term, one.version, one.digest, one.meta


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit


def lives(draw: random.Random) -> Iterator[Life]:
    """The lives of one history."""
    run, term, number, name = 0, 1, 0, draw.choice(NAMES)
    last: Version | None = None
    for _ in range(draw.randint(2, 5)):
        kind = draw.choice(["again", "again", "coordinator", "run", "older"])
        versions = [last] if last is not None and kind == "again" and draw.random() < 0.7 else []
        if kind in ("run", "older"):
            run, number = run + (kind == "run"), 0 if draw.random() < 0.7 else draw.randint(0, 5)
            name = draw.choice([name, *NAMES])
        term += kind != "again"
        for _ in range(draw.randint(1, 4)):
            number += 1
            step, nbytes = draw.randint(1, 3), draw.choice([100, 5000, 30_000])
            versions.append(version(number, step=step, run=f"run-{run}", term=term, nbytes=nbytes))
        last = versions[-1]
        life = Life(name, draw.randint(1, 3), versions)
        fault = draw.choice(["", "kill", "kill", "stop", "full"])
        if fault in ("kill", "stop"):
            life.signal, life.signal_at = signal.SIGKILL if fault == "kill" else signal.SIGTERM, draw.randint(1, 700)
        elif fault:
            life.room = draw.choice([0, 1, 2, 3, 6, 10, 20]) * PAGE_NBYTES, draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 50])
        yield life


def histories(place: Path, disk: bool, count: int, seed: int) -> Counter[str]:
    """Tell how many of what there were.

    :raises AssertionError: a reader has seen what none may see; it says which history.
    """
    counts: Counter[str] = Counter()
    like = place / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    exchanged = mirror._exchange_names
    for number in range(seed * 100_000, seed * 100_000 + count):
        draw, told = random.Random(number), []
        mirror._exchange_names = exchanged if draw.random() < 0.7 else lambda *_: False
        one = History(place / "folder", like, disk, counts)
        try:
            for life in lives(draw):
                told.append(life)
                one.live(life)
        except BaseException as error:
            error.add_note("\n".join([f"history {number}:", *map(str, told)]))
            raise
        shutil.rmtree(one.folder, ignore_errors=True)
        counts["histories"] += 1
        counts["lives"] += len(told)
    return counts


def every_call(place: Path) -> Counter[str]:
    """End a mirror at each system call of a write, and start another one.

    :raises AssertionError: ``latest`` is not whole then, or the other one cannot write.
    """
    counts: Counter[str] = Counter()
    first, second, third = (version(number, step=3) for number in (1, 2, 3))
    exchanged, like, copy = mirror._exchange_names, place / "like", place / "copy"
    like.mkdir()
    (like / "config.json").write_text("{}")
    for name, swaps in (("version-{version}", True), ("{step}", True), ("{step}", False)):
        mirror._exchange_names = exchanged if swaps else lambda *_: False
        folder = place / f"{name} {swaps}"

        def write(where: Path, *versions: Version, name: str = name) -> None:
            with Mirror(where, keep=1, name=name, like=like, marker=STABLE) as kept:
                if third in versions:
                    same(where / mirror.LATEST)
                for one in versions:
                    with slot(one) as file:
                        kept.write(file, one)

        def restart(calls: int, folder: Path = folder, write: Callable[..., None] = write) -> int:
            shutil.copytree(folder, copy, symlinks=True)
            found = same(copy / mirror.LATEST)
            assert _but_number(found) in (_but_number(second), _but_number(third))
            write(copy, third)
            assert _but_number(same(copy / mirror.LATEST)) == _but_number(third)
            assert len(list(copy.iterdir())) == 3, "a folder, latest and the lock"
            shutil.rmtree(copy)
            counts["calls"] += 1
            return 0

        write(folder, first, second)
        assert trace(lambda write=write, folder=folder: write(folder, third), restart) == 0  # type: ignore[misc]  # bound here
        counts["kinds of writes"] += 1
    mirror._exchange_names = exchanged
    return counts


def main(count: str, seed: str = "1") -> int:
    die_with_parent(os.getppid(), signal.SIGKILL)
    faulthandler.dump_traceback_later(limit_s(0 if count == EACH else int(count)), exit=True)
    if not can_trace():
        return FORBIDDEN
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk", DISK_NBYTES, DISK_FILES) as disk:
        place = Path(folder) / "disk"
        counts = every_call(place) if count == EACH else histories(place, disk, int(count), int(seed))
    print(", ".join(f"{number:,} {what}" for what, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
