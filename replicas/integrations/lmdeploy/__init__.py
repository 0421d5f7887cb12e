"""Serve a channel's versions with stock LMDeploy, on one machine and without a copy on
a disk.

- ``python -m replicas.integrations.lmdeploy serve MODEL ...`` starts LMDeploy's own
  server behind a gate (:mod:`replicas.integrations.gate`) and follows; further
  arguments are those of ``lmdeploy serve api_server``. It is the command of a group
  with ``launcher = "exec"``.
- ``python -m replicas.integrations.lmdeploy follow URL``, or :func:`follow`, loads each
  committed version into a server that already runs on this machine. It has no gate.

The follower is the only member of the channel; LMDeploy's processes read the slot's own
memory (:mod:`replicas.integrations.lmdeploy.engine`).
"""

from replicas.integrations.lmdeploy.engine import LmdeployEngine
from replicas.integrations.lmdeploy.serve import follow, main

__all__ = ["LmdeployEngine", "follow", "main"]
