"""HAProxy in front of the servers of a channel: requests by version, a canary's share,
conversations that stay with their server.

    python -m replicas.integrations.haproxy --channel policy --port 8000

starts ``haproxy`` (2.6 or newer) as a child and keeps it in step with the run's status,
which is read twice a second, through HAProxy's runtime API. No reload, and nothing on
disk once it runs: it ends with this process, also after SIGKILL.

Theory of operation
===================

A server has the same *place* in several backends: in ``any``, and in that of the
version that it serves. Two tables of HAProxy lead a request to a backend: ``labels``,
from a label to its version, and ``versions``, from a version to its backend.

========================== ========================================================
a request demands          it goes to
========================== ========================================================
nothing                    ``any``; of these, the canary gets its ``share``
``7``, or a label          the servers of that version
``>=7``                    ``any``, if all are high enough; else those of the newest
                           version that is not a candidate, or those of the newest
the current version,       nobody: 503
which nobody has loaded
what nobody serves         nobody: 409, with the versions that are served
what is no demand          ``any``, whose gate answers 400
========================== ========================================================

The list lags behind the servers by half a second, so it is the gate at the server that
decides (:mod:`replicas.engine.demands`). An answer to a demand that does not name its
version, as from a server without a gate, is replaced by 409. A request that no server
has answered is sent to another one: when the connection fails or ends, and after 503,
with which a gate refuses requests. That needs the request in one buffer of 64 KiB.
"""

from replicas.integrations.haproxy.proxy import Haproxy
from replicas.integrations.haproxy.routes import Routes, Server, routes_of

__all__ = ["Haproxy", "Routes", "Server", "routes_of"]
