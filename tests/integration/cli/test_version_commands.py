"""``replicas get``, ``put`` and ``verify`` against a living run: whole files, no member
that stays, and errors that name the remedy.

Covers: cli/version_commands.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import replicas
from replicas.cli import main as cli
from replicas.sources import checkpoint
from replicas.sources.checkpoint import differences
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

GROUPS = """
[groups.trainer]
launcher = "external"
[groups.loader]
launcher = "external"
min_ready = 0
[groups.rollout]
launcher = "external"
[groups.hand]
launcher = "external"
min_ready = 0
[groups.wide]
launcher = "external"
nproc_per_node = 2
min_ready = 0
[channels.policy]
sources = ["trainer", "loader"]
targets = ["rollout", "hand"]
[channels.kept]
sources = ["trainer", "loader"]
targets = ["rollout", "hand"]
slots = 4
[channels.steered]
sources = ["trainer", "loader"]
targets = ["rollout", "hand"]
follow = "promoted"
slots = 4
[channels.empty]
sources = ["trainer"]
targets = ["hand"]
[channels.closed]
sources = ["trainer"]
targets = ["wide"]
"""
ELEMENTS = 300_000
Command = Callable[..., tuple[str, str]]
"""Runs one command on the run; its exit code is checked, its two outputs returned."""
PROGRAM = "import sys; from replicas.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with running(tmp_path_factory.mktemp("run"), GROUPS) as started:
        started.wait_line("control at", timeout_s=120)
        yield started
        assert not members(started), "nobody stays on the channel"


@pytest.fixture
def run(one_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """One for all tests, each of which may find versions there; ``./x`` is its own."""
    monkeypatch.chdir(tmp_path)
    return one_run


def join(run: Run, group: str, channel: str = "policy") -> replicas.Channel:
    token = (run.state_dir / "token").read_text().strip()
    return replicas.join(channel, endpoint=run.endpoint(), token=token, group=group, replica=0, rank=0, world_size=1)


def weights(number: float) -> dict[str, torch.Tensor]:
    embed = torch.full((ELEMENTS,), number, dtype=torch.bfloat16)
    return {
        "small": torch.arange(5),
        "embed": embed,
        "head": embed,
        "scale": torch.ones(3).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
    }


@pytest.fixture
def command(run: Run, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: str, code: int = 0) -> tuple[str, str]:
        where = () if "--endpoint" in words else ("-c", str(run.config))
        got = cli.main([*words, *where])
        said = capsys.readouterr()
        assert got == code, said
        return said.out, said.err

    return call


def test_a_version_that_is_kept_can_be_had_beside_newer_ones(run: Run, command: Command) -> None:
    with join(run, "trainer", "kept") as trainer, join(run, "rollout", "kept"):
        for number in range(1, 7):
            trainer.publish(weights(float(number)), meta={"step": number}).wait(60)
            if number == 2:
                command("label", "kept", "best", "2")
        out, _ = command("get", "kept", "--version", "2", "-o", "x")
        assert out.startswith("kept: version 2, ")
        assert set(load_file("x")["embed"].tolist()) == {2.0}
        command("verify", "kept", "x", "--version", "2")
        assert "differs" in command("verify", "kept", "x", code=1)[0]
        said = command("get", "kept", "--version", "1", "-o", "y", code=1)[1]
        assert "1" in said
        assert "2" in said, "it names what is there"
        assert not Path("y").exists()

        def leases() -> list[str]:
            (found,) = [one for one in run.status().channels if one.name == "kept"]
            return [lease.name for version in found.versions for lease in version.leases]

        eventually(lambda: not leases(), "nothing is kept for who left")


def test_a_candidate_can_be_put_and_had_before_anybody_serves_it(run: Run, command: Command) -> None:
    with join(run, "rollout", "steered") as rollout:
        save_file({"w": torch.ones(8)}, "ones")
        out, _ = command("put", "ones", "steered")
        assert out.splitlines()[-1] == "steered: version 1 is the candidate"
        command("get", "steered", "--version", "1", "-o", "x")
        assert load_file("x")["w"].tolist() == [1.0] * 8
        said = command("put", "ones", "steered", "--wait", "100ms", code=1)[1]
        assert (
            "version 2 is not served within 0.1 s: that version is the candidate (replicas promote steered serves it)"
            in said
        )
        command("promote", "steered")
        with rollout.receive(deadline=60).wait() as update:
            assert update.version == 2
        command("reject", "steered", code=2)  # there is no candidate


def members(run: Run) -> list[str]:
    """Of channel ``policy``, by hand."""
    (channel,) = [one for one in run.status().channels if one.name == "policy"]
    return [one.name for one in channel.members if one.name.startswith(("hand", "loader")) and one.state != "gone"]


def test_a_version_is_a_file_and_a_file_a_version(run: Run, command: Command) -> None:
    with join(run, "trainer") as trainer, join(run, "rollout") as rollout:
        trainer.publish(weights(1.5), meta={"step": 7, "note": "first"}).wait(60)
        receipt = trainer.publish(weights(2.5), meta={"step": 8}).wait(60)
        version, digest = receipt.version, receipt.digest
        out, _ = command("get", "policy", "-o", "x")
        assert out.startswith(f"policy: version {version}, ")
        assert out.endswith(f"digest {digest}: x\n")
        eventually(lambda: not members(run), "nobody stays on the channel")
        assert [one.name for one in Path().iterdir()] == ["x"]
        found = load_file("x")
        assert all(torch.equal(found[name].view(torch.uint8), weights(2.5)[name].view(torch.uint8)) for name in found)
        assert set(found) == set(weights(0))  # tied ones, too, under each name
        with safe_open("x", "pt") as file:
            said = file.metadata()
        assert (said["replicas.version"], said["replicas.digest"], said["format"]) == (str(version), digest, "pt")
        assert json.loads(said["replicas.meta"]) == {"step": 8}

        answer = json.loads(command("verify", "policy", "x", "--json")[0])
        assert (answer["version"], answer["found"], answer["differences"]) == (version, digest, [])
        trainer.publish(weights(3.5)).wait(60)
        out, _ = command("verify", "policy", "x", code=1)
        assert out.splitlines()[1:] == ["embed: values differ", "head: values differ"]
        command("verify", "policy", "--at-least", str(version + 1))

        out, _ = command("put", "x", "policy")
        assert out.startswith(f"policy: version {version + 2}, ")
        assert out.endswith(f"digest {digest}: rollout/0\n")  # tied again, byte for byte
        with rollout.receive(deadline=60, at_least=version + 2).wait() as update:
            assert update.meta == {"step": 8}
            assert torch.equal(update.tensors()["head"], weights(2.5)["head"])
        eventually(lambda: not members(run), "nobody stays on the channel")
        assert trainer.publish(weights(5.5)).wait(60).version == version + 3  # the trainer's own go on


def add_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add a file to a model's folder, and to its index."""
    index, file = folder / "model.safetensors.index.json", f"model-{len(list(folder.iterdir()))}.safetensors"
    names = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    save_file(tensors, folder / file)
    index.write_text(json.dumps({"weight_map": names | dict.fromkeys(tensors, file)}))


