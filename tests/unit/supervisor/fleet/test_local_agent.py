"""The agent of the supervisor's machine as a watched process: found alive, frozen,
dead, started again.

Covers: supervisor/agent/local.py, supervisor/fleet/local_agent.py.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.common.tasks import say_if_slow
from replicas.supervisor.fleet import local_agent
from replicas.supervisor.fleet.local_agent import LocalAgent
from replicas.supervisor.state.run_state import ProcessRecord, process_record

ASLEEP = ["sleep", "600"]


class FakeCluster:
    """A cluster that an agent joins when the test says so."""

    def __init__(self) -> None:
        self.joined = asyncio.Event()
        self.unheard_s = 0.0

    def silent_s(self, _: str) -> float:
        return self.unheard_s

    def is_empty(self, _: str) -> bool:
        return True


class Local(LocalAgent):
    """It tells the pid of each process that it watches from now on."""

    def __init__(self, cluster: Any) -> None:
        super().__init__("local", cluster, [])
        self._watched: asyncio.Queue[int] = asyncio.Queue()

    def _watch(self, pid: int, pidfd: int) -> None:
        super()._watch(pid, pidfd)
        self._watched.put_nowait(pid)

    async def next(self) -> int:
        async with asyncio.timeout(20):
            return await self._watched.get()


@contextmanager
def patched(**constants: Any) -> Iterator[None]:
    """Agents that sleep, and short times."""
    with mock.patch.multiple(
        local_agent, python_module=lambda *_: ASLEEP, AGAIN=Backoff(0.0, 0.0), _LOOK_S=0.02, _END_S=0.0, **constants
    ):
        yield


@contextmanager
def earlier() -> Iterator[tuple[subprocess.Popen[bytes], ProcessRecord]]:
    """The agent of an earlier supervisor."""
    with subprocess.Popen(ASLEEP) as found:
        record = process_record(found.pid)
        assert record is not None
        try:
            yield found, record
        finally:
            found.kill()


@pytest.mark.anyio
async def test_a_frozen_agent_of_an_earlier_supervisor_is_replaced() -> None:
    with patched(FROZEN_S=0.2), earlier() as (known, record):
        known.send_signal(signal.SIGSTOP)
        cluster: Any = FakeCluster()
        agent = Local(cluster)
        agent.start(record)
        assert await agent.next() == known.pid
        joining = asyncio.create_task(agent.joined())
        new = await agent.next()
        assert known.wait(20) == -signal.SIGKILL
        cluster.joined.set()
        await joining
        assert agent.pid == new
        await agent.aclose()
        assert agent.pid not in (new, known.pid)


@pytest.mark.anyio
async def test_an_agent_of_an_earlier_supervisor_that_joins_is_kept_and_left() -> None:
    with patched(FROZEN_S=20.0), earlier() as (known, record):
        cluster: Any = FakeCluster()
        agent = Local(cluster)
        agent.start(record)
        cluster.joined.set()
        await agent.joined()
        agent.tick()
        assert agent.pid == known.pid
        agent.leave()
        assert known.poll() is None


@pytest.mark.slow
@pytest.mark.anyio
async def test_one_that_was_started_here_may_take_longer_to_join(caplog: pytest.LogCaptureFixture) -> None:
    with patched(FROZEN_S=0.0, JOIN_S=0.3, say_if_slow=partial(say_if_slow, after_s=0.1)):
        cluster: Any = FakeCluster()
        agent = Local(cluster)
        agent.start()
        pid = agent.pid
        with pytest.raises(errors.WorldError, match="has not joined within"):
            await agent.joined()
        assert "waiting up to 0.3 s for the agent of this machine to join" in caplog.text
        assert agent.pid == pid
        await agent.aclose()


def _kill_and_wait(pidfd: int, signum: int) -> bool:
    signal.pidfd_send_signal(pidfd, signum)
    select.select([pidfd], [], [], 20.0)
    return True


@pytest.mark.anyio
async def test_one_may_end_in_the_moment_in_which_the_wait_for_its_end_is_over() -> None:
    with patched(send_signal=_kill_and_wait):
        agent = Local(FakeCluster())
        agent.start()
        await agent.aclose()
        assert agent.pid is None


@pytest.mark.anyio
async def test_one_that_survives_sigkill_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """As the kernel keeps processes that wait for a broken device."""
    with patched(send_signal=lambda *_: True, _KILLED_S=0.1), earlier() as (known, record):
        agent = Local(FakeCluster())
        agent.start(record)
        async with asyncio.timeout(20):
            await agent.aclose()
        assert f"process {known.pid}: SIGKILL has not ended it" in caplog.text
        assert agent.pid is None


@pytest.mark.anyio
async def test_one_that_dies_or_falls_silent_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with patched(FROZEN_S=0.0):
        cluster: Any = FakeCluster()
        agent = Local(cluster)
        agent.start()
        cluster.joined.set()
        await agent.joined()
        first = await agent.next()
        agent.tick()
        assert agent.pid == first, "it was heard"
        os.kill(first, signal.SIGKILL)
        second = await agent.next()
        assert "starting a new agent of this machine in 0 s, as the last ended with code -9" in caplog.text
        cluster.unheard_s = 5.0
        agent.tick()
        third = await agent.next()
        assert "replacing the agent of this machine" in caplog.text
        await agent.aclose()
        assert third != second


@pytest.mark.anyio
async def test_one_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with patched():
        cluster: Any = FakeCluster()
        agent = Local(cluster)
        agent.start()
        first, popen = await agent.next(), subprocess.Popen
        refusals = [OSError("no memory")]

        def refused(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
            if refusals:
                raise refusals.pop()
            return popen(*given, **options)

        with mock.patch.object(subprocess, "Popen", refused):
            os.kill(first, signal.SIGKILL)
            await agent.next()
        assert "cannot be started: no memory" in caplog.text
        await agent.aclose()
