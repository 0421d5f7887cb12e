"""The process of a :mod:`tests.support.machine.cable`: it carries frames between a host
and the bridge, late, and not all of them.

Run as a program with one argument, the JSON of ``[[pid, link], [pid, link], shape]``:
both ends by a process that holds the network namespace, and the name that the end gets
there; it makes them, prints a line, and ends when its standard input does.

The ends are TAP devices without offloads, so each packet is one frame and is lost by
itself, as on a real line. (The switch loses up to 64 KiB at once, and carries more.)
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time

from tests.support.machine.switch_process import _TUNSETIFF, Way, _enter

_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_NBYTES = 1 << 16
_AT_ONCE = 256


def _make_end(pid: int, link: str) -> int:
    _enter(pid)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", link.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def _carry(ends: list[int], ways: list[Way]) -> None:
    """Until standard input ends. ``ways``: of what comes in at each end."""
    chance = random.Random(0).random
    with select.epoll() as poll:
        for fd in (0, *ends):
            poll.register(fd, select.EPOLLIN)
        while True:
            wait_s = min(way.next_at() for way in ways) - time.monotonic()
            for fd, _ in poll.poll(max(0.0, min(wait_s, 3600.0))):
                if not fd:
                    return
                for _ in range(_AT_ONCE):
                    try:
                        frame = os.read(fd, _FRAME_NBYTES)
                    except (BlockingIOError, OSError):  # no more, or not up yet
                        break
                    ways[ends.index(fd)].take(frame, time.monotonic(), chance())
            now = time.monotonic()
            for way, other in zip(ways, reversed(ends), strict=True):
                for frame in way.arrived(now):
                    try:
                        os.write(other, frame)
                    except OSError:  # the end is not up, or has no room
                        way.lost_nbytes += len(frame)


def _main() -> None:
    *places, shape = json.loads(sys.argv[1])
    ends = [_make_end(pid, link) for pid, link in places]
    print("ready", flush=True)
    _carry(ends, [Way(**shape) for _ in ends])


if __name__ == "__main__":
    _main()
