"""``python -m tests.chaos.syncs.supervisor_under_test FD DECISIONS CONFIG``: ``replicas run
CONFIG``, with a finger on its pulse.

Every decision that its log has taken is appended to the file ``DECISIONS``, too: the
log itself is written anew now and then. Over the socket ``FD`` come orders as JSON, one
in each packet; answers go back the same way::

    {"arm": 7, "channel": "policy", "moment": "moving", "delay_s": 0.002, "deeds": [...]}
    {"fire": 7}                          now, as the moment did not come
    {"ask": "refusals"}                  how many connections and messages were turned away, by reason

The engine's ``tap`` sees each effect and message; at the armed moment the deeds are
done from the supervisor's own loop, ``delay_s`` later, and told: ``{"done": 7, "at":
..., "landed": ..., "hit": [pids]}``. A deed is a signal or a memory limit::

    {"signal": 9, "pid": 123}            {"signal": 9, "beside": 123, "pick": 0.5}   a sidecar of this rank
    {"limit_nbytes": 0, "pid": 123}      address space beyond what it has now; null: no limit
"""  # noqa: W505  # a picture

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from unittest import mock

import msgspec

from replicas.config.file import load
from replicas.coordinator.decisions import DecisionLog
from replicas.core.base.effects import Effect
from replicas.core.base.ledger import Decision
from replicas.core.channel_state import ChannelState
from replicas.messages import FromMember
from replicas.supervisor import operator as command_line
from replicas.supervisor.supervisor import Supervisor
from tests.chaos.syncs.moments import Moments
from tests.support.processes import name_of, sidecars_of

__all__ = ["main"]


class Armed:
    """An order that waits for its moment. Processes are held by pidfd from the start: a
    pid may be used again."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.number = int(order["arm"])
        self.channel = str(order["channel"])
        self.moment = str(order["moment"])
        self.delay_s = float(order["delay_s"])
        self._deeds = order["deeds"]
        self._pidfds = {deed["pid"]: _pidfd(deed["pid"]) for deed in self._deeds if "pid" in deed}

    def aim(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Pid, pidfd and deed of each process that is there to be hit."""
        aimed = []
        for deed in self._deeds:
            pid = deed["pid"] if "pid" in deed else _sidecar(deed["beside"], deed["pick"])
            pidfd = self._pidfds[pid] if "pid" in deed else _pidfd(pid)
            if pidfd >= 0:
                aimed.append((pid, pidfd, deed))
        return aimed


def hit(pid: int, pidfd: int, deed: dict[str, Any]) -> None:
    """Do one deed; nothing when the process is gone."""
    with suppress(ProcessLookupError, FileNotFoundError):
        if "signal" in deed:
            signal.pidfd_send_signal(pidfd, deed["signal"])
        else:
            limit_memory(pid, deed["limit_nbytes"])
    os.close(pidfd)


def limit_memory(pid: int, more_nbytes: int | None) -> None:
    """Let a process map ``more_nbytes`` more than it has now; None: as much as it
    likes."""
    if more_nbytes is None:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + more_nbytes
    resource.prlimit(pid, resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _sidecar(rank: int, pick: float) -> int:
    """One of the sidecars of a replica that have a lane; 0, which no process has, when
    there is none."""
    used = sorted(pid for pid in sidecars_of(rank) if name_of(pid) != "replica-spare")
    return used[int(pick * len(used))] if used else 0


class Pulse:
    """The orders, and the moments for which they wait."""

    def __init__(self, control: socket.socket, supervisor: Supervisor) -> None:
        self._control = control
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._moments = {name: Moments() for name in supervisor.config.channels}
        self._armed: dict[int, Armed] = {}
        self._loop.add_reader(control, self._read)

    def tap(self, channel: ChannelState, event: Effect | FromMember) -> None:
        name = channel.config.name
        moment = self._moments[name].of(channel, event)
        if not moment or not self._armed:
            return
        for armed in [one for one in self._armed.values() if (one.channel, one.moment) == (name, moment)]:
            del self._armed[armed.number]
            if armed.delay_s:
                self._loop.call_later(armed.delay_s, self._fire, armed)
            else:
                self._fire(armed)

    def _fire(self, armed: Armed) -> None:
        landed, aimed = self._moments[armed.channel].now, armed.aim()
        self._tell({"done": armed.number, "at": time.monotonic(), "landed": landed, "hit": [pid for pid, *_ in aimed]})
        for pid, pidfd, deed in aimed:  # told before: one of them may be this process itself
            hit(pid, pidfd, deed)

    def _tell(self, answer: dict[str, Any]) -> None:
        self._control.send(json.dumps(answer).encode())

    def _read(self) -> None:
        data = self._control.recv(65536)
        if not data:
            self._loop.remove_reader(self._control)
            return
        order = json.loads(data)
        if "arm" in order:
            self._armed[int(order["arm"])] = Armed(order)
            self._tell({"armed": order["arm"]})
        elif "fire" in order:
            armed = self._armed.pop(int(order["fire"]), None)
            if armed is not None:
                self._fire(armed)
        elif order["ask"] == "refusals":
            self._tell({"refusals": dict(self._supervisor.coordinator.engine.refusals)})


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)

    class Tapped(Supervisor):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            self.coordinator.engine.tap = Pulse(control, self).tap
            return self

    append = DecisionLog.append
    with Path(sys.argv[2]).open("ab", buffering=0) as decisions:

        def appended(log: DecisionLog, decision: Decision) -> None:
            append(log, decision)
            decisions.write(msgspec.json.encode(decision) + b"\n")

        with mock.patch.object(command_line, "Supervisor", Tapped), mock.patch.object(DecisionLog, "append", appended):
            return command_line.supervise(load(Path(sys.argv[3])))


if __name__ == "__main__":
    sys.exit(main())
