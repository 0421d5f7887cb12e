"""What an operator's signals do to the daemon, what it tells systemd, and the exit
codes of both."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from replicas.control.exit_codes import PREEMPTED
from tests.support.machine.notify import FakeSystemd
from tests.support.programs import IGNORES, SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

DAEMON = (sys.executable, "-m", "replicas.supervisor")
CHECK = (sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())", "check")


def with_environment(*variables: str) -> Sequence[str]:
    return ("env", *variables, *DAEMON)


def pids(run: Run) -> dict[str, int | None]:
    return {one.name: one.pid for found in run.status().groups for one in found.replicas}


def is_up(run: Run, replica: str) -> bool:
    return run.log(replica).exists() and "up" in run.log(replica).read_text()


def test_systemd_is_told_of_start_reload_and_end(tmp_path: Path) -> None:
    shows = "import os; print('NOTIFY_SOCKET' in os.environ, 'WATCHDOG_USEC' in os.environ, flush=True); " + SLEEPS
    text = group("a", shows) + group("b", SLEEPS)
    with FakeSystemd() as systemd:
        command = with_environment(f"NOTIFY_SOCKET={systemd.address}", "WATCHDOG_USEC=2000000")
        with running(tmp_path, text, command=command) as run:
            first = systemd.wait(lambda message: "READY" in message)[-1]
            assert "RELOADING" not in first
            systemd.wait(lambda message: message.get("STATUS") == "a 1/1, b 1/1 ready")
            systemd.wait(lambda message: "WATCHDOG" in message)
            before = pids(run)

            good = run.config.read_text()
            run.config.write_text(good.replace("[groups.b]", "[groups.b]\nreplicas = 0"))
            run.signal(signal.SIGHUP)
            begun = systemd.wait(lambda message: "RELOADING" in message)[-1]
            systemd.wait(lambda message: "READY" in message)
            assert "groups.b.replicas: expected" in run.wait_line(
                "SIGHUP: the old config stays in use"
            ) + run.wait_line("b.replicas")
            assert int(begun["MONOTONIC_USEC"]) > 0
            assert pids(run) == before

            run.config.write_text(good.replace(group("b", SLEEPS), group("b", SLEEPS.replace("'up'", "'again'"))))
            run.signal(signal.SIGHUP)
            systemd.wait(lambda message: "RELOADING" in message)
            systemd.wait(lambda message: "READY" in message)
            run.wait_line("SIGHUP: the new config is in use; changed b")
            eventually(lambda: pids(run)["b/0"] not in (None, before["b/0"]), "a new process of b/0")
            assert pids(run)["a/0"] == before["a/0"]

            run.signal(signal.SIGTERM)
            systemd.wait(lambda message: "STOPPING" in message)
            assert run.wait() == 0
            assert not any("READY" in message for message in systemd.messages())
            assert run.log("a/0").read_text().startswith("False False\n")
            run.assert_nothing_left()


def test_a_reload_that_is_not_over_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    text = group("a", IGNORES, 'stop_timeout = "60s"') + group("b", SLEEPS)
    with (
        FakeSystemd() as systemd,
        running(tmp_path, text, command=with_environment(f"NOTIFY_SOCKET={systemd.address}")) as run,
    ):
        eventually(lambda: is_up(run, "a/0") and is_up(run, "b/0"), "a/0 and b/0")
        systemd.wait(lambda message: "READY" in message)
        good = run.config.read_text()
        for name in ("a", "b"):
            run.config.write_text(good.replace(f"[groups.{name}]", f"[groups.{name}]\nenv = {{ A = '1' }}"))
            run.signal(signal.SIGHUP)
            systemd.wait(lambda message: "RELOADING" in message)
            systemd.wait(lambda message: "READY" in message)
            run.wait_line("SIGHUP: the new config is in use; changed ")
        run.wait_line("the reload ends for group a: a newer reload has replaced it")
        run.signal(signal.SIGTERM)
        run.wait_line("SIGTERM: draining")
        run.end()


def test_a_terminal_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    run = Run(tmp_path, group("a", SLEEPS))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TEST_RUN_MARK": run.mark}
    with subprocess.Popen([*DAEMON, str(run.config)], stderr=theirs, env=environment, start_new_session=True) as daemon:
        try:
            eventually(lambda: is_up(run, "a/0"), "a/0")
            termios.tcflow(theirs, termios.TCOOFF)
            assert not run.status().draining
            daemon.send_signal(signal.SIGHUP)  # it says something
            eventually(lambda: run.status().pid == daemon.pid, "its status")
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(30) == 0
            run.assert_nothing_left()
        finally:
            daemon.kill()
            os.close(ours)
            os.close(theirs)
            run.clean_up()


def test_usr1_drains_and_ends_with_75(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS)) as run:
        eventually(lambda: is_up(run, "a/0"), "a/0")
        run.signal(signal.SIGUSR1)
        assert run.wait() == PREEMPTED
        run.assert_nothing_left()


def test_after_usr1_another_does_nothing_and_term_hurries(tmp_path: Path) -> None:
    with running(tmp_path, group("a", IGNORES, 'stop_timeout = "60s"')) as run:
        eventually(lambda: is_up(run, "a/0"), "a/0")
        run.signal(signal.SIGUSR1)
        run.wait_line("SIGUSR1: draining the run, because this machine is about to be taken away")
        run.signal(signal.SIGUSR1)
        run.wait_line("SIGUSR1: ignored, as the run is being drained already")
        run.signal(signal.SIGHUP)
        run.wait_line("SIGHUP: the config is not reloaded, as the run is being drained")
        run.signal(signal.SIGTERM)
        run.wait_line("SIGTERM: killing the remaining processes")
        assert run.wait(timeout_s=10) == PREEMPTED
        run.assert_nothing_left()


def test_a_terminal_that_goes_away_drains(tmp_path: Path) -> None:
    run = Run(tmp_path, group("a", SLEEPS))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TEST_RUN_MARK": run.mark}
    with subprocess.Popen([*DAEMON, str(run.config)], stderr=theirs, env=environment, start_new_session=True) as daemon:
        try:
            os.close(theirs)
            eventually(lambda: is_up(run, "a/0"), "a/0")
            os.close(ours)
            daemon.send_signal(signal.SIGHUP)
            assert daemon.wait(30) == 0
            run.assert_nothing_left()
        finally:
            daemon.kill()
            run.clean_up()


def test_gpus_are_given_out_once_and_come_back(tmp_path: Path) -> None:
    shows = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('OMP_NUM_THREADS'), flush=True)"
    text = (
        group("a", shows, "replicas = 2\nresources = { gpus = 2, cpu_threads = 2 }")
        + group("b", shows, 'resources = { gpus = 4 }\ndepends_on = ["a:finished"]')
        + group("c", shows)
    )
    with running(tmp_path, text, command=with_environment("CUDA_VISIBLE_DEVICES=GPU-x,1,2,3")) as run:
        assert run.wait() == 0
        shares = sorted(run.log(f"a/{index}").read_text() for index in (0, 1))
        assert shares == ["2,3 2\n", "GPU-x,1 2\n"]
        assert run.log("b/0").read_text() == "GPU-x,1,2,3 1\n"
        assert run.log("c/0").read_text() == " 1\n"


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    text = group("a", SLEEPS, "replicas = 2\nresources = { gpus = 1 }")
    wanted = "groups.a.resources.gpus: 2 GPUs are needed at once (a: 2 replicas x 1), but this machine has 1"
    for command in (DAEMON, CHECK):
        with running(tmp_path, text, command=("env", "CUDA_VISIBLE_DEVICES=0", *command)) as run:
            assert run.wait() == 78
            assert any(wanted in line for line in run.lines), run.lines
            run.assert_nothing_left()


def test_a_config_behind_links_is_read_again_where_they_lead_now(tmp_path: Path) -> None:
    """As a Kubernetes ConfigMap is: ``run.toml -> ..data/run.toml``, ``..data ->
    ..v1``, and ``..v1`` goes."""
    run = Run(tmp_path, group("a", SLEEPS))
    (tmp_path / "..v1").mkdir()
    run.config.rename(tmp_path / "..v1/run.toml")
    (tmp_path / "..data").symlink_to("..v1")
    run.config.symlink_to("..data/run.toml")
    try:
        run.start()
        eventually(lambda: is_up(run, "a/0"), "a/0")
        before = run.config.read_text()
        (tmp_path / "..v1").rename(tmp_path / "..v2")
        (tmp_path / "..v2/run.toml").write_text(before.replace("[groups.a]", "[groups.a]\nreplicas = 2"))
        (tmp_path / "new").symlink_to("..v2")
        (tmp_path / "new").rename(tmp_path / "..data")
        run.signal(signal.SIGHUP)
        run.wait_line("SIGHUP: the new config is in use; changed a")
        eventually(lambda: len(pids(run)) == 2, "a second replica")
        run.end()
    finally:
        run.clean_up()
