"""Find, open and hold memory of other processes on the same host; compare memory.

    beacon.find -> kept.hold (by /proc, or memory_door.fetch) -> descriptor -> mmap

``beacon`` proves that two processes are on one host, ``memory_door`` passes descriptors
between containers, ``kept`` holds memory beyond its owner's life, ``lines`` finds the
64-byte lines that differ. The room maps nothing and does not import torch.
"""
