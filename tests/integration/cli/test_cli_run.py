"""The ``replicas`` command against a living run, as an operator uses it: every command,
its words and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

from replicas.cli import main as cli
from replicas.control import exit_codes
from replicas.control.client import Client
from replicas.control.commands import Scale
from replicas.errors import UsageError
from replicas.status import RunStatus
from replicas.telemetry.events import RunEnded, RunStarted, Scaled, decode
from tests.support.programs import SLEEPS, group
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

COUNTS = """
import itertools, time
for i in itertools.count():
    print(f"tick {i}\\n", end="", flush=True)
    time.sleep(0.05)
"""
"""In one write for each line: it is killed at any moment."""
FAILS = "import os, sys, time; time.sleep(0.1); sys.exit(0 if os.path.exists('mended') else 7)"
GROUPS = group("a", COUNTS, "replicas = 2") + group("b", SLEEPS, 'depends_on = ["a"]')
COMMAND = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with running(tmp_path, GROUPS) as started:
        started.wait_line("b/0: ready")  # the last one, as it starts after the others
        yield started


class Cli:
    """Runs commands in this process. What they print is taken from ``capsys``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        got = cli.main([*arguments])
        captured = self._capsys.readouterr()
        self.err = captured.err
        assert got == code, (arguments, captured)
        return captured.out


