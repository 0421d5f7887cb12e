"""Join tokens as text, their roles and their rotation, and what a client makes of
them.

Covers: supervisor/state/token_files.py, trust/dial.py, trust/tokens.py, trust/way.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from replicas import errors
from replicas.control.access import ByToken
from replicas.coordinator.server import session_route
from replicas.coordinator.websocket import Ended, SocketRoute, WebSocket
from replicas.linux import private
from replicas.supervisor.fleet.agent_route import agent_route
from replicas.supervisor.state.token_files import TokenFiles
from replicas.trust.tokens import JoinToken, Role, SavedTokens, Tokens
from replicas.trust.way import way_to

KEY = "0123456789abcdef" * 4
NO_WORDS = "the token names no key, so the control port at 10.0.0.5:9477 cannot be verified"


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize(
    ("text", "key", "secret"),
    [
        ("secret", "", "secret"),
        ("se.cret", "", "se.cret"),
        ("R1", "", "R1"),
        (f"R1{KEY}.se.cret", KEY, "se.cret"),
        ("R1plain.secret", "plain", "secret"),
    ],
)
def test_a_token_in_parts(text: str, key: str, secret: str) -> None:
    assert JoinToken.parse(text) == (key, secret)
    assert str(JoinToken.parse(text)) == text


@pytest.mark.parametrize("text", [f"R1{KEY[:-1]}.hunter2", f"R1{KEY.upper()}.hunter2", "R1.hunter2", "R1PLAIN.hunter2"])
def test_a_token_that_was_cut_is_no_bare_secret(text: str) -> None:
    with pytest.raises(errors.UsageError, match="names no key") as caught:
        JoinToken.parse(text)
    assert "hunter2" not in str(caught.value)


def test_who_has_which_role() -> None:
    tokens = Tokens("m", "o")
    tokens.key = KEY
    assert (tokens.text("member"), tokens.text("operator")) == (f"R1{KEY}.m", f"R1{KEY}.o")
    assert [tokens.role_of(bearer(text)) for text in ("m", "o", f"R1{KEY}.o", "x", "")] == [
        *("member", "operator", "operator", None, None)
    ]
    assert tokens.role_of({}) is tokens.role(b"Basic bQ==") is tokens.role(b"m") is None
    assert Tokens("same", "same").role_of(bearer("same")) == "operator"
    assert tokens.role("Bearer gehé".encode()) is None


def test_two_tokens_of_a_role_are_valid_at_a_time() -> None:
    tokens = Tokens("first", "o")
    tokens.rotate("member", "second")
    assert tokens.text("member") == "second"
    assert tokens.both_valid("member")
    assert not tokens.both_valid("operator")
    assert [tokens.role_of(bearer(one)) for one in ("first", "second")] == ["member", "member"]
    tokens.rotate("member", "third")
    assert [tokens.role_of(bearer(one)) for one in ("first", "second", "third")] == [None, "member", "member"]
    assert tokens.refusal(bearer("first")) == "old token: it was replaced by a newer one"
    assert tokens.refusal(bearer("fourth")) == "wrong token"
    assert tokens.refusal({}) == "missing token"
    tokens.revoke_old("member")
    assert [tokens.role_of(bearer(one)) for one in ("second", "third")] == [None, "member"]
    with pytest.raises(errors.UsageError, match="in use already"):
        tokens.rotate("member", "third")
    tokens.rotate("member")
    assert len(tokens.secret("member")) >= 32


def test_what_showed_a_token_is_told_when_it_ends() -> None:
    tokens = Tokens("first", "o")
    ended: list[str] = []
    with (
        tokens.watched(bearer("first"), lambda: ended.append("first")),
        tokens.watched(bearer("second"), lambda: ended.append("second")),
    ):
        tokens.rotate("member", "second")
        assert ended == []
        tokens.revoke_old("member")
        assert ended == ["first"]
    tokens.rotate("member", "third")
    tokens.revoke_old("member")
    assert ended == ["first"]


def test_tokens_survive_a_restart() -> None:
    tokens = Tokens("first", "o")
    for secret in ("second", "third"):
        tokens.rotate("member", secret)
    again = Tokens.restored(msgspec.json.decode(msgspec.json.encode(tokens.saved()), type=SavedTokens))
    assert again.saved() == tokens.saved()
    assert again.role_of(bearer("second")) == "member"
    assert again.refusal(bearer("first")).startswith("old token")


# ------------------------------------------------------------ files of a run


def test_a_run_that_goes_on_has_the_tokens_that_it_had(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path)
    tokens = files.open(None, {})
    files.rotate(tokens, "member")
    files.write(tokens)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "tokens.json": 0o600,
        "token": 0o600,
        "operator-token": 0o600,
    }
    assert TokenFiles(tmp_path).open(tokens.text("member"), {}).saved() == tokens.saved()
    (tmp_path / "tokens.json").unlink()  # an earlier release's
    older = TokenFiles(tmp_path).open(f"R1{KEY}.secret", {})
    assert older.secret("member") == "secret"
    files.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("unwritable", ["tokens.json", "token", "operator-token"])
@pytest.mark.parametrize("role", ["member", "operator"])
def test_tokens_that_cannot_be_written_change_nothing(
    role: Role, unwritable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TokenFiles(tmp_path)
    tokens = files.open(None, {})
    files.write(tokens)
    held = (tmp_path / ("token" if role == "member" else "operator-token")).read_text()
    before, replace = tokens.saved(), private.replace

    def full(path: Path, data: bytes, *, sync: bool) -> None:
        if path.name == unwritable:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, data, sync=sync)

    ended: list[str] = []
    with tokens.watched(bearer(held), lambda: ended.append("whose token was retired")):
        monkeypatch.setattr(private, "replace", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                files.change(tokens, role, lambda changed: files.rotate(changed, role))
            assert (tokens.saved(), ended) == (before, [])
            others = {"member": tmp_path / "token", "operator": tmp_path / "operator-token"}
            assert {name: tokens.role_of(bearer(path.read_text())) for name, path in others.items()} == {
                "member": "member",
                "operator": "operator",
            }
        monkeypatch.setattr(private, "replace", replace)
        files.change(tokens, role, lambda changed: files.rotate(changed, role))
        assert (tokens.role_of(bearer(held)), ended) == (role, [])
        files.change(tokens, role, lambda changed: changed.revoke_old(role))
        assert (tokens.role_of(bearer(held)), ended) == (None, ["whose token was retired"])
        assert tokens.refusal(bearer(held)).startswith("old token")
    assert TokenFiles(tmp_path).open(tokens.text("member"), {}).saved() == tokens.saved()


def test_tokens_of_files(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text(f"R1{KEY}.first\n")
    files = TokenFiles(tmp_path)
    tokens = files.open(None, {"member": given})
    assert tokens.secret("member") == "first"
    assert not tokens.both_valid("member")
    files.check(KEY)
    with pytest.raises(errors.UsageError, match="another key"):
        files.check("f" * 64)
    with pytest.raises(errors.UsageError, match=r"is in use already \(put a new token into the file first"):
        files.rotate(tokens, "member")
    given.write_text("second")
    files.rotate(tokens, "member")
    assert (tokens.secret("member"), tokens.both_valid("member")) == ("second", True)
    files.write(tokens)
    given.write_text("third")  # replaced while no supervisor was there
    again = TokenFiles(tmp_path).open("second", {"member": given})
    assert again.saved().member == ("third", "second")
    given.write_text("")
    with pytest.raises(errors.UsageError, match=r"control.token_file"):
        TokenFiles(tmp_path).open(None, {"member": given})


def changes(folder: Path, known: str | None, **given: Path) -> list[tuple[str, str]]:
    files = TokenFiles(folder)
    files.write(files.open(known, cast("dict[Role, Path]", given)))
    return [(one.role, one.change) for one in files.changes]


def test_what_a_start_says_of_the_tokens(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text("first")
    assert changes(tmp_path, None) == [("member", "made"), ("operator", "made")]
    assert changes(tmp_path, None, member=given) == [("member", "made"), ("operator", "made")]
    assert changes(tmp_path, "first", member=given) == []
    given.write_text("second")
    assert changes(tmp_path, "first", member=given) == [("member", "rotated")]
    (tmp_path / "tokens.json").unlink()  # an earlier release's
    assert changes(tmp_path, "second") == [("operator", "made")]


# ------------------------------------------------------------ ways


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "LOCALHOST.:1"])
def test_on_loopback_a_bare_secret_does(endpoint: str) -> None:
    way = way_to(endpoint, "secret", {})
    assert way.context is None
    assert way.headers == {"Authorization": "Bearer secret"}
    assert way_to(endpoint, "", {}).headers == {}


@pytest.mark.parametrize("endpoint", ["10.0.0.5:9477", "[fd00::1]:9477", "replicas-0:9477", "localhost.example.com:1"])
def test_elsewhere_it_does_not(endpoint: str) -> None:
    with pytest.raises(errors.UsageError, match="nothing was sent") as caught:
        way_to(endpoint, "hunter2", {})
    assert str(caught.value).startswith(NO_WORDS.replace("10.0.0.5:9477", endpoint))
    assert "replicas token" in caught.value.hint
    assert "REPLICAS_CA_FILE" in caught.value.hint
    assert "hunter2" not in str(caught.value)
    with pytest.raises(errors.UsageError, match="no token given, so the control port at "):
        way_to(endpoint, "", {})


def test_a_token_that_names_a_key_means_tls_everywhere(tmp_path: Path) -> None:
    for endpoint in ("127.0.0.1:1", "10.0.0.5:9477"):
        way = way_to(endpoint, f"R1{KEY}.secret", {"REPLICAS_CA_FILE": str(tmp_path / "none")})
        assert way.context is not None
        assert way.headers == {"Authorization": "Bearer secret"}  # only that goes over the wire
        assert way.url("/v1/agent") == f"wss://{endpoint}/v1/agent"


def test_tls_is_switched_off_in_words() -> None:
    way = way_to("10.0.0.5:9477", "R1plain.secret", {})
    assert way.context is None
    assert way.url("/session") == "ws://10.0.0.5:9477/session"


def test_a_ca_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    for name, why in (("none", "No such file"), ("ca", "NO_CERTIFICATE_OR_CRL_FOUND")):
        with pytest.raises(errors.UsageError, match=why):
            way_to("10.0.0.5:9477", "secret", {"REPLICAS_CA_FILE": str(tmp_path / name)})


class OldToken:
    """A WebSocket whose token ends when its request has been accepted. Whoever reads
    it then serves it."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.read = False

    async def receive(self) -> bytes:
        self.read = True
        raise Ended

    def cut(self) -> None:
        pass


def routes(tokens: Tokens) -> dict[str, SocketRoute]:
    nothing = mock.MagicMock()
    return {
        "agents": agent_route(nothing, lambda _: None, ByToken(lambda: tokens, lambda _: None)),
        "members": session_route(nothing, tokens),
    }


@pytest.mark.parametrize("kind", ["agents", "members"])
def test_a_token_that_ends_while_its_connection_is_accepted_ends_that(kind: str) -> None:
    tokens = Tokens()
    route, websocket = routes(tokens)[kind], OldToken(bearer(tokens.secret("operator")))
    tokens.rotate("operator")
    assert route.refusal(websocket.headers) is None
    tokens.revoke_old("operator")
    refused = route.refusal(websocket.headers)
    assert refused is not None
    assert refused[0] == 401
    asyncio.run(cast("Any", route.serve(cast("WebSocket", websocket))))
    assert not websocket.read
