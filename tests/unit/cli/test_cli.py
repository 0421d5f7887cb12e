"""The command line: exit codes, exact messages, and tables that fit a terminal of 80
columns.

Covers: control/client.py, common/sizes.py, config/values.py, status.py.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console

import replicas
from replicas.cli import find_run as find
from replicas.cli import main as cli
from replicas.cli import render
from replicas.cli.base import Screen
from replicas.common.sizes import size_text
from replicas.control import client
from replicas.control.commands import Answer
from replicas.core.base import effects
from replicas.errors import Disconnected, UsageError
from replicas.linux.processes import start_time
from replicas.status import (
    ChannelStatus,
    GroupStatus,
    MemberStatus,
    NodeStatus,
    ReplicaStatus,
    RunStatus,
    StoreStatus,
    SyncRecord,
)
from replicas.supervisor.state.run_state import AgentRecord, RunState, Saved
from replicas.supervisor.state.state import StateDir
from replicas.telemetry import events as happened
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.words import duration_text
from tests.support.release import SERVICE_FILES

CONFIG = """
schema_version = 1
[run]
name = "grpo"
stop_when = ["trainer"]
[groups.trainer]
nproc_per_node = 2
command = ["train.py", "--steps", "200"]
[groups.rollout]
replicas = 2
command = ["rollout.py"]
depends_on = ["trainer"]
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "grpo.toml").write_text(CONFIG)
    for program in ("train.py", "rollout.py"):
        (tmp_path / program).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def a_status(run: str = "grpo") -> RunStatus:
    lost = ReplicaStatus(
        name="rollout/1",
        group="rollout",
        replica=1,
        state="backoff",
        generation=3,
        restarts=2,
        reason="rank 0 was killed by SIGKILL; its log is gen-3/rank-0.log",
        state_age_s=0.25,
    )
    good = ReplicaStatus(
        name="rollout/0",
        group="rollout",
        replica=0,
        state="ready",
        generation=1,
        state_age_s=75.0,
        heartbeat_age_s=0.8,
        versions={"policy": 12},
    )
    return RunStatus(
        run=run,
        version="0.1.0",
        endpoint="127.0.0.1:9477",
        pid=4242,
        uptime_s=3723.0,
        ready=False,
        store=StoreStatus(up=True, host="127.0.0.1", port=1),
        groups=(GroupStatus(name="rollout", launcher="torchrun", world_size=1, replicas=(good, lost)),),
        channels=(
            ChannelStatus(
                name="policy",
                epoch=4,
                committed_version=12,
                digest="ab",
                members=(),
                syncs={"committed": 12, "peers_lost": 1},
                bytes_total=3 * 2**20,
                last_sync=SyncRecord(version=12, outcome="committed", seconds=0.035, nbytes=1),
            ),
        ),
    )