@pytest.fixture
def replicas(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@contextlib.contextmanager
def background(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, ended at the end of the block."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Its lines up to the first with this text; the test's own timeout bounds it."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in {lines}")


def names(status: RunStatus) -> list[str]:
    return [one.name for group in status.groups for one in group.replicas]


def test_an_operators_day(run: Run, replicas: Cli) -> None:
    eventually(lambda: "test  ready" in replicas("status"), "the replicas, and a store that has loaded torch")
    out = replicas("status")
    assert "2 of 2" in out
    assert names(msgspec.json.decode(replicas("status", "-c", "run.toml", "--json"), type=RunStatus)) == [
        "a/0",
        "a/1",
        "b/0",
    ]

    assert replicas("scale", "a", "3") == "a: 3 replicas wanted\n"
    assert replicas("wait", "a", "--ready") == "a: ready\n"
    assert [one.state for one in run.status().groups[0].replicas] == ["ready"] * 3
    assert replicas("restart", "a/1") == "a/1: starting again\n"
    assert json.loads(replicas("restart", "a", "--rolling", "--json")) == {"done": True, "result": None}
    assert replicas("scale", "a", "1", "-c", "run.toml") == "a: 1 replica wanted\n"
    status = run.status()
    assert names(status) == ["a/0", "b/0"]
    assert status.groups[0].restarts == {"requested": 4}
    assert status.groups[0].restart_budget_remaining_ratio == 1.0

    assert replicas("drain", "b") == "b: drained\n"
    replicas("wait", "b", code=1)
    assert run.status().groups[1].replicas[0].state == "drained"
    assert replicas("restart", "b") == "b: starting again\n"
    assert replicas("reset-failed") == "nothing had failed; restart budgets are full\n"
    assert replicas("stacks", "a").startswith("a/0/0\n")
    for rank in ("b/0/0", "b/0.0"):  # as logs print it, and as they did
        assert list(json.loads(replicas("stacks", rank, "--json"))) == ["b/0/0"]
        assert replicas("logs", rank, "-n", "0") == ""
        assert "ready" in replicas("events", "-t", rank)
    replicas("stacks", "b/0/7", code=exit_codes.USAGE)
    assert 'rank "b/0/7" does not run now' in replicas.err
    assert list(json.loads(replicas("stacks", "--json"))) == ["a/0/0", "b/0/0"]

    assert replicas("logs", "a/0", "-g", "1", "-r", "0").startswith("tick 0\ntick 1\n")
    eventually(lambda: replicas("logs", "a", "-n", "1").startswith("a/0/0| tick "), "a line after the stacks")
    assert replicas("logs", "--since", "1h").startswith("a/0/0| tick 0\na/0/0| tick 1\n")
    line = json.loads(replicas("logs", "a/0", "-n", "1", "--json").splitlines()[-1])  # another may have come meanwhile
    assert (line["replica"], line["rank"]) == ("a/0", 0)
    events = [decode(line.encode()) for line in replicas("events", "--json").splitlines()]
    assert isinstance(events[0].event, RunStarted)
    assert [(one.event.before, one.event.after) for one in events if isinstance(one.event, Scaled)] == [(2, 3), (3, 1)]
    assert "scaled from 2 to 3" in replicas("events", "-t", "a", "--since", "1h")
    assert len(replicas("events", "-n", "3").splitlines()) == 3
    behind = decode(replicas("events", "--after", "4", "--json").splitlines()[0].encode())
    assert behind == events[4]
    assert "[+] run       the run is supervised by process" in replicas("doctor", "run.toml")

    run.config.write_text(run.config.read_text().replace("replicas = 2", "replicas = 2\nenv = { NEW = '1' }"))
    assert replicas("reload") == "reloaded; changed: a\n"
    run.config.write_text(run.config.read_text().replace("replicas = 2", "replica = 2"))
    replicas("reload", code=exit_codes.BAD_CONFIG)
    assert replicas.err.splitlines()[1].startswith("  line ")
    assert replicas.err.splitlines()[1].partition(": ")[2] == 'groups.a.replica: unknown key; did you mean "replicas"?'
    assert run.status().groups[1].replicas[0].state == "ready"

    assert replicas("drain") == "the run is over\n"
    assert run.wait() == 0
    run.assert_nothing_left()
    for words in (["status"], ["drain"], ["detach"], ["status", "--watch"]):
        replicas(*words, code=exit_codes.UNAVAILABLE)
        assert 'run "test" is not running: it ended at ' in replicas.err
    assert isinstance(decode(replicas("events", "--json").splitlines()[-1].encode()).event, RunEnded)
    assert replicas("logs", "a/0", "-n", "1", "-f").startswith("tick ")  # it ends, as nothing more can come


def test_two_runs_are_started_in_the_background_and_waited_for(tmp_path: Path, replicas: Cli) -> None:
    """``replicas run & replicas wait``, without a look at what the first one prints."""
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("first", "second"):
            config = tmp_path / f"{name}.toml"
            config.write_text(f'schema_version = 1\n[run]\nname = "{name}"\n{group("a", SLEEPS)}')
            words, env = [*COMMAND, "run", config.name], {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append((name, config, process))
        endpoints = set()
        for _, config, _ in started:
            assert replicas("wait", "--ready", "-c", str(config)) == "the run: ready\n"
            endpoints.add(json.loads(replicas("status", "-c", str(config), "--json"))["endpoint"])
        assert len(endpoints) == 2
        said = ""
        for name, _, process in started:
            process.terminate()
            lines = process.communicate(timeout=60)[1].splitlines()
            assert lines[0].endswith(f" replicas: run {name}: starting")
            assert lines[-1].endswith(
                f" replicas: run {name}: over, exit code 0; its output: replicas logs {name}.toml"
            )
            assert process.returncode == 0, lines
            said += "\n".join(lines)
        assert re.search(
            r"serving the control port on \d+, because 9477 is in use: Address already in use by process \d+ \(", said
        )


HELPFUL = [
    (["scale", "c", "1"], 'no group "c"; known: "a", "b"'),
    (["restart", "a/9"], 'no replica "a/9"'),
    (["restart", "run.toml"], '"run.toml" is not a group or replica (write CONFIG after it, or -c CONFIG)'),
    (["drain", "c"], 'no group "c"'),
    (["logs", "c"], "there is no log of c"),
    (["logs", "--since", "noon"], '"noon" is not a time'),
    (["scale", "a=1"], '"a=1" was read as the group'),
    (["scale", "a"], "Missing argument 'REPLICAS'"),
    (["scale", "a", "x"], "'REPLICAS'"),
    (["status", "run.toml", "-c", "run.toml"], "give CONFIG once"),
]


def test_over_tcp_orders_need_the_token_and_errors_help(run: Run, replicas: Cli, tmp_path: Path) -> None:
    endpoint = run.endpoint()
    token = str(run.state_dir / "operator-token")
    for arguments, words in HELPFUL:
        replicas(*arguments, code=exit_codes.USAGE)
        assert words in replicas.err

    assert Client(endpoint).status().run == "test"
    replicas("scale", "a", "1", "--endpoint", endpoint, code=exit_codes.USAGE)
    assert "refuses orders from here: an order needs an operator's token" in replicas.err
    assert "give --token-file" in replicas.err
    with pytest.raises(UsageError, match="wrong token"):
        Client(endpoint, token="wrong").order(Scale(group="a", replicas=1))
    replicas("logs", "--endpoint", endpoint, code=exit_codes.USAGE)
    assert run.status().refused["token"] == 1
    assert names(run.status()) == ["a/0", "a/1", "b/0"]

    assert replicas("scale", "a", "1", "--endpoint", endpoint, "--token-file", token) == "a: 1 replica wanted\n"
    assert replicas("logs", "a/0", "--endpoint", endpoint, "--token-file", token).startswith("tick 0\ntick 1\n")
    assert "scaled from 2 to 1" in replicas("events", "--endpoint", endpoint, "--after", "0")
    assert names(msgspec.json.decode(replicas("status", "--endpoint", endpoint, "--json"), type=RunStatus)) == [
        "a/0",
        "b/0",
    ]
    replicas("drain", "--endpoint", endpoint, "--token-file", str(tmp_path / "none"), code=exit_codes.USAGE)
    assert "cannot read the token" in replicas.err

    request = urllib.request.Request(f"http://{endpoint}/reload", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    refused.value.close()
    assert refused.value.code == 401
    assert replicas("drain", "--endpoint", endpoint, "--token-file", token, "--hurry") == "the run is over\n"
    assert run.wait() == 0


def test_following_until_the_run_is_over(run: Run, replicas: Cli) -> None:
    with (
        background("logs", "a/0", "-f", "-n", "1") as logs,
        background("events", "-f", "-n", "1") as events,
        background("status", "--watch", "--interval", "0.1") as watch,
        background("status", "--watch", "--interval", "0.1", "--json") as stream,
    ):
        first = until(logs, "tick")[-1]
        assert until(logs, "tick")[-1] != first
        until(watch, "2 of 2")
        until(events, "")  # it follows from here on
        replicas("restart", "a/0")
        assert until(events, "a/0                restart requested")
        until(logs, "tick 0\n")  # the new generation is followed, too
        until(stream, '"name":"a/0","group":"a","replica":0,"state":"ready","generation":2')
        assert replicas("drain") == "the run is over\n"
        assert "over, exit code 0" in until(events, "over, exit code")[-1]
        assert until(watch, "the run is over")
        assert [process.wait(20) for process in (logs, events, watch, stream)] == [0, 0, 0, 0]


def test_reset_failed_starts_at_once_what_waits_after_a_failure(
    tmp_path: Path, replicas: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = group("c", FAILS, 'restart = { initial_delay = "300s", max_delay = "300s" }')
    with running(tmp_path, text) as run:
        run.wait_line("c/0: rank 0 exited with code 7; starting again in ")
        (tmp_path / "mended").touch()
        assert replicas("reset-failed", "c/0") == "starting again: c/0\n"
        assert run.wait() == 0
    assert not any("stopping" in line for line in run.lines)


def completed(*words: str) -> list[str]:
    """What the shell is offered for the last word."""
    line = " ".join(["replicas", *words])
    env = {"_REPLICAS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"],
        env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_knows_commands_groups_and_replicas(run: Run) -> None:
    commands: Any = typer.main.get_command(cli.app)
    assert set(completed("re")) == {name for name in commands.commands if name.startswith("re")} >= {"reload", "reject"}
    # Again, as a completion does not wait for a busy machine.
    eventually(lambda: completed("restart", "a") == ["a", "a/0", "a/1"], "replicas to restart", timeout_s=40)
    eventually(lambda: completed("scale", "''") == ["a", "b"], "groups to scale", timeout_s=40)
    run.signal(15)
    assert run.wait() == 0
    assert completed("restart", "a") == []  # there is nobody to ask, and no tracebacks either
    assert completed("restart", "-c", "run.toml", "a") == ["a"]
