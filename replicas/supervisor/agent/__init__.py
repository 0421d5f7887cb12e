"""The agent: the one process of a node that starts, watches and ends its shims.

The supervisor sends ``Start`` -> the agent starts a shim -> the shim starts torchrun
and its ranks; states and exit reports go back that way. The agent decides only when to
end everything (:mod:`replicas.supervisor.agent.agent`). It does not restart replicas
and does not place them: the supervisor does.
"""
