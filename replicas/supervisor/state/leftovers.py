"""Find and kill the living processes of a dead supervisor's run, never by name.

A process belongs to a run whose supervisor is dead if one of these is true:

* ``record``: its pid and start time are in a record of the state file, or it descends
  from such a process;
* ``cgroup``: it is in a control group that such a record names;
* ``mark``: it was started with the mark of such a record in its environment, which is
  random and new for each shim;
* ``identity``: it was started with any shim's mark and with the id of this very state
  folder. That finds processes that no record names, such as after the loss of the
  state file. Folders can be copied with their ids, so processes under a shim whose
  supervisor lives are spared.

Records of pids and control groups are valid only on the machine, and in the boot and
pid namespace, in which they were written. This process and its ancestors are never
touched, whatever their environment says.

While the supervisor of the state file lives, only ``identity`` counts, for marks that
its records do not name (for ``replicas doctor``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from replicas import environ
from replicas.linux import cgroups
from replicas.linux.processes import MARK, SHIM, command_line, descendants, parents, processes, start_time
from replicas.supervisor.cleanup.sweeping import Sweep
from replicas.supervisor.state.run_state import Saved, ShimRecord
from replicas.telemetry.events import How, LeftoverFound


def find(
    saved: Saved | None, identity: str, *, spare: Collection[int] = (), kept: Collection[str] = ()
) -> list[LeftoverFound]:
    """Return the living processes of a dead supervisor's run; kill none.

    ``swept`` is False in each. Reads all of ``/proc``. While the supervisor of
    ``saved`` lives, its recorded processes are left out.

    :param saved: the state that the supervisor left, if there is one.
    :param identity: the id of its state folder; may be empty.
    :param spare: pids to leave out: processes that the present supervisor has started,
        which inherit its environment.
    :param kept: marks of shims to spare, with all processes under them.
    """
    spared = {os.getpid(), *parents(os.getpid()), *spare}
    if kept and saved is not None:
        saved = msgspec.structs.replace(
            saved,
            shims=tuple(one for one in saved.shims if one.nonce not in kept),
            helpers=tuple(one for one in saved.helpers if one.pid not in spare),
        )
    by_nonce = {record.nonce: record for record in saved.shims} if saved is not None else {}
    here = saved if saved is not None and saved.of_this_machine() else None
    if here is not None and here.supervisor is not None and here.supervisor.alive():
        candidates = _by_environment({}, identity, but={*by_nonce, *kept})
    else:
        recorded = () if here is None else itertools.chain(_by_record(here), _by_group(here))
        candidates = itertools.chain(recorded, _by_environment(by_nonce, identity, but=kept))
    found: dict[int, LeftoverFound] = {}
    for pid, how, record in candidates:
        started = start_time(pid)
        if pid in spared or pid in found or started is None:
            continue
        found[pid] = LeftoverFound(
            pid=pid,
            start_time=started,
            command=command_line(pid, 200),
            how=how,
            group=record.group if record is not None else "",
            replica=record.replica if record is not None else -1,
            generation=record.generation if record is not None else 0,
            swept=False,
        )
    return list(found.values())


def sweep(
    saved: Saved | None,
    identity: str,
    timeout_s: float = 5.0,
    *,
    spare: Collection[int] = (),
    kept: Collection[str] = (),
) -> list[LeftoverFound]:
    """SIGKILL all processes that :func:`find` returns, and return them. Blocks.

    Also remove the control groups of the state's shims. The other parameters are those
    of :func:`find`.

    :param timeout_s: how long to kill; ``swept`` is True for those that are gone then.
    """
    seen: dict[tuple[int, int], LeftoverFound] = {}

    def look() -> dict[int, int]:
        """Find the leftovers that live now, and remember them for the result."""
        found = find(saved, identity, spare=spare, kept=kept)
        for one in found:
            seen.setdefault((one.pid, one.start_time), one)
        return {one.pid: one.start_time for one in found}

    killing = Sweep(look)
    if killing.kill_once():  # most runs have no leftovers, and one look is enough
        killing.run(timeout_s)
    for record in saved.shims if saved is not None and saved.of_this_machine() else ():
        if record.cgroup and record.nonce not in kept:
            cgroups.leave(Path(record.cgroup), run=True)
    return [
        msgspec.structs.replace(one, swept=start_time(one.pid) != one.start_time)
        for one in sorted(seen.values(), key=lambda one: one.start_time)
    ]


def lock_holders(lock: Path) -> list[int]:
    """Return the other processes that hold a flock on this file.

    Found by ``/proc/<pid>/fdinfo``, so only visible ones.

    :raises OSError: the file cannot be examined.
    """
    there = lock.stat()
    return [pid for pid in processes() if pid != os.getpid() and _holds(pid, there)]


_Candidate = tuple[int, How, ShimRecord | None]


def _by_record(saved: Saved) -> Iterator[_Candidate]:
    """Yield living processes of the state's records, and their descendants.

    Each is a pid, the way it was found, and the record of its shim or None.
    """
    for process, record in [*((one.process, one) for one in saved.shims), *((one, None) for one in saved.helpers)]:
        if process is not None and process.alive():
            for pid in (process.pid, *descendants(process.pid)):
                yield pid, "record", record


def _by_group(saved: Saved) -> Iterator[_Candidate]:
    """Yield the processes in the control groups of the records of shims."""
    for record in saved.shims:
        if record.cgroup:
            for pid in cgroups.members(Path(record.cgroup)):
                yield pid, "cgroup", record


def _by_environment(
    records: dict[str, ShimRecord], identity: str, *, but: Collection[str] = ()
) -> Iterator[_Candidate]:
    """Yield processes of a recorded shim, or of another shim of this state folder.

    They are found by variables in their environment: a shim's mark and the folder's id.
    Other shims are skipped while their supervisor lives.

    :param records: those of the state, by mark.
    :param identity: the id of the state folder; "" finds only the recorded ones.
    :param but: marks to skip.
    """
    entry, mark = f"{environ.STATE_ID}={identity}".encode(), f"{MARK}=".encode()
    found: list[tuple[int, list[bytes], str]] = []
    for pid in processes():
        entries = _words(pid, "environ")
        nonce = next((one.removeprefix(mark).decode(errors="replace") for one in entries if one.startswith(mark)), "")
        if nonce:
            found.append((pid, entries, nonce))
    supervised = {nonce for pid, _, nonce in found if _starter_lives(pid)}
    for pid, entries, nonce in found:
        record = records.get(nonce)
        if record is not None and nonce not in but:
            yield pid, "mark", record
        elif identity and entry in entries and nonce not in but and nonce not in supervised:
            yield pid, "identity", None


def _words(pid: int, file: str) -> list[bytes]:
    """Return the words of a process's file ``environ`` or ``cmdline`` in ``/proc``.

    An empty list if the file cannot be read.
    """
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []


def is_orphan(pid: int) -> bool:
    """Return True if this is a shim whose starter (supervisor or agent) is dead."""
    return _starter_lives(pid) is False


def _starter_lives(pid: int) -> bool | None:
    """Return True if this shim's starter (supervisor or agent) lives, else False.

    Return None if the process is not a shim.
    """
    words = _words(pid, "cmdline")
    if SHIM.encode() not in words or b"--parent" not in words[:-1]:
        return None
    told = words[words.index(b"--parent") + 1]
    return parents(pid)[:1] == [int(told)] if told.isdigit() else None


def _holds(pid: int, lock: os.stat_result) -> bool:
    """Return True if the process holds a lock on the file with this stat result.

    False also if that cannot be known: the process has ended, or is another user's.
    """
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # it has ended, or is another user's
    for path in descriptors:
        try:
            there = path.stat()
            ours = (there.st_dev, there.st_ino) == (lock.st_dev, lock.st_ino)
            if ours and b"lock:" in Path(f"/proc/{pid}/fdinfo/{path.name}").read_bytes():
                return True
        except OSError:
            continue  # it was closed meanwhile
    return False
