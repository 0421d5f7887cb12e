"""A shim that a template forks for an agent, from the agent's side.

The template (:mod:`replicas.supervisor.shim.template`) may still be loading its
modules: then the requests wait in its socket. Each shim has a connection of its own,
over which the template tells its pid, and at last its exit code.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Protocol

from replicas.linux import frames, rank_environment
from replicas.linux.sockets import SocketAddress
from replicas.sidecar import wire

LOAD_S = 120.0
"""Seconds that a template may take until it forks; then the shim starts cold."""


class Owner(Protocol):
    """The caller that wants a shim, told of the outcome on the loop."""

    def forked(self, pid: int, pidfd: int) -> None:
        """Watch the forked shim. The owner closes its ``pidfd``."""

    def not_forked(self, reason: str) -> None:
        """Start the shim in another way: the template has confirmed no fork.

        :param reason: why, in words.
        """

    def ended(self, code: int | None) -> None:
        """Note the exit code of the forked shim.

        None: the connection to the template has ended, and the shim lives on perhaps.
        """


class ShimFork:
    """A request to a template process to fork a shim, the parent of a part's ranks.

    It is the connection to the template, until the end of the shim.
    """

    def __init__(
        self, address: str, owner: Owner, log: int, environment: Mapping[str, str], fds: Mapping[str, int]
    ) -> None:
        """Ask the template for a shim, without waiting for it.

        :param address: of the template, with its secret.
        :param owner: told on the loop of the fork and of the end.
        :param log: descriptor to which the shim writes.
        :param environment: all variables of the shim.
        :param fds: its descriptors by name, ``control`` first; they stay open here.
        :raises OSError: the template cannot be reached.
        """
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self._is_forked = False
        to = SocketAddress.parse(address)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        place = rank_environment.describe_own_place(log, environment)
        try:
            self._sock.setblocking(False)
            self._sock.connect("\0" + to.name)  # this process keeps the listening socket: it is ours
            frames.write_packet(self._sock, wire.Attach(to.secret), place)
            frames.write_packet(self._sock, wire.ForkShim(tuple([*fds][1:])), [*fds.values()])
        except BaseException:
            self._sock.close()
            raise
        finally:
            frames.close_all(place)
        self._loop.add_reader(self._sock, self._read)
        self._timer = self._loop.call_later(LOAD_S, self._give_up, f"has not answered within {LOAD_S:g} s")

    def close(self) -> None:
        """Close the connection; the owner is told no more. A forked shim lives on."""
        self._timer.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _read(self) -> None:
        """Handle the template's next message, or its end; called by the loop."""
        fds: list[int] = []
        try:
            data, fds = frames.read_packet(self._sock)
            match wire.decode_forkserver_reply(data) if data else None, fds:
                case wire.Attached(), []:
                    pass
                case wire.Forked(pid=pid), [pidfd] if not self._is_forked:
                    fds, self._is_forked = [], True
                    self._timer.cancel()
                    self._owner.forked(pid, pidfd)
                case wire.Ended(code=code), [] if self._is_forked:
                    self.close()
                    self._owner.ended(code)
                case wire.ForkFailed(error=reason), []:
                    self._give_up(reason)
                case _:
                    self._give_up("has ended")
        except BlockingIOError:
            return
        except OSError as error:
            self._give_up(str(error))
        finally:
            frames.close_all(fds)

    def _give_up(self, reason: str) -> None:
        """Close it, and tell the owner ``ended(None)`` or, unforked, ``not_forked``."""
        self.close()
        if self._is_forked:
            self._owner.ended(None)
        else:
            self._owner.not_forked(reason)