def test_a_folder_of_shards_is_published(run: Run, command: Command) -> None:
    folder = Path("model")
    folder.mkdir()
    add_shard(folder, {"small": torch.arange(5), "scale": weights(1)["scale"]})
    add_shard(folder, {"head": weights(6.5)["head"], "none": torch.empty(0, 4)})
    with join(run, "trainer") as trainer, join(run, "rollout") as rollout:
        trainer.publish(weights(1.5), new_manifest=True).wait(60)
        assert "'embed' (bfloat16[300000]) is missing" in command("put", "model", "policy", code=2)[1]
        add_shard(folder, {"embed": weights(6.5)["head"]})
        number = str(trainer.latest + 7)
        trainer.publish({**weights(1.5), "head": torch.ones(ELEMENTS).bfloat16()}, new_manifest=True).wait(60)
        answer = json.loads(command("put", "model", "policy", "--version", number, "--json")[0])
        assert (answer["version"], answer["members"]) == (int(number), ["rollout/0"])
        with rollout.receive(deadline=60, at_least=int(number)).wait() as update:
            assert torch.equal(update.tensors()["embed"], weights(6.5)["head"])
        command("verify", "policy", "model")


def test_errors_name_the_remedy(run: Run, command: Command) -> None:
    def refused(*words: str, code: int = 2) -> str:
        return command(*words, code=code)[1]

    assert 'no channel "polcy"; did you mean "policy"?' in refused("get", "polcy", "-o", "x")
    assert '[groups.reader] with launcher = "external"' in refused("get", "closed", "-o", "x")
    assert "use --group hand or rollout, or leave --group out" in refused(
        "get", "policy", "-o", "x", "--group", "loader"
    )
    assert "not both" in refused("get", "policy", "-o", "x", "--version", "1", "--at-least", "1")
    assert "--token-file" in refused("get", "policy", "-o", "x", "--endpoint", run.endpoint())
    assert "within its 0.2 s" in refused("get", "empty", "-o", "x", "--deadline", "0.2", code=1)
    Path("text").write_text("no tensors here, however long it may be")
    assert "is not a valid safetensors file" in refused("put", "text", "policy")
    assert "cannot be read" in refused("put", "nothing", "policy")
    with join(run, "trainer") as trainer:
        trainer.publish(weights(1.0), new_manifest=True).wait(60)
        version = trainer.publish(weights(2.0)).wait(60).version
        older = refused("get", "policy", "-o", "x", "--version", str(version - 1), code=1)
        assert "raise channels.policy.slots" in older
        assert "cannot be written" in refused("get", "policy", "-o", "no/folder")
        assert "cannot be written" in refused("get", "policy", "-o", ".")
        assert "/dev/null cannot be written: it is not a regular file" in refused("get", "policy", "-o", "/dev/null")
        assert Path("/dev/null").is_char_device()
        command("get", "policy", "-o", "y")
        assert "min_targets = 1" in refused("put", "y", "policy", code=1)
    assert not Path("x").exists()
    eventually(lambda: not members(run), "nobody stays on the channel")


