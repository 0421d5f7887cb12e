"""The batch script of a run on Slurm: what it asks for, and what it does with each end
of the supervisor and of the agents, with stand-ins for Slurm's commands.

Covers: cli/slurm.py, cli/slurm_script.py, supervisor/scheduler_hooks.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.cli import main as cli
from replicas.cli import slurm_job
from replicas.cli.slurm_job import Task, host_names, without_step
from replicas.cli.slurm_script import grace_s, script, time_text
from replicas.config.file import parse
from replicas.config.structs import Config
from replicas.errors import BadConfig, UsageError, WorldError
from replicas.supervisor.scheduler_hooks import SchedulerHooks, on_cluster
from tests.support.waits import eventually

PYTHON = "/opt/a venv/bin/python"


def config(slurm: Mapping[str, Any] | None = None, **more: Any) -> Config:
    group = {"launcher": "exec", "command": ["/bin/sleep", "1"], "drain_timeout": "5m", "stop_timeout": "30s"}
    tables = {"run": {"name": "grpo"}, "groups": {"trainer": group}, "slurm": dict(slurm or {}), **more}
    return parse({"schema_version": 1, **tables})


def made(slurm: Mapping[str, Any] | None = None) -> str:
    read = config(slurm)
    return script(read, read.slurm, [PYTHON, "-m", "replicas", "slurm", "/runs/grpo.toml"])


def asked(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_job_asks_for_whole_nodes_unless_it_is_told_how_many_cpus() -> None:
    assert asked(made()) == [
        "--job-name=grpo",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--open-mode=append",
        "--signal=B:TERM@360",
    ]
    table = {"partition": "gpu", "nodes": 4, "gpus_per_node": 8, "cpus_per_node": 32, "time": "26h", "grace": "90s"}
    text = made({**table, "options": ["--account=grpo", "--constraint=a100"]})
    assert asked(text) == [
        "--job-name=grpo",
        "--partition=gpu",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=32",
        "--time=1-02:00:00",
        "--requeue",
        "--open-mode=append",
        "--signal=B:TERM@90",
        "--account=grpo",
        "--constraint=a100",
    ]
    assert "--cpu-bind=none --kill-on-bad-exit=0 --no-kill --cpus-per-task=32" in text
    assert "'/opt/a venv/bin/python' -m replicas slurm /runs/grpo.toml --here agent" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "0-00:01:00"), (61, "0-00:02:00"), (5400, "0-01:30:00"), (864000, "10-00:00:00")]
)
def test_times_are_written_as_slurm_reads_them(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_the_grace_covers_the_longest_drain() -> None:
    read = config()
    assert grace_s(read, read.slurm) == 360
    assert grace_s(read, config({"grace": "2m"}).slurm) == 120


@pytest.mark.parametrize("table", [{"time": "7m"}, {"time": "1m"}, {"time": "30m", "grace": "30m"}])
def test_a_job_that_would_drain_as_it_starts_is_refused(table: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"slurm\.time \(.* s\) is too short: .* \(slurm\.grace\)"):
        made(table)
    made({"time": "7m", "grace": "5m"})
    made({"time": "8m"})


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"nodes": 0}, "slurm.nodes: expected a whole number of at least 1, got 0"),
        ({"options": ["account=x"]}, 'slurm.options: expected options such as "--account=grpo", got "account=x"'),
        ({"options": ["--account=x\nrm -rf /"]}, r'slurm.options: expected options .*, got "--account=x\\n'),
        ({"partition": "a b"}, "slurm.partition: expected a name"),
        ({"time": "1s"}, "slurm.time: expected a duration of at least 60 seconds"),
        ({"node": 2}, 'slurm.node: unknown key; did you mean "nodes"?'),
    ],
)
def test_what_is_wrong_with_the_table_is_said(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadConfig, match=problem.replace("?", r"\?")):
        config(table)


RUN = """
schema_version = 1
[run]
name = "grpo"
[slurm]
nodes = 2
partition = "gpu"
[groups.trainer]
launcher = "exec"
command = ["/bin/sleep", "1"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_options_of_the_command_replace_those_of_the_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--nodes", "3", "--time", "2h", "--option=--account=a", "--option=--qos=high"]
    assert cli.main(["slurm", str(path), *given]) == 0
    found = asked(capsys.readouterr().out)
    assert {"--nodes=3", "--partition=gpu", "--time=0-02:00:00", "--account=a", "--qos=high"} <= set(found)
    assert cli.main(["slurm", str(path), *given, "--grace", "2h"]) == 2
    assert "slurm.time (7200 s) is too short" in capsys.readouterr().err


def test_wrong_options_are_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["slurm", str(path), "--nodes", "0", "--option", "foo"]) == 2
    said = capsys.readouterr().err
    assert "--nodes: expected a whole number of at least 1, got 0" in said
    assert '--option: expected options such as "--account=grpo", got "foo"' in said


