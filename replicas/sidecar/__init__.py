"""Sidecars: killable processes that own a rank's cross-replica process groups.

``forkserver`` forks them. In the sidecar, ``process`` is the main loop, ``mailbox``
reads the channel, ``meeting`` and ``building`` make the process group, ``groups`` has
its operations. In the rank, ``rank_side`` controls them. ``wire`` has the messages
between the two. A sidecar takes its rank's place by :mod:`replicas.linux.place`.

This file imports nothing, so that the forkserver listens before it loads torch.
"""
