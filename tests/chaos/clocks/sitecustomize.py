"""A wall clock that a test can set, for every Python process that has this folder on
its path.

``CHAOS_CLOCK`` names a file with one number (a C double): by how many seconds the wall
clock is wrong. It is mapped, and read at each look at the clock. What must know the
true time asks ``time.clock_gettime(time.CLOCK_REALTIME)``.
"""

import os

if "CHAOS_CLOCK" in os.environ:
    import mmap
    import struct
    import time

    with open(os.environ["CHAOS_CLOCK"], "rb") as file:  # noqa: PTH123  # every process pays for an import
        clock = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def wrong() -> float:
        return time.clock_gettime(time.CLOCK_REALTIME) + struct.unpack_from("d", clock)[0]  # type: ignore[no-any-return]

    def wrong_ns() -> int:
        return time.clock_gettime_ns(time.CLOCK_REALTIME) + int(struct.unpack_from("d", clock)[0] * 1e9)

    time.time, time.time_ns = wrong, wrong_ns
