"""Memory that was closed here because its file was shown, and who still maps it.

The kernel frees such memory after its last mapping and descriptor, so nothing has to be
done for it. But a reader that keeps what it has loaded of every version lets memory
grow until no more can be allocated. So the processes that map it are looked up now and
then: never more than once for as many versions as are still mapped, and on a thread of
its own. They are named in the log when there are more than a reader needs that drops
one version before it takes the next, and in the errors that follow from too little
memory.
"""

from __future__ import annotations

import threading

from replicas.common.logs import Log
from replicas.linux.mapped import mappers, named

logger = Log("replicas.weights")


class Left:
    """The left memory of one arena. Thread-safe.

    :param name: of the arena, for the log.
    :param usual: how many versions may be left before the log says so.
    """

    def __init__(self, name: str, usual: int) -> None:
        self._name = name
        self._usual = usual
        self._lock = threading.Lock()
        self._nbytes: dict[int, int] = {}
        self._look_at = usual + 1
        self._looking: threading.Thread | None = None

    def add(self, inode: int, nbytes: int) -> None:
        with self._lock:
            self._nbytes[inode] = nbytes
            if len(self._nbytes) < self._look_at or self._looking is not None:
                return
            self._looking = looking = threading.Thread(target=self._look, name=f"{self._name} readers", daemon=True)
        try:
            looking.start()
        except RuntimeError:  # a limit of threads: the next one that is left tries again
            self._looking = None

    def text(self) -> str:
        """Versions that are still mapped, their size and the processes; or empty."""
        with self._lock:
            known = dict(self._nbytes)
        found = mappers(known) if known else {}
        alive = set().union(*found.values())
        with self._lock:
            for inode in known.keys() - alive:
                self._nbytes.pop(inode, None)
            self._look_at = max(self._usual + 1, 2 * len(self._nbytes))
        if not alive:
            return ""
        mib = sum(known[inode] for inode in alive) / 2**20
        versions = f"{len(alive)} older version{'' if len(alive) == 1 else 's'} ({mib:.0f} MiB)"
        return f"{versions} whose `path` was read are still mapped by {named(found)}"

    def _look(self) -> None:
        try:
            text = self.text()
        finally:
            self._looking = None
        if text and len(self._nbytes) > self._usual:
            logger.warning(
                "%s: %s. Their memory is freed when what was loaded from them is dropped; "
                "copy it inside the block to keep one version only",
                *(self._name, text),
            )
