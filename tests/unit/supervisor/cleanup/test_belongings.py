"""What processes have, and who holds it afterwards."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path

import anyio
import pytest

from replicas.linux.smi import _stuck as smi_stuck
from replicas.linux.sockets import Listener
from replicas.supervisor.cleanup import still_held as remains
from replicas.supervisor.cleanup.inventory import Belongings, Stocktaking, take
from replicas.supervisor.cleanup.still_held import StillHeld, held, wait_clear

ME = f"process {os.getpid()} ("


def test_ports_are_found_with_their_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = take([os.getpid()])
        mine = Belongings(ports=tuple(one for one in found.ports if one.port == port))
        assert [one.address for one in mine.ports] == ["127.0.0.1"]
        assert [pid for pid, _ in found.processes] == [os.getpid()]
        assert Belongings.of(found.message()) == found
        (now,) = held([mine])
        assert now.what == f"port 127.0.0.1:{port}"
        assert now.holder.startswith(ME)
    assert held([mine]) == []


def test_another_socket_on_the_same_port_is_no_matter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert held([Belongings(ports=(Listener("0.0.0.0", listener.getsockname()[1], 1),))]) == []


def test_gpu_memory_that_the_driver_counts_for_the_old_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '4000001, GPU-a, 512\n77, GPU-b, 3\n[N/A], GPU-c, 1'\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    assert held([Belongings(gpu=True, processes=((4000001, 5),))]) == [
        StillHeld("512 MiB on GPU GPU-a", "process 4000001 (gone)")
    ]
    assert held([Belongings(processes=((4000001, 5),))]) == []


def test_a_driver_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 600\n")
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(smi))
    monkeypatch.setattr(remains, "_SMI_TIMEOUT_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)  # no signal reaches it
        patch.setattr("replicas.linux.smi._KILL_S", 0.0)
        (one,) = held([Belongings(gpu=True)])
        assert one.holder == "the driver: nvidia-smi does not answer within 0.01 s"
        (stuck,) = smi_stuck
        assert held([Belongings(gpu=True)]) == [one]
        assert smi_stuck == [stuck]  # no other one was started
    stuck.kill()
    stuck.wait()
    smi.write_text("#!/bin/sh\n")
    monkeypatch.setattr(remains, "_SMI_TIMEOUT_S", 60.0)
    assert held([Belongings(gpu=True)]) == []
    assert smi_stuck == []


def test_the_wait_ends_when_it_is_clear_given_up_or_too_long() -> None:
    said: list[StillHeld] = []
    pauses: list[float] = []

    async def waits(seconds: float) -> bool:
        pauses.append(seconds)
        return True

    async def gives_up(seconds: float) -> bool:
        return False

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            old = [Belongings(ports=tuple(one for one in take([os.getpid()]).ports if one.port == port))]

            async def closes(seconds: float) -> bool:
                listener.close()
                return True

            assert len(await wait_clear(old, said.append, waits, timeout_s=0.0)) == 1
            assert len(await wait_clear(old, said.append, gives_up)) == 1
            assert await wait_clear(old, said.append, closes) == []
        assert await wait_clear([Belongings()], said.append, gives_up) == []

    anyio.run(main)
    assert [one.what.startswith("port 127.0.0.1:") for one in said] == [True, True, True]
    assert pauses == []


def test_what_cannot_be_looked_for_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def gives_up(seconds: float) -> bool:
        return False

    monkeypatch.setattr(remains, "listeners", no_descriptor)
    said: list[StillHeld] = []
    old = [Belongings(ports=(Listener("127.0.0.1", 80, 1),))]
    assert anyio.run(wait_clear, old, said.append, gives_up) == said
    assert [one.holder for one in said] == ["unknown: it cannot be looked for (Too many open files)"]


def test_stock_is_taken_when_due_and_told_when_changed() -> None:
    with socket.socket(socket.AF_INET) as one:
        one.bind(("127.0.0.1", 0))
        stock = Stocktaking(lambda: [os.getpid()], 100.0)
        assert stock.on_time(104.9) is None
        before = stock.on_time(105.0)
        assert before is not None
        assert stock.wakes == [165.0]
        assert stock.on_time(165.0) is None
        one.listen()
        port = one.getsockname()[1]
        after = stock.on_time(225.0)
        assert after is not None
        assert {listener.port for listener in after.ports} - {listener.port for listener in before.ports} == {port}
    assert stock.last_time(226.0) is None  # what it had counts, too
