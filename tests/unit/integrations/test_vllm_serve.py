"""`python -m replicas.integrations.vllm serve`: what it makes of its options before
vLLM starts.

Covers: integrations/vllm.py, integrations/shared/serving.py.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from replicas import errors
from replicas.config.structs import GroupConfig
from replicas.engine import following
from replicas.integrations import router, vllm
from replicas.integrations.gate import SHUT, GatePage
from replicas.integrations.shared import serving
from replicas.integrations.vllm_verbs import VllmEngine, release_of
from replicas.linux.processes import start_time
from tests.support.waits import eventually


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--api-key", "a", "b"], "a"),
        (["--api-key=a"], "a"),
        (["--api_key", "a"], "a"),
        (["--dtype", "bfloat16"], "of the environment"),
    ],
)
def test_the_followers_api_key_is_the_servers(monkeypatch: pytest.MonkeyPatch, options: list[str], key: str) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    assert vllm._api_key(options) == key


def variables_of_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Mapping[str, str]:
    """The environment with which vLLM would start."""
    started: list[Mapping[str, str]] = []

    @contextlib.contextmanager
    def child(name: str, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[None]:
        started.append(variables)
        yield

    monkeypatch.setattr(vllm, "child", child)
    with vllm._vllm("127.0.0.1", 1, [], Mock(path="gate"), folder):
        return started[0]


@pytest.mark.parametrize("known", [True, False])
def test_a_user_that_has_no_name_can_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: bool) -> None:
    """As a container's user without an entry in /etc/passwd."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: pwd.getpwall()[0].pw_uid if known else 4_000_000_007)
    assert variables_of_vllm(monkeypatch, tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


@pytest.mark.parametrize("option", ["--uds", "--uds=/tmp/x", "--ssl-certfile", "--ssl_keyfile=x"])
def test_an_address_that_nobody_finds_is_refused_with_a_remedy(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm.main(["serve", "model", option, "x"]) == 1
    assert "put a proxy with TLS in front" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--grpc"], ["--grpc-port", "1"], ["--grpc_port=1"]])
def test_a_way_past_the_gate_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm.main(["serve", "model", *options]) == 1
    assert "the gate refuses requests over HTTP alone" in capsys.readouterr().err


def test_a_front_end_that_takes_no_gate_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM 0.33 has one in Rust, off by default."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert vllm.main(["serve", "model"]) == 1
    assert "VLLM_USE_RUST_FRONTEND is set" in capsys.readouterr().err


def test_the_front_end_is_that_of_the_gate_whatever_the_default_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    assert variables_of_vllm(monkeypatch, tmp_path)["VLLM_USE_RUST_FRONTEND"] == "0"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = (200, b"") if self.path == "/health" else self.server.ready  # type: ignore[attr-defined]  # set below
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


@pytest.mark.parametrize(
    ("ready", "has_gate"),
    [
        ((503, b'{"error": {"message": "replicas: %s", "code": 503}}' % SHUT.encode()), True),
        ((404, b'{"detail": "Not Found"}'), False),
        ((200, b""), False),
    ],
)
def test_a_server_without_the_gate_is_not_followed(ready: tuple[int, bytes], has_gate: bool) -> None:
    """Whatever a release does with the option by which it takes the gate."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.ready = ready  # type: ignore[attr-defined]  # for the handler
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found: list[str] = []
        verbs = VllmEngine(f"http://127.0.0.1:{server.server_port}", secret="secret")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verbs, "read_identity", lambda: found.append("looked up"))
            with contextlib.nullcontext() if has_gate else pytest.raises(errors.UsageError, match="without the gate"):
                verbs.wait_until_up(10.0)
        verbs.close()
        server.shutdown()
        thread.join()
    assert found == (["looked up"] if has_gate else [])


HOSTS = ["127.0.0.1", *(["::1"] if Path("/proc/net/if_inet6").exists() else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_free_port_is_held_until_the_server_has_it(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with serving.reserve_port(host, 0) as port:
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        with socket.socket(family) as server:  # as vLLM binds its own
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
            server.listen()


def test_shared_memory_of_killed_workers_goes_with_the_folder_in_which_they_met(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    name = f"vllm_dist_{tmp_path.name}"
    (folder / name).touch()
    left, others = Path(f"/dev/shm/{name}-tp:0-[0-1]-cpushm"), Path(f"/dev/shm/other-{tmp_path.name}")
    try:
        left.touch()
        others.touch()
        vllm._remove(folder)
        assert not left.exists()
        assert not folder.exists()
        assert others.exists()
    finally:
        left.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("version", "release"), [("0.32.0+cpu", (0, 32)), ("0.33.1rc1", (0, 33)), ("dev", ()), ("", ())]
)
def test_the_release_of_vllm_is_read(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


def test_a_release_that_is_too_old_is_refused() -> None:
    with pytest.raises(errors.UsageError, match=r"vLLM 0\.28\.1"):
        release_of("0.28.1")


TREE = "import os, time\nif not os.fork():\n    print(os.getpid(), flush=True)\ntime.sleep(600)"


DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TREE}"


def starts(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have this program started in place of vLLM."""
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)

    monkeypatch.setattr(subprocess, "Popen", start)


def test_a_server_has_ended_before_its_supervisor_would_kill_it() -> None:
    promised_s = {field.name: field.default for field in msgspec.structs.fields(GroupConfig)}["stop_timeout_s"]
    for limit_s in (serving.STOP_TIMEOUT_S, router.STOP_TIMEOUT_S):
        assert limit_s + 4 * following.BEAT_S <= promised_s


@pytest.mark.parametrize("given_up", [False, True])
def test_a_server_that_does_not_end_in_time_or_is_given_up_is_killed_with_its_frozen_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given_up: bool
) -> None:
    """A stopped process cannot notice that its follower has gone."""
    starts(monkeypatch, TREE if given_up else DEAF)
    if not given_up:
        monkeypatch.setattr(serving, "STOP_TIMEOUT_S", 0.01)
    page = GatePage.create()
    with (
        pytest.raises(errors.SyncError) if given_up else contextlib.nullcontext(),
        vllm._vllm("127.0.0.1", 1, (), page, tmp_path) as server,
    ):
        assert server.process.stdout is not None
        engine = int(server.process.stdout.readline())
        server.process.stdout.close()
        os.kill(engine, signal.SIGSTOP)
        if given_up:
            raise errors.SyncError("frozen")
    assert server.process.returncode == -signal.SIGKILL
    eventually(lambda: start_time(engine) is None, "the end of the engine")
    page.close()
