"""The command line in folders, and at ports, of other people: it believes none of them,
and its token stays here.

Covers: cli/find_run.py, cli/main.py, linux/sockets.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from replicas.cli import doctor
from replicas.cli import find_run as find
from replicas.cli import main as cli
from replicas.linux.sockets import listener_uids
from tests.support.machine.users import ATTACKER, needs_users, stranger

TOKEN = "the-crown-jewels"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("REPLICAS_TOKEN_FILE", "REPLICAS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write_state(folder: Path, endpoint: str, **more: str) -> Path:
    state = folder / ".replicas" / "grpo"
    state.mkdir(parents=True)
    content = {"endpoint": endpoint, "pid": os.getpid(), "run": "grpo", **more}
    (state / find.ENDPOINT_FILE).write_text(json.dumps(content))
    return state


def _answer(pipe: Connection, listener: socket.socket) -> None:
    """Show what each request is, and refuse it."""
    while True:
        connection, _ = listener.accept()
        with connection:
            pipe.send(connection.recv(65536))
            body = b'{"done":false,"error":{"kind":"UsageError","message":"this needs the token"}}'
            with contextlib.suppress(OSError):  # it asked nothing, and is gone
                connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def _listen(pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        _answer(pipe, listener)


@pytest.fixture
def theirs() -> Iterator[tuple[Connection, str]]:
    """A port on which another user listens: what it hears, and its address."""
    with stranger(_listen) as pipe:
        yield pipe, f"127.0.0.1:{pipe.recv()}"


def heard(pipe: Connection, where: str) -> list[bytes]:
    """What was sent to it until now; a connection without a request is an empty one."""
    host, _, port = where.rpartition(":")
    with socket.socket() if host else socket.socket(socket.AF_UNIX) as connection:
        connection.connect((host, int(port)) if host else where)
        connection.sendall(b"that is all")
        connection.shutdown(socket.SHUT_WR)
        found: list[bytes] = []
        while not found or found[-1] != b"that is all":
            assert pipe.poll(30.0)
            found.append(pipe.recv())
    return found[:-1]


@needs_users
@pytest.mark.parametrize("command", [["status"], ["events"], ["logs", "a"], ["scale", "a", "2"], ["wait"]])
def test_a_state_folder_of_somebody_else_is_not_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str], theirs: tuple[Connection, str], command: list[str]
) -> None:
    pipe, endpoint = theirs
    secret = folder / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    state = write_state(folder, endpoint)
    (state / "token").symlink_to(secret)
    (state / "lock").touch()
    for path in (state, *state.iterdir()):
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert (
        f"replicas: the state folder {state} cannot be trusted: it belongs to user {ATTACKER}, and this is user 0"
        in said
    )
    assert "give --endpoint HOST:PORT or unix:PATH, or run this as the user of the supervisor" in " ".join(said.split())
    assert heard(pipe, endpoint) == []


@needs_users
def test_an_endpoint_file_and_a_token_of_somebody_else_are_not_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str], theirs: tuple[Connection, str]
) -> None:
    pipe, endpoint = theirs
    state = write_state(folder, endpoint)
    os.chown(state / find.ENDPOINT_FILE, ATTACKER, ATTACKER)
    assert cli.main(["status"]) == 2
    assert f"it is not a regular file of this user (owner: user {ATTACKER})" in capsys.readouterr().err
    os.chown(state / find.ENDPOINT_FILE, 0, 0)
    (folder / "secret").write_text(TOKEN)
    (state / "operator-token").symlink_to(folder / "secret")
    assert cli.main(["status"]) == 2
    assert f"cannot be trusted: it is a symbolic link: {state / 'operator-token'}" in capsys.readouterr().err
    assert heard(pipe, endpoint) == []


@needs_users
def test_a_doctor_says_whose_it_is_and_looks_at_the_machine(folder: Path) -> None:
    state = write_state(folder, "127.0.0.1:1")
    os.chown(state, ATTACKER, ATTACKER)
    findings = list(doctor.examine(None, state))
    assert [one.text for one in findings if one.about == "run"] == [
        f"the state folder {state} cannot be trusted: it belongs to user {ATTACKER}, and this is user 0"
    ]
    assert {one.about for one in findings} > {"run"}


@needs_users
@pytest.mark.parametrize("command", [["status"], ["scale", "a", "2"]])
def test_nothing_is_sent_to_whoever_has_the_port_of_a_dead_supervisor(
    folder: Path, capsys: pytest.CaptureFixture[str], theirs: tuple[Connection, str], command: list[str]
) -> None:
    pipe, endpoint = theirs
    (write_state(folder, endpoint) / "operator-token").write_text(TOKEN)
    assert cli.main(command) == 69
    assert f"{endpoint} is of user {ATTACKER}: nothing was sent to it" in capsys.readouterr().err
    assert heard(pipe, endpoint) == [b""]


@needs_users
def test_nothing_is_sent_to_a_socket_of_somebody_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)

    def listen(pipe: Connection) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("control.sock")
            listener.listen()
            pipe.send("listens")
            _answer(pipe, listener)

    with contextlib.chdir(open_folder), stranger(listen) as pipe:
        assert pipe.recv() == "listens"
        path = open_folder / "control.sock"
        write_state(folder, "127.0.0.1:1", socket=str(path))
        with contextlib.chdir(folder):
            assert cli.main(["scale", "a", "2"]) == 69
        assert f"unix:{path} is of user {ATTACKER}: nothing was sent to it" in capsys.readouterr().err
        assert heard(pipe, "control.sock") == [b""]


@needs_users
def test_a_token_of_the_environment_is_not_shown_to_another_user(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, theirs: tuple[Connection, str]
) -> None:
    pipe, endpoint = theirs
    (folder / "mine").write_text(TOKEN)
    monkeypatch.setenv("REPLICAS_TOKEN_FILE", str(folder / "mine"))
    assert cli.main(["status", "--endpoint", endpoint]) == 69
    (page,) = heard(pipe, endpoint)
    assert page.startswith(b"GET /status ")
    assert TOKEN.encode() not in page
    assert cli.main(["scale", "a", "2", "--endpoint", endpoint]) == 2
    said = capsys.readouterr().err
    assert f"{endpoint} is of user {ATTACKER}: the token, which is another user's, was not shown to it" in said
    assert "--token-file" in said
    assert heard(pipe, endpoint) == [b""]


@needs_users
def test_a_token_is_shown_to_whose_it_is_and_to_whom_one_chooses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, theirs: tuple[Connection, str]
) -> None:
    pipe, endpoint = theirs
    (folder / "mine").write_text(TOKEN)
    monkeypatch.setenv("REPLICAS_TOKEN_FILE", str(folder / "mine"))
    assert cli.main(["scale", "a", "2", "--endpoint", endpoint, "--token-file", str(folder / "mine")]) == 2
    os.chown(folder / "mine", ATTACKER, ATTACKER)
    assert cli.main(["scale", "a", "2", "--endpoint", endpoint]) == 2
    assert [f"Authorization: Bearer {TOKEN}".encode() in request for request in heard(pipe, endpoint)] == [True, True]


def test_a_token_is_read_once_as_its_file_goes_with_the_run(folder: Path) -> None:
    (folder / "mine").write_text(TOKEN)
    place = find.RunAddress(endpoint="127.0.0.1:1", token_file=folder / "mine")
    first = place.client()
    (folder / "mine").unlink()
    assert place.client()._way == first._way
    assert first._way is not None
    assert first._way.headers == {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")],
)
def test_whose_process_listens(bound: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    try:
        listener = socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, socket.create_connection((asked, listener.getsockname()[1])) as connection:
        taken, _ = listener.accept()
        with taken:
            assert listener_uids(connection) == frozenset({os.geteuid()})
            listener.close()
            assert listener_uids(connection) == frozenset()