class Handler(http.server.BaseHTTPRequestHandler):
    answer: bytes = b""
    code: int = 200
    headers_sent: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        self.send_response(self.code)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.answer)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Keep stderr for what is tested."""


@pytest.fixture
def supervisor() -> Iterator[tuple[type[Handler], str]]:
    """An HTTP server that answers everything with ``Handler.answer``."""

    class Answer(Handler):
        answer = msgspec.json.encode(a_status())

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Answer, f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(timeout=10)


def write_endpoint(folder: Path, endpoint: str, run: str = "grpo") -> None:
    state = folder / ".replicas" / run
    state.mkdir(parents=True)
    (state / find.ENDPOINT_FILE).write_text(json.dumps({"endpoint": endpoint, "pid": 4242, "run": run}))


def test_check_prints_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "grpo.toml"]) == 0
    out = capsys.readouterr().out
    assert "2 groups, 3 replicas, 4 ranks" in out
    assert "trainer finished" in out
    rules = out.partition("Failures")[2].partition("Timeouts")[0]
    trainer, rollout = rules.partition("trainer ")[2].split("rollout ")
    # releases of rich break the cells at other words
    for row, wanted in (
        (trainer, "on-failure 5/10m 3 in a row the run ends 1 of 1"),
        (rollout, "on-failure 5/10m 3 in a row it stays failed, the run below 1 2 of 2"),
    ):
        assert not Counter(wanted.split()) - Counter(row.split()), row
    assert max(len(line) for line in out.splitlines() if str(folder) not in line) <= 80


def test_no_heading_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = '[channels.experience]\npeers = [{ group = "trainer", ranks = "leader" }, "rollout"]\n'
    (folder / "grpo.toml").write_text(CONFIG + peers)
    assert cli.main(["check", "grpo.toml"]) == 0
    out = capsys.readouterr().out
    for word in ("transport", "deadline", "staging", "restart", "progress", "experience"):
        assert f" {word} " in out.replace("\n", " \n"), out


def test_check_json_is_the_resolved_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "grpo.toml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["groups"]["rollout"]["health"]["start_timeout_s"] == 300.0
    assert plan["run"]["state_dir"] == str(folder / ".replicas" / "grpo")


@pytest.mark.parametrize(
    ("state_dir", "why"), [("/proc/nowhere", "No such file|Operation not supported"), ("plain/x", "Not a directory")]
)
def test_check_refuses_a_state_folder_that_a_run_could_not_make(
    folder: Path, capsys: pytest.CaptureFixture[str], state_dir: str, why: str
) -> None:
    (folder / "plain").touch()
    (folder / "grpo.toml").write_text(CONFIG.replace("[run]", f'[run]\nstate_dir = "{state_dir}"'))
    with pytest.raises(UsageError, match=why):
        StateDir(Path(folder, state_dir), "grpo").acquire()  # as `run` does
    assert cli.main(["check", "grpo.toml"]) == 2
    out, err = capsys.readouterr()
    assert re.match(f"replicas: cannot use the state folder {folder / state_dir}: ({why})", err), out
    assert not (folder / ".replicas").exists()


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["check", "grpo.toml", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_check_says_what_fits_on_no_node_of_the_living_run(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str]
) -> None:
    (folder / "grpo.toml").write_text(CONFIG + '[groups.rollout.placement]\nlabels = { pool = "x" }\nper_node = 1\n')
    alone, plan = checked(capsys), json.loads(checked(capsys, "--json"))
    write_endpoint(folder, supervisor[1])
    assert checked(capsys) == alone, "of a run that starts, no node is known"
    nodes = [NodeStatus(name="head", state="up", local=True), NodeStatus(name="n1", state="up", labels={"pool": "x"})]
    supervisor[0].answer = msgspec.json.encode(msgspec.structs.replace(a_status(), nodes=(*nodes[:1],)))
    assert checked(capsys).removeprefix(alone).splitlines() == [
        "note: on the 1 node of its run",
        "head       runs trainer/0",
        "rollout/0  waits for a node with pool=x",
        "rollout/1  waits for a node with pool=x",
    ]
    supervisor[0].answer = msgspec.json.encode(msgspec.structs.replace(a_status(), nodes=(*nodes,)))
    why = "a node with fewer than 1 of the group with pool=x"
    assert checked(capsys).removeprefix(alone).splitlines() == [
        "note: on the 2 nodes of its run",
        "head       runs trainer/0",
        "n1         runs rollout/0",
        f"rollout/1  waits for {why}",
    ]
    where = {"trainer/0": ["head"], "rollout/0": ["n1"]}
    assert json.loads(checked(capsys, "--json")) == {**plan, "placement": where, "waiting": {"rollout/1": why}}
    (folder / "grpo.toml").write_text(CONFIG)
    assert "\nnote: all replicas fit on the 2 nodes of its run\nhead  runs " in checked(capsys)


def test_check_names_what_is_valid_but_hardly_meant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listen = '[control]\nlisten = "192.0.2.1:9477"\n'
    channels = '[channels.c]\nsources = ["trainer"]\n'
    head, _, _ = CONFIG.partition("[channels")
    (folder / "grpo.toml").write_text(head + listen + channels)
    assert [line for line in checked(capsys).splitlines() if line.startswith("note: ")] == [
        "note: channel c has no targets to receive its versions",
        "note: group rollout is on no channel: it shares no weights",
        "note: control.listen: this machine cannot listen on 192.0.2.1 (Cannot assign requested address); "
        "run the supervisor elsewhere",
    ]


@pytest.mark.slow
def test_check_waits_for_a_run_that_does_not_answer_for_less_than_a_second(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = checked(capsys)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_endpoint(folder, f"127.0.0.1:{silent.getsockname()[1]}")
        assert cli._ANSWER_S < 1
        began = time.monotonic()
        assert checked(capsys) == alone
        assert cli._ANSWER_S <= time.monotonic() - began < 5


@pytest.mark.parametrize("command", ["check", "run", "status"])
def test_a_bad_config_ends_with_78_and_every_problem(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = CONFIG.replace("replicas = 2", "replica = 2").replace("train.py", "trian.py")
    (folder / "grpo.toml").write_text(text)
    assert cli.main([command, "grpo.toml"]) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "replicas: grpo.toml: 2 problems",
        f'  line 8: groups.trainer.command: "trian.py" does not exist in {folder}',
        '  line 10: groups.rollout.replica: unknown key; did you mean "replicas"?',
    ]


BROKEN = {
    "an unknown key": CONFIG.replace("replicas = 2", "replica = 2"),
    "a script that is gone": CONFIG.replace("train.py", "trian.py"),
    "no text": CONFIG + "# caf\udce9\n",
}
NO_TOML = {
    "half a line": CONFIG + "[groups.new",
    "a key twice": CONFIG + "[groups.trainer]\n",
    "a number without measure": CONFIG + f"[groups.new]\nreplicas = {'9' * 5000}\n",
    "nesting without measure": CONFIG + f"[groups.new]\nreplicas = {'[' * 5000}\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_is_seen_and_stopped_while_its_config_has_problems(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str], what: str
) -> None:
    handler, endpoint = supervisor
    write_endpoint(folder, endpoint)
    (folder / "grpo.toml").write_text(BROKEN[what], errors="surrogateescape")
    assert cli.main(["status", "grpo.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "grpo"
    handler.answer = msgspec.json.encode(Answer(done=True))
    assert cli.main(["drain", "rollout", "-c", "grpo.toml"]) == 0
    assert cli.main(["reload", "grpo.toml"]) == 0, "the supervisor is asked: its events and metrics tell of the refusal"


@pytest.mark.parametrize("what", NO_TOML)
def test_a_run_whose_config_is_no_toml_is_addressed_without_it(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str], what: str
) -> None:
    _, endpoint = supervisor
    write_endpoint(folder, endpoint)
    (folder / "grpo.toml").write_text(NO_TOML[what])
    assert cli.main(["status", "grpo.toml"]) == 78
    title, *_, hint = capsys.readouterr().err.splitlines()
    assert title == "replicas: grpo.toml: 1 problem"
    assert hint.endswith("(without CONFIG, in its folder, the command addresses the only run there)")
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "grpo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run] # the run\nname = 'a'  # its name\n", ".replicas/a"),
        ('[run]\nname = "a"\nstate_dir = "b"\n', "b"),
        ('[run]\nname = "a"\n[groups', None),
        ('[groups.x]\nname = "a"\n', None),
        ('[run]\nname = "../a"\n', None),
        ("[run]\nname = 3\n", None),
        ("run = 3\n", None),
    ],
)
def test_the_state_folder_is_read_from_what_can_be_read(tmp_path: Path, text: str, expected: str | None) -> None:
    (tmp_path / "run.toml").write_text(text)
    found = find.state_dir_of(tmp_path / "run.toml")
    assert found == (None if expected is None else tmp_path.resolve() / expected)


def test_python_m_supervisor_is_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["replicas.supervisor", "gone.toml"])
    with pytest.raises(SystemExit, match="78"):
        runpy.run_module("replicas.supervisor", run_name="__main__")
    assert (
        capsys.readouterr().err
        == "replicas: gone.toml: 1 problem\n  the file cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize("words", [["check", "grpo.toml"], ["--help"], ["--version"]])
def test_a_full_disk_behind_stdout_is_no_bug(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert cli.main(words) == 1
        sys.stdout.close()
        with contextlib.suppress(OSError):  # what is left in it
            full.close()
    assert capsys.readouterr().err == "replicas: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_usage_errors_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chekc", "x.toml"]) == 2
    assert "No such command 'chekc'" in capsys.readouterr().err
    assert cli.main(["check"]) == 2
    assert "CONFIG" in capsys.readouterr().err
    assert cli.main(["status", "x.toml", "--endpoint", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "replicas: give CONFIG or --endpoint, not both\n"
    assert cli.main(["status", "--endpoint", "9477"]) == 2
    assert capsys.readouterr().err == 'replicas: "9477" is not HOST:PORT (for example "127.0.0.1:9477")\n'
    for url in ("http://10.0.0.7:9477", "https://me@10.0.0.7:9477/status"):
        assert cli.main(["status", "--endpoint", url]) == 2
        assert capsys.readouterr().err == f'replicas: "{url}" is not HOST:PORT (write "10.0.0.7:9477")\n'
    for odd in ("http://10.0.0.7", "10.0.0.7/status:9477"):
        assert cli.main(["status", "--endpoint", odd]) == 2
        assert capsys.readouterr().err == f'replicas: "{odd}" is not HOST:PORT (for example "127.0.0.1:9477")\n'


def test_a_config_may_follow_the_target_and_numbers_may_be_negative(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str]
) -> None:
    handler, endpoint = supervisor
    write_endpoint(folder, endpoint)
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    handler.answer = msgspec.json.encode(Answer(done=True))
    for words in ("restart rollout ../grpo.toml", "drain rollout ../grpo.toml", "drain ../grpo.toml rollout"):
        assert cli.main(words.split()) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["restart", "../grpo.toml"]) == 2
    assert "write CONFIG after it, or -c CONFIG" in capsys.readouterr().err
    assert cli.main(["scale", "rollout", "-1"]) == 2
    assert "0" in capsys.readouterr().err, "the least number"
    assert cli.main(["scale", "rollout", "--chekc"]) == 2
    assert re.search(r"No such option:? '?--chekc", capsys.readouterr().err)


def test_a_piped_status_is_not_cut(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    supervisor: tuple[type[Handler], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS")
    write_endpoint(folder, supervisor[1])
    assert cli.main(["status"]) == 0
    assert "rank 0 was killed by SIGKILL; its log is gen-3/rank-0.log" in capsys.readouterr().out


def test_events_leave_out_what_each_version_brings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = folder / ".replicas" / "grpo"
    write_endpoint(folder, "127.0.0.1:1")
    log = EventLog(state / "events.jsonl")
    for outcome in ("committed", "failed"):
        log.emit(effects.SyncEnded("policy", SyncRecord(version=1, outcome=outcome, seconds=1.0, nbytes=1)))
    for version in (0, 1):
        log.emit(effects.ReplicaLoaded("policy", "rollout", 0, version))
    log.close()

    def shown(*words: str) -> list[str]:
        assert cli.main(["events", "grpo.toml", *words]) == 0
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()]

    assert shown() == ["2"], "the failed sync"
    assert shown("--type", "SyncEnded") == ["1", "2"]
    assert shown("--type", "SyncEnded", "--type", "ReplicaLoaded") == ["1", "2", "3", "4"]
    assert cli.main(["events", "grpo.toml", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert cli.main(["events", "grpo.toml", "--type", "SyncEnd"]) == 2
    assert 'no event has the type SyncEnd; did you mean "SyncEnded"?' in capsys.readouterr().err


@pytest.mark.parametrize(("target", "known"), [("foo", False), ("rollout/7", False), ("rollout", True), (None, True)])
def test_events_of_a_name_that_none_has_are_said_to_be_of_others(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str | None, known: bool
) -> None:
    state_dir = folder / ".replicas" / "grpo"
    state_dir.mkdir(parents=True)
    log = EventLog(state_dir / "events.jsonl")
    log.emit(happened.RunStarted(run="grpo", pid=1, version="1"))
    log.emit(happened.Scaled(group="rollout", before=1, after=2))
    log.close()
    (state_dir / "lock").touch()
    assert cli.main(["events", *(("--target", target) if target else ())]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == (1 if target == "foo" else 2)
    assert said.err.startswith("" if known else f"replicas: no event names {target}; shown are those of the run")
    assert bool(said.err) is not known


def test_logs_without_output_are_said_to_be_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / ".replicas" / "grpo" / "logs" / "rollout" / "0" / "gen-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    assert cli.main(["logs", "rollout/0", "-c", "grpo.toml"]) == 0
    assert capsys.readouterr() == ("", "replicas: rollout/0: no output yet, or its logs were removed\n")
    log.write_text("loss 1\n")
    assert cli.main(["logs", "rollout/0", "-c", "grpo.toml"]) == 0
    assert capsys.readouterr() == ("loss 1\n", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--services"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    for name in SERVICE_FILES:
        assert (folder / name).is_file(), name
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("replicas ")


def test_a_bug_ends_with_70_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(render, "config_tables", broken)
    assert cli.main(["check", "grpo.toml"]) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: of ours" in err
    assert err.endswith("replicas: this is a bug; please report it with the lines above\n")


def test_status_of_a_run_found_by_its_config(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str]
) -> None:
    write_endpoint(folder, supervisor[1])
    assert cli.main(["status", "grpo.toml"]) == 0
    out = capsys.readouterr().out
    assert "grpo  not ready  127.0.0.1:9477  pid 4242  up 1h 2m" in out
    assert "committed in" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_status_json_of_the_only_run_below_this_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str]
) -> None:
    write_endpoint(folder, supervisor[1])
    assert cli.main(["status", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=RunStatus) == a_status()


@pytest.mark.parametrize("command", ["status", "events"])
def test_a_token_that_is_refused_is_said_also_where_the_page_is_public(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str], command: str
) -> None:
    supervisor[0].headers_sent = {"Replicas-Token": "wrong token"}
    (folder / "token").write_text("wrong")
    assert cli.main([command, "--endpoint", supervisor[1], "--token-file", "token"]) == 2
    assert capsys.readouterr().err == (
        f"replicas: {supervisor[1]} does not accept the token: wrong token "
        "(give an operator's token with --token-file, or none to read state and events, which are public)\n"
    )


def test_status_of_several_runs_asks_which(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_endpoint(folder, "127.0.0.1:1", "a")
    write_endpoint(folder, "127.0.0.1:1", "b")
    assert cli.main(["status"]) == 2
    assert capsys.readouterr().err == "replicas: several runs have their state here: a, b (name the CONFIG of one)\n"


def test_status_of_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / ".replicas" / "grpo" / "endpoint.json"
    assert cli.main(["status", "grpo.toml"]) == 69
    assert capsys.readouterr().err == (
        f'replicas: run "grpo" is not running: {path} does not exist (start it with: replicas run CONFIG)\n'
    )
    assert cli.main(["status"]) == 69
    assert capsys.readouterr().err == (
        f"replicas: no run has its state in {folder / '.replicas'} (name a CONFIG, or give --endpoint HOST:PORT)\n"
    )


def test_the_status_of_a_run_that_is_over_says_how_it_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_dir = folder / ".replicas" / "grpo"
    state_dir.mkdir(parents=True)
    log = EventLog(state_dir / "events.jsonl", now=lambda: 1.8e9)
    log.emit(happened.RunStarted(run="grpo", pid=1, version="1"))
    log.emit(happened.RunEnded(exit_code=1, reason="group trainer failed"))
    for count in range(3):
        log.emit(happened.ConnectionsRefused(reason="token", count=count))
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.8e9))
    assert cli.main(["status", "grpo.toml"]) == 69
    assert capsys.readouterr().err == (
        f'replicas: run "grpo" is not running: it ended at {at} with exit code 1: group trainer failed '
        "(start it with: replicas run CONFIG)\n"
    )
    log.emit(happened.RunStarted(run="grpo", pid=1, version="1"))
    log.close()
    assert cli.main(["status", "grpo.toml"]) == 69
    assert "it ended" not in capsys.readouterr().err


def test_a_run_that_starts_is_not_one_that_does_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locks = [folder / ".replicas" / name / "lock" for name in ("grpo", "other")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    pid = os.getpid()
    locks[0].write_text(f"{pid} {start_time(pid)} machine host")
    assert find.RunAddress(folder / "grpo.toml").starting
    for words in (["status", "grpo.toml"], ["status"], ["scale", "rollout", "1"]):
        assert cli.main(words) == 69
        expected = (
            f'replicas: run "grpo" is starting: process {pid} does not answer yet (wait for it with: replicas wait)\n'
        )
        assert capsys.readouterr().err == expected
    locks[0].write_text(f"{pid} 1 machine host")
    assert not find.RunAddress(folder / "grpo.toml").starting
    assert cli.main(["status", "grpo.toml"]) == 69
    assert "is not running" in capsys.readouterr().err


def test_the_status_shows_steps_ages_open_updates_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status = a_status()
    good, lost = status.groups[0].replicas
    good = msgspec.structs.replace(good, reason="", open_s={"policy": 125.0, "quick": 1.0})
    group = msgspec.structs.replace(status.groups[0], replicas=(good, lost))
    channel = msgspec.structs.replace(status.channels[0], step=40, committed_at=time.time() - 7200.0)
    screen = Screen(soft_wrap=True)
    with screen.capture() as shown:
        whole = msgspec.structs.replace(status, groups=(group,), channels=(channel,), exit_code=1)
        screen.print(render.status_tables(whole), width=200)
    for words in ("12 (step 40)", "committed in 35 ms, 2h ago", "update of policy open for 2m 5s", "over, exit code 1"):
        assert words in shown.get(), shown.get()
    assert "quick" not in shown.get()


def test_of_several_runs_the_living_one_is_meant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (folder / ".replicas" / name).mkdir(parents=True)
        (folder / ".replicas" / name / "lock").touch()
    assert cli.main(["status"]) == 69
    assert "none of the runs here is running: a, b (start one with" in capsys.readouterr().err
    for name, pid in (("a", os.getpid()), ("b", 2**22 + 1)):
        endpoint = {"endpoint": "127.0.0.1:1", "pid": pid, "run": name}
        (folder / ".replicas" / name / find.ENDPOINT_FILE).write_text(json.dumps(endpoint))
        (folder / ".replicas" / name / "lock").write_text(f"{pid} {start_time(os.getpid())} machine host")
    assert find.read_endpoint(find.find_state_dir(folder, running=True)).run == "a"
    assert find.find_state_dir(folder).name == "a"


@pytest.mark.parametrize(
    ("pid", "hint"),
    [
        (os.getpid(), f"its supervisor, process {os.getpid()}, is alive, but busy"),
        (2**22 + 1, "process 4194305, is dead"),
    ],
    ids=["busy", "dead"],  # without a pid: every worker of xdist must find the same names
)
def test_nobody_answers_and_why(folder: Path, capsys: pytest.CaptureFixture[str], pid: int, hint: str) -> None:
    write_endpoint(folder, "127.0.0.1:1")
    path = folder / ".replicas" / "grpo" / find.ENDPOINT_FILE
    path.write_text(path.read_text().replace("4242", str(pid)))
    assert cli.main(["restart", "rollout/1"]) == 69
    assert hint in capsys.readouterr().err


def test_status_when_the_port_belongs_to_another_run_now(
    folder: Path, capsys: pytest.CaptureFixture[str], supervisor: tuple[type[Handler], str]
) -> None:
    handler, endpoint = supervisor
    handler.answer = msgspec.json.encode(a_status("other"))
    write_endpoint(folder, endpoint)
    assert cli.main(["status", "grpo.toml"]) == 69
    assert f'run "grpo" has ended: {endpoint} is now the port of run "other"' in capsys.readouterr().err


class Silent(find.RunAddress):
    """A run that does not answer; ``cause``: of that error."""

    cause: OSError | None = None

    def status(self, *, timeout_s: float = 5.0) -> RunStatus:
        raise Disconnected("silence") from self.cause


def test_the_end_of_a_run_is_more_than_its_silence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Silent(folder / "grpo.toml")
    with pytest.raises(Disconnected, match="is not running"):
        place.poll_status(0.0)
    write_endpoint(folder, "127.0.0.1:1")
    path = folder / ".replicas" / "grpo" / find.ENDPOINT_FILE
    monkeypatch.setattr(find, "start_time", lambda pid: 1)
    states, slow, killed = (place.poll_status(0.0) for _ in range(3))
    assert next(states) is None, "it lives, and is only slow"
    assert next(slow) is None
    with monkeypatch.context() as patched, pytest.raises(Disconnected, match="silence"):
        patched.setattr(find, "SILENT_S", -1.0)
        next(slow)
    with monkeypatch.context() as patched, pytest.raises(Disconnected, match="silence"):
        patched.setattr(find, "start_time", lambda pid: None)  # it was killed: an orderly end removes the file
        next(killed)
    path.unlink()
    assert list(states) == []


def test_the_end_of_a_run_elsewhere() -> None:
    place = Silent(endpoint="127.0.0.1:1")
    states = place.poll_status(0.0)
    assert next(states) is None
    place.cause = ConnectionRefusedError()
    assert list(states) == []


@pytest.mark.parametrize(
    ("code", "answer", "message"),
    [
        (404, b"", "answered GET /status with HTTP status 404: Input data was truncated (check that a supervisor"),
        (200, b"<html>", "answered GET /status with HTTP status 200: JSON is malformed"),
        (200, b"{}", "answered GET /status with HTTP status 200: Object missing required field `run`"),
    ],
)
def test_an_answer_of_something_else(
    supervisor: tuple[type[Handler], str], code: int, answer: bytes, message: str
) -> None:
    handler, endpoint = supervisor
    handler.code, handler.answer = code, answer
    with pytest.raises(Disconnected) as caught:
        client.Client(endpoint).status()
    assert message in str(caught.value)


def test_nobody_answers_and_a_damaged_endpoint_file(folder: Path) -> None:
    with pytest.raises(Disconnected, match=r"127\.0\.0\.1:1"):
        client.Client("127.0.0.1:1").status()
    (folder / find.ENDPOINT_FILE).write_text("{")
    with pytest.raises(Disconnected, match="cannot be read"):
        find.read_endpoint(folder)


def test_the_status_counts_replicas_by_group_and_ranks_by_channel(capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer of two ranks is one replica, and two members of its channel: the
    headings tell them apart."""
    trainer = ReplicaStatus(name="trainer/0", group="trainer", replica=0, state="ready", generation=1)
    ranks = tuple(MemberStatus(name=f"trainer/0/{rank}", state="live", role="source") for rank in range(2))
    absent = MemberStatus(name="rollout/0/0", state="behind", role="target")
    channel = ChannelStatus(name="policy", epoch=3, committed_version=7, digest="ab", members=(*ranks, absent))
    group = GroupStatus(name="trainer", launcher="torchrun", world_size=2, replicas=(trainer,))
    status = msgspec.structs.replace(a_status(), groups=(group,), channels=(channel,))
    Console(width=160).print(render.status_tables(status))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells for line in lines if (cells := [cell.strip() for cell in line if cell.strip()])}
    assert dict(zip(rows["group"], rows["trainer"], strict=True))["ready"] == "1 of 1"
    assert dict(zip(rows["channel"], rows["policy"], strict=True)).get("live ranks") == "2"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0351, "35.1 ms"),
        (2.5, "2.5 s"),
        (59.99, "60 s"),
        (60, "1m"),
        (200, "3m 20s"),
        (3600, "1h"),
        (18130, "5h 2m"),
        (349200, "4d 1h"),
    ],
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (282066944, "269 MiB"), (5 * 2**40, "5 TiB")]
)
def test_size_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["logs", "-c", "grpo.toml"], ["check", "grpo.toml"]])
def test_a_stdout_that_knows_ascii_alone_gets_escapes(folder: Path, arguments: list[str]) -> None:
    (folder / "grpo.toml").write_text(CONFIG.replace('"train.py"', '"train.py", "é漢"'))
    log = folder / ".replicas" / "grpo" / "logs" / "trainer" / "0" / "gen-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("loss é漢\U0001f680\n")
    code = "import sys; from replicas.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(replicas.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\xe9\u6f22" in done.stdout


