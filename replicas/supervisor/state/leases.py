"""What may still run when a supervisor is gone: ``<state_dir>/leases``.

The file says nothing that the state does not say, but it is there when that is lost,
old, or of another release: it has no schema. Each line is a JSON object, of which a
reader takes the fields that it knows. The first line has numbers of the run, each other
one is a :class:`Lease`; what is not understood counts as one of unknown length::

    {"starts":                  12,"generations":16,"floor":0}
    {"node":"gpu2","incarnation":"0f...","scope":"...","lease_s":120.0}

* A lease is on disk, and synced with its folder, *before* it is granted, and leaves the
  file when it is over. So whatever may run is named, with the time that it has left
  once its agent falls silent.
* ``starts`` counts the generations that were started. The state has the number, too,
  and is written first: a state with a smaller one is old. The number is written in
  place, which takes no room on a full disk, and is not synced, as the state is not:
  after another boot of the machine no state is known to be the newest.
* ``generations`` is the highest number that a generation may have. It is raised in
  steps, before it is used. Where the state cannot tell which numbers were used, the
  next ones are above the ``floor``, which is set to it then.
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

    :ivar node: empty: it is not known.
    :ivar local: it was the agent of its supervisor's own machine, as ``process``.
    :ivar scope: where its pids are valid.
    :ivar lease_s: for how long, in seconds, it may go on unheard; 0: it is not known.
    :ivar unseen: no state says what runs under it.
    """

    node: str = ""
    incarnation: str = ""
    local: bool = False
    scope: str = ""
    lease_s: float = 0.0
    process: ProcessRecord | None = None
    unseen: bool = False


class _Numbers(msgspec.Struct):
    starts: int = 0
    generations: int = 0
    floor: int = 0


class Leases:
    """The file of leases. Hold the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = False
        """True if a file was there, and could be read."""
        self.damaged = False
        """True if a file was there, and could not be read."""
        self.records: tuple[Lease, ...] = ()
        self.starts = 0
        self.floor = 0
        self._generations = 0

    def load(self) -> None:
        """Read what was written before, if anything. Then say what is left of that:
        :meth:`count` or :meth:`forget_numbers`."""
        try:
            lines = private.read(self.path).splitlines()
            numbers = msgspec.json.decode(lines[0], type=_Numbers)
        except FileNotFoundError:
            pass
        except (OSError, IndexError, *MALFORMED) as error:
            self.damaged = True
            log.error("the leases in %s cannot be read: %s", self.path, error)
        else:
            self.found = True
            self.starts, self._generations, self.floor = numbers.starts, numbers.generations, numbers.floor
            self.records = tuple(_lease(line) for line in lines[1:])

    def write(self, records: Sequence[Lease]) -> None:
        """Have these leases on disk. OSError: they are not, and nothing has changed."""
        if tuple(records) != self.records:
            self._write(records)

    def _write(self, records: Iterable[Lease], *, generations: int | None = None, floor: int | None = None) -> None:
        new = tuple(records)
        numbers = self._generations if generations is None else generations
        lowest = self.floor if floor is None else floor
        head = f'{{"starts":{self.starts:{_WIDTH}},"generations":{numbers},"floor":{lowest}}}\n'.encode()
        private.replace(self.path, head + b"".join(msgspec.json.encode(one) + b"\n" for one in new), sync=True)
        self.records, self._generations, self.floor = new, numbers, lowest

    def forget_numbers(self, records: Iterable[Lease], *, used: int = 0) -> None:
        """Use no number of a generation again that may have been used.

        OSError: it cannot be written.

        :param records: may still run.
        :param used: the highest number by the state, for a file that tells none.
        """
        unread = used + _STEP if used and not self.found else 0
        self._write(records, floor=max(self.floor, self._generations, unread))

    def reserve(self, generation: int) -> None:
        """Have it on disk that this number may be used. OSError: it is not."""
        if generation > self._generations:
            self._write(self.records, generations=generation + _STEP - 1)

    def count(self) -> None:
        """Have the number of starts on disk. OSError: it is not."""
        try:
            private.overwrite(self.path, f"{self.starts:{_WIDTH}}".encode(), _AT)
        except FileNotFoundError:  # it is new, or somebody purged old files
            self._write(self.records)

    def remove(self) -> None:
        private.remove(self.path)
        private.remove(self.path.with_name(f"{self.path.name}.new"))


def _lease(line: bytes) -> Lease:
    try:
        return msgspec.json.decode(line, type=Lease)
    except MALFORMED:
        return Lease(unseen=True)
