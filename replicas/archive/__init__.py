"""Versions through object storage, for readers that can dial nobody.

``format`` says which objects an archive has, ``plan`` when a whole is written, what is
read and what is deleted; both are pure. ``writer`` writes the versions of one channel,
``reader`` follows them, each through ``store``.
"""

from replicas.archive.keys import ArchiveKey
from replicas.archive.plan import Rules
from replicas.archive.reader import Follower, follow
from replicas.archive.writer import Facts, Version, Writer

__all__ = ["ArchiveKey", "Facts", "Follower", "Rules", "Version", "Writer", "follow"]
