"""A writer's process is killed at each object that it writes or deletes.

The storage's proxy tells when a request has come, and when the server has done it, and
holds it there: so each kill is at that event, not after a sleep.

Covers: archive/writer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import replicas
from replicas import errors
from replicas.archive import ArchiveKey, Follower, Rules
from tests.support.archives import CHANNEL, bytes_of
from tests.support.archives.faults import Door, Proxy, Stop
from tests.support.archives.nursery import Child, Command, Nursery, nursery, words_of
from tests.support.archives.servers import ENVIRONMENT, make_bucket, serving

COUNT, SEED = 20_001, 5
RULES = Rules(chain=3, keep=2, grace_s=0.0)
WAIT_S = 30.0


class World(NamedTuple):
    server: str
    proxy: Proxy
    nursery: Nursery
    folder: Path


class Case(NamedTuple):
    """Version ``number`` is written when the ``nth`` such request is held; the
    first ``began`` ones by another writer, those since by this one."""

    what: str
    number: int
    began: int = 0
    nth: int = 1


CASES = [
    *(Case(what, 1) for what in ("PUT data/", "PUT entries/", "PUT latest")),
    *(Case(what, 2, 1) for what in ("GET latest", "PUT data/", "PUT entries/", "PUT latest", "LIST data", "GET entr")),
    *(Case(what, 3) for what in ("PUT data/", "PUT entries/", "PUT latest", "DELETE")),
    *(Case(what, 4) for what in ("PUT data/", "PUT entries/", "PUT latest", "DELETE")),
    Case("PUT data/", 4, nth=2),  # a whole, and the delta beside it
]


LATER = ("LIST data", "GET entr", "DELETE")
"""They follow ``latest``."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving() as (server, host, port), Proxy(host, port) as proxy, nursery() as processes:
        yield World(server, proxy, processes, tmp_path_factory.mktemp("keys"))


def started(world: World, bucket: str, door: Door) -> Child:
    environment = ENVIRONMENT | {"AWS_ENDPOINT": door.endpoint}
    return world.nursery.start(f"s3://{bucket}/run", world.folder / "key.pem", environment, RULES, 20.0)


def command(number: int) -> Command:
    return Command(number, number + 3, SEED, COUNT)


def written(child: Child, number: int) -> None:
    child.tell(command(number))
    found = child.result(WAIT_S)
    assert found.get("version") == number, found


def read(follower: Follower) -> int:
    with next(follower) as update:
        assert bytes_of(update) == words_of(SEED, update.version + 3, COUNT).tobytes()
        return update.version


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.what}-of-{case.number}-{case.began}-{case.nth}")
def test_a_kill_at_each_object_leaves_a_readable_archive(
    world: World, case: Case, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = CASES.index(case) * 2 + after
    bucket, door = f"kill-{number}", world.proxy.door()
    make_bucket(world.server, bucket)
    if case.began:
        before = started(world, bucket, door)
        written(before, case.began)
        before.kill()
    child = started(world, bucket, door)
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT": world.proxy.door().endpoint}).items():
        monkeypatch.setenv(name, value)
    key = ArchiveKey.of_file(world.folder / "key.pem").public
    url = f"s3://{bucket}/run"
    follower = replicas.follow(url, CHANNEL, key=key, timeout=0.0)
    for earlier in range(1 + case.began, case.number):
        written(child, earlier)
    seen = read(follower) if case.number > 1 else 0
    assert seen == case.number - 1
    # ---- the kill
    stop = door.stop = Stop(case.what, case.nth, after)
    child.tell(command(case.number))
    assert stop.arrived.wait(WAIT_S), "there was no such request"
    child.kill()
    door.heal()
    # ---- who reads now
    names = [write.name for write in world.proxy.writes.get(bucket, [])]
    newest = names.count("latest")
    assert newest == case.number - (case.what not in LATER and (case.what, after) != ("PUT latest", True))
    joiner = replicas.follow(url, CHANNEL, key=key, timeout=0.0)
    for one, expected in ((follower, newest if newest > seen else 0), (joiner, newest)):
        if expected:
            assert read(one) == expected
        else:
            with pytest.raises(errors.DeadlineExceeded):
                read(one)
    joiner.close()
    # ---- the next writer
    again = started(world, bucket, door)
    for later in range(case.number, case.number + 4):
        written(again, later)
        if later > newest:
            assert read(follower) == later
            entries = sorted(name for name in world.proxy.objects(bucket) if name.startswith("entries/"))
            kept = [int(name[8:16]) for name in entries]
            assert kept == [number for number in (later - 1, later) if number], "orphans and old entries stay"
    follower.close()
    for number in kept:
        one = replicas.follow(url, CHANNEL, key=key, timeout=0.0, version=number)
        assert read(one) == number
        one.close()
    data = [name for name in world.proxy.objects(bucket) if name.startswith("data/")]
    assert len(data) <= 4, ("data that nothing needs stays", data)
    again.kill()
    door.close()


@pytest.mark.parametrize("what", ["BEGIN", "PART", "END"])
def test_a_kill_in_the_middle_of_a_large_whole_leaves_a_readable_archive(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, door, count = f"parts-{what.lower()}", world.proxy.door(), 6 << 20
    make_bucket(world.server, bucket)
    environment = ENVIRONMENT | {"AWS_ENDPOINT": door.endpoint}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    start = world.nursery.start
    life = f"s3://{bucket}/run", world.folder / "key.pem", environment, Rules(), 20.0
    child = start(*life, parts=True)
    child.tell(Command(1, 1, SEED, COUNT))
    assert child.result(WAIT_S)["version"] == 1
    stop = door.stop = Stop(what, 2 if what == "PART" else 1)
    child.tell(Command(2, 2, SEED, count))
    assert stop.arrived.wait(WAIT_S), "there was no such request"
    child.kill()
    door.heal()
    key = ArchiveKey.of_file(world.folder / "key.pem").public
    follower = replicas.follow(life[0], CHANNEL, key=key, timeout=0.0)
    with next(follower) as update:
        assert update.version == 1
    again = start(*life, parts=True)
    again.tell(Command(2, 2, SEED, count))
    assert again.result(WAIT_S)["version"] == 2
    with next(follower) as update:
        assert bytes_of(update) == words_of(SEED, 2, count).tobytes()
    whole = [write for name, write in world.proxy.objects(bucket).items() if name.startswith("data/00000002")]
    assert len(whole) == 1
    assert whole[0].data is not None
    assert whole[0].data.endswith(words_of(SEED, 2, count).tobytes())
    follower.close()
    again.kill()
    door.close()
