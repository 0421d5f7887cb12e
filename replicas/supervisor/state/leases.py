"""The leases of agents that may run without a supervisor: ``<state_dir>/leases``.

The file repeats parts of the state, for the case that the state is lost, old, or of
another release. It has no schema: each line is a JSON object, and a reader ignores
unknown fields. The first line has numbers of the run, each other line is a
:class:`Lease`; an unreadable line counts as a lease of unknown length::

    {"starts":                  12,"generations":16,"floor":0}
    {"node":"gpu2","incarnation":"0f...","scope":"...","lease_s":120.0}

* A lease is on disk, and synced with its folder, *before* it is granted, and leaves the
  file when it is over. So the file names every agent that may run, and for how long
  after its last beat.
* ``starts`` counts the generations that were started. The state has the number, too,
  and is written first: a state with a smaller number is old. The number is written in
  place, which needs no room on a full disk, and is not synced, as the state is not:
  after another boot of the machine, no state is known to be the newest.
* ``generations`` is the highest number that a generation may have. It is raised in
  steps, before use. If the state does not tell which numbers were used, ``floor`` is
  set to it, and new generations have numbers above ``floor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.linux import private
from replicas.supervisor.state.run_state import ProcessRecord

log = Log("replicas.supervisor")

_STEP = 16
"""By how much the highest number of a generation is raised at a time."""
_WIDTH = 20
_AT = len('{"starts":')


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incarnation of an agent that may run replicas without a supervisor.

    :ivar node: empty if unknown.
    :ivar local: True if it was the agent of its supervisor's own machine, ``process``.
    :ivar scope: where its pids are valid.
    :ivar lease_s: how long it may run unheard, in seconds; 0 if unknown.
    :ivar unseen: True if no state names the replicas under it.
    """

    node: str = ""
    incarnation: str = ""
    local: bool = False
    scope: str = ""
    lease_s: float = 0.0
    process: ProcessRecord | None = None
    unseen: bool = False


class _Numbers(msgspec.Struct):
    """The first line of the file: numbers of the run."""

    starts: int = 0
    generations: int = 0
    floor: int = 0


class Leases:
    """The file of leases: how long agents may run without a supervisor.

    Hold the run's lock.
    """

    def __init__(self, path: Path) -> None:
        """Store the path of the file; read it in :meth:`load`."""
        self.path = path
        self.found = False
        """True if the file exists and was read."""
        self.damaged = False
        """True if the file exists and is unreadable."""
        self.records: tuple[Lease, ...] = ()
        self.starts = 0
        self.floor = 0
        self._generations = 0

    def load(self) -> None:
        """Read the file into the attributes; note whether it is missing or damaged.

        Then, the caller must call :meth:`raise_floor` if numbers may be lost, or
        :meth:`write_starts` if the file was missing.
        """
        try:
            lines = private.read(self.path).splitlines()
            numbers = msgspec.json.decode(lines[0], type=_Numbers)
        except FileNotFoundError:
            pass
        except (OSError, IndexError, *MALFORMED) as error:
            self.damaged = True
            log.error("delaying starts, as old replicas may run: cannot read %s: %s", self.path, error)
        else:
            self.found = True
            self.starts, self._generations, self.floor = numbers.starts, numbers.generations, numbers.floor
            self.records = tuple(_lease(line) for line in lines[1:])

    def write(self, records: Sequence[Lease]) -> None:
        """Replace the leases by ``records``, on disk first.

        Blocks for a sync if they differ.

        :raises OSError: writing failed, and the old leases hold.
        """
        if tuple(records) != self.records:
            self._write(records)

    def _write(self, records: Iterable[Lease], *, generations: int | None = None, floor: int | None = None) -> None:
        """Replace the file and sync it, then the attributes.

        :param records: the leases, all of them.
        :param generations: highest number that a generation may have; None keeps it.
        :param floor: number above which new generations are numbered; None keeps it.
        :raises OSError: writing failed; file and attributes are unchanged.
        """
        new = tuple(records)
        numbers = self._generations if generations is None else generations
        lowest = self.floor if floor is None else floor
        head = f'{{"starts":{self.starts:{_WIDTH}},"generations":{numbers},"floor":{lowest}}}\n'.encode()
        private.replace(self.path, head + b"".join(msgspec.json.encode(one) + b"\n" for one in new), sync=True)
        self.records, self._generations, self.floor = new, numbers, lowest

    def raise_floor(self, records: Iterable[Lease], *, used: int = 0) -> None:
        """Set :attr:`floor` to a number that no generation has exceeded, and write it.

        New generations are numbered above it. Writes the file, with a sync.

        :param records: leases that may still hold; they replace those in the file.
        :param used: the highest generation in the saved state. It counts only if
            :meth:`load` has found no file.
        :raises OSError: the file cannot be written.
        """
        unread = used + _STEP if used and not self.found else 0
        self._write(records, floor=max(self.floor, self._generations, unread))

    def reserve_generation(self, generation: int) -> None:
        """Write that this number of a generation may be used, before it is.

        Raises the number in the file in steps, so that few calls write.

        :raises OSError: writing failed.
        """
        if generation > self._generations:
            self._write(self.records, generations=generation + _STEP - 1)

    def write_starts(self) -> None:
        """Write :attr:`starts`, the number of started generations, without a sync.

        :raises OSError: writing failed.
        """
        try:
            private.overwrite(self.path, f"{self.starts:{_WIDTH}}".encode(), _AT)
        except FileNotFoundError:  # the run is new, or the file was removed by hand
            self._write(self.records)

    def remove(self) -> None:
        """Remove the file of leases, and a half-written new one."""
        private.remove(self.path)
        private.remove(self.path.with_name(f"{self.path.name}.new"))


def _lease(line: bytes) -> Lease:
    """Decode a line of the file; return a lease of unknown length if that fails."""
    try:
        return msgspec.json.decode(line, type=Lease)
    except MALFORMED:
        return Lease(unseen=True)
