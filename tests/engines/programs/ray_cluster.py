"""A Ray cluster of several raylets on this machine, and what is left of its jobs."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from tests.support.runs import MARK, ROOT, processes_marked
from tests.support.waits import eventually

__all__ = ["Raylets", "raylets"]

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}
_OURS = ("replicas.", "ray::", "forkserver", "trainer.py", "rollout.py")
_STARTS = 4
_RAYS = ("ray.dashboard", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}


class Raylets:
    """The cluster. ``mark``: in the environment of all its processes."""

    def __init__(self, cluster: Any, mark: str) -> None:
        self.cluster, self.mark = cluster, mark

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def ours(self) -> dict[int, str]:
        """Living processes that this library, or an actor of a test, has on it."""
        return {
            pid: line
            for pid, line in processes_marked(self.mark).items()
            if any(word in line for word in _OURS) and not any(word in line for word in _RAYS)
        }

    def wait_until_free(self, timeout_s: float = 20.0) -> None:
        eventually(lambda: not self.ours(), f"the end of {self.ours()}", timeout_s=timeout_s)


@contextlib.contextmanager
def raylets(*cpus: float, **head: Any) -> Iterator[Raylets]:
    """A cluster with a head and further nodes of so many CPUs, ended with all it
    started."""
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: Ray's sockets are in it
    before = dict(os.environ)
    paths = os.pathsep.join(filter(None, (str(ROOT), before.get("PYTHONPATH"))))
    os.environ.update(VARIABLES, PYTHONPATH=paths, RAY_TMPDIR=str(folder), **{MARK: mark})
    (folder / "ray").mkdir()  # where Ray notes the cluster's address, and expects a folder
    try:
        first, *others = cpus
        cluster = _with_head({**SMALL, **head, "num_cpus": first, "temp_dir": str(folder)}, mark)
        try:
            for count in others:
                cluster.add_node(num_cpus=count, object_store_memory=SMALL["object_store_memory"])
            yield Raylets(cluster, mark)
        finally:
            cluster.shutdown()
            eventually(lambda: not processes_marked(mark), "the end of Ray", timeout_s=30)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder)


def _with_head(head: dict[str, Any], mark: str) -> Any:
    """Ray waits half a minute for its own processes, which a busy machine may not give
    them: then all is started anew."""
    for _ in range(_STARTS - 1):
        try:
            return Cluster(initialize_head=True, head_node_args=head)
        except Exception as error:  # noqa: BLE001  # Ray raises just this class
            print(f"Ray is started once more: {error}")
            for pid in processes_marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not processes_marked(mark), "the end of Ray", timeout_s=30)
    return Cluster(initialize_head=True, head_node_args=head)
