"""The tokens of a supervised run: who may do what with which, from the command line and
over TLS, and what is left of them when its supervisor is killed, or is over.

Covers: supervisor/agent/token_file.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replicas.cli import main as cli
from replicas.control.client import Client
from replicas.control.commands import ORDERS, Scale, TokensOrder
from replicas.errors import UsageError, WorldError
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import TokenChanged, decode
from replicas.trust.certificate import PortKey
from replicas.trust.tokens import JoinToken
from tests.integration.supervisor.fleet.test_external import EXTERNAL, SERVES, TRAINS, Others
from tests.support.machine.full_disk import file_size_limit
from tests.support.machine.networks import hosts, why_no_hosts
from tests.support.nodes import Agent, over_nodes, ready, states, there
from tests.support.programs import SLEEPS, group
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

TLS = '[control]\nlisten = "127.0.0.1:{port}"\ntls = "on"\n'


def token_of(run: Run, role: str = "member") -> str:
    return (run.state_dir / ("token" if role == "member" else "operator-token")).read_text()


def stop(run: Run) -> None:
    run.signal(signal.SIGTERM)
    assert run.wait() == 0


def test_what_each_role_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, group("a", SLEEPS), head=TLS.format(port=0)) as run:
        run.wait_line("control at https://")
        run.wait_line("a/0: ready")
        endpoint = run.endpoint()
        files = ("token", "operator-token", "tokens.json", "key.pem")
        assert {(run.state_dir / name).stat().st_mode & 0o777 for name in files} == {0o600}
        operator = Client(endpoint, token=token_of(run, "operator"))
        member = Client(endpoint, token=token_of(run))
        operator.order(Scale(group="a", replicas=2))
        assert operator.status().store.port
        assert not member.status().store.port  # as everybody sees it
        for kind in ORDERS.values():
            fields = [field for field in msgspec.structs.fields(kind) if field.required]
            needed: dict[str, Any] = {
                field.name: 1 if field.type is int else {} if "dict" in str(field.type) else "a" for field in fields
            }
            with pytest.raises(UsageError, match="operator's token"):
                member.order(kind(**needed))
        with pytest.raises(UsageError, match="a member's token does not permit orders"):
            next(member.logs({}))
        for command in (["status"], ["scale", "a", "2"]):
            assert (
                cli.main([*command, "--endpoint", endpoint, "--token-file", str(run.state_dir / "operator-token")]) == 0
            )
        (tmp_path / "wrong").write_text(f"R1{'0' * 64}.hunter2")
        capsys.readouterr()
        assert cli.main(["status", "--endpoint", endpoint, "--token-file", str(tmp_path / "wrong")]) == 2
        assert f"the control port at {endpoint} has another key than the token names" in capsys.readouterr().err
        stop(run)
    assert {name for name in files if (run.state_dir / name).exists()} == {"key.pem"}


def test_tokens_are_shown_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def replicas(*words: str, code: int = 0) -> str:
        assert cli.main(["token", *words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    with running(tmp_path, EXTERNAL, head=TLS.format(port=0)) as run, Others(run) as others:
        run.wait_line("control at")
        first = token_of(run)
        assert replicas() == f"member    {first}\noperator  {token_of(run, 'operator')}\n"
        trainer = others.start(TRAINS, "trainer")
        assert others.says(trainer) == "joined 0"
        second = replicas("--role", "member", "--rotate").strip()
        assert second == token_of(run) != first
        assert "(the previous one is still valid)" in replicas()
        assert JoinToken.parse(second).key == JoinToken.parse(first).key
        assert others.publish(trainer, 1.0) == "1"
        assert replicas("--role", "member", "--revoke-old").strip() == second
        assert "(the one before" not in replicas()
        assert others.publish(trainer, 2.0) == "2"  # it has read the new one
        assert "add --role member or --role operator" in replicas("--rotate", code=2)
        assert '"boss" is not a role' in replicas("--role", "boss", code=2)
        operator = token_of(run, "operator")
        replicas("--role", "operator", "--rotate")
        Client(run.endpoint(), token=operator).order(Scale(group="rollout", replicas=1))
        replicas("--role", "operator", "--revoke-old")
        with pytest.raises(UsageError, match="old token: it was replaced by a newer one"):
            Client(run.endpoint(), token=operator).order(Scale(group="rollout", replicas=2))
        assert run.status().refused["token"] == 1
        stop(run)
    told = (run.state_dir / "events.jsonl").read_text()
    events = [decode(line).event for line in told.encode().splitlines()]
    assert [(one.role, one.change) for one in events if isinstance(one, TokenChanged)] == [
        *(("member", "made"), ("operator", "made")),
        *(("member", "rotated"), ("member", "revoked"), ("operator", "rotated"), ("operator", "revoked")),
    ]
    assert not any(JoinToken.parse(one).secret in told for one in (first, second, operator))


@pytest.mark.anyio
async def test_a_rotation_for_which_the_disk_has_no_room_cuts_nobody_off(tmp_path: Path) -> None:
    external = {"launcher": "external"}
    config = {
        "schema_version": 1,
        "run": {"name": "grpo", "state_dir": str(tmp_path / "state")},
        "control": {"listen": "127.0.0.1:0"},
        "cluster": {"local": False},
        "groups": {"trainer": external, "rollout": external},
        "channels": {"policy": {"sources": ["trainer"], "targets": ["rollout"]}},
    }
    async with Supervisor(config) as supervisor:
        tokens = supervisor.coordinator.tokens
        held = {"authorization": f"Bearer {(tmp_path / 'state/token').read_text()}"}
        for _ in range(2):
            with pytest.raises(WorldError, match="make room on its disk"), file_size_limit(0):
                await supervisor.tokens("member", rotate=True)
            assert tokens.role_of(held) == "member"
        assert (await supervisor.tokens("member", rotate=True))["member"]["old_is_valid"]
        assert tokens.role_of(held) == "member"
        await supervisor.tokens("member", revoke_old=True)
        assert tokens.role_of(held) is None
        assert tokens.role_of({"authorization": f"Bearer {(tmp_path / 'state/token').read_text()}"}) == "member"


def test_a_run_that_goes_on_has_the_same_key_and_tokens(tmp_path: Path) -> None:
    with running(tmp_path, EXTERNAL, head=TLS.format(port=0)) as run, Others(run) as others:
        port = run.endpoint().rpartition(":")[2]
        before = token_of(run), token_of(run, "operator")
        trainer, server = others.start(TRAINS, "trainer"), others.start(SERVES, "rollout")
        assert (others.says(trainer), others.says(server)) == ("joined 0", "joined 0")
        run.signal(signal.SIGKILL)
        run.wait()
        with running(tmp_path, EXTERNAL, head=TLS.format(port=port)) as after:
            assert others.publish(trainer, 2.0) == "1"
            assert others.says(server) == "1 2.0"
            assert (token_of(after), token_of(after, "operator")) == before
            after.wait_line("control at")  # a start that is given up would be gone on with
            stop(after)
        with running(tmp_path, EXTERNAL, head=TLS.format(port=0)) as anew:
            anew.wait_line("control at")
            token = JoinToken.parse(token_of(anew))
            assert token.key == JoinToken.parse(before[0]).key
            assert token.secret != JoinToken.parse(before[0]).secret
            stop(anew)


def test_tokens_that_are_made_before_their_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    assert cli.main(["token", "--make", str(folder)]) == 0
    lines = capsys.readouterr().out
    assert cli.main(["token", "--make", str(folder)]) == 2
    assert f"there is a key in {folder} already" in capsys.readouterr().err
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    head = f'{lines}listen = "127.0.0.1:0"\ntls = "on"\n'
    with running(tmp_path, EXTERNAL, head=head) as run:
        run.wait_line("control at https://")
        assert JoinToken.parse(token_of(run)).key == PortKey.configured(folder / "key.pem").hash
        for role, name in (("member", "token"), ("operator", "operator-token")):
            assert token_of(run, role) == (folder / name).read_text().strip()
        with pytest.raises(UsageError, match="put a new token into the file first, then rotate"):
            Client(f"unix:{run.state_dir / 'control.sock'}").order(TokensOrder(role="member", rotate=True))
        stop(run)
    (folder / "key.pem").unlink()
    head = head.replace(f'certificate = "{folder / "key.pem"}"\n', "")
    with running(tmp_path, EXTERNAL, head=head) as run:
        assert run.wait() != 0
    assert any("was made for another key than the control port has" in line for line in run.lines)


def test_new_tokens_reach_agents_and_what_runs_on_their_nodes(tmp_path: Path) -> None:
    head = TLS.format(port=0)
    with over_nodes(tmp_path, there("a", SLEEPS), ["n1"], head=head) as (run, agents):
        before = ready(run, "a")
        file = agents["n1"].state_dir / "token"
        assert (file.read_text(), file.stat().st_mode & 0o777) == (token_of(run), 0o600)
        orders = Client(f"unix:{run.state_dir / 'control.sock'}")
        orders.order(TokensOrder(role="member", rotate=True))
        eventually(lambda: file.read_text() == token_of(run), "the new token in the file of its ranks")
        assert states(run)["n1"] == "up"
        orders.order(TokensOrder(role="operator", rotate=True, revoke_old=True))
        run.wait_line("node n1: away")  # it had shown the old one
        eventually(lambda: states(run)["n1"] == "up", "node n1 with the new token")
        assert run.status().refused.get("token", 0) == 0
        assert ready(run, "a") == before
        stop(run)
        assert agents["n1"].wait() == 0
    assert not file.exists()


def test_an_agent_needs_an_operators_token_of_this_run(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS), head=TLS.format(port=0)) as run:
        run.wait_line("control at https://")
        secret = JoinToken.parse(token_of(run, "operator")).secret
        wrong = {
            "member": (token_of(run), "operator's token"),
            "key": (f"R1{'0' * 64}.{secret}", "has another key than the token names"),
            "secret": (f"{token_of(run)}x", "wrong token"),
        }
        agents = {name: Agent(run, name, token=token) for name, (token, _) in wrong.items()}
        for name, (token, said) in wrong.items():
            assert agents[name].wait() != 0
            output = agents[name].output.read_text()
            assert said in output
            assert JoinToken.parse(token).secret not in output
            assert "Traceback" not in output
        refused = run.status().refused
        assert (refused["tls"], refused["token"]) == (1, 1)  # a member's token is a valid one
        assert not states(run).keys() & wrong.keys()
        stop(run)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_program_on_another_host_joins_by_its_token_alone(tmp_path: Path) -> None:
    with hosts(1) as net:
        (other,) = net.machines
        head = f'[control]\nlisten = "{net.address}:0"\n[store]\nbind = "{net.address}"\n'
        with running(tmp_path, EXTERNAL, head=head) as run:
            run.wait_line("control at https://")
            (tmp_path / "copied").write_text(token_of(run))
            secret = JoinToken.parse(token_of(run)).secret

            def start(token: str) -> subprocess.Popen[str]:
                variables = {
                    "PYTHONPATH": str(ROOT),
                    "REPLICAS_ENDPOINT": run.endpoint(),
                    "REPLICAS_TOKEN_FILE": token,
                    "REPLICAS_GROUP": "rollout",
                    "REPLICA_ID": "auto",
                }
                words = [f"{name}={value}" for name, value in variables.items()]
                command = other.command("env", *words, sys.executable, "-c", SERVES)
                return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

            (tmp_path / "bare").write_text(secret)
            with start(str(tmp_path / "bare")) as bare:
                _, complaint = bare.communicate(timeout=60)
            assert "cannot be verified; nothing was sent" in complaint
            assert secret not in complaint
            with start(str(tmp_path / "copied")) as server, Others(run) as others:
                try:
                    assert server.stdout is not None
                    assert server.stdout.readline() == "joined 0\n"
                    trainer = others.start(TRAINS, "trainer")
                    assert others.says(trainer) == "joined 0"
                    assert others.publish(trainer, 1.5) == "1"
                    assert server.stdout.readline() == "1 1.5\n"
                    eventually(lambda: run.status().groups[1].replicas[0].state == "ready", "rollout/0 is ready")
                finally:
                    server.kill()
            stop(run)
