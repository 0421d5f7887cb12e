"""Lives of replicas and nodes: states, restarts, start order, placement, leases.

Flow: observation -> transition table (:mod:`.lifecycle`, :mod:`.ending`,
:mod:`.node_life`, :mod:`.tenancy`) -> action, which :mod:`replicas.supervisor.fleet`
and the agent carry out. Nothing here starts or ends a process or reads a clock.
"""
