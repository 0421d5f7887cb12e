"""What the process tools make of a /proc, and of processes, that are somebody else's;
and messages of any length.

Covers: linux/processes.py, linux/stalls.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from replicas.linux.processes import children, descendants, has_zombie, parents, send_signal, start_time
from replicas.linux.stalls import StallWatch
from replicas.supervisor.wire import orders


def test_with_hidepid_the_processes_of_others_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def hidden(path: Path) -> bytes:
        if path.parts[1] == "proc" and path.parts[2] in ("1", "4000001"):
            raise PermissionError(1, "Operation not permitted")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", hidden)
    monkeypatch.setattr("replicas.linux.processes.processes", lambda: iter([1, os.getpid(), os.getppid()]))
    assert start_time(1) is None
    assert os.getpid() in descendants(os.getppid())
    assert os.getpid() in children(os.getppid())
    assert not has_zombie(os.getpid())
    assert os.getppid() in parents(os.getpid())
    watch = StallWatch(4000001, 0.0)
    assert [watch.reason_to_give_up(at / 2, awaited=True) for at in range(100)] == [None] * 100


def test_one_that_may_not_be_signalled_ends_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)
    assert not send_signal(-1, signal.SIGKILL)


def test_messages_may_be_long_and_one_that_is_too_long_is_refused() -> None:
    one, other = orders.pair()
    with one, other:
        for nbytes in (220 << 10, 4 << 20):
            message = {"type": "start", "env": "x" * nbytes}
            assert orders.send(one, message)
            assert orders.send(one, {"type": "ping"})
            assert orders.receive(other) == message
            assert orders.receive(other) == {"type": "ping"}
        with pytest.raises(OSError, match="Message too long"):
            orders.send(one, {"type": "start", "env": "x" * (16 << 20)})
