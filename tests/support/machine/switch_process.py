"""The process of a :mod:`tests.support.machine.switch`: it carries packets between the
hosts, as they are allowed to pass.

Run as a program with one argument, the JSON of ``[[pid, "10.1.2.3"], ...]``: each host
by a process that holds its network namespace, and its address. It makes the link of
each host, prints a line, and obeys lines of JSON on its standard input, each answered
by one line, until that ends.

Theory of operation
===================

The link of a host is a TUN device: what its kernel sends comes here as IP packets, and
what is written here it receives. There are no Ethernet frames, so no ARP and nothing to
flood: the destination address alone says to whom a packet goes. Packets pass with their
virtio header, so the kernel neither cuts TCP's segments apart nor sums them up: one
packet here is up to 64 KiB, which is why a switch written in Python carries nearly a
Gbit/s.

A :class:`Way` is one ordered pair of hosts. A packet on it is lost, or waits in a queue
until a transmitter of that rate has sent those before it and itself, then travels for
the delay. The queue drops what comes when it is full, as that of a router does, so that
TCP finds the rate. All is computed by the time at which a packet came, so a late
wake-up of this process delays packets, and loses no rate. What is under way on a cut
way is lost too.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.support.machine.networks import LINK

__all__ = ["MTU", "QUEUE_NBYTES", "QUEUE_S", "Way"]

MTU = 1500
QUEUE_S = 0.2
QUEUE_NBYTES = 16 * 1024
"""A queue holds what its way sends in so many seconds, and at least so many bytes."""

_HEADER_NBYTES = 10
"""Of virtio, before each packet."""
_PACKET_NBYTES = 1 << 17
_AT_ONCE = 64
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_CLONE_NEWNET = 0x40000000


@dataclass
class Way:
    """One direction between two hosts. ``rate_nbytes_s``: bytes a second, 0 for no
    limit; ``loss``: 0 to 1, of packets."""

    cut: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    rate_nbytes_s: float = 0.0
    passed_nbytes: int = 0
    """With the headers of IP."""
    lost_nbytes: int = 0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Each with the time at which it arrives; in order."""
    _free_at: float = 0.0
    """When the transmitter has sent all that is queued."""

    def change(self, **what: Any) -> None:
        """What is queued travels on as the new way has it: at once, or, when it is cut,
        not at all."""
        for name, value in what.items():
            setattr(self, name, value)
        self._free_at = 0.0
        self.under_way = deque((0.0, packet) for _, packet in self.under_way)

    def take(self, packet: bytes, now: float, chance: float) -> None:
        """A packet sets out. ``chance``: drawn from 0 to 1."""
        size = len(packet) - _HEADER_NBYTES
        starts = max(now, self._free_at)
        queued = (starts - now) * self.rate_nbytes_s
        if self.cut or chance < self.loss or queued > max(QUEUE_NBYTES, QUEUE_S * self.rate_nbytes_s):
            self.lost_nbytes += size
            return
        if self.rate_nbytes_s:
            self._free_at = starts = starts + size / self.rate_nbytes_s
        self.under_way.append((starts + self.delay_s, packet))

    def arrived(self, now: float) -> list[bytes]:
        """What reaches the other end by now."""
        found: list[bytes] = []
        while self.under_way and self.under_way[0][0] <= now:
            packet = self.under_way.popleft()[1]
            size = len(packet) - _HEADER_NBYTES
            if self.cut:
                self.lost_nbytes += size
            else:
                self.passed_nbytes += size
                found.append(packet)
        return found

    def next_at(self) -> float:
        """When the next packet arrives; infinite when none is under way."""
        return self.under_way[0][0] if self.under_way else float("inf")


class _Switch:
    def __init__(self, hosts: list[tuple[int, str]]) -> None:
        self._links = [_make_link(pid) for pid, _ in hosts]
        self._host_of = {socket.inet_aton(address): host for host, (_, address) in enumerate(hosts)}
        count = range(len(hosts))
        self._ways = {(one, other): Way() for one in count for other in count if one != other}
        self._random = random.Random(0)

    def serve(self) -> None:
        """Until standard input ends."""
        sources = {link: host for host, link in enumerate(self._links)}
        orders = b""
        with select.epoll() as poll:
            for fd in (0, *self._links):
                poll.register(fd, select.EPOLLIN)
            while True:
                wait_s = min(way.next_at() for way in self._ways.values()) - time.monotonic()
                for fd, _ in poll.poll(max(0.0, min(wait_s, 3600.0))):
                    if fd:
                        self._accept(fd, sources[fd])
                        continue
                    read = os.read(0, 1 << 16)
                    if not read:
                        return
                    *lines, orders = (orders + read).split(b"\n")
                    for line in lines:
                        os.write(1, json.dumps(self._obey(**json.loads(line))).encode() + b"\n")
                self._deliver()

    def _accept(self, link: int, source: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(link, _PACKET_NBYTES)
            except BlockingIOError:
                return
            begin = _HEADER_NBYTES
            target = self._host_of.get(packet[begin + 16 : begin + 20]) if packet[begin] >> 4 == 4 else None
            if target is not None and target != source:
                self._ways[source, target].take(packet, time.monotonic(), self._random.random())

    def _deliver(self) -> None:
        now = time.monotonic()
        for (_, target), way in self._ways.items():
            for packet in way.arrived(now):
                try:
                    os.write(self._links[target], packet)
                except OSError:  # its host has no room for it, or is gone
                    way.lost_nbytes += len(packet) - _HEADER_NBYTES

    def _obey(self, ways: list[tuple[int, int]], **what: Any) -> list[tuple[int, int]]:
        """Change these ways; what each has passed and lost so far."""
        found = [self._ways[one, other] for one, other in ways]
        for way in found if what else ():
            way.change(**what)
        return [(way.passed_nbytes, way.lost_nbytes) for way in found]


def _make_link(pid: int) -> int:
    """A TUN device in the network namespace of a process."""
    _enter(pid)
    link = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", LINK.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(link, _TUNSETIFF, request)
    fcntl.ioctl(link, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return link


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(space, _CLONE_NEWNET):  # os.setns came with Python 3.12
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"/proc/{pid}/ns/net")
    finally:
        os.close(space)


def _main() -> None:
    hosts = json.loads(sys.argv[1])
    try:
        switch = _Switch([(pid, address) for pid, address in hosts])
    except OSError as error:
        sys.exit(f"no TUN device: {error}")
    print("ready", flush=True)
    switch.serve()


if __name__ == "__main__":
    _main()
