"""Which servers HAProxy is told of, and with which weights.

Covers: integrations/haproxy/routes.py, integrations/haproxy/configuration.py.
"""

from __future__ import annotations

import pytest

from replicas import errors
from replicas.integrations.haproxy.configuration import BACKENDS, Options, text_of
from replicas.integrations.haproxy.routes import Routes, Server, routes_of
from replicas.status import ChannelStatus, MemberStatus, RunStatus, StoreStatus, VersionStatus


def member(replica: int, version: int, state: str = "live") -> MemberStatus:
    info = {"url": f"http://h:{replica}"}
    return MemberStatus(name=f"server/{replica}/0", state=state, role="target", loaded=version, info=info)  # type: ignore[arg-type]


def status(*members: MemberStatus) -> RunStatus:
    versions = (VersionStatus(number=8, labels=("candidate",)), VersionStatus(number=7, labels=("current", "best")))
    channel = ChannelStatus(
        name="policy",
        epoch=1,
        committed_version=8,
        digest="",
        members=members,
        versions=versions,
        current=7,
        canary=("server/1",),
        canary_share=0.1,
    )
    store = StoreStatus(up=True, host="127.0.0.1", port=1)
    return RunStatus(
        run="r", version="", endpoint="", pid=1, uptime_s=0.0, ready=True, store=store, channels=(channel,)
    )


def fleet(others: int, canaries: int = 1, share: float = 0.1) -> Routes:
    servers = [Server(f"http://h:{number}", 7) for number in range(others)]
    canary = [Server(f"http://c:{number}", 8, True) for number in range(canaries)]
    return Routes(frozenset([*servers, *canary]), {}, 7, share)


def test_the_routes_are_those_of_the_status() -> None:
    found = routes_of(status(member(0, 7), member(1, 8), member(2, 7, "gone"), member(3, 0)), "policy")
    assert found.servers == {Server("http://h:0", 7), Server("http://h:1", 8, True)}
    assert found.labels == {"candidate": 8, "current": 7, "best": 7}
    assert (found.current, found.share, found.settled, found.newest) == (7, 0.1, 7, 8)


def test_an_unknown_channel_is_named() -> None:
    with pytest.raises(errors.UnknownChannel, match="polcy"):
        routes_of(status(), "polcy")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize(("others", "canaries"), [(1, 1), (7, 1), (3, 2), (30, 3)])
def test_the_canary_gets_its_share(share: float, others: int, canaries: int) -> None:
    routes = fleet(others, canaries, share)
    weights = routes.weights
    of_canary = sum(weight for server, weight in weights.items() if server.is_canary)
    assert of_canary / sum(weights.values()) == pytest.approx(share, abs=0.01)
    assert all(1 <= weight <= 256 for weight in weights.values())


@pytest.mark.parametrize(
    "routes",
    [
        fleet(7, share=0.0),
        fleet(0),
        fleet(7)._replace(current=8),  # the candidate was promoted
        Routes(frozenset()),
    ],
    ids=["no share", "the canary alone", "no candidate", "nobody"],
)
def test_all_servers_count_the_same_without_a_canary_that_has_a_share(routes: Routes) -> None:
    assert set(routes.weights) == routes.servers
    assert len(set(routes.weights.values())) <= 1


def test_nobody_serves() -> None:
    assert (Routes(frozenset()).newest, Routes(frozenset()).settled) == (0, 0)


def test_the_configuration_has_the_options() -> None:
    options = Options(servers=3, session="x-chat", timeout_s=1.5, paths=("/a/", "/b"))
    text = text_of(options, {"labels": "/l", "versions": "/v", "state": "/s"}, 7, 8)
    assert text.count("server-template s 1-3 ") == BACKENDS + 1
    assert "bind fd@7\n" in text
    assert "path_beg /a/ /b }" in text
    assert "req.fhdr(x-chat)" in text
    assert "timeout server 1500\n" in text
    assert "stats socket sockpair@8 level admin" in text
