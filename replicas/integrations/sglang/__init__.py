"""Serve a channel's versions with stock SGLang, on one machine and without a copy on a
disk.

- ``python -m replicas.integrations.sglang serve MODEL ...`` starts SGLang's own server
  behind a gate (:mod:`replicas.integrations.gate`) and follows; further arguments are
  SGLang's own. It is the command of a group with ``launcher = "exec"``.
- ``python -m replicas.integrations.sglang follow URL``, or :func:`follow`, loads each
  committed version into a server that already runs on this machine.

Theory of operation
===================

The follower is the only member of the channel: SGLang's schedulers read the slot's own
memory by a path (:mod:`replicas.integrations.sglang.engine`). So a version counts as
loaded when all schedulers have it and the server answers with it again. All processes
of a server that ``serve`` has started die with the follower: SGLang's HTTP server is
its child, and ends its own schedulers.
"""

from replicas.integrations.sglang.engine import SglangEngine
from replicas.integrations.sglang.serve import follow, main

__all__ = ["SglangEngine", "follow", "main"]