def test_without_slurm_it_says_where_to_submit(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(path.parent))
    assert cli.main(["slurm", str(path), "--submit"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["slurm", str(path), "--here", "all"]) == 2
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err


def test_submitting_prints_the_number_or_what_sbatch_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(path.parent, "sbatch", 'cat > script; [ "$1" = --parsable ] && echo "17;cluster"')
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(path.parent)
    assert cli.main(["slurm", str(path), "--submit"]) == 0
    assert capsys.readouterr().out == "17\n"
    assert (path.parent / "script").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=grpo\n")
    program(path.parent, "sbatch", 'echo "sbatch: error: invalid partition" >&2; exit 1')
    assert cli.main(["slurm", str(path), "--submit"]) == 1
    assert "invalid partition" in capsys.readouterr().err


def test_the_status_of_a_job_in_the_queue_names_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--me --noheader --name grpo --format %i %T %r"
    program(path.parent, "squeue", f'[ "$*" = "{asked}" ] && echo "17 PENDING Resources"')
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    assert cli.main(["status", str(path)]) == 69
    assert "is not running" in (said := capsys.readouterr().err)
    assert "(Slurm has its job 17: PENDING Resources)" in said
    program(path.parent, "squeue", "exit 1")
    assert cli.main(["status", str(path)]) == 69
    assert "(start it with: replicas run CONFIG)" in capsys.readouterr().err


# ------------------------------------------------------------ the script, run


def program(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


class Job:
    """The script with stand-ins: of ``replicas`` by part, and of Slurm's commands."""

    def __init__(self, folder: Path, *, supervisor: str, agent: str, state: str = "RUNNING") -> None:
        self.folder = folder
        self.noted = folder / "noted"
        parts = f'case "$2" in supervisor) {supervisor};; agent) {agent};; esac'
        command = program(folder, "replicas", f"noted={self.noted}\n{parts}")
        program(folder, "srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
        program(folder, "sleep", "exec /bin/sleep 1")
        show = f'echo "JobId=7 JobName=x JobState={state} Reason=None"'
        program(folder, "scontrol", f'if [ "$1" = requeue ]; then echo "requeue $2" >> {self.noted}; else {show}; fi')
        read = config()
        (folder / "job.sh").write_text(script(read, read.slurm, [str(command)]))
        environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        self.out = folder / "slurm-7.out"
        self.out.touch(0o644)
        with self.out.open("a") as out:
            self.process = subprocess.Popen(
                ["bash", folder / "job.sh"], env=environ, stdout=out, stderr=subprocess.PIPE, text=True
            )

    def ended(self) -> tuple[int, str, list[str]]:
        """Exit code, what it said, and what was noted."""
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said, self.noted.read_text().splitlines() if self.noted.exists() else []

    def terminate(self) -> None:
        eventually(lambda: self.noted.exists(), "the supervisor's first note")
        self.process.send_signal(signal.SIGTERM)


WAITER = """
import signal, sys
from pathlib import Path
noted = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
noted.open("a").write("up\\n")
if signal.sigtimedwait({signal.SIGUSR1}, 20):
    noted.open("a").write("preempted\\n")
    sys.exit(75)
"""
WAITS = f'exec {sys.executable} -c {shlex.quote(WAITER)} "$noted"'
"""bash cannot trap a signal that was ignored when it began."""


@pytest.mark.parametrize("code", [0, 1, 78])
def test_the_job_ends_as_the_run_does(code: int, tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor=f"exit {code}", agent="exit 0")
    assert job.ended() == (code, "", [])
    assert job.out.stat().st_mode & 0o777 == 0o600


def test_a_preempted_run_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor=WAITS, agent="exit 0")
    job.terminate()
    assert job.ended() == (75, "", ["up", "preempted", "requeue 7"])


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_a_job_that_slurm_has_ended_is_not_queued_again(state: str, tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor=WAITS, agent="exit 0", state=state)
    job.terminate()
    assert job.ended() == (75, "", ["up", "preempted"])


@pytest.mark.slow
def test_a_notice_before_the_supervisor_listens_does_not_kill_it(tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor='echo up >> "$noted"; /bin/sleep 0.5; exit 0', agent="exit 0")
    job.terminate()
    assert job.ended() == (0, "", ["up"])


@pytest.mark.slow
def test_a_run_without_agents_ends_and_is_not_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor=WAITS, agent="exit 1")
    code, said, noted = job.ended()
    assert (code, noted) == (1, ["up", "preempted"])
    assert "the agents have failed" in said


@pytest.mark.slow
def test_agents_that_fail_when_the_run_is_over_change_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, supervisor="exit 0", agent="exit 1")
    assert job.ended() == (0, "", [])


# ------------------------------------------------------------ parts of a job


