"""What a supervisor is born with: ignored and blocked signals, closed streams, a
terminal that goes away, odd namespaces.

Covers: linux/inherited.py.
"""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicas import errors
from replicas.control.exit_codes import USAGE
from replicas.linux import inherited
from tests.support.machine.users import needs_users
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

DAEMON = (sys.executable, "-m", "replicas.supervisor")
COMMAND_LINE = (sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")

IGNORES_AND_BLOCKS = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1])
os.execv(sys.executable, [sys.executable, "-m", "replicas.supervisor", *sys.argv[1:]])
"""

LEAVES_A_DAEMON = """
import os, subprocess, sys, time
(blocked,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigBlk")]
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(daemon.pid, blocked, flush=True)
time.sleep(600)
"""


def first_line(run: Run, replica: str, generation: int = 1) -> list[str]:
    """What its rank 0 said first, in words."""
    log = run.log(replica, generation)
    text = eventually(lambda: log.exists() and "\n" in (text := log.read_text()) and text, f"the log of {replica}")
    return str(text).splitlines()[0].split()


def test_ignored_and_blocked_signals(tmp_path: Path) -> None:
    """Ends are seen and told rightly, and what was asked to end hears of it."""
    command = (sys.executable, "-c", IGNORES_AND_BLOCKS)
    again = 'restart = { initial_delay = "1ms", max_delay = "2ms" }'
    with running(tmp_path, group("a", LEAVES_A_DAEMON, again), command=command) as run:
        daemon, blocked = first_line(run, "a/0")
        assert int(blocked, 16) == 0
        os.kill(run.find("replicas.supervisor.shim.shim"), signal.SIGKILL)
        run.wait_line("a/0: the shim on node 0, which watches the ranks, was killed by SIGKILL")
        first_line(run, "a/0", 2)
        assert not alive(int(daemon))
        run.end()


@needs_root
def test_a_mount_point_whose_name_is_no_text(tmp_path: Path) -> None:
    mounts = 'odd="$(printf "%s/\\377" "$0")" && mkdir "$odd" && mount -t tmpfs none "$odd" && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", mounts, str(tmp_path), *DAEMON)
    with running(tmp_path, group("a", SLEEPS), command=command) as run:
        run.wait_line("a/0: ready")
        assert b"\xff" in Path(f"/proc/{run.pid}/mountinfo").read_bytes()
        run.end()


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "pidfd_send_signal"])
def test_a_supervisor_names_a_call_of_the_kernel_that_is_denied(tmp_path: Path, call: str) -> None:
    command = (sys.executable, "-m", "tests.support.machine.seccomp", call, *DAEMON)
    with running(tmp_path, group("a", SLEEPS), command=command) as run:
        assert run.wait() == USAGE
        assert f"{call} is refused: Operation not permitted" in run.lines[-1]
        assert "SystemCallFilter" in run.lines[-1]


@needs_root
def test_a_hidden_boot_id_is_named(tmp_path: Path) -> None:
    command = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/sys && exec "$@"', "sh", *DAEMON)
    with running(tmp_path, group("a", SLEEPS), command=command) as run:
        assert run.wait() == USAGE
        assert "boot_id (/proc/sys is hidden: in a unit of systemd set ProcSubset=all" in run.lines[-1]


def test_closed_standard_streams(tmp_path: Path) -> None:
    with running(tmp_path, group("a", LEAVES_A_DAEMON), command=(*CLOSED, *DAEMON)) as run:
        first_line(run, "a/0")
        assert {Path(f"/proc/{run.pid}/fd/{number}").readlink() for number in range(3)} == {Path(os.devnull)}
        run.endpoint()
        status = [*CLOSED, *COMMAND_LINE, "status", str(run.config)]
        assert subprocess.run(status, timeout=60, cwd=tmp_path, check=False).returncode == 0
        run.end()


# ------------------------------------------------------------ terminals


@contextmanager
def on_a_terminal(run: Run, script: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A shell that leads a session on a terminal of its own, and our end of that."""
    ours, theirs = pty.openpty()

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TEST_RUN_MARK": run.mark, "TMPDIR": str(run.scratch)}
    shell = subprocess.Popen(
        ["sh", "-c", script],
        cwd=run.folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lead,
    )
    os.close(theirs)
    try:
        yield shell, ours
    finally:
        run.clean_up()
        shell.kill()
        shell.wait(20)


def supervisor_of(run: Run) -> int:
    """Its pid, by its endpoint file."""
    run.endpoint()
    return run.status().pid


DAEMON_WORDS = f"{shlex.join(DAEMON)} run.toml"


def test_a_terminal_that_is_closed_ends_a_run_that_writes_into_a_pipe(tmp_path: Path) -> None:
    run = Run(tmp_path, group("a", SLEEPS))
    with on_a_terminal(run, f"{DAEMON_WORDS} 2>&1 | tee log") as (_, ours):
        first_line(run, "a/0")
        pid = supervisor_of(run)
        os.close(ours)
        eventually(lambda: not alive(pid), "the end of the supervisor")
        run.assert_nothing_left()


def test_nohup_keeps_a_run_when_its_terminal_is_closed(tmp_path: Path) -> None:
    run = Run(tmp_path, group("a", SLEEPS))
    with on_a_terminal(run, f"nohup {DAEMON_WORDS} > log 2>&1") as (_, ours):
        first_line(run, "a/0")
        pid = supervisor_of(run)
        os.close(ours)
        eventually(
            lambda: "SIGHUP: the new config is in use" in (tmp_path / "log").read_text(), "a config that is read again"
        )
        assert alive(pid)
        assert not run.status().draining
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: not alive(pid), "the end of the supervisor")
        run.assert_nothing_left()


# ------------------------------------------------------------ namespaces


def refused(tmp_path: Path, *command: str) -> str:
    """What a supervisor says that ends with exit code 2 before it has started
    anything."""
    with running(tmp_path, group("a", SLEEPS), command=command) as run:
        assert run.wait(timeout_s=60) == 2, run.lines
        run.assert_nothing_left()
        assert not any("Traceback" in line or "frame #" in line for line in run.lines), run.lines
        return run.lines[-1]


@needs_users
def test_a_network_without_its_loopback_device(tmp_path: Path) -> None:
    said = refused(tmp_path, "unshare", "--net", *DAEMON)
    assert "rendezvous store: 127.0.0.1 cannot be reached from this machine itself: Network is unreachable" in said
    assert "ip link set lo up" in said


@needs_users
def test_the_processes_of_another_pid_namespace(tmp_path: Path) -> None:
    said = refused(tmp_path, "unshare", "--pid", "--fork", *DAEMON)
    assert "/proc is of another pid namespace: there this process is" in said
    assert "here it is 1" in said


@needs_users
def test_no_proc_at_all(tmp_path: Path) -> None:
    hide = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    said = refused(tmp_path, "unshare", "--mount", "sh", "-c", hide, "sh", *DAEMON)
    assert "/proc cannot be read (No such file or directory)" in said


def test_this_proc_is_ours() -> None:
    inherited.check_proc()


def test_a_foreign_proc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(errors.UsageError, match="another pid namespace"):
        inherited.check_proc()
