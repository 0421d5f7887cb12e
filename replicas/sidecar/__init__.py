"""Sidecars: killable processes that run collectives and broadcasts of versions.

Each owns one rank's part of one process group across replicas. Rank (``rank_side``) ->
``forkserver`` forks a sidecar -> ``process`` handles requests, which ``mailbox`` reads:
``meeting`` and ``building`` make the process group, ``groups`` has its operations.
``wire`` has the messages. A sidecar gets its rank's environment, output and cgroup by
:mod:`replicas.linux.rank_environment`. It retries nothing: the coordinator does.

This file imports nothing, so that the forkserver listens before it loads torch.
"""
