"""Runs over several nodes, each with a real agent, here all on one machine: what they
do together, and what is left when agents, supervisors or all of a node are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas import environ
from replicas.cli import main as cli
from replicas.control.exit_codes import CUT, SUPERVISED, USAGE
from replicas.linux.processes import MARK as PROCESS_MARK
from replicas.linux.processes import SHIM, command_line, descendants
from replicas.supervisor.fleet.local_agent import AGENT
from replicas.supervisor.state.locked_folder import identity_of
from replicas.trust.tokens import OPERATOR_FILE
from tests.support.nodes import AGENT_COMMAND, LEASE_S, Agent, over_nodes, placed, ready, replicas_of, states, there
from tests.support.programs import PUBLISHES, RECEIVES, SLEEPS, group
from tests.support.runs import MARK, ROOT, Run, alive, running
from tests.support.waits import eventually

# ---------------------------------------------------------------- together


MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([float(dist.get_rank())])
dist.all_reduce(mine)
print("sum", mine.item(), os.environ["MASTER_ADDR"], flush=True)
dist.destroy_process_group()  # else torch may abort as the interpreter ends
"""


def test_a_replica_over_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    text = '[groups.a]\ncommand = ["meets.py"]\nnnodes = 2\nnproc_per_node = 2\n' + placed("there").format("a")
    with over_nodes(tmp_path, text, ["n1", "n2"]) as (run, agents):
        assert run.wait(timeout_s=90) == 0
        said = [
            path.read_text()
            for agent in agents.values()
            for path in sorted(agent.state_dir.glob("logs/a/0/*/rank-*.log"))
        ]
        assert len(said) == 4
        assert all("sum 6.0" in text for text in said)
        assert [agent.wait() for agent in agents.values()] == [0, 0], "the run is over"
        run.assert_nothing_left()


