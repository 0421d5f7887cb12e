"""A real HAProxy in front of servers that tell their version: where requests go, and
what is left when its keeper is killed.

Ran with HAProxy 2.6.12, Debian's of 2026-10.

Covers: integrations/haproxy/proxy.py.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from replicas import errors
from replicas.integrations.haproxy import Haproxy, Routes, Server
from replicas.integrations.haproxy.configuration import Options
from tests.support.root import ROOT
from tests.support.runs import alive
from tests.support.waits import eventually


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    subprocess.run([ROOT / "tests/support/need_haproxy.sh"], check=True, timeout=300)


class Engine(ThreadingHTTPServer):
    """Answers with its version, or with a status alone.

    :ivar version: in its answers; 0: they name none.
    """

    def __init__(self, version: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version, self.status, self.asked = version, 200, 0

    @property
    def route(self) -> Server:
        return Server(f"http://127.0.0.1:{self.server_address[1]}", self.version, self.version == 8)

    def handle_error(self, request: object, client_address: object) -> None:
        """HAProxy resets connections that it keeps."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked += 1
        body = json.dumps({"port": self.server.server_address[1]}).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        if self.server.version:
            self.send_header("x-replicas-version", str(self.server.version))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def engines(*versions: int) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        found = [stack.enter_context(Engine(version)) for version in versions]
        for one in found:
            thread = threading.Thread(target=one.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(one.shutdown)
        yield found


@contextmanager
def proxy_of(servers: list[Engine], *, share: float = 0.0) -> Iterator[Haproxy]:
    with Haproxy("127.0.0.1", 0) as proxy:
        labels = {"current": 7, "candidate": 8, "best": 3}
        proxy.bring_to(Routes(frozenset(one.route for one in servers), labels, 7, share))
        yield proxy


def ask(url: str, path: str = "/v1/completions", **headers: str) -> tuple[int, str, str]:
    """The status of an answer, the version that it names, and its body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request("POST", path, b"{}", {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers.get("x-replicas-version", ""), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("demand", "version"),
    [("7", "7"), ("8", "8"), ("current", "7"), ("candidate", "8"), (">=8", "8"), (">= 8", "8"), ("  8 ", "8")],
)
def test_a_demand_leads_to_a_server_of_that_version(demand: str, version: str) -> None:
    with engines(7, 8, 7) as servers, proxy_of(servers) as proxy:
        for _ in range(6):
            assert ask(proxy.url, x_replicas_version=demand)[:2] == (200, version)


@pytest.mark.parametrize("demand", ["9", ">=9", "best", "3"])
def test_what_nobody_serves_is_refused_with_what_is_served(demand: str) -> None:
    with engines(7, 8) as servers, proxy_of(servers) as proxy:
        status, _, body = ask(proxy.url, x_replicas_version=demand)
        text = json.loads(body)["error"]["message"]
        assert status == 409
        assert text == f"replicas: no server has version {demand if demand != 'best' else 'best'}; served: 7 and 8"


def test_a_demand_with_quotes_does_not_break_the_json() -> None:
    """What is no demand goes to a server, whose gate refuses it; a server without a
    gate answered nothing that names a version, so neither does the proxy."""
    with engines(0) as servers, proxy_of(servers) as proxy:
        status, _, body = ask(proxy.url, x_replicas_version='a"b')
        assert (status, json.loads(body)["error"]["code"]) == (409, 409)


def test_an_answer_that_names_no_version_meets_no_demand() -> None:
    with engines(7) as servers, proxy_of(servers) as proxy:
        servers[0].version = 0
        assert ask(proxy.url)[0] == 200
        assert ask(proxy.url, x_replicas_version="7")[0] == 409


def test_the_canary_gets_its_share_of_what_demands_nothing() -> None:
    with engines(7, 7, 7, 8) as servers, proxy_of(servers, share=0.1) as proxy:
        found = collections.Counter(ask(proxy.url)[1] for _ in range(1000))
    assert found["8"] / 1000 == pytest.approx(0.1, abs=0.02)


def test_a_conversation_stays_with_its_server() -> None:
    with engines(7, 7, 7, 8) as servers, proxy_of(servers) as proxy:
        homes = set()
        for name in map(str, range(12)):
            (answer,) = {ask(proxy.url, x_session_id=name) for _ in range(4)}
            homes.add(answer)
            if answer[1] == "7":  # also with a demand, which its server meets
                assert ask(proxy.url, x_session_id=name, x_replicas_version="7") == answer
        assert len(homes) == 4, "conversations spread"


def test_a_request_that_a_server_refuses_goes_to_another_one() -> None:
    with engines(7, 7) as servers, proxy_of(servers) as proxy:
        servers[0].status = 503
        assert {ask(proxy.url, x_replicas_version="7")[0] for _ in range(20)} == {200}
        assert servers[0].asked > 0
        servers[1].status = 503
        assert ask(proxy.url)[0] == 503, "all refuse"


def test_servers_come_and_go_and_change_their_version() -> None:
    with engines(7, 7) as servers, proxy_of(servers[:1]) as proxy:
        first, second = (one.route for one in servers)
        for server in (*servers,):
            server.version = 8
        assert ask(proxy.url, x_replicas_version="8")[0] == 409, "it does not know yet"
        proxy.bring_to(Routes(frozenset([second._replace(version=8)]), {}, 8))
        assert {json.loads(ask(proxy.url, x_replicas_version="8")[2])["port"] for _ in range(4)} == {
            servers[1].server_address[1]
        }
        assert ask(proxy.url, x_replicas_version="7")[0] == 409
        proxy.bring_to(Routes(frozenset([first._replace(version=8), second._replace(version=8)]), {}, 8))
        assert len({ask(proxy.url, x_replicas_version=">=8")[2] for _ in range(4)}) == 2
        proxy.bring_to(Routes(frozenset()))
        status, _, body = ask(proxy.url)
        assert (status, json.loads(body)["error"]["message"]) == (503, "replicas: no server is ready")


def test_more_versions_than_backends_leave_out_the_oldest() -> None:
    with engines(*range(1, 11)) as servers, proxy_of(servers) as proxy:
        assert [ask(proxy.url, x_replicas_version=str(one))[0] for one in range(1, 11)] == [409] * 2 + [200] * 8
        assert ask(proxy.url)[0] == 200


def test_a_low_demand_is_met_by_all_and_a_higher_one_by_those_that_have_loaded_it() -> None:
    """As while a promoted version is loaded by one server after the other."""
    with engines(7, 7, 8) as servers, proxy_of(servers) as proxy:
        proxy.bring_to(Routes(frozenset(one.route for one in servers), {"current": 8}, 8))
        low = collections.Counter(ask(proxy.url, x_replicas_version=">=7")[1] for _ in range(30))
        assert low == {"7": 20, "8": 10}
        assert {ask(proxy.url, x_replicas_version=">=8")[1] for _ in range(5)} == {"8"}


@pytest.mark.parametrize("demand", ["current", "9", ">=9"])
def test_a_version_that_was_just_promoted_is_not_there_yet(demand: str) -> None:
    with engines(7, 8) as servers, proxy_of(servers) as proxy:
        proxy.bring_to(Routes(frozenset(one.route for one in servers), {"current": 9}, 9))
        status, _, body = ask(proxy.url, x_replicas_version=demand)
        assert (status, json.loads(body)["error"]["code"]) == ((409, 409) if ">" in demand else (503, 503))


def test_a_demand_while_nobody_is_ready_is_to_be_repeated() -> None:
    with Haproxy("127.0.0.1", 0) as proxy:
        assert [ask(proxy.url, x_replicas_version=one)[0] for one in ("7", ">=7", "current", "")] == [503] * 4


def test_a_demand_does_not_move_a_conversation() -> None:
    with engines(7, 7, 8) as servers, proxy_of(servers) as proxy:
        for name in map(str, range(9)):
            home = ask(proxy.url, x_session_id=name)
            assert ask(proxy.url, x_session_id=name, x_replicas_version="8" if home[1] == "7" else "7")[0] == 200
            assert {ask(proxy.url, x_session_id=name) for _ in range(3)} == {home}


def test_a_new_server_does_not_take_the_place_of_the_one_that_has_just_left() -> None:
    """To which clients may still have connections."""
    with engines(7, 7) as servers, proxy_of(servers[:1]) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=20)
        ports = []
        for one in servers:
            proxy.bring_to(Routes(frozenset([one.route]), {}, 7))
            connection.request("POST", "/v1/completions", b"{}")
            ports.append(json.loads(connection.getresponse().read())["port"])
        connection.close()
        assert ports == [one.server_address[1] for one in servers]


def test_a_client_that_leaves_is_passed_on() -> None:
    """So that an engine does not generate for nobody."""
    with engines(7) as servers, proxy_of(servers) as proxy, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        proxy.bring_to(Routes(frozenset([Server(url, 7)]), {}, 7))
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=20)
        connection.request("POST", "/v1/completions", b"{}")
        silent.settimeout(20)
        asked, _ = silent.accept()
        with asked:
            asked.settimeout(20)
            assert b"POST" in asked.recv(4096)
            connection.close()
            with contextlib.suppress(ConnectionResetError):
                while asked.recv(4096):
                    pass


def test_a_server_that_ends_without_an_answer_is_an_error_as_json() -> None:
    with Haproxy("127.0.0.1", 0) as proxy, socket.create_server(("127.0.0.1", 0)) as dying:
        url = f"http://127.0.0.1:{dying.getsockname()[1]}"
        proxy.bring_to(Routes(frozenset([Server(url, 7)]), {}, 7))
        over = threading.Event()

        def end_each() -> None:
            while not over.is_set():
                dying.accept()[0].close()

        thread = threading.Thread(target=end_each)
        thread.start()
        try:
            status, _, body = ask(proxy.url)
        finally:
            over.set()
            socket.create_connection(dying.getsockname()).close()
            thread.join()
        text = "replicas: the server ended before it answered"
        assert (status, json.loads(body)["error"]["message"]) == (502, text)


def test_a_haproxy_that_does_not_answer_is_given_up() -> None:
    """It may have carried out a part of what it was told."""
    with engines(7) as servers, proxy_of(servers) as proxy:
        proxy._socket.settimeout(0.2)
        proxy._process.send_signal(signal.SIGSTOP)
        with pytest.raises(OSError, match="timed out"):
            proxy.bring_to(Routes(frozenset()))
        assert "does not take commands" in str(proxy.is_gone())
        proxy._process.send_signal(signal.SIGCONT)


def test_other_paths_are_not_passed_on() -> None:
    with engines(7) as servers, proxy_of(servers) as proxy:
        for path in ("/sleep", "/", "/v1", "/metrics"):
            assert ask(proxy.url, path)[0] == 404
        assert servers[0].asked == 0
        assert ask(proxy.url, "/readyz")[0] == 200
        proxy.bring_to(Routes(frozenset()))
        assert ask(proxy.url, "/readyz")[0] == 503


def test_a_server_too_many_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with engines(7, 7) as servers, Haproxy("127.0.0.1", 0, Options(servers=1)) as proxy:
        for _ in range(2):
            proxy.bring_to(Routes(frozenset(one.route for one in servers)))
        assert caplog.text.count("--servers allows 1") == 1
        assert ask(proxy.url)[0] == 200


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/prefix",
        "https://127.0.0.1:1",
        "http://no-such-host.invalid:1",
        "http://a..b:1",
        "http://[fe80::1%25lo]:1",
    ],
)
def test_an_address_that_cannot_be_asked_is_left_out_and_named(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with engines(7) as servers, Haproxy("127.0.0.1", 0) as proxy:
        routes = Routes(frozenset([servers[0].route, Server(url, 7)]))

        def is_named() -> bool:
            proxy.bring_to(routes)
            return f"not adding server {url}" in caplog.text

        eventually(is_named, "the warning")
        proxy.bring_to(routes)
        assert caplog.text.count(f"not adding server {url}") == 1
        assert {ask(proxy.url)[0] for _ in range(3)} == {200}


def test_a_slow_look_up_holds_up_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a name is added when its name was found."""
    answer, real = threading.Event(), socket.getaddrinfo

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "server.test" and not options.get("flags"):
            assert answer.wait(20)
            host = "127.0.0.1"
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with engines(7, 8) as (first, second), Haproxy("127.0.0.1", 0) as proxy:
        named = Server(f"http://server.test:{second.server_address[1]}", 8)
        routes = Routes(frozenset([first.route, named]))
        proxy.bring_to(routes)
        assert {ask(proxy.url)[1] for _ in range(3)} == {"7"}
        answer.set()

        def is_added() -> bool:
            proxy.bring_to(routes)
            return ask(proxy.url, x_replicas_version="8")[:2] == (200, "8")

        eventually(is_added, "the server with a name")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.UsageError, match=f"127.0.0.1:{port}"):
            Haproxy("127.0.0.1", port)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(errors.UsageError, match="no program haproxy"), Haproxy("127.0.0.1", 0):
        pass


def test_options_that_it_refuses_are_an_error_at_the_start() -> None:
    with (
        pytest.raises(errors.UsageError, match="haproxy refuses its options"),
        Haproxy("127.0.0.1", 0, Options(paths=["'"])),
    ):
        pass


def test_it_ends_with_its_keeper() -> None:
    code = (
        "import time; from replicas.integrations.haproxy import Haproxy\n"
        "with Haproxy('127.0.0.1', 0) as proxy: print(proxy._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        keeper.send_signal(signal.SIGKILL)
    eventually(lambda: not alive(pid), "the end of haproxy")
