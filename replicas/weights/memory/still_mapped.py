"""Memory that was closed here after its file was shown, and the processes that map it.

The kernel frees such memory after its last mapping and descriptor. But a reader that
keeps its tensors of every version makes memory grow until allocations fail. So a thread
looks up the processes that map such memory, rarely: at most once for each doubling of
the mapped versions. The log names them if they map more versions than a reader needs
that drops one version before it takes the next; errors about too little memory name
them, too.
"""

from __future__ import annotations

import threading

from replicas.common.logs import Log
from replicas.linux.mapped import mappers, named

logger = Log("replicas.weights")


class StillMapped:
    """Closed memory of one arena whose file was shown to users. Thread-safe."""

    def __init__(self, name: str, usual: int) -> None:
        """Begin with no memory recorded.

        :param name: of the arena, for the log.
        :param usual: how many such versions may be mapped without a warning.
        """
        self._name = name
        self._usual = usual
        self._lock = threading.Lock()
        self._nbytes: dict[int, int] = {}
        self._look_at = usual + 1
        self._looking: threading.Thread | None = None

    def add(self, inode: int, nbytes: int) -> None:
        """Record that memory was closed here whose file users may still have mapped.

        If there is much of it, a thread looks for the processes that map it.

        :param inode: of its file.
        """
        with self._lock:
            self._nbytes[inode] = nbytes
            if len(self._nbytes) < self._look_at or self._looking is not None:
                return
            self._looking = looking = threading.Thread(
                target=self._warn_if_many, name=f"{self._name} readers", daemon=True
            )
        try:
            looking.start()
        except RuntimeError:  # no thread left; the next call tries again
            self._looking = None

    def text(self) -> str:
        """Return a text about the versions that are still mapped, and by whom.

        Return "" if none are. Reads the mappings of all processes: a millisecond for a
        large one. Memory that is no longer mapped is forgotten.
        """
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

    def _warn_if_many(self) -> None:
        """Log the processes that map more versions than usual; a thread's function."""
        try:
            text = self.text()
        finally:
            self._looking = None
        if text and len(self._nbytes) > self._usual:
            logger.warning(
                "%s: %s. Their memory is freed when the tensors loaded from them are dropped; "
                "copy these inside the block to keep one version only",
                *(self._name, text),
            )
