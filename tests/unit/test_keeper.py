"""A forkserver for which there is no process, as the shim's watcher sees it."""

from __future__ import annotations

import errno
import os
import selectors
import subprocess
from pathlib import Path

import pytest

from replicas.linux.processes import Child
from replicas.supervisor.shim.starting import TRIES, ForkserverWatcher


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_one_that_cannot_be_started_again_is_tried_again_and_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    """A machine that is out of processes for a moment costs no replica."""
    before = descriptors()
    children: list[Child] = []

    def spawn(ready: int) -> Child:
        if children:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        children.append(Child(subprocess.Popen(["true"], pass_fds=(ready,))))
        return children[0]

    with selectors.DefaultSelector() as selector:
        keeper = ForkserverWatcher(spawn, selector)
        keeper.start()
        assert keeper.pid == children[0].pid
        for key, _ in selector.select(30.0):
            key.data()  # the end of its ready pipe
        reason, tried = keeper.ended(children[0].popen.wait(30.0)), 0
        while not reason:
            (due,) = keeper.wakes
            assert keeper.on_time(due - 0.01) == ""
            reason, tried = keeper.on_time(due), tried + 1
        assert tried == TRIES - 1
        assert f"{TRIES} times" in reason
        assert (keeper.wakes, keeper.pid) == ([], 0)
    assert descriptors() == before
    assert capfd.readouterr().err.count("cannot be started: ") == TRIES - 1
