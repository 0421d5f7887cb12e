"""Collect the stacks of a node's ranks. Standard library only.

1. Ranks that have joined a channel left a file in the folder ``stacks``
   (:mod:`replicas.linux.stacks`). Each such rank that is alive, below the shim, and
   catches the signal (which would kill it otherwise) is signalled through a pidfd.
   faulthandler's text has no end mark: it is complete when the file has not grown for
   ``STILL_S``.
2. For ranks that never joined, or do not answer within ``ANSWER_S`` (stopped, or in
   uninterruptible sleep), the dump has the state of the process instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from replicas.linux import private, stacks
from replicas.linux.processes import Child, catches, children, is_below, signal_each, start_time
from replicas.linux.stacks import Asked
from replicas.supervisor.shim.log_pipes import LogPipes
from replicas.supervisor.wire.orders import MessageSocket, PartSpec, note

ANSWER_S = 2.0
"""How long a rank may take to write its stacks, in seconds."""
STILL_S = 0.15
_LOOK_INTERVAL_S = 0.05
_MESSAGE_NBYTES = 100 << 10
_MAX_NBYTES = 256 << 10


class Stack(NamedTuple):
    """The stack traces of one rank, or why there are none."""

    rank: int
    pid: int
    text: str

    def entry(self) -> str:
        """Return the stacks as lines for the log of the rank."""
        return f"replicas: stacks of rank {self.rank}, process {self.pid}:\n{self.text.rstrip()}\nreplicas: end of stacks\n"


def short(found: list[Stack]) -> list[Stack]:
    """Return the stacks, with texts cut so that all fit into one message."""
    share = _MESSAGE_NBYTES // max(1, len(found))
    return [stack._replace(text=_cut(stack.text, share)) for stack in found]


def _cut(text: str, most: int) -> str:
    """Return the text, cut to ``most`` bytes of JSON, with a note if it was cut."""
    if len(json.dumps(text)) <= most:
        return text
    while len(json.dumps(text)) > most:
        text = text[: len(text) * most // len(json.dumps(text))]
    return f"{text}\n[cut]"


class StackDump:
    """One collection of stacks, until :meth:`collect_stacks` returns them.

    :param root: process below which the ranks must be.
    :param ranks: rank by pid, from :func:`ranks_below`.
    :ivar look_at: when :meth:`collect_stacks` must be called.
    """

    def __init__(self, root: int, log_dir: Path, ranks: Mapping[int, int], now: float) -> None:
        """Signal the ranks that have joined a channel to write their stacks.

        Do not wait.

        :param root: pid of the process below which the ranks must be.
        :param log_dir: folder of the logs, which has the files for the stacks.
        :param ranks: rank by pid, from :func:`ranks_below`.
        :param now: time of a steady clock, from which the ranks' time to answer counts.
        """
        self._found: list[Stack] = []
        self._sizes: dict[int, tuple[int, float]] = {}
        self._asked: dict[int, Asked] = {}
        self._until = now + ANSWER_S
        self.look_at = now
        with contextlib.suppress(FileNotFoundError):  # no rank has joined
            for path in stacks.folder(log_dir).iterdir():
                asked = stacks.parse(path)
                if asked is not None and _ask(asked, root):
                    self._asked[asked.pid] = asked
        for pid, rank in ranks.items():
            if pid not in self._asked:
                hint = f"while it runs, py-spy dump --pid {pid} shows what it does"
                text = f"process {pid} has not joined a channel, {_state(pid)}; {hint}\n"
                self._found.append(Stack(rank, pid, text))

    def collect_stacks(self, now: float, *, last: bool = False) -> list[Stack] | None:
        """Read the files that are complete; return all stacks, sorted by rank.

        Return None while a rank has not written its stacks and has time left. Ranks
        that do not answer get a text that says so. The files are emptied.

        :param last: do not wait for ranks: return the stacks that there are.
        """
        self.look_at = now + _LOOK_INTERVAL_S
        for pid in [pid for pid in self._asked if self._answered(pid, now)]:
            asked = self._asked.pop(pid)
            self._found.append(Stack(asked.rank, pid, _read_and_truncate(asked.path)))
        if self._asked and now < self._until and not last:
            return None
        for pid, asked in self._asked.items():
            text = f"it did not show its stacks within {ANSWER_S:g} s, {_state(pid)}\n"
            self._found.append(Stack(asked.rank, pid, f"{_read_and_truncate(asked.path)}{text}"))
        return sorted(self._found)

    def _answered(self, pid: int, now: float) -> bool:
        """Return True if the rank's file has not grown for 0.15 s, or is removed."""
        try:
            size = self._asked[pid].path.stat().st_size
        except FileNotFoundError:
            return True
        before, since = self._sizes.get(pid, (0, now))
        if size != before:
            since = now
        self._sizes[pid] = (size, since)
        return size > 0 and now - since >= STILL_S


