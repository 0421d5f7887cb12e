"""The messages between agents, shims, launchers and log pumps.

Agent -> orders -> shim -> launcher and guard; the state of the part goes back. The
modules use only the standard library and do not start or watch processes. The messages
between supervisor and agent are in :mod:`replicas.supervisor.agent.messages`.
"""
