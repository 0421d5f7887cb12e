"""The shim: the process that owns one part of a replica, and its helpers.

Agent -> ``start`` -> shim -> launcher (torchrun) -> guards -> ranks; their output goes
through pipes to a log pump. The shim ends and sweeps all processes below it and reports
how the main process ended. It restarts only its log pump: the supervisor restarts
replicas.
"""
