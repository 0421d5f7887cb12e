"""Sidecars: killable processes that own a rank's cross-replica process groups.

``forkserver`` makes them, ``process`` is what runs in one, ``mailbox`` reads its
channel, ``meeting`` and ``groups`` build the process group; ``client`` (``forks``,
``handle``, ``pulse``) is the rank's side, ``wire`` what they say to each other. Nothing
is imported here, so that the forkserver listens before it loads torch.
"""
