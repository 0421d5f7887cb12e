"""Identity of this process on its machine."""

from __future__ import annotations

import os

from replicas.linux.machine import boot_id, namespace
from replicas.linux.processes import START_TIME, stat_fields
from replicas.messages.identity import ProcessIdentity

__all__ = ["own_process"]


def own_process() -> ProcessIdentity:
    """Pid, start time, boot id and pid namespace of this process."""
    return ProcessIdentity(
        pid=os.getpid(),
        start_time=int(stat_fields("self")[START_TIME]),
        boot_id=boot_id(),
        pid_namespace=namespace("pid"),
    )
