"""The replicas and nodes of a run, in the supervisor.

Fleet (when to start and end) -> replica (restarts) -> course and generation (one start)
-> cluster (nodes) -> the agent of a node, which starts the shims. Their states come
back: cluster -> handle -> course -> replica -> fleet.

It starts no processes itself, except the agent of this machine. The rules (restarts,
budgets, placement) are pure code in ``core/lives``.
"""
