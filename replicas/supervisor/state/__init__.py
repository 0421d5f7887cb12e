"""The state folder of a run: lock, identity, saved state, leases, tokens.

A supervisor locks the folder -> reads the state and leases of a dead predecessor ->
kills leftover processes or takes them over -> writes the state before each start and
restart. Versions are not here: the decision log of the coordinator has them.
"""
