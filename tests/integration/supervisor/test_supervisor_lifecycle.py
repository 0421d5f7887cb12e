"""The daemon on trivial programs: how a run ends, restarts, drains, and what it
refuses."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from replicas.control.exit_codes import CUT
from replicas.status import GroupStatus
from replicas.telemetry.events import RunEnded, decode
from tests.support.programs import DAEMONIZES, IGNORES, SLEEPS, group
from tests.support.runs import alive, running
from tests.support.waits import eventually


def test_a_run_ends_with_0_when_its_groups_have_finished(tmp_path: Path) -> None:
    show = (
        "import os; print(*(os.environ.get(k) for k in ('REPLICAS_RUN', 'REPLICAS_GROUP', 'REPLICA_ID', 'REPLICA_NUM',"
    )
    show += " 'REPLICAS_GENERATION', 'EXTRA', 'RANK', 'MASTER_ADDR')))"
    text = group("job", show, 'replicas = 2\nenv = { EXTRA = "x y" }') + group("server", SLEEPS)
    with running(tmp_path, text, stop_when='["job"]') as run:
        assert run.wait() == 0
        assert run.log("job/1").read_text() == "test job 1 2 1 x y None None\n"
        run.assert_nothing_left()
    assert not (run.state_dir / "token").exists()
    assert not (run.state_dir / "endpoint.json").exists()
    assert sorted(path.name for path in run.state_dir.iterdir()) == ["events.jsonl", "id", "lock", "logs"]
    assert any("server/0: stopped" in line for line in run.lines)


def test_a_replica_is_restarted_with_backoff_until_the_budget_is_spent(tmp_path: Path) -> None:
    restart = 'restart = { max_restarts = 2, initial_delay = "100ms", max_delay = "1s" }'
    with running(tmp_path, group("bad", "raise ValueError('boom')", restart) + group("good", SLEEPS)) as run:
        assert run.wait() == 1
        run.assert_nothing_left()
    lines = "\n".join(run.lines)
    reason = "bad/0: rank 0 exited with code 1: ValueError: boom"
    assert lines.count(f"{reason}; starting again in ") == 2
    assert (
        "bad/0: failed: rank 0 exited with code 1: ValueError: boom; all restarts are used (2 in 600 s); "
        "the run ends; logs: " in lines
    )
    assert "group bad failed with replica bad/0" in lines
    last = decode((run.state_dir / "events.jsonl").read_bytes().splitlines()[-1]).event
    assert isinstance(last, RunEnded)
    assert last.reason.startswith(
        "group bad failed with replica bad/0: rank 0 exited with code 1: ValueError: boom; all restarts"
    )
    assert run.log("bad/0", generation=3).read_text().endswith("ValueError: boom\n")


def test_a_command_that_cannot_run_says_so(tmp_path: Path) -> None:
    program = tmp_path / "prog"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    text = '[groups.a]\nlauncher = "exec"\ncommand = ["./prog"]\nrestart = { policy = "never" }\n'
    with running(tmp_path, text) as run:
        assert run.wait() == 1
    assert any("rank 0 exited with code 127: replicas: command not found: './prog'" in line for line in run.lines)


def daemons(path: Path) -> list[int]:
    """What a daemonizing replica has printed first; its stacks may follow."""
    return [int(pid) for pid in eventually(lambda: path.exists() and path.read_text(), f"{path}").split()[:2]]


def test_sigterm_drains_and_nothing_is_left(tmp_path: Path) -> None:
    text = group("a", DAEMONIZES, 'stop_timeout = "1s"') + group("b", IGNORES, 'stop_timeout = "1s"')
    with running(tmp_path, text) as run:
        pids = daemons(run.log("a/0"))
        eventually(lambda: run.log("b/0").exists() and run.log("b/0").read_text(), "b/0")
        status = run.status()
        ports = (int(status.endpoint.rpartition(":")[2]), status.store.port)
        start = time.monotonic()
        run.signal(signal.SIGTERM)
        assert run.wait() == CUT
        assert time.monotonic() - start < 10
        assert any("b/0: stopped: killed 1 s after SIGTERM" in line for line in run.lines)
        assert "exit code 4: killed, as they had not ended in time: b/0" in run.lines[-1]
        run.assert_nothing_left(*ports)
        assert not any(map(alive, pids))


def test_a_second_sigint_hurries(tmp_path: Path) -> None:
    with running(tmp_path, group("b", IGNORES, 'stop_timeout = "60s"')) as run:
        eventually(lambda: run.log("b/0").exists() and run.log("b/0").read_text(), "b/0")
        run.signal(signal.SIGINT)
        run.wait_line("SIGINT: draining")
        run.signal(signal.SIGINT)
        run.wait_line("SIGINT: killing the remaining processes")
        assert run.wait(timeout_s=10) == 0
        run.assert_nothing_left()


def test_a_restart_sweeps_daemons_of_the_old_generation(tmp_path: Path) -> None:
    text = group("a", DAEMONIZES.replace("time.sleep(600)\n", "time.sleep(0.2); os.kill(os.getpid(), 11)\n"))
    with running(tmp_path, text.replace("launcher", 'restart = { initial_delay = "100ms" }\nlauncher')) as run:
        line = run.wait_line("rank 0 was killed by SIGSEGV")
        assert "starting again in" in line
        assert not any(map(alive, daemons(run.log("a/0"))))
        run.wait_line("a/0: starting (generation 2)")
        group_status: GroupStatus = run.status().groups[0]
        assert group_status.restarts.get("signal", 0) >= 1


def test_a_group_waits_for_those_it_depends_on(tmp_path: Path) -> None:
    text = group("late", "pass", 'depends_on = ["early"]') + group("early", "import time; time.sleep(0.5)")
    with running(tmp_path, text) as run:
        assert run.wait() == 0
    steps = [line.split("replicas: ")[1] for line in run.lines]
    assert steps.index("late/0: starting") > next(i for i, s in enumerate(steps) if s.startswith("early/0: ready"))


def test_a_second_supervisor_of_a_run_is_refused(tmp_path: Path) -> None:
    text = group("a", SLEEPS)
    with running(tmp_path, text) as first:
        first.wait_line("a/0: ready")
        with running(tmp_path, text) as second:
            assert second.wait() == 3
        assert f'run "test" is already supervised by process {first.pid}' in second.lines[-1]
        assert first.status().groups[0].replicas[0].state == "ready"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for head, word in (
            (f'[control]\nlisten = "127.0.0.1:{port}"\n', "control"),
            (f"[store]\nport = {port}\n", "store"),
        ):
            with running(tmp_path, group("a", "pass"), head=head) as run:
                assert run.wait() == 2
                assert f"cannot listen on 127.0.0.1:{port}" in run.lines[-1]
                assert f"Address already in use by process {os.getpid()} (" in run.lines[-1]
                assert word in run.lines[-1]
                run.assert_nothing_left()


def test_eight_replicas_take_less_than_80_mb_and_no_torch(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS, "replicas = 8")) as run:
        eventually(lambda: run.state_dir.joinpath("endpoint.json").exists() and run.status().ready, "8 ready replicas")
        memory = Path(f"/proc/{run.pid}/status").read_text()
        resident_kb = int(next(line.split()[1] for line in memory.splitlines() if line.startswith("VmRSS")))
        assert resident_kb < 80_000
        assert "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text()