def test_a_token_and_an_address_suffice(run: Run, command: Command) -> None:
    address = "--endpoint", run.endpoint(), "--token-file"
    with join(run, "trainer") as trainer:
        trainer.publish(weights(1.0), new_manifest=True).wait(60)
        command("get", "policy", "-o", "x", *address, str(run.state_dir / "token"))
        assert torch.equal(checkpoint("x")["head"], weights(1.0)["head"])
        Path("wrong").write_text("somebody-elses")
        assert "token" in command("get", "policy", "-o", "y", *address, "wrong", code=2)[1]
        assert not Path("y").exists()


@pytest.mark.parametrize("moment", ["joined", "writing"])
def test_a_get_that_is_killed_leaves_no_file_and_no_member(run: Run, moment: str) -> None:
    Path("files").mkdir()
    number = "1000000" if moment == "joined" else "1"
    words = ["get", "policy", "-o", "files/x", "--at-least", number, "-c", str(run.config)]
    with join(run, "trainer") as trainer:
        trainer.publish({"w": torch.ones(64 << 20)}, new_manifest=True).wait(60)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=env) as process:

            def writes() -> bool:
                """Its file is open, or it is over."""
                with contextlib.suppress(OSError):
                    open_files = [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]  # noqa: PTH115
                    return any("/files/" in one for one in open_files)
                return process.poll() is not None

            try:
                eventually(writes if moment == "writing" else lambda: members(run), moment, timeout_s=120)
            finally:
                process.kill()
        for one in Path("files").iterdir():  # it was quicker than the signal
            assert (one.name, list(checkpoint(one))) == ("x", ["w"])
        eventually(lambda: not members(run), "nobody stays on the channel")
        assert trainer.publish({"w": torch.ones(64 << 20)}).wait(60).lost == ()


def test_every_dtype_of_safetensors_is_in_the_file(run: Run, command: Command) -> None:
    """And one that it lacks is refused by name, and is loaded all the same."""
    raw = torch.arange(1, 33, dtype=torch.uint8).view(4, 8)
    given = {str(dtype): raw.view(dtype) for dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64)}
    given |= {str(dtype): raw.view(dtype) for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}
    Path("kept").mkdir()
    Path("x").symlink_to("kept/file")
    with join(run, "trainer") as trainer, join(run, "rollout") as rollout:
        receipt = trainer.publish(given, new_manifest=True).wait(60)
        command("get", "policy", "-o", "x")
        assert (os.readlink("x"), os.listdir("kept")) == ("kept/file", ["file"])  # noqa: PTH115, PTH208
        assert differences(load_file("x"), given) == []
        with safe_open("x", "pt") as file:
            assert file.get_slice("torch.float4_e2m1fn_x2").get_shape() == [4, 16]
        command("verify", "policy", "x")
        assert f"digest {receipt.digest}: rollout/0" in command("put", "x", "policy")[0]
        trainer.publish({"wide": torch.ones(2, dtype=torch.complex128)}, new_manifest=True).wait(60)
        assert (
            "tensor 'wide' is complex128[2], and safetensors has no" in command("get", "policy", "-o", "y", code=2)[1]
        )
        with rollout.receive(deadline=60, at_least=trainer.latest).wait() as update:
            assert update.tensors()["wide"].dtype == torch.complex128
