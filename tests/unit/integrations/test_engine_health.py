"""When a server of an engine is given up: gone, frozen, or only at work.

Covers: integrations/engine_health.py, integrations/engine_server.py.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from replicas.integrations import engine_health
from replicas.integrations.engine_health import (
    EVERY_S,
    LivenessWatch,
    ProcessorTime,
    _Call,
    processor_time,
    serving_process,
    watch_processes,
)
from replicas.integrations.engine_server import Answer, EngineServer
from replicas.linux.processes import children
from tests.support.waits import eventually

WATCHED = {"/health": 15.0, "/is_paused": 30.0}
LIMIT_S = 600.0


class Watched:
    """A server and the clock by which it is watched, second by second.

    :ivar answers: how each path is answered.
    :ivar works: the part of a processor that its API process and its engine use.
    :ivar is_seen: whether its processes can be seen.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.vigil = LivenessWatch(WATCHED, LIMIT_S, self.now, while_loading=("/health",))
        self.answers: dict[str, Answer] = dict.fromkeys(WATCHED, "good")
        self.works = ProcessorTime(0.0, 0.0)
        self.is_seen = True
        self._spent = ProcessorTime(0.0, 0.0)

    def run(self, seconds: float, *, pauses: bool = False, scan_s: float = 0.0) -> str:
        """Why it is given up in this time; with ``pauses`` the watcher sleeps through
        it."""
        until = self.now + seconds
        while self.now < until:
            passes = seconds if pauses else EVERY_S + scan_s
            self.now += passes
            self._spent = ProcessorTime(
                *(used + passes * part for used, part in zip(self._spent, self.works, strict=True))
            )
            for path, answer in self.answers.items():
                self.vigil.record_answer(path, answer, self.now)
            if reason := self.vigil.reason_to_give_up(self._spent if self.is_seen else None, self.now, scan_s):
                return reason
        return ""


def test_a_server_that_answers_is_left_alone() -> None:
    assert not Watched().run(1000)


@pytest.mark.parametrize(("path", "patience_s"), WATCHED.items())
def test_a_server_that_neither_answers_nor_works_is_given_up_soon(path: str, patience_s: float) -> None:
    watched = Watched()
    watched.run(100)
    watched.answers[path] = "none"
    assert f"has not answered {path} for" in watched.run(patience_s + 2)
    assert patience_s < watched.now - 100 <= patience_s + 2


@pytest.mark.parametrize(
    ("path", "works"), [("/health", ProcessorTime(0.3, 0.0)), ("/is_paused", ProcessorTime(0.0, 0.3))]
)
def test_a_process_at_work_gets_the_longer_time(path: str, works: ProcessorTime) -> None:
    watched = Watched()
    watched.run(5)
    watched.answers[path], watched.works = "none", works
    assert not watched.run(300)
    watched.works = ProcessorTime(0.0, 0.0)
    assert f"has not answered {path}" in watched.run(WATCHED[path] + 2)


def test_the_work_of_the_api_process_is_no_life_of_the_engine() -> None:
    watched = Watched()
    watched.run(5)
    watched.answers["/is_paused"], watched.works = "none", ProcessorTime(1.0, 0.001)
    assert "has not answered /is_paused" in watched.run(32)


@pytest.mark.parametrize("is_seen", [True, False])
def test_processes_that_work_for_ever_or_cannot_be_seen_get_the_longer_time(is_seen: bool) -> None:
    watched = Watched()
    watched.is_seen = is_seen
    watched.run(5)
    watched.answers["/is_paused"], watched.works = "none", ProcessorTime(is_seen, is_seen)
    assert not watched.run(LIMIT_S - 2)
    assert watched.run(5)


def test_a_server_that_refuses_connections_is_gone_within_two_seconds() -> None:
    watched = Watched()
    watched.run(5)
    watched.answers = dict.fromkeys(WATCHED, "dead")
    assert "no longer answers /health" in watched.run(2)


def test_during_a_load_the_call_under_way_counts_in_place_of_the_engines_path() -> None:
    watched = Watched()
    watched.answers["/is_paused"] = "none"
    watched.vigil.is_loading, watched.vigil.call = True, _Call("/update_weights", 0.0, 100.0)
    assert not watched.run(99)
    watched.works = ProcessorTime(0.0, 0.5)
    assert not watched.run(100)
    watched.works = ProcessorTime(0.0, 0.0)
    assert "no answer to /update_weights" in watched.run(102)


def test_a_server_is_not_given_up_for_a_pause_of_its_follower() -> None:
    watched = Watched()
    watched.run(20)
    watched.answers["/health"] = "none"
    watched.vigil.call = _Call("/pause", watched.now, 12.0)
    assert not watched.run(10)
    assert not watched.run(3600, pauses=True)
    assert not watched.run(10)
    assert "no answer to /pause" in watched.run(5)


def test_a_scan_of_a_large_machine_is_no_pause() -> None:
    watched = Watched()
    watched.run(20, scan_s=4.0)
    watched.answers["/is_paused"] = "none"
    assert "has not answered /is_paused" in watched.run(40, scan_s=4.0)


def test_a_pause_within_a_scan_is_a_pause() -> None:
    watched = Watched()
    watched.run(20)
    watched.answers["/is_paused"] = "none"
    assert not watched.run(20)
    assert not watched.run(EVERY_S, scan_s=3600.0)
    assert not watched.run(20)


def test_the_watch_goes_on_without_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(pid: int) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(engine_health, "stat_fields", exhausted)
    assert processor_time(os.getpid()) is None


BUSY = "import os\nif not os.fork():\n    while True: pass\nprint(flush=True)\nos.wait()"


def test_the_processor_time_of_a_tree_grows_until_a_process_of_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as api:
        try:
            assert api.stdout is not None
            api.stdout.readline()
            first = eventually(lambda: used(api.pid), "work of the child", timeout_s=20)
            eventually(lambda: used(api.pid) > first + 0.1, "more of it", timeout_s=20)
            (child,) = children(api.pid)
            os.kill(child, signal.SIGSTOP)
            eventually(lambda: used(api.pid) == 0.0, "no sign of life", timeout_s=20)
            os.kill(child, signal.SIGKILL)
        finally:
            api.kill()
    assert processor_time(api.pid) is None


def test_a_process_that_a_server_needs_is_missed_when_it_has_ended() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as api:
        try:
            assert api.stdout is not None
            api.stdout.readline()
            (child,) = children(api.pid)
            ended, others = watch_processes(api.pid, sys.executable), watch_processes(api.pid, "another")
            assert (ended(), others()) == (None, None)
            os.kill(child, signal.SIGKILL)
            eventually(lambda: f"its process {child} (" in str(ended()), "the end of the child", timeout_s=20)
            assert others() is None
        finally:
            api.kill()


def used(pid: int) -> float:
    found = processor_time(pid)
    return 0.0 if found is None else found.engine_s


def test_the_process_of_a_server_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert serving_process(port) == os.getpid()
    assert serving_process(port) is None


@pytest.mark.parametrize(
    ("url", "port"), [("http://127.0.0.1:80", 80), ("http://[::1]:8000/prefix", 8000), ("http://10.0.0.1:8000", None)]
)
def test_a_server_on_loopback_is_local(url: str, port: int | None) -> None:
    assert EngineServer(url).local_port == port


def test_a_port_without_a_listener_is_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = EngineServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
    ask: Callable[[str], Answer] = server.check_path
    assert ask("/health") == "dead"
