"""Which servers a router is told of, and how its list is brought there.

Covers: integrations/router.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from replicas import errors
from replicas.integrations.router import WorkerList, channel_of, ready_leaders
from replicas.status import ChannelStatus, MemberStatus, RunStatus, StoreStatus


def member(
    name: str, state: str = "live", *, loaded: int = 3, url: str = "http://h:1", role: str = "target"
) -> MemberStatus:
    info = {"url": url} if url else {}
    return MemberStatus(name=name, state=state, role=role, loaded=loaded, info=info)  # type: ignore[arg-type]


def status(*members: MemberStatus) -> RunStatus:
    channel = ChannelStatus(name="policy", epoch=1, committed_version=3, digest="", members=members)
    store = StoreStatus(up=True, host="127.0.0.1", port=1)
    return RunStatus(
        run="r", version="", endpoint="", pid=1, uptime_s=0.0, ready=True, store=store, channels=(channel,)
    )


def ready_urls(found: RunStatus) -> set[str]:
    return {one.info["url"] for one in ready_leaders(channel_of(found, "policy"))}


def test_a_live_leader_with_a_version_and_an_address_is_a_worker() -> None:
    assert ready_urls(status(member("rollout/0/0"))) == {"http://h:1"}


@pytest.mark.parametrize(
    "other",
    [
        member("rollout/0/0", "gone"),
        member("rollout/0/0", "joining"),
        member("rollout/0/0", loaded=0),
        member("rollout/0/0", url=""),
        member("rollout/0/1"),
        member("trainer/0/0", role="source"),
    ],
)
def test_others_are_not(other: MemberStatus) -> None:
    assert ready_urls(status(other)) == set()


def test_a_replica_that_is_behind_answers_with_the_version_that_it_has() -> None:
    assert ready_urls(status(member("rollout/0/0", "behind"))) == {"http://h:1"}


def test_an_unknown_channel_is_named_with_those_that_there_are() -> None:
    with pytest.raises(errors.UnknownChannel, match="policy"):
        channel_of(status(), "polcy")


class Router(ThreadingHTTPServer):
    """The worker list of a router, over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.urls: list[str] = []
        self.calls: list[str] = []
        self.status = 200


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        split = urlsplit(self.path)
        url = parse_qs(split.query).get("url", [""])[0]
        if split.path == "/add_worker":
            self.server.urls.append(url)
        elif split.path == "/remove_worker":
            self.server.urls.remove(url)
        if url:
            self.server.calls.append(f"{split.path} {url}")
        body = json.dumps({"urls": self.server.urls}).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as router:
        thread = threading.Thread(target=router.serve_forever)
        thread.start()
        yield router
        router.shutdown()
        thread.join()


def workers(router: Router) -> WorkerList:
    return WorkerList(f"http://127.0.0.1:{router.server_address[1]}")


def test_the_list_is_brought_to_what_is_ready(router: Router) -> None:
    router.urls = ["http://gone:1", "http://stays:1"]
    workers(router).bring_to(frozenset({"http://stays:1", "http://new:1"}))
    assert router.calls == ["/remove_worker http://gone:1", "/add_worker http://new:1"]
    assert sorted(router.urls) == ["http://new:1", "http://stays:1"]


def test_a_list_that_is_right_is_left_alone(router: Router) -> None:
    router.urls = ["http://stays:1"]
    workers(router).bring_to(frozenset({"http://stays:1"}))
    assert router.calls == []


def test_a_router_that_refuses_is_an_error_that_names_the_request(router: Router) -> None:
    router.status = 500
    with pytest.raises(ConnectionError, match="GET /list_workers: 500"):
        workers(router).bring_to(frozenset())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://h:1", "http://"])
def test_an_address_of_another_form_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(errors.UsageError, match=r"HOST:PORT"):
        WorkerList(url)
