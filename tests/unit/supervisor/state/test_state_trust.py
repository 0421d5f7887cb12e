"""The state folder of a run: what others have made, planted or shared is not taken for
the run's own.

Covers: supervisor/state/locked_folder.py.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from replicas import errors
from replicas.coordinator.decisions import DecisionLog
from replicas.linux import stacks
from replicas.linux.processes import start_time
from replicas.supervisor.logs.log_file import RotatedFile
from replicas.supervisor.state import locked_folder
from replicas.supervisor.state.run_state import ProcessRecord, Saved, ShimRecord, machine
from replicas.supervisor.state.state import AlreadySupervised, StateDir
from replicas.telemetry.events import RunEnded
from replicas.trust.tokens import Tokens
from tests.support.machine.users import ATTACKER, needs_users

THESIS = b"my thesis"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "thesis"
    path.write_bytes(THESIS)
    return path


def modes(folder: Path) -> dict[str, int]:
    return {str(one.relative_to(folder)): stat.S_IMODE(one.lstat().st_mode) for one in folder.rglob("*")}


@needs_users
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_somebody_else_has_made_is_refused(tmp_path: Path, precious: Path, mode: int) -> None:
    planted = tmp_path / ".replicas" / "r"
    planted.mkdir(parents=True)
    (planted / "lock").symlink_to(precious)
    os.chown(planted, ATTACKER, ATTACKER)
    planted.chmod(mode)
    with pytest.raises(errors.UsageError, match=rf"{planted}: it belongs to user {ATTACKER}") as caught:
        StateDir(planted, "r").acquire()
    assert caught.value.hint == "have it removed, or set run.state_dir in the config"
    assert precious.read_bytes() == THESIS
    assert {one.name for one in planted.iterdir()} == {"lock"}


def test_a_folder_to_which_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o775)
    with pytest.raises(errors.UsageError, match=r"others can write to it \(its mode is 0775\)") as caught:
        StateDir(tmp_path / "s", "r").acquire()
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"chmod go-w {tmp_path / 's'}, or name a folder in it, which will be made")
    StateDir(tmp_path / "s" / "in" / "it", "r").acquire()


def test_a_folder_that_a_volume_has_opened_to_its_group_is_closed_again(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "s", "r")
    first.acquire()
    first.release()
    (tmp_path / "s").chmod(0o2770)
    StateDir(tmp_path / "s", "r").acquire()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o2750


@pytest.mark.parametrize("name", ["lock", "state.json", "events.jsonl", "decisions.jsonl"])
def test_no_file_of_the_state_is_a_link(tmp_path: Path, precious: Path, name: str) -> None:
    folder = StateDir(tmp_path / "s", "r")
    folder.path.mkdir()
    (folder.path / name).symlink_to(precious)
    try:
        folder.acquire()
        folder.open_events(1 << 20).close()
        DecisionLog(folder.decisions_file).close()
    except errors.UsageError as error:
        assert f"it is a symbolic link: {folder.path / name}" in str(error)  # noqa: PT017  # some files are done without
    assert precious.read_bytes() == THESIS


def test_the_token_and_the_endpoint_are_new_files(tmp_path: Path, precious: Path) -> None:
    folder = StateDir(tmp_path / "s", "r")
    folder.acquire()
    for name in ("token", "endpoint.json", "endpoint.json.new", "endpoint.new"):
        (folder.path / name).symlink_to(precious)
    folder.write(endpoint="127.0.0.1:1", tokens=Tokens("secret"))
    assert precious.read_bytes() == THESIS
    assert folder.token_file.read_text() == "secret"
    assert {modes(folder.path)[name] for name in ("token", "endpoint.json")} == {0o600}


@needs_users
def test_a_state_that_somebody_else_has_written_kills_nobody(tmp_path: Path) -> None:
    with sleeper() as process:
        started = start_time(process.pid)
        assert started is not None
        victim = ProcessRecord(process.pid, started)
        shim = ShimRecord(nonce="x" * 32, process=victim, group="a", replica=0, generation=1)
        saved = Saved(run="r", machine=machine(), shims=(shim,), helpers=(victim,))
        folder = StateDir(tmp_path / "s", "r")
        folder.path.mkdir()
        folder.run_state.path.write_bytes(msgspec.json.encode(saved))
        os.chown(folder.run_state.path, ATTACKER, ATTACKER)
        folder.acquire()
        assert process.poll() is None
        assert folder.saved is None
        assert folder.run_state.set_aside is not None
        assert f"it is not a regular file of this user (owner: user {ATTACKER})" in folder.run_state.set_aside[1]


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_a_run_writes_is_for_its_user_alone_in_a_folder_that_others_may_look_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs print passwords; over HTTP one needs the token for what they print."""
    folder = StateDir(tmp_path / "s", "r")
    folder.path.mkdir(mode=0o755)
    old = os.umask(0o022)
    try:
        folder.events_file.touch(0o644)  # an older release's
        folder.acquire()
        events = folder.open_events(100)
        events.emit(RunEnded(exit_code=0))
        events.close()
        folder.write(endpoint="127.0.0.1:1", tokens=Tokens("secret"))
        log = RotatedFile(folder.log_dir("a", 0, 1) / "rank-0.log", 10, 1)
        log.append(b"password=hunter2\n")
        log.rotate()
        log.append(b"more\n")
        log.close()
        with monkeypatch.context() as patch:
            patch.setattr(stacks, "_open", {})
            stacks.register(folder.log_dir("a", 0, 1), 0, 0)
            faulthandler.unregister(stacks.SIGNUM)
            for file in stacks._open.values():
                file.close()
    finally:
        os.umask(old)
    found = modes(folder.path)
    assert {name for name, mode in found.items() if mode & 0o077} == set()
    assert {"events.jsonl", "events.jsonl.1", "logs/a/0/gen-1/rank-0.log.1", "logs/a/0/gen-1/rank-0.log.times"} <= set(
        found
    )


@pytest.mark.parametrize(
    ("signed", "said"),
    [
        ("{pid} {start} other-boot/1 trainer-7", r'is supervised by process \d+ on host "trainer-7", or processes'),
        ("{pid} {start} {machine} here", r"is already supervised by process"),
        ("{pid} {start}", r"is already supervised by process"),
        ("4194303 1", r"processes of an earlier supervisor of run \"r\" \(pid 4194303\) are still alive"),
        ("", r"\(pid unknown\) are still alive"),
    ],
)
def test_who_has_the_lock_is_said_also_when_it_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: str, said: str
) -> None:
    """Locks reach across hosts on NFS, and across containers that share a volume; pids
    do not."""
    monkeypatch.setattr(locked_folder, "SETTLE_S", 0.0)
    monkeypatch.setattr(StateDir, "patience_s", 0.0)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, signed.format(pid=os.getpid(), start=start_time(os.getpid()), machine=machine()).encode())
    with pytest.raises(AlreadySupervised, match=said):
        StateDir(tmp_path, "r").acquire()
    os.close(descriptor)


def test_the_lock_says_which_machine(tmp_path: Path) -> None:
    folder = StateDir(tmp_path, "r")
    folder.acquire()
    assert (tmp_path / "lock").read_text().split()[:3] == [str(os.getpid()), str(start_time(os.getpid())), machine()]
    folder.release()
