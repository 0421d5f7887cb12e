"""sd_notify against a fake of systemd's socket: each message, and when there is
none.

Covers: supervisor/operator.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from replicas.status import ChannelStatus, GroupStatus, ReplicaState, ReplicaStatus, RunStatus, StoreStatus
from replicas.supervisor.operator import Notifier, Watcher, status_line
from replicas.supervisor.supervisor import Supervisor
from tests.support.machine.notify import FakeSystemd


class FakeSupervisor:
    def __init__(self) -> None:
        self.states: list[ReplicaState] = ["starting", "ready"]
        self.looked_at = 0.0
        self.draining = False

    def status(self) -> RunStatus:
        replicas = tuple(
            ReplicaStatus(name=f"a/{index}", group="a", replica=index, state=state, generation=1)
            for index, state in enumerate(self.states)
        )
        return RunStatus(
            run="x",
            version="0",
            endpoint="",
            pid=1,
            uptime_s=0.0,
            ready=False,
            draining=self.draining,
            store=StoreStatus(up=True, host="", port=0),
            groups=(GroupStatus(name="a", launcher="exec", world_size=1, replicas=replicas),),
            channels=(ChannelStatus(name="p", epoch=1, committed_version=7, digest="", members=()),),
        )


@pytest.fixture
def systemd() -> Iterator[FakeSystemd]:
    with FakeSystemd() as fake:
        yield fake


@pytest.fixture
def notifier(systemd: FakeSystemd) -> Iterator[Notifier]:
    with closing(Notifier(systemd.address, watchdog_s=3.0)) as notifier:
        yield notifier


def test_the_environment_names_the_socket_and_replicas_do_not_inherit_it(systemd: FakeSystemd) -> None:
    environ = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "2500000", "A": "1"}
    with closing(Notifier.from_environ(environ)) as notifier:
        assert environ == {"A": "1"}
        assert notifier.watchdog_s == 2.5
        assert notifier.send(READY="1", STATUS="two\nlines of it")
    assert systemd.messages() == [{"READY": "1", "STATUS": "two lines of it"}]


def test_a_socket_in_the_file_system(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        with closing(Notifier.from_environ({"NOTIFY_SOCKET": path})) as notifier:
            assert notifier.send(READY="1")
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
    ],
)
def test_nobody_listens(environ: dict[str, str], watchdog_s: float | None) -> None:
    notifier = Notifier.from_environ(environ)
    assert not notifier.wanted
    assert notifier.watchdog_s == watchdog_s
    assert not notifier.send(READY="1")


def test_a_receiver_that_is_gone_or_slow_costs_nothing_and_gets_the_latest_later(
    systemd: FakeSystemd, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    count = 0
    while notifier.send(STATUS=str(count)):
        count += 1
    assert not notifier.send(STATUS="latest")
    assert not notifier.send(READY="1")
    assert len(systemd.messages()) == count
    assert notifier.send()
    assert systemd.messages() == [{"STATUS": "latest", "READY": "1"}]
    with systemd:
        pass
    assert not notifier.send(STATUS="a")
    assert not notifier.send(STATUS="b")
    assert caplog.text.count("going on without telling") == 1


def test_a_reload_is_begun_and_ended(systemd: FakeSystemd, notifier: Notifier) -> None:
    before = time.monotonic_ns() // 1000
    with pytest.raises(ValueError, match="bad file"), notifier.reloading():
        (begun,) = systemd.messages()
        raise ValueError("bad file")
    assert begun.pop("RELOADING") == "1"
    assert before <= int(begun.pop("MONOTONIC_USEC")) <= time.monotonic_ns() // 1000
    assert begun == {}
    assert systemd.messages() == [{"READY": "1"}]


def test_status_is_sent_when_it_changes(systemd: FakeSystemd, notifier: Notifier) -> None:
    supervisor = FakeSupervisor()
    watcher = Watcher(notifier, cast("Supervisor", supervisor))
    watcher.send_changes(0.5, READY="1")
    watcher.send_changes(0.6)
    supervisor.states[0] = "finished"
    watcher.send_changes(0.7)
    assert systemd.messages() == [
        {"READY": "1", "STATUS": "a 1/2 ready; p at version 7"},
        {"STATUS": "a 2/2 ready; p at version 7"},
    ]
    assert status_line(supervisor.status()) == "a 2/2 ready; p at version 7"


def test_no_message_is_longer_than_systemd_takes(systemd: FakeSystemd, notifier: Notifier) -> None:
    notifier.send(STATUS="ä" * 5000, READY="1", WATCHDOG="1")
    (message,) = systemd.messages()
    assert message["STATUS"].endswith("ä...")
    assert len("\n".join(message.values()).encode()) < 4000


def test_stopping_is_said_once_and_a_drain_asks_for_time(systemd: FakeSystemd, notifier: Notifier) -> None:
    supervisor = FakeSupervisor()
    watcher = Watcher(notifier, cast("Supervisor", supervisor))
    watcher.send_changes(0.5)
    systemd.messages()
    supervisor.draining = True
    watcher.send_changes(0.6)
    watcher.send_changes(0.7)
    watcher.stopping()
    assert systemd.messages() == [
        {"STOPPING": "1"},
        {"STATUS": "draining; a 1/2 ready; p at version 7", "EXTEND_TIMEOUT_USEC": "15000000"},
        {"EXTEND_TIMEOUT_USEC": "15000000"},
    ]


def test_the_watchdog_is_fed_only_by_a_control_loop_that_comes_round(systemd: FakeSystemd, notifier: Notifier) -> None:
    supervisor = FakeSupervisor()
    watcher = Watcher(notifier, cast("Supervisor", supervisor))
    fed = []
    for now in range(1, 9):
        if now not in (4, 5, 6):
            supervisor.looked_at = now - 0.1
        watcher.send_changes(float(now))
        fed += [now for message in systemd.messages() if message.get("WATCHDOG") == "1"]
    assert fed == [1, 2, 3, 7, 8]
