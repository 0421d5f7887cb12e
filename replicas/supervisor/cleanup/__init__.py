"""Clean up after the processes of a run.

Inventory while they live (:mod:`~replicas.supervisor.cleanup.inventory`) -> kill those
that a dead shim left (:mod:`~replicas.supervisor.cleanup.sweeping`) -> wait for their
GPU memory (:mod:`~replicas.supervisor.cleanup.still_held`). The finders of processes
are the callers'; shared memory, ports and files are cleaned up by their owners.
"""