def test_logs_and_stacks_of_all_nodes(tmp_path: Path) -> None:
    text = there("a", SLEEPS, "replicas = 2") + there("b", SLEEPS, where="here")
    with over_nodes(tmp_path, text, ["n1", "n2"]) as (run, agents):
        nodes = {nodes for *_, nodes in ready(run, "a").values()}
        assert nodes == {"n1", "n2"}
        ready(run, "b")
        command = [sys.executable, "-m", "replicas"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}

        def said(*words: str) -> str:
            found = subprocess.run(
                [*command, *words, "-c", str(run.config)],
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return found.stdout + found.stderr

        eventually(lambda: said("logs").count("up") == 3, "a line of each replica")
        assert sorted(said("logs").splitlines()) == ["a/0/0| up", "a/1/0| up", "b/0/0| up"]
        assert said("logs", "a/1") == "up\n"
        assert "there is no log of c" in said("logs", "c")
        stacks = said("stacks", "a")
        assert all(f"{name}/0\n" in stacks for name in ("a/0", "a/1")), stacks
        status = said("status")
        assert "this machine" in status
        assert "place=there" in status
        run.end()
        assert [agent.wait() for agent in agents.values()] == [0, 0]


def test_a_doctor_of_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what a dead agent of one has left, and then without another's agent."""
    with over_nodes(tmp_path, there("a", SLEEPS, "replicas = 2"), ["n1", "n2"]) as (run, agents):
        ready(run, "a")
        local = next(node.name for node in run.status().nodes if node.local)

        def found(*words: str, code: int) -> dict[str, list[dict[str, str]]]:
            assert cli.main(["doctor", *words, "--json"]) == code
            by_node: dict[str, list[dict[str, str]]] = {}
            for one in json.loads(capsys.readouterr().out)["findings"]:
                by_node.setdefault(one["node"], []).append(one)
            return by_node

        healthy = found(str(run.config), code=0)
        assert list(healthy) == ["", "n1", "n2"]
        for name in ("n1", "n2"):
            assert {one["about"] for one in healthy[name]} == {"node", "leftovers", "gpus", "limits", "disk"}
            assert healthy[name][-1]["text"].endswith(str(agents[name].state_dir))
        remote = ["--endpoint", run.endpoint(), "--token-file", str(run.state_dir / OPERATOR_FILE)]
        everywhere = found(*remote, code=0)
        assert set(everywhere) == {local, "n1", "n2"}
        assert [one["text"] for one in everywhere[local] if one["about"] == "leftovers"] == [
            "no process of a dead supervisor of this run"
        ]
        env = {**os.environ, PROCESS_MARK: "0123456789abcdef", environ.STATE_ID: identity_of(agents["n1"].state_dir)}
        with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as left:
            (problem,) = [one for one in found(str(run.config), code=1)["n1"] if one["state"] == "problem"]
            assert problem["text"].startswith(f"process {left.pid} (found by its identity)")
            assert list(found(str(run.config), "--node", "n2", code=0)) == ["n2"]
            left.communicate(b"\n", timeout=20)
        assert cli.main(["doctor", str(run.config), "--node", "n9"]) == USAGE
        assert 'the run has no node "n9" (its nodes are ' in capsys.readouterr().err
        agents["n2"].kill()
        eventually(lambda: states(run)["n2"] != "up", "a node that is away")
        assert cli.main(["doctor", str(run.config)]) == 1
        out = capsys.readouterr().out
        assert "node n1\n[+] node      up, release" in out
        assert "node n2\n[-] node      away: its agent has sent nothing for " in out
        run.end()


def test_a_run_whose_nodes_do_not_come_ends(tmp_path: Path) -> None:
    head = '[cluster]\nmin_nodes = 3\njoin_timeout = "3s"\n'
    with running(tmp_path, group("a", SLEEPS), head=head) as run:
        run.wait_line("control at")
        agent = Agent(run, "n1")
        assert run.wait() == USAGE
        if any("node n1: up" in line for line in run.lines):
            assert agent.wait() in (0, 1)
        else:  # it came too late, and would look for a supervisor for minutes
            agent.popen.kill()
            agent.wait()
        assert any("of 3 nodes (cluster.min_nodes) joined within 3 s" in line for line in run.lines)
        last = (run.state_dir / "events.jsonl").read_text().splitlines()[-1]
        assert '"RunEnded","exit_code":2' in last
        run.assert_nothing_left()


def test_a_check_asks_a_living_run_for_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says of a plan what the status says of replicas that wait."""

    def checked(run: Run, *words: str) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
        assert cli.main(["check", str(run.config), *words]) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # of the agent
    text = there("a", SLEEPS, "replicas = 2\nresources = { gpus = 1 }")
    command = ("env", "CUDA_VISIBLE_DEVICES=0,1,2", sys.executable, "-m", "replicas.supervisor")
    with over_nodes(tmp_path, text, ["n1"], command=command) as (run, agents):
        missing = "1 GPU (0 free on n1) with place=there"

        def waits() -> list[str]:
            return [one.name for one in run.status().groups[0].replicas if one.reason == f"waits for {missing}"]

        assert len(eventually(waits, "a replica that waits")) == 1
        assert checked(run).splitlines()[-1] == f"a/1  waits for {missing}"
        assert json.loads(checked(run, "--json"))["waiting"] == {"a/1": missing}
        run.config.write_text(run.config.read_text().replace("replicas = 2", "replicas = 1"))
        assert "note: all replicas fit on the 2 nodes of its run\n" in checked(run)
        run.signal(signal.SIGSTOP)
        stopped = checked(run)
        run.signal(signal.SIGCONT)
        run.kill()
        assert checked(run) == stopped
        assert "its run" not in stopped
        agents["n1"].kill()
        run.assert_nothing_left()


# ---------------------------------------------------------------- loss


def test_replicas_of_a_killed_node_start_elsewhere(tmp_path: Path) -> None:
    """All processes of the node are killed: nobody says goodbye."""
    with over_nodes(tmp_path, there("a", SLEEPS, "replicas = 2"), ["n1", "n2"]) as (run, agents):
        before = ready(run, "a")
        (lost,) = [name for name, (*_, nodes) in before.items() if nodes == "n1"]
        pid = before[lost][2]
        assert pid is not None
        agents["n1"].kill_all()
        began = time.monotonic()
        eventually(lambda: replicas_of(run.status(), "a")[lost][3] == "n2", "it starts elsewhere", timeout_s=30)
        assert time.monotonic() - began > LEASE_S, "not before its lease is over"
        after = ready(run, "a")
        assert after[lost][1] == 2
        assert after.keys() == before.keys()
        status = run.status()
        assert status.groups[0].restarts == {"node": 1}
        assert status.groups[0].restart_budget_remaining_ratio == 1.0
        assert states(run)["n1"] == "lost"
        again = Agent(run, "n1", "--label", "place=there")
        eventually(lambda: states(run)["n1"] == "up", "the node is back")
        run.end()
        assert again.wait() == 0


def test_a_killed_agent_that_comes_back_cleans_up_first(tmp_path: Path) -> None:
    with over_nodes(tmp_path, there("a", SLEEPS), ["n1"]) as (run, agents):
        (_, _, pid, _) = ready(run, "a")["a/0"]
        agents["n1"].kill()
        agents["n1"] = Agent(run, "n1", "--label", "place=there")
        eventually(lambda: replicas_of(run.status(), "a")["a/0"][1] == 2, "the next generation", timeout_s=30)
        assert pid is not None
        assert not alive(pid)
        ready(run, "a")
        run.end()
        assert agents["n1"].wait() == 0


def test_a_frozen_shim_of_a_killed_agent_does_not_keep_the_next_one_out(tmp_path: Path) -> None:
    """Whose start may not end with exit code 2: its unit would not try again."""
    with over_nodes(tmp_path, there("a", SLEEPS), ["n1"]) as (run, agents):
        (_, _, pid, _) = ready(run, "a")["a/0"]
        (shim,) = [one for one in descendants(agents["n1"].popen.pid) if SHIM in command_line(one, 1000)]
        os.kill(shim, signal.SIGSTOP)
        agents["n1"].kill()
        agents["n1"] = Agent(run, "n1", "--label", "place=there")
        eventually(lambda: replicas_of(run.status(), "a")["a/0"][1] == 2, "the next generation", timeout_s=40)
        assert pid is not None
        assert not alive(pid)
        assert not alive(shim)
        assert f"lock the state folder: [{shim}]" in agents["n1"].output.read_text()
        ready(run, "a")
        run.end()
        assert agents["n1"].wait() == 0


def test_a_node_whose_agent_is_told_to_end_leaves_in_order(tmp_path: Path) -> None:
    with over_nodes(tmp_path, there("a", SLEEPS, "replicas = 2"), ["n1", "n2"]) as (run, agents):
        ready(run, "a")
        agents["n1"].popen.terminate()
        assert agents["n1"].wait() == 0
        after = ready(run, "a")
        assert {nodes for *_, nodes in after.values()} == {"n2"}
        assert run.status().groups[0].restarts == {"node": 1}
        assert "n1" not in states(run)
        run.end()


def test_an_agent_without_its_supervisor_ends_with_the_lease(tmp_path: Path) -> None:
    with over_nodes(tmp_path, there("a", SLEEPS), ["n1"]) as (run, agents):
        ready(run, "a")
        run.kill()
        assert agents["n1"].wait() == 1
        assert "the supervisor cannot be reached" in agents["n1"].output.read_text()
        run.assert_nothing_left(timeout_s=20)


def test_a_frozen_agent_s_replicas_end_in_time(tmp_path: Path) -> None:
    """By the lease that the shims have, too."""
    with over_nodes(tmp_path, there("a", SLEEPS), ["n1", "n2"]) as (run, agents):
        (_, _, pid, node) = ready(run, "a")["a/0"]
        agents[node].popen.send_signal(signal.SIGSTOP)
        eventually(lambda: replicas_of(run.status(), "a")["a/0"][1] == 2, "the next generation", timeout_s=30)
        assert pid is not None
        assert not alive(pid)
        ready(run, "a")
        agents[node].popen.send_signal(signal.SIGCONT)
        eventually(lambda: states(run)[node] == "up", "the node is back", timeout_s=30)
        run.end()
        assert [agent.wait() for agent in agents.values()] == [0, 0]


# ---------------------------------------------------------------- adoption


def adopting(seconds: float) -> str:
    """What makes replicas outlive the supervisor. A key of ``[run]``, which is open."""
    return f'adopt = "{seconds:g}s"\n'


@contextmanager
def publishing(folder: Path, adopt_s: float, nodes: Sequence[str] = ("n1",)) -> Iterator[tuple[Run, dict[str, Agent]]]:
    """A trainer here that publishes without end, and rollouts here and there."""
    (folder / "out").mkdir()
    env = f'env = {{ OUT = "{folder / "out"}" }}'
    text = there("trainer", PUBLISHES, env, where="here") + there("rollout", RECEIVES, f"replicas = 2\n{env}")
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with over_nodes(folder, text, nodes, stop_when=f'["trainer"]\n{adopting(adopt_s)}') as (run, agents):
        ready(run, "trainer")
        ready(run, "rollout")
        eventually(lambda: versions(run), "the first version")
        yield run, agents


def again(run: Run) -> None:
    """Start another supervisor in place of a killed one."""
    run.start()
    run.wait_line("control at", timeout_s=60)


def told(run: Run, name: str = "trainer-0") -> list[dict[str, Any]]:
    lines = (run.folder / "out" / f"{name}.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # it is being written
            break
    return found


def versions(run: Run) -> list[int]:
    return [line["version"] for line in told(run) if "version" in line]


def test_a_killed_supervisor_is_replaced_and_everything_goes_on(tmp_path: Path) -> None:
    """The same processes and generations, here and on another node; versions go on;
    counters do not go back; the token and the port are as they were."""
    with publishing(tmp_path, 30.0) as (run, agents):
        before = {name: ready(run, name) for name in ("trainer", "rollout")}
        endpoint, token = run.endpoint(), (run.state_dir / "token").read_text()
        agent = run.find(AGENT)
        restarted_at = versions(run)[-1]
        syncs = run.status().channels[0].syncs["committed"]
        for round_ in range(2):
            run.kill()
            reached = versions(run)[-1]
            time.sleep(0.5 * round_)  # the time itself: how long nobody supervises
            again(run)
            eventually(lambda reached=reached: versions(run)[-1] > reached + 2, "versions that go on", timeout_s=30)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            after = {name: ready(run, name) for name in ("trainer", "rollout")}
            assert after == before
        assert run.endpoint() == endpoint
        assert (run.state_dir / "token").read_text() == token
        assert run.find(AGENT) == agent
        assert [line for line in told(run) if "error" in line] == []
        found = versions(run)
        assert found == sorted(set(found))
        assert found[-1] > restarted_at
        status = run.status()
        assert status.channels[0].syncs["committed"] >= syncs
        assert all(group.restarts == {} for group in status.groups)
        assert agents["n1"].popen.poll() is None
        (tmp_path / "out" / "stop").touch()
        assert run.wait(timeout_s=60) == 0
        assert agents["n1"].wait() == 0
        run.assert_nothing_left()


def test_when_nobody_comes_in_time_nothing_is_left(tmp_path: Path) -> None:
    with publishing(tmp_path, 5.0) as (run, agents):
        run.kill()
        assert agents["n1"].wait() == 1
        run.assert_nothing_left(timeout_s=30)
        again(run)  # and the next one begins with the versions of the dead one
        reached = versions(run)[-1]
        agents["n1"] = Agent(run, "n1", "--label", "place=there")
        eventually(lambda: versions(run)[-1] > reached, "versions that go on", timeout_s=60)
        assert replicas_of(run.status(), "trainer")["trainer/0"][1] == 2
        run.end(timeout_s=60)


def test_a_frozen_agent_keeps_nothing_alive_when_nobody_comes_in_time(tmp_path: Path) -> None:
    with over_nodes(tmp_path, there("a", SLEEPS, where="here"), [], stop_when=f"[]\n{adopting(5)}") as (run, _):
        (_, _, pid, _) = ready(run, "a")["a/0"]
        agent = run.find(AGENT)
        os.kill(agent, signal.SIGSTOP)
        try:
            run.kill()
            assert pid is not None
            eventually(lambda: not alive(pid), "the end of the rank", timeout_s=40)
        finally:
            os.kill(agent, signal.SIGCONT)
        run.assert_nothing_left()


def test_a_frozen_agent_is_replaced_by_the_next_supervisor(tmp_path: Path) -> None:
    """Who cannot take its replicas over, and starts them again."""
    with over_nodes(tmp_path, there("a", SLEEPS, where="here"), [], stop_when=f"[]\n{adopting(60)}") as (run, _):
        (_, _, pid, _) = ready(run, "a")["a/0"]
        agent = run.find(AGENT)
        os.kill(agent, signal.SIGSTOP)
        run.kill()
        again(run)
        eventually(lambda: replicas_of(run.status(), "a")["a/0"][:2] == ("ready", 2), "another start", timeout_s=30)
        assert pid is not None
        assert not alive(pid)
        assert not alive(agent)
        assert run.status().groups[0].restarts == {"node": 1}
        run.end()


def test_of_two_supervisors_that_come_at_once_one_wins(tmp_path: Path) -> None:
    text = there("a", SLEEPS, where="here")
    with over_nodes(tmp_path, text, [], stop_when=f"[]\n{adopting(60)}") as (run, _):
        before = ready(run, "a")
        run.kill()
        run.start()
        env = {**os.environ, MARK: run.mark, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "replicas.supervisor", str(run.config)]
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as second:
            eventually(lambda: second.poll() is not None or not run.running, "the end of one", timeout_s=60)
            if second.poll() is None:  # it was faster
                assert run.wait() == SUPERVISED
                eventually(lambda: (run.state_dir / "endpoint.json").exists(), "the run of the other")
            else:
                assert second.returncode == SUPERVISED
                run.wait_line("control at", timeout_s=60)
            assert ready(run, "a") == before
            if run.running:
                run.signal(signal.SIGTERM)
                assert run.wait() == 0
            else:
                second.terminate()
                assert second.wait(30) == 0
        run.assert_nothing_left()


def test_a_drain_goes_on_under_the_next_supervisor(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, lambda *_: time.sleep(6)); print('up', flush=True); time.sleep(600)"
    )
    text = there("a", stubborn, 'stop_timeout = "20s"', where="here")
    with over_nodes(tmp_path, text, [], stop_when=f"[]\n{adopting(30)}") as (run, _):
        ready(run, "a")
        eventually(lambda: run.log("a/0").read_text() == "up\n", "its handler")
        run.signal(signal.SIGTERM)
        run.wait_line("draining")
        eventually(lambda: replicas_of(run.status(), "a")["a/0"][0] == "draining", "a drain under way")
        run.kill()
        assert run.start().wait() == CUT, "its rank heeds no SIGTERM"
        run.assert_nothing_left()


def test_what_ended_meanwhile_is_judged_by_the_next_supervisor(tmp_path: Path) -> None:
    """A failure restarts it; one that has finished, before or meanwhile, rests."""
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(int(sys.argv[2]))"
    (tmp_path / "waits.py").write_text(waits)

    def waiting(name: str, code: int) -> str:
        command = json.dumps(["waits.py", str(tmp_path / name), str(code)])
        more = f"[groups.{name}.restart]\ninitial_delay = 0\n"
        return f'[groups.{name}]\nlauncher = "exec"\ncommand = {command}\n{more}'

    text = there("a", SLEEPS, where="here") + waiting("done", 0) + waiting("late", 0) + waiting("fails", 3)
    with over_nodes(tmp_path, text, [], stop_when=f'["a"]\n{adopting(30)}') as (run, _):
        ready(run, "a")
        (tmp_path / "done").touch()
        eventually(lambda: replicas_of(run.status(), "done")["done/0"][0] == "finished", "one that has finished")
        run.kill()
        (tmp_path / "late").touch()
        (tmp_path / "fails").touch()
        pids = [pid for pid, line in run.processes().items() if "waits.py" in line]
        eventually(lambda: not any(alive(pid) for pid in pids), "their ends")
        (tmp_path / "fails").unlink()
        again(run)
        eventually(lambda: replicas_of(run.status(), "fails")["fails/0"][:2] == ("ready", 2), "another start")
        assert replicas_of(run.status(), "done")["done/0"][:2] == ("finished", 1)
        assert replicas_of(run.status(), "late")["late/0"][:2] == ("finished", 1)
        assert run.status().groups[3].restarts == {"exit": 1}
        run.end()


def test_a_config_that_has_changed_meanwhile_is_in_use_then(tmp_path: Path) -> None:
    """Only the group that it concerns restarts."""
    text = there("a", SLEEPS, where="here") + there("b", SLEEPS, where="here")
    with over_nodes(tmp_path, text, [], stop_when=f"[]\n{adopting(60)}") as (run, _):
        before = {name: ready(run, name) for name in ("a", "b")}
        run.kill()
        config = run.config.read_text()
        first = config.index("[groups.b]")
        run.config.write_text(
            config[:first] + config[first:].replace("[groups.b]", '[groups.b]\nenv = { NEW = "1" }', 1)
        )
        again(run)
        eventually(lambda: replicas_of(run.status(), "b")["b/0"][:2] == ("ready", 2), "a restart of b", timeout_s=60)
        assert ready(run, "a") == before["a"]
        assert run.status().groups[1].restarts == {"reload": 1}
        run.end()


# ---------------------------------------------------------------- who may join


def test_agents_that_are_not_taken(tmp_path: Path) -> None:
    with over_nodes(tmp_path, there("a", SLEEPS, where="here"), ["n1"]) as (run, agents):
        wrong = Agent(run, "n2", token="not-the-token")
        assert wrong.wait() != 0
        assert "refuses this node (401)" in wrong.output.read_text()
        own = next(node.name for node in run.status().nodes if node.local)
        taken = Agent(run, own)
        assert taken.wait() != 0
        assert "is the supervisor's own node" in taken.output.read_text()
        same = subprocess.run(
            [*AGENT_COMMAND, "--join", f"x@{run.endpoint()}", "--state-dir", str(agents["n1"].state_dir)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "another agent uses the state folder" in same.stderr
        assert run.status().refused["token"] >= 1
        run.end()


@pytest.mark.parametrize("words", [["--join", "nonsense"], [], ["--join", "a@b:1", "--label", "x"]])
def test_what_an_agent_cannot_be_told(words: list[str], tmp_path: Path) -> None:
    found = subprocess.run(
        [*AGENT_COMMAND, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode != 0
    assert "Traceback" not in found.stderr
    assert "--join TOKEN@HOST:PORT" in found.stderr or "TOKEN@HOST:PORT" in found.stderr or "NAME=VALUE" in found.stderr
    assert not list(tmp_path.iterdir())