class Stacks:
    """Collects the ranks' stack traces, one dump at a time, for logs and the agent."""

    def __init__(self, spec: PartSpec, pipes: LogPipes, agent: MessageSocket) -> None:
        """Begin without a dump; signal nothing.

        :param pipes: of the ranks' logs. :param agent: the connection to the agent.
        """
        self._spec, self._pipes, self._agent = spec, pipes, agent
        self._dump: StackDump | None = None
        self._then: Callable[[], None] | None = None

    @property
    def due(self) -> float:
        """When :meth:`on_time` must be called; inf for never."""
        return math.inf if self._dump is None else self._dump.look_at

    def ask(self, main: Child | None, now: float, then: Callable[[], None] | None = None) -> None:
        """Signal the ranks for their stacks, unless a dump is running. Never waits.

        :param main: the main process of the part. If it has ended, an empty answer goes
            to the agent, and ``then`` is not called.
        :param then: called when the dump, new or running, is complete; in place of the
            ``then`` of an earlier call.
        """
        if main is None or main.code is not None:
            self._agent.send({"type": "stacks", "found": {}})
            return
        if self._dump is None:
            ranks = ranks_below(main.pid, torchrun=self._spec.launcher == "torchrun")
            self._dump = StackDump(os.getpid(), Path(self._spec.log_dir), ranks, now)
        self._then = then or self._then

    def on_time(self, now: float) -> None:
        """End the dump, if it is complete: log it, send it, and call ``then``."""
        found = None if self._dump is None or now < self._dump.look_at else self._dump.collect_stacks(now)
        if found is not None:
            then, self._then = self._then, None
            self._dump = None
            self._show(found)
            if then is not None:
                then()

    def finish(self, now: float) -> None:
        """Log and send the stacks that have arrived, and end the dump.

        ``then`` is not called. For the moment at which the ranks are ended.
        """
        dump, self._dump, self._then = self._dump, None, None
        if dump is not None:
            self._show(dump.collect_stacks(now, last=True) or [])

    def _show(self, found: list[Stack]) -> None:
        """Write stacks into the ranks' logs, and send them, cut, to the agent."""
        for stack in found:
            self._pipes.write_lines(stack.rank, stack.entry())
        name = f"{self._spec.group}/{self._spec.replica}"
        texts = {f"{name}/{stack.rank}": f"process {stack.pid}\n{stack.text}" for stack in short(found)}
        self._agent.send({"type": "stacks", "found": texts})


def ranks_below(main: int, *, torchrun: bool) -> dict[int, int]:
    """Return the ranks of a part by pid.

    :param main: pid of the main process.
    :param torchrun: it is torchrun, whose children are ranks; else it is rank 0 itself.
    """
    if not torchrun:
        return {main: 0}
    found: dict[int, int] = {}
    for pid in children(main):
        environment = _read(Path(f"/proc/{pid}/environ")).split("\0")
        rank = next((entry[5:] for entry in environment if entry.startswith("RANK=")), "")
        if rank.isdigit():
            found[pid] = int(rank)
    return found


def _ask(asked: Asked, root: int) -> bool:
    """Signal the rank that made this file to write its stacks there.

    Empties the file before. Return False, and send nothing, if the process is gone, is
    not below ``root``, or does not handle the signal, which would kill it.

    :param asked: the file, and pid, start time and rank of its process.
    :param root: pid of the shim.
    """

    def still(pid: int) -> bool:
        """Return True if the pid is still the rank's process, handling the signal."""
        return start_time(pid) == asked.start and catches(pid, stacks.SIGNUM) and is_below(pid, root)

    if not still(asked.pid):
        return False
    try:
        private.write(asked.path, b"")  # empty it: later content is the answer
    except OSError as error:
        note(f"not saving the stacks of process {asked.pid}: {error}")
        return False
    return bool(signal_each([asked.pid], stacks.SIGNUM, still))


def _read_and_truncate(path: Path) -> str:
    """Return the text of a file, up to 256 KiB, and empty the file; "" on error."""
    try:
        with os.fdopen(private.open_file(path, os.O_RDWR), "rb") as file:
            text = file.read(_MAX_NBYTES).decode(errors="replace")
            os.ftruncate(file.fileno(), 0)
    except OSError as error:  # the rank can change or remove the file
        note(f"not saving the stacks of the ranks: {error}")
        return ""
    return text


def _state(pid: int) -> str:
    """Return the state of a process in words: "state S (sleeping)"."""
    status = dict(line.partition(":")[::2] for line in _read(Path(f"/proc/{pid}/status")).splitlines())
    return f"state {status['State'].strip()}" if "State" in status else "it is gone"


def _read(path: Path) -> str:
    """Return the content of a file of /proc, or "" if it is not readable."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
