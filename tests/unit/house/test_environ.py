"""Covers: environ.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas import environ, errors


def test_reads_what_the_supervisor_sets() -> None:
    found = environ.read(
        {
            "REPLICAS_ENDPOINT": "127.0.0.1:9477",
            "REPLICAS_TOKEN_FILE": "/run/token",
            "REPLICAS_RUN": "grpo",
            "REPLICAS_GROUP": "rollout",
            "REPLICA_ID": "2",
            "REPLICA_NUM": "4",
            "REPLICAS_GENERATION": "3",
            "REPLICAS_FORKSERVER": "replicas-x",
            "REPLICAS_LOG_DIR": "/logs",
            "RANK": "1",
            "WORLD_SIZE": "2",
        }
    )
    assert found == environ.Environment(
        endpoint="127.0.0.1:9477",
        token_file=Path("/run/token"),
        run="grpo",
        group="rollout",
        replica=2,
        replicas=4,
        generation=3,
        forkserver="replicas-x",
        log_dir=Path("/logs"),
        rank=1,
        world_size=2,
    )


def test_an_empty_environment_says_nothing() -> None:
    assert environ.read({}) == environ.Environment()


@pytest.mark.parametrize("value", ["two", "-1", "1.5"])
def test_numbers_must_be_numbers(value: str) -> None:
    with pytest.raises(errors.UsageError, match=f"REPLICA_ID .*'{value}'"):
        environ.read({"REPLICA_ID": value})


def test_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(errors.UsageError, match="no token: REPLICAS_TOKEN_FILE is not set"):
        environ.read_token(environ.Environment())
    with pytest.raises(errors.UsageError, match=f"{path}: .*No such file"):
        environ.read_token(environ.Environment(token_file=path))
    path.write_text("\n")
    with pytest.raises(errors.UsageError, match="is empty"):
        environ.read_token(environ.Environment(token_file=path))
    path.write_text("secret\n")
    assert environ.read_token(environ.Environment(token_file=path)) == "secret"
    assert environ.read_token(environ.read({"REPLICAS_TOKEN": "bare\n"})) == "bare"
    both = environ.read({"REPLICAS_TOKEN": "bare", "REPLICAS_TOKEN_FILE": str(path)})
    assert environ.read_token(both) == "secret"


def test_without_torchrun() -> None:
    given = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "TORCHELASTIC_RUN_ID": "y",
        "GROUP_RANK": "0",
        "ROLE_NAME": "z",
        "REPLICA_ID": "1",
        "PATH": "/bin",
    }
    assert environ.without_torchrun(given) == {"REPLICA_ID": "1", "PATH": "/bin"}