def test_a_folder_of_an_agent_is_no_run(tmp_path: Path) -> None:
    for name, file in (("agent-n1", "id"), ("a", "events.jsonl")):
        (tmp_path / ".replicas" / name).mkdir(parents=True)
        for made in ("lock", file):
            (tmp_path / ".replicas" / name / made).touch()
    assert find.find_state_dir(tmp_path).name == "a"


@pytest.mark.parametrize(
    ("ago_s", "words"),
    [
        (30.0, "has no supervisor since 12:00:00: its replicas go on until 12:02:03, or until the next one takes them"),
        (300.0, "is not running: its supervisor left it at 12:00:00, and no other came until 12:02:03"),
    ],
)
def test_a_run_that_was_detached_says_until_when_its_replicas_live(ago_s: float, words: str, tmp_path: Path) -> None:
    at = time.mktime((2026, 1, 5, 12, 0, 0, 0, 0, -1))
    agents = tuple(
        AgentRecord(node=name, incarnation=name, local=name == "a", lease_s=lease_s)
        for name, lease_s in (("a", 123.0), ("b", 120.0))
    )
    RunState(tmp_path / "state.json").save(Saved(run="r", at=at, agents=agents))
    assert find._describe_detached(tmp_path, at + ago_s).startswith(words)
    RunState(tmp_path / "state.json").save(Saved(run="r", at=at, agents=agents, draining="preempted"))
    assert find._describe_detached(tmp_path, at + ago_s) == ""
    with pytest.raises(Disconnected, match="is not running"):
        find.read_endpoint(tmp_path)
