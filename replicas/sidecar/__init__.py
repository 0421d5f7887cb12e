"""Sidecars: killable processes that own a rank's cross-replica process groups.

``forkserver`` makes them, ``process`` is what runs in one, ``groups`` builds the process group, ``client`` is the rank's
side, ``wire`` what they say to each other. Nothing is imported here, so that the forkserver listens before it loads torch.
"""
