"""Who gets the state folder of an agent, and what becomes of shims that hold it.

Covers: supervisor/agent/agent_folder.py, supervisor/agent/remote.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicas import errors
from replicas.linux import private
from replicas.supervisor.agent import agent_folder, remote
from replicas.supervisor.agent.agent_folder import AgentFolder
from replicas.supervisor.cleanup import sweeping
from replicas.supervisor.state import leftovers, locked_folder

SHIM, AGENT, DYING = 71, 72, 73
LINES = {SHIM: "python -m shim", AGENT: "replicas agent", DYING: "[python]"}


@contextmanager
def held(folder: Path, by: Collection[int], dies: bool = True) -> Iterator[list[int]]:
    """Somebody has the folder; the pids that are killed. ``dies``: that frees it."""
    private.make_folder(folder)
    lock = private.open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    killed: list[int] = []

    def kill(pids: Iterable[int], signum: int, still: Any) -> list[int]:
        assert signum == signal.SIGKILL
        killed.extend(pids)
        if dies:
            fcntl.flock(lock, fcntl.LOCK_UN)
        return [*pids]

    try:
        with (
            mock.patch.multiple(leftovers, lock_holders=lambda _: [*by], is_orphan=lambda pid: pid == SHIM),
            mock.patch.multiple(sweeping, start_time=lambda pid: pid, signal_each=kill),
            mock.patch.multiple(locked_folder, SETTLE_S=0.0, _LOOK_INTERVAL_S=0.01),
            mock.patch.multiple(AgentFolder, patience_s=0.2),
            mock.patch.object(agent_folder, "command_line", LINES.get),
        ):
            yield killed
    finally:
        os.close(lock)


def test_shims_of_a_dead_agent_are_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = AgentFolder(tmp_path / "a")
    with held(folder.path, [SHIM, DYING]) as killed:
        assert len(folder.acquire()) == 32
        assert killed == [SHIM]
    assert caplog.text.count("lock the state folder: [71]") == 1
    folder.release()


@pytest.mark.parametrize("holders", [(AGENT,), (SHIM, AGENT), ()])
def test_a_living_agent_and_one_that_cannot_be_seen_keep_it(tmp_path: Path, holders: tuple[int, ...]) -> None:
    folder = AgentFolder(tmp_path / "a")
    with held(folder.path, holders) as killed, pytest.raises(errors.UsageError, match="another agent uses"):
        folder.acquire()
    assert killed == []
    folder.release()


@pytest.mark.parametrize("holder", [SHIM, DYING])
def test_what_does_not_die_is_no_error_of_the_user(
    tmp_path: Path, holder: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The unit of an agent tries again after a WorldError."""
    folder = AgentFolder(tmp_path / "a")
    with (
        caplog.at_level(logging.WARNING),
        held(folder.path, [holder], dies=False),
        pytest.raises(errors.WorldError, match="do not die"),
    ):
        folder.acquire()
    assert caplog.text.count("killing processes of an earlier agent (shims)") == (holder == SHIM), "once a minute"
    folder.release()


def test_an_agent_that_was_never_taken_leaves_no_folder(tmp_path: Path) -> None:
    def refused(to: remote.Invitation, name: str, labels: Any, folder: AgentFolder, address: str) -> Any:
        async def serve() -> int:
            folder.acquire()
            raise errors.WorldError("the supervisor refuses this node")

        return serve()

    with mock.patch.object(remote, "_serve", refused), pytest.raises(errors.WorldError, match="refuses"):
        remote.serve_node(
            remote.Invitation("token@127.0.0.1:1"), name="n", labels={}, state_dir=tmp_path / ".replicas" / "agent-n"
        )
    assert list((tmp_path / ".replicas").iterdir()) == []


def test_a_folder_of_an_agent_that_ran_something_stays(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path / "a")
    folder.acquire()
    (tmp_path / "a" / "logs" / "rollout").mkdir()
    folder.release(failed=True)
    assert (tmp_path / "a" / "logs" / "rollout").exists()
    again = AgentFolder(tmp_path / "a")
    again.acquire()
    again.release(failed=True)
    assert (tmp_path / "a" / "id").exists(), "it was there before"