def test_a_task_knows_its_start_of_the_run() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        Task.of({}, whole_run=True)
    environ = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2"}
    first = Task.of(environ, whole_run=False)
    assert (first.node, first.index, first.nodes, first.start) == ("n2", 1, 2, "5-0-batch")
    again = Task.of({**environ, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}, whole_run=False)
    assert again.start == "5-2-batch"
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1"}
    assert Task.of({**environ, **step}, whole_run=True).start == "5-0-3"
    with pytest.raises(UsageError, match="a node of a run may have only one task"):
        Task.of({**environ, **step, "SLURM_LOCALID": "1"}, whole_run=True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("head", ("head",)),
        ("n[08-10,2],head-1,gpu[1]-ib", ("n08", "n09", "n10", "n2", "head-1", "gpu1-ib")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[a-c]", ()),
    ],
)
def test_the_nodes_of_a_job_by_name(text: str, names: tuple[str, ...]) -> None:
    assert host_names(text) == names
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": text}
    assert Task.of(environ, whole_run=False).names == names


def test_ports_for_this_machine_alone_are_opened_to_the_cluster() -> None:
    used = on_cluster(config(), "10.0.0.1", 2)
    assert (used.control.host, used.control.port, used.store.bind) == ("10.0.0.1", 0, "10.0.0.1")
    assert (used.cluster.local, used.cluster.min_nodes, used.cluster.join_timeout_s) == (False, 2, 900.0)
    named = config(control={"listen": "10.1.0.1:9477"}, store={"bind": "10.1.0.1"})
    used = on_cluster(named, "10.0.0.1", 2)
    assert (used.control.host, used.control.port, used.store.bind) == ("10.1.0.1", 9477, "10.1.0.1")


def test_a_node_whose_name_is_of_loopback_needs_addresses_in_the_config(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loopback(*given: object, **more: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    def supervised(config: Config, surroundings: SchedulerHooks) -> int:
        used = surroundings.adapt(config)
        print("at", used.control.host, used.store.bind)
        return 0

    monkeypatch.setattr(socket, "getaddrinfo", loopback)
    monkeypatch.setattr(slurm_job, "supervise", supervised)
    for name, value in {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    here = ["slurm", str(path), "--here", "supervisor"]
    assert cli.main(here) == 2
    assert "no address was found at which the other nodes reach n1" in capsys.readouterr().err
    named = '[control]\nlisten = "10.1.2.3:9477"\n'
    path.write_text(f"{RUN}{named}")
    assert cli.main(here) == 2  # the store is open to this node alone
    path.write_text(f'{RUN}{named}[store]\nbind = "10.1.2.3"\n')
    assert cli.main(here) == 0
    assert capsys.readouterr().out == "at 10.1.2.3 10.1.2.3\n"


LOOPBACK = {"n1": "127.0.1.1", socket.gethostname(): "127.0.1.1"}


@pytest.mark.parametrize(
    ("node_addr", "names", "expected"),
    [
        ("10.1.2.3", {}, "10.1.2.3"),
        ("n1-ib", {"n1-ib": "10.1.2.4"}, "10.1.2.4"),
        ("n1", {"n2": "10.1.2.5"}, "the end of the route to 10.1.2.5"),
        ("", {"n2": "10.1.2.5"}, "the end of the route to 10.1.2.5"),
    ],
)
def test_a_node_whose_name_is_of_loopback_is_reached_as_slurm_does_or_by_the_route(
    node_addr: str, names: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = LOOPBACK | names

    def resolved(name: str, port: None, **more: object) -> list[tuple[Any, ...]]:
        if name not in known and not name.startswith("10."):
            raise OSError(f"{name} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(name, name), 0))]

    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "NodeName=$4 Arch=x86_64 NodeAddr={node_addr} NodeHostName=$4"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if not node_addr:
        scontrol.unlink()
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(slurm_job, "_end_of_route", lambda there: f"the end of the route to {there}")
    task = slurm_job.Task(node="n1", index=0, nodes=2, start="5", names=("n1", "n2"))
    assert slurm_job._own_address(task) == expected


def test_the_end_of_a_route_is_no_loopback_address() -> None:
    assert slurm_job._end_of_route("127.0.0.1") == ""
    assert slurm_job._end_of_route("no address") == ""


def test_ranks_are_not_taken_for_tasks_of_slurm() -> None:
    task = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "PMI_RANK": "0",
        "SLURM_TASKS_PER_NODE": "1",
    }
    kept = {"SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin"}
    assert without_step({**task, **kept}) == kept


def test_the_agent_of_a_node_says_once_that_it_waits_for_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(slurm_job, "time", SimpleNamespace(monotonic=lambda: passed, sleep=sleep))
    with pytest.raises(WorldError, match="has not written"):
        slurm_job._wait_for(tmp_path / "join", [])
    assert capsys.readouterr().err.count("s for the supervisor to write") == 1
